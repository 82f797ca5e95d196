"""FAFED (Wu, Huang, Hu, Huang, AAAI 2023, Algorithm 2) and its counter-example, Algorithm 1.

FAFED, one round being q local steps, the last of which synchronises; t counts local steps, so step
k of round r has t = r q + k + 1, and the start t = 0:

    start   m_0 = sum_i w_i g_i ,  v_0 = sum_i w_i g_i^2 ,  A_0 = sqrt(v_0) + rho
            x_1 = x_0 - eta_0 m_0          (precondition_first_step: - eta_0 m_0 / A_0)
    step    g = g_i(y_t) ,  g' = g_i(y_{t-1})                      one mini-batch
            m_i <- g + (1 - alpha_t) (m_i - g') ;  v_i <- beta v_i + (1 - beta) g^2
            before the last step:  y_{t+1} = y_t - eta_t m_i / A
    sync    v = sum_i w_i v_i ;  m = sum_i w_i m_i ;  A = sqrt(v) + rho
            x <- x + server_lr ( sum_i w_i y_t^i - eta_t m / A - x ) ,   t = (r + 1) q

g_i of the start is the mean gradient over all of the round's examples of client i. y_{t-1} at a
round's first step is the client's own iterate before the last averaging, a state row (x_0 at
first). A client with K_i < q steps takes its last one as its part of the sync, so K_i - 1 move its
iterate, and the common step uses eta at (r + 1) q all the same.

Naive adaptive FedAvg, clients' v_i never shared, learning rates scheduled by the round:

    v_i <- beta v_i + (1 - beta) g^2 ;  y <- y - eta g / sqrt(v_i)   (0/0 is 0)
    x   <- x + server_lr ( sum_i w_i y_K^i - x )
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class FAFED(Twin):
    """``client_lr`` and ``momentum`` may be schedules of the local step t.

    ``x``, ``m``, ``v`` are shared after a round, ``previous`` [N, d] is y_{t-1}. ``init(clients)``
    takes the first estimates from a round's examples; the first round does so itself otherwise.
    ``preconditioner`` replaces A(v), for tests.
    """

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        momentum,
        second_moment_decay,
        steps_per_round,
        stability=0.01,
        precondition_first_step=False,
        preconditioner=None,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.alpha, self.beta = momentum, second_moment_decay
        self.q = steps_per_round
        self.precondition_first_step = precondition_first_step
        self.preconditioner = preconditioner or (lambda v: np.sqrt(v) + stability)
        self.previous = np.tile(self.x, (num_clients, 1))
        self.m = self.v = None

    def init(self, clients):
        clients = participants(clients)
        weights = cohort_weights(clients)
        gradients = [self.grad(self.x, client.round_examples()) for client in clients]
        self.m = weighted_mean(gradients, weights)
        self.v = weighted_mean([g**2 for g in gradients], weights)
        a = self.preconditioner(self.v) if self.precondition_first_step else 1.0
        self.x = self.x - at(self.client_lr, 0) * self.m / a

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        if self.m is None:
            self.init(clients)
        a = self.preconditioner(self.v)
        iterates, momenta, moments = [], [], []
        for client in clients:
            y, S = self.x, self.new_step()
            previous, m, v = self.previous[client.id], self.m, self.v
            for k, minibatch in enumerate(client.minibatches):
                step = t * self.q + k + 1
                g, g_previous = self.grad(y, minibatch), self.grad(previous, minibatch)
                m = g + (1 - at(self.alpha, step)) * (m - g_previous)
                v = self.beta * v + (1 - self.beta) * g**2
                previous = y
                if k < client.steps - 1:
                    y = y - at(self.client_lr, step) * S(m / a, y)
            iterates.append(y)
            momenta.append(m)
            moments.append(v)
        weights = cohort_weights(clients)
        self.m, self.v = weighted_mean(momenta, weights), weighted_mean(moments, weights)
        eta = at(self.client_lr, (t + 1) * self.q)
        move = weighted_mean([y - self.x for y in iterates], weights)
        move = move - eta * self.m / self.preconditioner(self.v)
        self.x = self.x + at(self.server_lr, t) * move
        for client, y in zip(clients, iterates, strict=True):
            self.previous[client.id] = y


class NaiveAdaptiveFedAvg(Twin):
    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        second_moment_decay,
        initial_second_moment=0.0,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.beta = second_moment_decay
        self.v = self.client_rows() + initial_second_moment

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        moves = []
        for client in clients:
            y, S, v = self.x, self.new_step(), self.v[client.id]
            for minibatch in client.minibatches:
                g = self.grad(y, minibatch)
                v = self.beta * v + (1 - self.beta) * g**2
                direction = np.divide(g, np.sqrt(v), out=np.zeros_like(g), where=v > 0)
                y = y - at(self.client_lr, t) * S(direction, y)
            self.v[client.id] = v
            moves.append(y - self.x)
        self.x = self.x + at(self.server_lr, t) * weighted_mean(moves, cohort_weights(clients))
