"""FedBuff (Nguyen et al., AISTATS 2022, Algorithm 1), event by event.

A client that starts at time s with model w^v sends Delta = w^v - (its local model) at s + seconds.
The server adds s(t - v) Delta to a buffer; as soon as K updates are in, w^{t+1} = w^t - eta_g times
their weighted mean, t grows by one, and K clients start with the new model. C start at time 0.
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
        does not start. Returns (time, model, tau of each update) of every full buffer.
        """
        waiting = [pair for pair in zip(cohorts, seconds, strict=True) if participants(pair[0])]
        queue, buffer, steps = [], [], []
        now, number = 0.0, 0
        while True:
            while waiting and len(queue) + len(buffer) <= self.concurrency - self.buffer_size:
                for client, takes in zip(*waiting.pop(0), strict=True):
                    update = self.local_sgd(client, 0) if client.minibatches else None
                    number += 1  # of several that finish at once, the first to start
                    event = (now + takes, number, self.version, client, update)
                    heapq.heappush(queue, event)
            if len(queue) + len(buffer) < self.concurrency:
                return steps  # nobody is left who could fill the places
            now, _, version, client, update = heapq.heappop(queue)
            buffer.append((client, update, self.version - version))
            if len(buffer) == self.buffer_size:
                steps.append((now, *self.step(buffer)))
                buffer = []

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
