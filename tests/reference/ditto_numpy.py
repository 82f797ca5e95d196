"""Ditto (Li et al., ICML 2021), pFedMe (T. Dinh et al., NeurIPS 2020), APFL (Deng et al., 2020).

Ditto, lambda = ``prox_weight``, eta_p = ``personal_lr``; the server's part is FedAvg:

    v <- v - eta_p ( g_i(v) + lambda (v - x_t) )            K_i steps, on the same mini-batches

pFedMe, lambda = ``prox_weight``, beta = ``server_lr``; R = K_i mini-batches:

    w = x_t ;  for each mini-batch:
        K times  theta <- theta - eta_p ( g_i(theta) + lambda (theta - w) )
        w <- w - eta lambda (w - theta)
    x_{t+1} = (1 - beta) x_t + beta sum_i w_i w_K^i

APFL; m = alpha v + (1 - alpha) w, and the server's part is FedAvg:

    w <- w - eta g(w) ;  v <- v - eta alpha g(m)
    first step only, if adaptive: alpha <- clip(alpha - eta <v - w, g(m)>, 0, 1)

with v, w and alpha on the right as the step found them.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean
from tests.reference.fedavg_numpy import FedAvg


class Ditto(FedAvg):
    def __init__(self, *arguments, prox_weight, personal_lr=None, **options):
        super().__init__(*arguments, **options)
        self.lam = prox_weight
        self.eta_p = self.client_lr if personal_lr is None else personal_lr
        self.v = np.tile(self.x, (self.num_clients, 1))

    def personal_model(self, i):
        return self.v[i]

    def round(self, clients, t):
        for client in participants(clients):
            v, S = self.v[client.id].copy(), self.new_step()
            for minibatch in client.minibatches:
                pull = at(self.lam, t) * (v - self.x)
                v = v - at(self.eta_p, t) * S(self.grad(v, minibatch) + pull, v)
            self.v[client.id] = v
        super().round(clients, t)


class PFedMe(Twin):
    def __init__(self, *arguments, prox_weight, personal_lr, inner_steps, **options):
        super().__init__(*arguments, **options)
        self.lam, self.eta_p, self.inner_steps = prox_weight, personal_lr, inner_steps
        self.theta = np.tile(self.x, (self.num_clients, 1))

    def personal_model(self, i):
        return self.theta[i]

    def round(self, clients, t):
        clients, ends = participants(clients), []
        lam, eta_p = at(self.lam, t), at(self.eta_p, t)
        for client in clients:
            w, theta, S = self.x.copy(), self.theta[client.id].copy(), self.new_step()
            for minibatch in client.minibatches:
                for _ in range(self.inner_steps):
                    theta = theta - eta_p * (self.grad(theta, minibatch) + lam * (theta - w))
                w = w - at(self.client_lr, t) * S(lam * (w - theta), w)
            self.theta[client.id] = theta
            ends.append(w)
        if clients:
            beta = at(self.server_lr, t)
            mean = weighted_mean(ends, cohort_weights(clients))
            self.x = (1 - beta) * self.x + beta * mean


class APFL(Twin):
    def __init__(self, *arguments, mixing, adaptive_mixing=True, **options):
        super().__init__(*arguments, **options)
        self.adaptive = adaptive_mixing
        self.v = np.tile(self.x, (self.num_clients, 1))
        self.alpha = np.full(self.num_clients, float(mixing))

    def personal_model(self, i):
        return self.alpha[i] * self.v[i] + (1 - self.alpha[i]) * self.x

    def round(self, clients, t):
        clients, deltas = participants(clients), []
        eta = at(self.client_lr, t)
        for client in clients:
            i = client.id
            w, S_w, S_v = self.x.copy(), self.new_step(), self.new_step()
            for k, minibatch in enumerate(client.minibatches):
                v, alpha = self.v[i], self.alpha[i]
                g = self.grad(w, minibatch)
                g_m = self.grad(alpha * v + (1 - alpha) * w, minibatch)
                if self.adaptive and k == 0:
                    self.alpha[i] = np.clip(alpha - eta * (v - w) @ g_m, 0, 1)
                self.v[i] = v - eta * S_v(alpha * g_m, v)
                w = w - eta * S_w(g, w)
            deltas.append(self.x - w)
        if clients:
            mean = weighted_mean(deltas, cohort_weights(clients))
            self.x = self.x - at(self.server_lr, t) * mean
