"""SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1), options I and II.

y_{k+1} = y_k - eta_l ( g_i(y_k) - c_i + c )
c_i+    = option I : full local gradient at x_t
          option II: mean of the g_i(y_k) that the steps saw, which for SGD is
                     c_i - c + d_i / (K_i eta_l)          (the old c_i and c; 0/0 is 0)
x_{t+1} = x_t - eta_g sum_i w_i d_i
c       <- c + (1/N) sum_{i in S_t} (c_i+ - c_i)          (N, not S; no weights)
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class Scaffold(Twin):
    def __init__(self, x0, num_clients, gradient, *, client_lr, control_update="II", **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.control_update = control_update
        self.c = np.zeros_like(self.x)
        self.c_i = self.client_rows()

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        eta = at(self.client_lr, t)
        moves, changes = [], []
        for client in clients:
            c_i = self.c_i[client.id]
            y, S, seen = self.x.copy(), self.new_step(), []
            for minibatch in client.minibatches:
                seen.append(self.grad(y, minibatch))
                y = y - eta * S(seen[-1] - c_i + self.c, y)
            if self.control_update == "I":
                c_new = self.grad(self.x, client.full_examples())
            else:
                c_new = np.mean(seen, axis=0) if eta else c_i - self.c
            moves.append(self.x - y)
            changes.append(c_new - c_i)
        self.x = self.x - at(self.server_lr, t) * weighted_mean(moves, cohort_weights(clients))
        self.c = self.c + sum(changes) / self.num_clients
        for client, change in zip(clients, changes, strict=True):
            self.c_i[client.id] = self.c_i[client.id] + change
