"""FedSpeed (Sun et al., ICLR 2023, Algorithm 1; thesis 2023, Algorithm 2) and FedSpeed-Ing.

With prox_weight = 1/lambda, rho = perturbation_radius, a = perturbation_weight, one mini-batch for
both gradients of a step:

    g1      = g(y_k) ;  g2 = g(y_k + r g1)       r = rho / ||g1||, or rho; both gradients raw
    g~      = T( (1 - a) g1 + a g2 ; y_k )       T: the gradient transform, at the unperturbed y_k
    y_{k+1} = y_k - eta_l ( g~ - c_i + (y_k - x_t)/lambda )
    c_i+    = c_i - (y_K - x_t)/lambda ;  send y_K - lambda c_i+
    x_{t+1} = x_t + server_lr ( mean - x_t )
              mean = sum_i w_i (sent)                                        server_dual "cohort"
                     sum_i w_i y_K^i + (1/N) sum_{all j} ( - lambda c_j )    server_dual "all"

``correction=False``: no c_i, and y_K is sent. r is 0 where ||g1|| < 1e-12.

FedSpeed-Ing (thesis, Algorithm 3; its print lost its accents, this is the reading that its text
describes) anchors the local steps at xbar_t and uses cbar_i in them, starting from y_0 = x_t:

    y_{k+1} = y_k - eta_l ( g~ - cbar_i + (y_k - xbar_t)/lambda )
    c_i+    = c_i - (y_K - x_t)/lambda ;  cbar_i+ = c_i+ + zeta_t (c_i+ - c_i)
    xbar_{t+1} = x_{t+1} + zeta_t (x_{t+1} - x_t)                            xbar_0 = x_0
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class FedSpeedIng(Twin):
    """``xbar``, ``c`` [N, d] and ``cbar`` [N, d]; inertia 0 is FedSpeed."""

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        inertia,
        prox_weight=0.1,
        perturbation_radius=0.1,
        perturbation_weight=1.0,
        normalize_perturbation=True,
        correction=True,
        server_dual="cohort",
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        if prox_weight <= 0:
            raise ValueError("prox_weight must be positive")
        self.prox = prox_weight
        self.radius = perturbation_radius
        self.a = perturbation_weight
        self.normalize = normalize_perturbation
        self.correction = correction
        self.server_dual = server_dual
        self.zeta = inertia
        self.xbar = self.x.copy()
        self.c = self.client_rows()
        self.cbar = self.client_rows()

    def direction(self, y, minibatch, t):
        """g~ at y, with one gradient only if a = 0."""
        g1 = self.gradient(y, minibatch)
        mixed = g1
        if self.a != 0:
            radius, norm = at(self.radius, t), np.linalg.norm(g1)
            if self.normalize:
                radius = radius / norm if norm >= 1e-12 else 0.0
            mixed = (1 - self.a) * g1 + self.a * self.gradient(y + radius * g1, minibatch)
        return self.transformed(mixed, y)

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        moves = []
        for client in clients:
            y, S = self.x.copy(), self.new_step()
            for minibatch in client.minibatches:
                pull = self.prox * (y - self.xbar) - self.cbar[client.id]
                y = y - at(self.client_lr, t) * S(self.direction(y, minibatch, t) + pull, y)
            moves.append(y - self.x)
            if self.correction:
                c_old = self.c[client.id]
                c_new = c_old - self.prox * (y - self.x)
                self.cbar[client.id] = c_new + at(self.zeta, t) * (c_new - c_old)
                self.c[client.id] = c_new
        weights = cohort_weights(clients)
        move = weighted_mean(moves, weights)
        if self.server_dual == "all":
            move = move - self.c.mean(axis=0) / self.prox
        else:
            move = move - weighted_mean([self.c[c.id] for c in clients], weights) / self.prox
        x_old = self.x
        self.x = x_old + at(self.server_lr, t) * move
        self.xbar = self.x + at(self.zeta, t) * (self.x - x_old)


class FedSpeed(FedSpeedIng):
    def __init__(self, x0, num_clients, gradient, *, client_lr, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, inertia=0.0, **options)
