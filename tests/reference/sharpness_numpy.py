"""The sharpness-aware family: local steps that take the gradient at a perturbed point.

FedSAM and MoFedSAM: Qu et al., ICML 2022. FedASAM: Caldarola, Caputo, Ciccone, ECCV 2022.
FedLESAM, -S, -D: Fan et al., ICML 2024. FedGAMMA: Dai et al., TNNLS 2023.
FedSMOO: Sun et al., ICML 2023.

With rho = perturbation_radius, g the raw mini-batch gradient (one mini-batch per step for both
passes), unit(v) = v / ||v|| over the whole vector and 0 where ||v|| < 1e-12, and T the gradient
transform at the unperturbed y_k, every step is y_{k+1} = y_k - eta v_k with

    gs        = T( g(y_k + e_k) ; y_k )
    FedSAM    e_k = rho unit(g(y_k))                          v = gs
    MoFedSAM  e_k as FedSAM                                   v = a gs + (1 - a) m
    FedASAM   e_k = rho t (t g) / ||t g|| ,                   v = gs
              t_j = |y_kj| + stability where entry j is adaptive, else 1
    FedGAMMA  e_k as FedSAM                                   v = gs - c_i + c
    FedLESAM  e = rho unit(w_i - x_t) for the whole round     v = gs
         -S   as FedLESAM                                     v = gs + corr (c - c_i)
         -D   as FedLESAM                                     v = gs + p (h_i + y_k - x_t)
    FedSMOO   e_k = rho unit(g(y_k) - mu - s)                 v = gs + p (h_i + y_k - x_t)
              then mu <- mu + e_k - s

where w_i is the model of the client's last visit, or the model of the last round in which anybody
took part ("last_round"); without one, e = 0. After the K_i steps, with d_i = x_t - y_K:

    m         sum_i w_i v_i                                                 MoFedSAM
    c_i+      c_i - c + v_i ;  c <- c + (1/N) sum (c_i+ - c_i)              FedGAMMA, -S
    v_i       mean of the v_k, d_i / (K_i eta) for SGD
    h_i+      h_i - d_i ;  hbar <- hbar - (1/N) sum d_i                     -D, FedSMOO
    mu_i+     mu ;  s <- rho unit( sum_i w_i (mu_i+ - e_{K-1}) ), or of sum_i w_i mu_i+   FedSMOO
    x_{t+1}   x_t - server_lr sum_i w_i d_i
              x_t + server_lr ( hbar - sum_i w_i d_i )                      -D, FedSMOO (rate 1)

0/0 is 0 where eta is 0.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


def unit(v):
    """v / ||v||, and 0 for a norm below 1e-12."""
    norm = np.linalg.norm(v)
    return v / norm if norm >= 1e-12 else np.zeros_like(v)


def mean_of(directions, eta):
    """v_i."""
    return np.mean(directions, axis=0) if eta else np.zeros_like(directions[0])


class FedSAM(Twin):
    def __init__(self, x0, num_clients, gradient, *, client_lr, perturbation_radius, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.radius = perturbation_radius

    def ascent(self, y, minibatch, t):
        """e_k at y."""
        return at(self.radius, t) * unit(self.gradient(y, minibatch))

    def descent(self, y, e, minibatch):
        """The gradient at y + e, transformed as if taken at y."""
        return self.transformed(self.gradient(y + e, minibatch), y)

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        moves = []
        for client in clients:
            y, S = self.x.copy(), self.new_step()
            for minibatch in client.minibatches:
                e = self.ascent(y, minibatch, t)
                y = y - at(self.client_lr, t) * S(self.descent(y, e, minibatch), y)
            moves.append(self.x - y)
        self.x = self.x - at(self.server_lr, t) * weighted_mean(moves, cohort_weights(clients))


class FedASAM(FedSAM):
    """``adaptive``: bool [d], the entries with |y_j| + stability in t; all of them by default."""

    def __init__(
        self, x0, num_clients, gradient, *, client_lr, stability=0.2, adaptive=None, **options
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.stability = stability
        self.adaptive = np.ones(self.x.size, bool) if adaptive is None else np.asarray(adaptive)

    def scales(self, y):
        """The diagonal t at y."""
        return np.where(self.adaptive, np.abs(y) + self.stability, 1.0)

    def ascent(self, y, minibatch, t):
        scales = self.scales(y)
        return at(self.radius, t) * scales * unit(scales * self.gradient(y, minibatch))


class MoFedSAM(FedSAM):
    """``m`` is 0 at first."""

    def __init__(self, x0, num_clients, gradient, *, client_lr, mixing, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.mixing = mixing
        self.m = np.zeros_like(self.x)

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        a, eta = at(self.mixing, t), at(self.client_lr, t)
        moves, directions = [], []
        for client in clients:
            y, S, seen = self.x.copy(), self.new_step(), []
            for minibatch in client.minibatches:
                e = self.ascent(y, minibatch, t)
                seen.append(a * self.descent(y, e, minibatch) + (1 - a) * self.m)
                y = y - eta * S(seen[-1], y)
            moves.append(self.x - y)
            directions.append(mean_of(seen, eta))
        weights = cohort_weights(clients)
        self.x = self.x - at(self.server_lr, t) * weighted_mean(moves, weights)
        self.m = weighted_mean(directions, weights)


class FedGAMMA(FedSAM):
    """``c`` and ``c_i`` [N, d] are 0 at first."""

    def __init__(self, x0, num_clients, gradient, *, client_lr, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.c = np.zeros_like(self.x)
        self.c_i = self.client_rows()

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        eta = at(self.client_lr, t)
        moves, changes = [], []
        for client in clients:
            correction = self.c - self.c_i[client.id]
            y, S, seen = self.x.copy(), self.new_step(), []
            for minibatch in client.minibatches:
                e = self.ascent(y, minibatch, t)
                seen.append(self.descent(y, e, minibatch) + correction)
                y = y - eta * S(seen[-1], y)
            moves.append(self.x - y)
            changes.append(mean_of(seen, eta) - self.c)
        self.x = self.x - at(self.server_lr, t) * weighted_mean(moves, cohort_weights(clients))
        self.c = self.c + sum(changes) / self.num_clients
        for client, change in zip(clients, changes, strict=True):
            self.c_i[client.id] = self.c_i[client.id] + change


class FedLESAM(FedSAM):
    """``visited`` has a client's w_i once it took part, ``previous`` the last round's model."""

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        variant="base",
        reference="own_last_visit",
        prox_weight=0.1,
        correction_weight=1.0,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        if variant not in ("base", "S", "D") or reference not in ("own_last_visit", "last_round"):
            raise ValueError(f"unknown variant {variant!r} or reference {reference!r}")
        self.variant = variant
        self.reference = reference
        self.prox = prox_weight
        self.correction_weight = correction_weight
        self.visited = {}
        self.previous = self.x.copy()
        self.c, self.c_i = np.zeros_like(self.x), self.client_rows()
        self.hbar, self.h_i = np.zeros_like(self.x), self.client_rows()

    def perturbation(self, client_id, t):
        """e of the whole round: from the current model back to the older one."""
        older = self.previous
        if self.reference == "own_last_visit":
            older = self.visited.get(client_id, self.x)
        return at(self.radius, t) * unit(older - self.x)

    def correction(self, client_id, y, t):
        if self.variant == "S":
            return at(self.correction_weight, t) * (self.c - self.c_i[client_id])
        if self.variant == "D":
            return at(self.prox, t) * (self.h_i[client_id] + y - self.x)
        return np.zeros_like(y)

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        eta = at(self.client_lr, t)
        moves, means = [], []
        for client in clients:
            e = self.perturbation(client.id, t)
            y, S, seen = self.x.copy(), self.new_step(), []
            for minibatch in client.minibatches:
                g = self.descent(y, e, minibatch)
                seen.append(g + self.correction(client.id, y, t))
                y = y - eta * S(seen[-1], y)
            moves.append(self.x - y)
            means.append(mean_of(seen, eta))
        old_c = self.c
        for client, d, mean in zip(clients, moves, means, strict=True):
            self.visited[client.id] = self.x
            if self.variant == "S":
                change = mean - old_c
                self.c_i[client.id] = self.c_i[client.id] + change
                self.c = self.c + change / self.num_clients
            if self.variant == "D":
                self.h_i[client.id] = self.h_i[client.id] - d
                self.hbar = self.hbar - d / self.num_clients
        mean = weighted_mean(moves, cohort_weights(clients))
        self.previous = self.x
        self.x = self.x + at(self.server_lr, t) * (self.hbar - mean)


class FedSMOO(Twin):
    """``mu_i`` [N, d], ``h_i`` [N, d], ``s`` and ``hbar`` are 0 at first."""

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        perturbation_radius,
        prox_weight,
        s_source="mu_minus_e",
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        if s_source not in ("mu_minus_e", "mu"):
            raise ValueError(f"unknown s_source {s_source!r}")
        self.radius = perturbation_radius
        self.prox = prox_weight
        self.s_source = s_source
        self.s = np.zeros_like(self.x)
        self.hbar = np.zeros_like(self.x)
        self.mu_i = self.client_rows()
        self.h_i = self.client_rows()

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        eta, rho, prox = at(self.client_lr, t), at(self.radius, t), at(self.prox, t)
        moves, sources = [], []
        for client in clients:
            mu, h = self.mu_i[client.id].copy(), self.h_i[client.id]
            y, S = self.x.copy(), self.new_step()
            for minibatch in client.minibatches:
                e = rho * unit(self.gradient(y, minibatch) - mu - self.s)
                mu = mu + e - self.s
                g = self.transformed(self.gradient(y + e, minibatch), y)
                y = y - eta * S(g + prox * (h + y - self.x), y)
            self.mu_i[client.id] = mu
            self.h_i[client.id] = h + (y - self.x)
            moves.append(y - self.x)
            sources.append(mu if self.s_source == "mu" else mu - e)
        weights = cohort_weights(clients)
        self.s = rho * unit(weighted_mean(sources, weights))
        self.hbar = self.hbar + sum(moves) / self.num_clients
        self.x = self.x + weighted_mean(moves, weights) + self.hbar
