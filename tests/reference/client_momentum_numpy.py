"""FedCM, Mime and MimeLite: every local step mixes in a direction that the server broadcasts.

FedCM (Xu et al., 2021, Algorithm 1), alpha = ``mixing``, Delta_0 = 0:

    y_{k+1} = y_k - eta_l ( alpha g_i(y_k) + (1 - alpha) Delta )
    Delta   <- sum_i w_i (mean of the client's directions), which for SGD is
               sum_i w_i d_i / (eta_l K_i)                              (0/0 is 0)
    x_{t+1} = x_t - eta_g sum_i w_i d_i

Mime and MimeLite (Karimireddy et al., 2020, Algorithm 1), with the statistics of a centralised
optimiser, 0 at first and frozen during the local steps:

    c       = sum_i w_i (full local gradient at x_t)
    v       = g_i(y_k) - g_i(x_t) + c  with the step's mini-batch (Mime) ,  g_i(y_k) (MimeLite)
    y_{k+1} = y_k - eta_l U(v) ;  x_{t+1} = x_t - eta_g sum_i w_i d_i ;  then V(c)
    sgdm    U(v) = (1 - beta) v + beta m
            V    : m <- (1 - beta) c + beta m
    adam    U(v) = ((1 - beta) v + beta m) / (sqrt(s) + stability)
            V    : m as sgdm ;  s <- (1 - beta_2) c^2 + beta_2 s

beta is ``momentum``, beta_2 ``second_moment_decay``; no bias correction. Every g here is
transformed, the full gradient once.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class FedCM(Twin):
    def __init__(self, x0, num_clients, gradient, *, client_lr, mixing=0.1, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.alpha = mixing
        self.delta = np.zeros_like(self.x)

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        eta, alpha = at(self.client_lr, t), at(self.alpha, t)
        moves, directions = [], []
        for client in clients:
            y, S, seen = self.x.copy(), self.new_step(), []
            for minibatch in client.minibatches:
                seen.append(alpha * self.grad(y, minibatch) + (1 - alpha) * self.delta)
                y = y - eta * S(seen[-1], y)
            moves.append(self.x - y)
            directions.append(np.mean(seen, axis=0) if eta else 0 * y)
        weights = cohort_weights(clients)
        self.x = self.x - at(self.server_lr, t) * weighted_mean(moves, weights)
        self.delta = weighted_mean(directions, weights)


class MimeLite(Twin):
    """``m`` and, for adam, ``s``."""

    svrg = False

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        momentum,
        base_optimizer="sgdm",
        second_moment_decay=0.99,
        stability=1e-3,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.beta, self.beta2, self.stability = momentum, second_moment_decay, stability
        self.adam = base_optimizer == "adam"
        self.m, self.s = np.zeros_like(self.x), np.zeros_like(self.x)

    def direction(self, v, t):
        """U(v)."""
        mixed = (1 - at(self.beta, t)) * v + at(self.beta, t) * self.m
        return mixed / (np.sqrt(self.s) + self.stability) if self.adam else mixed

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        weights = cohort_weights(clients)
        full = [self.grad(self.x, client.full_examples()) for client in clients]
        c = weighted_mean(full, weights)
        moves = []
        for client in clients:
            y, S = self.x.copy(), self.new_step()
            for minibatch in client.minibatches:
                v = self.grad(y, minibatch)
                if self.svrg:
                    v = v - self.grad(self.x, minibatch) + c
                y = y - at(self.client_lr, t) * S(self.direction(v, t), y)
            moves.append(self.x - y)
        self.x = self.x - at(self.server_lr, t) * weighted_mean(moves, weights)
        self.m = (1 - at(self.beta, t)) * c + at(self.beta, t) * self.m
        self.s = (1 - self.beta2) * c**2 + self.beta2 * self.s


class Mime(MimeLite):
    svrg = True
