"""FedSWA and FedMoSWA (Liu et al., ICML 2025, Algorithms 1 and 2), and the ablation FedMo.

    eta_k   = eta_l (1 - k/K_i) + (k/K_i) rho eta_l ,   k = 0..K_i-1, over the steps taken
    FedSWA    y_{k+1} = y_k - eta_k g(y_k)
    FedMoSWA  y_{k+1} = y_k - eta_k ( g(y_k) - c_i + m )
              c_i+    = option I : full local gradient at x_t
                        option II: c_i - m + v_i / sum_k eta_k            (0/0 is 0)
                        its code : c_i - m + v_i / ( K_i (1 + rho) / 2 eta_l )   "trapezoid"
              v_i     = sum_k eta_k ( g(y_k) - c_i + m ), which is d_i for SGD
              m       <- m + gamma sum_i w_i ( c_i+ - m )
    both      x_{t+1} = x_t + alpha ( sum_i w_i y_K^i - x_t )

alpha is ``server_lr``, rho ``final_lr_ratio``, gamma ``momentum``. FedMo is rho = alpha = 1.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


def step_sizes(eta, steps, ratio):
    """eta_0 .. eta_{K-1}, linear from eta towards ratio * eta, which step K would have."""
    return [eta * (1 - k / steps) + (k / steps) * ratio * eta for k in range(steps)]


class FedSWA(Twin):
    def __init__(
        self, x0, num_clients, gradient, *, client_lr, final_lr_ratio=0.1, server_lr=1.5, **options
    ):
        super().__init__(
            x0, num_clients, gradient, client_lr=client_lr, server_lr=server_lr, **options
        )
        self.rho = final_lr_ratio

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        moves = []
        for client in clients:
            y, S = self.x.copy(), self.new_step()
            rates = step_sizes(at(self.client_lr, t), client.steps, at(self.rho, t))
            for eta, minibatch in zip(rates, client.minibatches, strict=True):
                y = y - eta * S(self.grad(y, minibatch), y)
            moves.append(y - self.x)
        self.x = self.x + at(self.server_lr, t) * weighted_mean(moves, cohort_weights(clients))


class FedMoSWA(FedSWA):
    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        momentum=0.2,
        control_update="II",
        control_divisor="sum",
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.gamma = momentum
        self.control_update = control_update
        self.trapezoid = control_divisor == "trapezoid"
        self.m = np.zeros_like(self.x)
        self.c_i = self.client_rows()

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        moves, controls = [], []
        for client in clients:
            c_i = self.c_i[client.id]
            y, S, v = self.x.copy(), self.new_step(), np.zeros_like(self.x)
            rates = step_sizes(at(self.client_lr, t), client.steps, at(self.rho, t))
            for eta, minibatch in zip(rates, client.minibatches, strict=True):
                direction = self.grad(y, minibatch) - c_i + self.m
                v, y = v + eta * direction, y - eta * S(direction, y)
            total = sum(rates)
            if self.trapezoid:
                total = client.steps * (1 + at(self.rho, t)) / 2 * at(self.client_lr, t)
            if self.control_update == "I":
                c_new = self.grad(self.x, client.full_examples())
            else:
                c_new = c_i - self.m + (v / total if total else 0 * v)
            moves.append(y - self.x)
            controls.append(c_new)
        weights = cohort_weights(clients)
        self.x = self.x + at(self.server_lr, t) * weighted_mean(moves, weights)
        changes = [c_new - self.m for c_new in controls]
        self.m = self.m + at(self.gamma, t) * weighted_mean(changes, weights)
        for client, c_new in zip(clients, controls, strict=True):
            self.c_i[client.id] = c_new


class FedMo(FedMoSWA):
    def __init__(self, x0, num_clients, gradient, *, client_lr, **options):
        super().__init__(
            x0,
            num_clients,
            gradient,
            client_lr=client_lr,
            final_lr_ratio=1.0,
            server_lr=1.0,
            **options,
        )
