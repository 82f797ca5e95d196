"""FedPer, LG-FedAvg, FedBN, FedRep, FedBABU and training alone: parts of the model that stay.

The numbers of a model are two parts, ``own`` and the rest, u; h_i is client i's own part.

    FedPer and kin   y_0 = (u_t, h_i) ;  y_{k+1} = y_k - eta_l g_i(y_k) ;  h_i <- own part of y_K
                     u_{t+1} = u_t - eta_g sum_i w_i (u_t - shared part of y_K^i)
    FedRep           steps 1..K_h: only the own part moves ;  the steps after them: only the rest.
                     K_h is given, or floor(K_i / 2) of client i's K_i steps
    FedBABU          no step moves the own part, which nobody ever changes
    alone            u is nothing: y_0 = h_i ;  h_i <- y_K

A client's model is (u_t, h_i). The server model that is compared is (u_t, mean of all h_i).
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class FedPer(Twin):
    def __init__(self, x0, num_clients, gradient, *, own, **options):
        super().__init__(x0, num_clients, gradient, **options)
        self.is_own = np.zeros(self.x.size, bool)
        self.is_own[own] = True
        self.h = np.tile(self.x, (num_clients, 1))

    def moves(self, k, steps):
        """Which numbers the k-th of a client's steps in a round may change, from 0."""
        return np.ones(self.x.size, bool)

    def personal_model(self, i):
        return np.where(self.is_own, self.h[i], self.x)

    def descend(self, y, client, t):
        S = self.new_step()
        for k, minibatch in enumerate(client.minibatches):
            moves = self.moves(k, client.steps)
            direction = S(np.where(moves, self.grad(y, minibatch), 0), y)
            y = y - at(self.client_lr, t) * np.where(moves, direction, 0)
        return y

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        deltas = []
        for client in clients:
            start = self.personal_model(client.id)
            end = self.descend(start, client, t)
            self.h[client.id] = end
            deltas.append(np.where(self.is_own, 0, start - end))
        mean = weighted_mean(deltas, cohort_weights(clients))
        new = self.x - at(self.server_lr, t) * mean
        self.x = np.where(self.is_own, self.h.mean(axis=0), new)


class FedRep(FedPer):
    def __init__(self, *arguments, head_steps=None, **options):
        super().__init__(*arguments, **options)
        self.head_steps = head_steps

    def moves(self, k, steps):
        first = steps // 2 if self.head_steps is None else self.head_steps
        return self.is_own if k < first else ~self.is_own


class LocalOnly(FedPer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, own=slice(None), **options)


class FedBABU(FedPer):
    """The own part is the head, of which every row stays what it was at first."""

    def moves(self, k, steps):
        return ~self.is_own

    def fine_tuned(self, minibatches, lr, head_only=False):
        """The server's model after steps on a client's own mini-batches."""
        y, S = self.x.copy(), self.new_step()
        for minibatch in minibatches:
            moves = self.is_own | (not head_only)
            step = S(np.where(moves, self.grad(y, minibatch), 0), y)
            y = y - lr * np.where(moves, step, 0)
        return y
