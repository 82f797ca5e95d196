"""Seven methods with the local step of their published code, FL-Simulator's.

There the clip acts on the whole step and not on the gradient, and SGD adds the weight decay wd
after it. With G the mini-batch gradient, at y or, with e = rho unit(g(y)), at y + e, and clip(.)
to the norm C, each step is y <- y - eta v with

    SCAFFOLD, FedGAMMA          v = clip( G + c - c_i ) + wd y
    FedCM, MoFedSAM             v = clip( a G + (1 - a) m ) + wd y
    FedDyn, FedSpeed, FedSMOO   v = clip( G + p (h_i - x_t) ) + (wd + p) y

G is at y in SCAFFOLD, FedCM and FedDyn; e is rho unit(g(y) - mu_i - s) in FedSMOO, after which
mu_i <- mu_i + e - s. The clip of the last three sees the proximal term p (y - x_t) without p y,
which SGD takes for weight decay. After the round, with d_i = x_t - y_K:

    SCAFFOLD, FedGAMMA          c_i+ = c_i - c + d_i / (K_i eta) ;  c <- c + (1/N) sum (c_i+ - c_i)
    FedCM, MoFedSAM             m = sum_i w_i d_i / (K_i eta)
    both                        x_{t+1} = x_t - eta_g sum_i w_i d_i
    FedDyn, FedSpeed, FedSMOO   h_i <- h_i - d_i ;  s = rho unit( sum_i w_i mu_i )
                                x_{t+1} = sum_i w_i y_K + (1/N) sum over all clients of h_j

K_i are the client's own steps, where the published code has a number for all of them.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, cohort_weights, participants, weighted_mean


class Published(Twin):
    """``acted`` says of every step so far whether the clip did something."""

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        clip_norm,
        weight_decay,
        perturbation_radius=0.0,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.clip_norm, self.weight_decay = clip_norm, weight_decay
        self.rho = perturbation_radius
        self.acted = []

    def clip(self, v):
        norm = np.linalg.norm(v)
        self.acted.append(norm > self.clip_norm)
        return self.clip_norm / norm * v if self.acted[-1] else v

    def perturbed_gradient(self, y, minibatch):
        """G."""
        g = self.gradient(y, minibatch)
        return self.gradient(y + self.rho * g / np.linalg.norm(g), minibatch)


class SCAFFOLD(Published):
    """With a perturbation_radius, FedGAMMA."""

    def __init__(self, x0, num_clients, gradient, **options):
        super().__init__(x0, num_clients, gradient, **options)
        self.c, self.c_i = np.zeros_like(self.x), self.client_rows()

    def round(self, clients, t):
        clients, eta, wd = participants(clients), self.client_lr, self.weight_decay
        if not clients:
            return
        moves, changes = [], []
        for client in clients:
            y, c_i = self.x, self.c_i[client.id]
            for minibatch in client.minibatches:
                G = self.perturbed_gradient(y, minibatch)
                y = y - eta * (self.clip(G + self.c - c_i) + wd * y)
            moves.append(self.x - y)
            c_new = c_i - self.c + moves[-1] / (client.steps * eta)
            changes.append(c_new - c_i)
            self.c_i[client.id] = c_new
        self.x = self.x - self.server_lr * weighted_mean(moves, cohort_weights(clients))
        self.c = self.c + sum(changes) / self.num_clients


class FedCM(Published):
    """With a perturbation_radius, MoFedSAM."""

    def __init__(self, x0, num_clients, gradient, *, mixing, **options):
        super().__init__(x0, num_clients, gradient, **options)
        self.a = mixing
        self.m = np.zeros_like(self.x)

    def round(self, clients, t):
        clients, eta, wd = participants(clients), self.client_lr, self.weight_decay
        if not clients:
            return
        moves, momenta = [], []
        for client in clients:
            y = self.x
            for minibatch in client.minibatches:
                G = self.perturbed_gradient(y, minibatch)
                y = y - eta * (self.clip(self.a * G + (1 - self.a) * self.m) + wd * y)
            moves.append(self.x - y)
            momenta.append(moves[-1] / (client.steps * eta))
        weights = cohort_weights(clients)
        self.x = self.x - self.server_lr * weighted_mean(moves, weights)
        self.m = weighted_mean(momenta, weights)


class FedDyn(Published):
    """With a perturbation_radius, FedSpeed."""

    def __init__(self, x0, num_clients, gradient, *, prox_weight, **options):
        super().__init__(x0, num_clients, gradient, **options)
        self.p = prox_weight
        self.h_i = self.client_rows()

    def step_gradient(self, client_id, y, minibatch):
        return self.perturbed_gradient(y, minibatch)

    def round(self, clients, t):
        clients, eta, wd, p = participants(clients), self.client_lr, self.weight_decay, self.p
        if not clients:
            return
        models = []
        for client in clients:
            y = self.x
            linear = p * (self.h_i[client.id] - self.x)
            for minibatch in client.minibatches:
                G = self.step_gradient(client.id, y, minibatch)
                y = y - eta * (self.clip(G + linear) + (wd + p) * y)
            models.append(y)
        for client, y in zip(clients, models, strict=True):
            self.h_i[client.id] += y - self.x
        self.x = weighted_mean(models, cohort_weights(clients)) + self.h_i.mean(axis=0)


class FedSMOO(FedDyn):
    def __init__(self, x0, num_clients, gradient, **options):
        super().__init__(x0, num_clients, gradient, **options)
        self.s, self.mu_i = np.zeros_like(self.x), self.client_rows()

    def step_gradient(self, client_id, y, minibatch):
        ascent = self.gradient(y, minibatch) - self.mu_i[client_id] - self.s
        e = self.rho * ascent / np.linalg.norm(ascent)
        self.mu_i[client_id] += e - self.s
        return self.gradient(y + e, minibatch)

    def round(self, clients, t):
        super().round(clients, t)
        clients = participants(clients)
        if clients:
            mean = weighted_mean([self.mu_i[c.id] for c in clients], cohort_weights(clients))
            self.s = self.rho * mean / np.linalg.norm(mean)
