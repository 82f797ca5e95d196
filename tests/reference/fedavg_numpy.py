"""FedAvg (McMahan et al., AISTATS 2017, Algorithm 1) with a server learning rate.

y_0 = x_t ;  y_{k+1} = y_k - eta_l g_i(y_k) ;  d_i = x_t - y_{K_i}
x_{t+1} = x_t - eta_g sum_i w_i d_i
"""

from __future__ import annotations

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class FedAvg(Twin):
    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        mean = weighted_mean([self.local_sgd(c, t) for c in clients], cohort_weights(clients))
        self.x = self.x - at(self.server_lr, t) * mean
