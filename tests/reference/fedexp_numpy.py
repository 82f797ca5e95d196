"""FedExP (Jhunjhunwala et al., ICLR 2023, Algorithm 1).

    d_i of local SGD ;  dbar = sum_i w_i d_i
    eta_g = max(1, sum_i w_i ||d_i||^2 / (2 (||dbar||^2 + eps))) ;  x_{t+1} = x_t - eta_g dbar

With equal weights w_i = 1/M it is the paper's. What is compared is (x_t + x_{t-1}) / 2.
"""

from __future__ import annotations

from tests.reference.base import Twin, cohort_weights, participants, weighted_mean


class FedExP(Twin):
    def __init__(self, x0, num_clients, gradient, *, epsilon, average_last_two=True, **options):
        super().__init__(x0, num_clients, gradient, **options)
        self.eps = epsilon
        self.average = average_last_two
        self.last = self.x.copy()
        self.step = 1.0

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        self.x = self.last
        deltas, weights = [self.local_sgd(c, t) for c in clients], cohort_weights(clients)
        dbar = weighted_mean(deltas, weights)
        squares = sum(w * d @ d for w, d in zip(weights, deltas, strict=True))
        self.step = max(1.0, squares / (2 * (dbar @ dbar + self.eps)))
        previous, self.last = self.x, self.x - self.step * dbar
        self.x = (self.last + previous) / 2 if self.average else self.last
