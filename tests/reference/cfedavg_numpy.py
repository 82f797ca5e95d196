"""CFedAvg (Yang et al., MobiHoc 2021, Algorithms 1 and 2): compressed changes, error feedback.

    client  u_i = y_K - x_t,  or (y_K - x_t) / K_i with normalize_by_steps
            p_i = u_i + e_i ;  Delta_i = C(p_i) ;  e_i <- p_i - Delta_i     (kept while absent)
    server  x_{t+1} = x_t + eta_g sum_i w_i Delta_i

Without error feedback Delta_i = C(u_i), and e_i stays 0. A compressor is called with the vector,
the client's id and the round, and returns the decompressed vector.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


def identity(v, client=None, t=None):
    return v


def top_k(comp):
    """Keep the max(1, round((1 - comp) d)) largest magnitudes; ties go to the lowest index."""

    def compress(v, client=None, t=None):
        kept = max(1, round((1 - comp) * v.size))
        order = sorted(range(v.size), key=lambda j: (-abs(v[j]), j))
        out = np.zeros_like(v)
        for j in order[:kept]:
            out[j] = v[j]
        return out

    return compress


def random_drop(masks, rescale_by=1.0):
    """Keep the coordinates where ``masks(client, t)`` is true; no rescaling by default."""

    def compress(v, client, t):
        return np.where(masks(client, t), v * rescale_by, 0.0)

    return compress


class CFedAvg(Twin):
    """``sent`` maps each client of the last round to (u_i, Delta_i, e_i after it)."""

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        compressor=identity,
        error_feedback=True,
        normalize_by_steps=False,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.compressor = compressor
        self.error_feedback = error_feedback
        self.normalize_by_steps = normalize_by_steps
        self.e = self.client_rows()
        self.sent = {}

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        self.sent = {}
        messages = []
        for client in clients:
            u = -self.local_sgd(client, t)
            if self.normalize_by_steps:
                u = u / client.steps
            p = u + self.e[client.id]
            message = self.compressor(p, client.id, t)
            if self.error_feedback:
                self.e[client.id] = p - message
            messages.append(message)
            self.sent[client.id] = (u, message, self.e[client.id].copy())
        mean = weighted_mean(messages, cohort_weights(clients))
        self.x = self.x + at(self.server_lr, t) * mean
