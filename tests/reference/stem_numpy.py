"""STEM (Khanduri et al., NeurIPS 2021, Algorithm 1): STORM momentum on clients and server.

A round is q local steps, the last of which synchronises; t counts local steps, so step k of round
r has t = r q + k + 1, and the start t = 0:

    start   m = sum_i w_i g_i(x_0) ;  x = x_0 - eta_0 m ;  old_i = x_0
    step    m_i <- g_i(y) + (1 - a_t) (m_i - g_i(old_i))                 one mini-batch
            before the last step:  old_i <- y ;  y <- y - eta_t m_i
    sync    m = sum_i w_i m_i ;  x = sum_i w_i y_i - eta_t m ,           t = (r + 1) q
            old_i <- y_i, the client's own iterate (``prev_at_sync="local"``), or the mean of
            them, sum_i w_i y_i ("mean")

y = x and m_i = m at a round's start. a is ``momentum``: 1 is none. g_i of the start is the mean
gradient over all of the round's examples. A client with K_i < q steps takes its last one as its
part of the sync, so K_i - 1 move its iterate, and the common step uses eta at (r + 1) q all the
same. No server_lr.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class STEM(Twin):
    """``client_lr`` and ``momentum`` may be schedules of the local step t; q = steps_per_round.

    ``init(clients)`` takes the first estimates from a round's examples; the first round with
    participants does so itself otherwise.
    """

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        momentum,
        steps_per_round,
        prev_at_sync="local",
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.a = momentum
        self.q = steps_per_round
        self.own_iterate = prev_at_sync == "local"
        self.old_i = np.tile(self.x, (num_clients, 1))
        self.m = None

    def init(self, clients):
        clients = participants(clients)
        gradients = [self.grad(self.x, client.round_examples()) for client in clients]
        self.m = weighted_mean(gradients, cohort_weights(clients))
        self.x = self.x - at(self.client_lr, 0) * self.m

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        if self.m is None:
            self.init(clients)
        iterates, momenta = [], []
        for client in clients:
            y, S = self.x, self.new_step()
            old, m = self.old_i[client.id], self.m
            for k, minibatch in enumerate(client.minibatches):
                step = t * self.q + k + 1
                g, g_old = self.grad(y, minibatch), self.grad(old, minibatch)
                m = g + (1 - at(self.a, step)) * (m - g_old)
                if k < client.steps - 1:
                    old, y = y, y - at(self.client_lr, step) * S(m, y)
            iterates.append(y)
            momenta.append(m)
        weights = cohort_weights(clients)
        self.m, mean = weighted_mean(momenta, weights), weighted_mean(iterates, weights)
        self.x = mean - at(self.client_lr, (t + 1) * self.q) * self.m
        for client, y in zip(clients, iterates, strict=True):
            self.old_i[client.id] = y if self.own_iterate else mean
