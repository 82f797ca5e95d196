"""MIFA (Gu et al., NeurIPS 2021, Algorithm 1) and MIFA-M (GradMA, CVPR 2023, Algorithm 6).

The server steps along the last update of all N clients, stale for those that are absent:

    G_i <- d_i                                     i in S_t; G_i = 0 before the first time
    G   <- G + (1/N) sum_{i in S_t} (G_i+ - G_i)   = (1/N) sum of all G_i; no weights
    m   <- beta m + G                              beta = ``momentum``, 0 for MIFA
    x_{t+1} = x_t - eta_g m

``table="gradient"``, the authors' form, stores G_i = d_i / eta_t (0/0 is 0) and steps by
eta_g eta_t m. ``start="wait"``, also theirs, leaves x and m as they are until every client has
taken part once; their first updates are then all taken at x_0.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, participants


class MIFAM(Twin):
    """``table_i`` [N, d], ``mean``, ``m``."""

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        momentum,
        table="displacement",
        start="zeros",
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.beta = momentum
        self.in_gradient_units = table == "gradient"
        self.wait = start == "wait"
        self.table_i = self.client_rows()
        self.seen = np.zeros(num_clients, bool)
        self.mean, self.m = np.zeros_like(self.x), np.zeros_like(self.x)

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        eta = at(self.client_lr, t)
        changes = []
        for client in clients:
            update = self.local_sgd(client, t)
            if self.in_gradient_units:
                update = update / eta if eta else 0 * update
            changes.append(update - self.table_i[client.id])
            self.table_i[client.id] = update
            self.seen[client.id] = True
        self.mean = self.mean + sum(changes) / self.num_clients
        if self.wait and not self.seen.all():
            return
        self.m = at(self.beta, t) * self.m + self.mean
        scale = eta if self.in_gradient_units else 1.0
        self.x = self.x - at(self.server_lr, t) * scale * self.m


class MIFA(MIFAM):
    def __init__(self, x0, num_clients, gradient, *, client_lr, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, momentum=0.0, **options)
