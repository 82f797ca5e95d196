"""FedACG (Kim, Kim, Han, CVPR 2024): clients start at, and are pulled to, a look-ahead model.

z_t     = x_t + lam m_t                                     m_0 = 0
y_0     = z_t ;  y_{k+1} = y_k - eta ( g(y_k) + b (y_k - z_t) )
m_{t+1} = lam m_t - sum_i w_i ( z_t - y_K^i )
x_{t+1} = x_t + m_{t+1}

lam is ``momentum``, b ``prox_weight``; there is no server rate.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class FedACG(Twin):
    def __init__(self, x0, num_clients, gradient, *, client_lr, momentum, prox_weight, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.lam = momentum
        self.prox = prox_weight
        self.m = np.zeros_like(self.x)

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        z = self.x + at(self.lam, t) * self.m
        moves = []
        for client in clients:
            y, S = z.copy(), self.new_step()
            for minibatch in client.minibatches:
                direction = self.grad(y, minibatch) + at(self.prox, t) * (y - z)
                y = y - at(self.client_lr, t) * S(direction, y)
            moves.append(z - y)
        self.m = at(self.lam, t) * self.m - weighted_mean(moves, cohort_weights(clients))
        self.x = self.x + self.m
