"""FedNova (Wang et al., NeurIPS 2020): displacements divided by their effective number of steps.

    local     v <- rho v + g_i(y_k) + mu (y_k - x_t) ;  y_{k+1} = y_k - eta_l v ;  v = 0 at first
    A_i       sum of the weights with which a constant gradient would enter d_i / eta_l:
              c <- rho c + 1, A <- A + c        (momentum; K_i for rho = 0)
              A <- (1 - eta_l mu) A + 1         (proximal)                          K_i times
    tau       = sum_i w_i A_i
    buf       <- beta buf + (tau / eta_l) sum_i w_i d_i / A_i                       (0/0 is 0)
    x_{t+1}   = x_t - eta_g eta_l buf

rho is ``local_momentum``, mu ``prox_weight``, beta ``server_momentum``. rho and mu together have no
A_i in the paper.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


def effective_steps(steps, *, rho=0.0, shrink=0.0):
    """A_i by its recursion; shrink is eta_l mu."""
    c = total = 0.0
    for _ in range(steps):
        c = rho * c + 1
        total = (1 - shrink) * total + c
    return total


class FedNova(Twin):
    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        local_momentum=0.0,
        prox_weight=0.0,
        server_momentum=0.0,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        if local_momentum != 0 and prox_weight != 0:
            raise ValueError("local_momentum and prox_weight exclude each other")
        self.rho, self.mu, self.beta = local_momentum, prox_weight, server_momentum
        self.buffer = np.zeros_like(self.x)

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        eta, rho, mu = at(self.client_lr, t), at(self.rho, t), at(self.mu, t)
        moves, effective = [], []
        for client in clients:
            y, S, v = self.x.copy(), self.new_step(), np.zeros_like(self.x)
            for minibatch in client.minibatches:
                v = rho * v + self.grad(y, minibatch) + mu * (y - self.x)
                y = y - eta * S(v, y)
            steps = effective_steps(client.steps, rho=rho, shrink=eta * mu)
            moves.append((self.x - y) / steps)
            effective.append(steps)
        weights = cohort_weights(clients)
        tau = sum(w * steps for w, steps in zip(weights, effective, strict=True))
        step = tau * weighted_mean(moves, weights)
        self.buffer = at(self.beta, t) * self.buffer + (step / eta if eta else 0 * step)
        self.x = self.x - at(self.server_lr, t) * eta * self.buffer
