"""FedBuff (Nguyen et al., AISTATS 2022, Algorithm 1), event by event.

A client that starts at time s with model w^v sends Delta = w^v - (its local model) at s + seconds.
The server adds s(t - v) Delta to a buffer; as soon as K updates are in, w^{t+1} = w^t - eta_g times
their weighted mean, t grows by one, and K clients start with the new model. C start at time 0.

Cohorts of K start one after the other while there are places for another one. A cohort of fewer
says that no more clients are there: the server then goes on to its next K updates, if as many are
at work.
"""

from __future__ import annotations

import heapq

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class FedBuff(Twin):
    def __init__(self, *args, buffer_size, concurrency, staleness=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.buffer_size = buffer_size
        self.concurrency = concurrency
        self.staleness = staleness or (lambda tau: (1 + tau) ** -0.5)
        self.version = 0  # t

    def run(self, cohorts, seconds):
        """All cohorts, in the order in which they start; ``seconds`` [rounds][S] of each client.

        A client without a mini-batch sends nothing and holds its place; a cohort of nobody else
        does not start. Id N is no client. Returns (cohort before it, time, model, tau of each
        update) of every full buffer.
        """
        queue, steps = [], []
        now, number = 0.0, 0
        for t, (cohort, lasting) in enumerate(zip(cohorts, seconds, strict=True)):
            if not participants(cohort):
                continue
            there = [
                pair for pair in zip(cohort, lasting, strict=True) if pair[0].id < self.num_clients
            ]
            for client, takes in there:
                update = self.local_sgd(client, 0) if client.minibatches else None
                number += 1  # of several that finish at once, the first to start
                heapq.heappush(queue, (now + takes, number, self.version, client, update))
            has_room = len(queue) + self.buffer_size <= self.concurrency
            if has_room and (len(there) == self.buffer_size or len(queue) < self.buffer_size):
                continue
            came = [heapq.heappop(queue) for _ in range(min(self.buffer_size, len(queue)))]
            now = came[-1][0]
            buffer = [(client, update, self.version - v) for _, _, v, client, update in came]
            steps.append((t, now, *self.step(buffer)))
        return steps

    def step(self, buffer):
        """One server step with the updates of a full buffer: (model, tau of each)."""
        came = [entry for entry in buffer if entry[1] is not None]
        if came:
            clients, updates, taus = zip(*came, strict=True)
            scaled = [self.staleness(tau) * u for u, tau in zip(updates, taus, strict=True)]
            mean = weighted_mean(scaled, cohort_weights(clients))
            self.x = self.x - at(self.server_lr, self.version) * mean
            self.version += 1
        return self.x.copy(), [tau for _, _, tau in came]
