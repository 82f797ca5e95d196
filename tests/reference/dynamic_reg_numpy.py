"""FedDyn, FedADMM in its two variants, and FedPD: a dual variable and a proximal term per client.

FedDyn (Acar et al., ICLR 2021, Algorithm 1), alpha = ``prox_weight``; lambda_i estimates grad f_i:

    y_{k+1}  = y_k - eta_l ( g_i(y_k) - lambda_i + alpha (y_k - x_t) )
    lambda_i <- lambda_i + alpha d_i
    h        <- h + (alpha/N) sum_{i in S_t} d_i
    x_{t+1}  = sum_i w_i y_K^i - h / alpha

FedADMM, rho = ``prox_weight``; u_i, the papers' y_i, estimates - grad f_i:

    y_{k+1} = y_k - eta_l ( g_i(y_k) + u_i + rho (y_k - x_t) ) ,  y_0 = x_t
    u_i+    = u_i + rho (y_K - x_t)
    D_i     = (y_K - x_i) + (u_i+ - u_i)/rho ;  x_i+ = y_K
    W (Wang, Marella, Anderson, CDC 2022)   x_{t+1} = x_t + (1/N) sum_{i in S_t} D_i
    G (Gong, Li, Freris, ICDE 2022)         x_{t+1} = x_t + eta_s sum_i w_i D_i

x_i is the client's last local model, x_0 at first (``prev="local"``), or x_t, as in the code of
variant G (``prev="global"``). eta_s is ``server_lr``, which variant W does not use.

FedPD (Zhang et al., 2020, Algorithm 1), rho = ``prox_weight``; each client has its own anchor a_i:

    y_{k+1} = y_k - eta_l ( g_i(y_k) + u_i + rho (y_k - a_i) ) ,  y_0 = x_i
    x_i <- y_K ;  u_i <- u_i + rho (x_i - a_i) ;  a_i <- x_i + u_i / rho
    unless the round's coin says skip:  x = sum_i w_i a_i ;  a_i <- x
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class Dual(Twin):
    """Local SGD on f_i(y) + <u_i, y> + (rho/2) ||y - anchor||^2."""

    def __init__(self, x0, num_clients, gradient, *, client_lr, prox_weight, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        if not callable(prox_weight) and prox_weight <= 0:
            raise ValueError("prox_weight must be positive")
        self.rho = prox_weight

    def local_model(self, client, t, *, start, dual, anchor):
        """y_K; tests replace it by an exact minimiser."""
        y, S = start, self.new_step()
        for minibatch in client.minibatches:
            pull = dual + at(self.rho, t) * (y - anchor)
            y = y - at(self.client_lr, t) * S(self.grad(y, minibatch) + pull, y)
        return y


class FedDyn(Dual):
    """``h`` and ``lambda_i`` [N, d]."""

    def __init__(self, x0, num_clients, gradient, *, client_lr, prox_weight, **options):
        super().__init__(
            x0, num_clients, gradient, client_lr=client_lr, prox_weight=prox_weight, **options
        )
        self.h = np.zeros_like(self.x)
        self.lambda_i = self.client_rows()

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        alpha = at(self.rho, t)
        models = []
        for client in clients:
            dual = -self.lambda_i[client.id]
            y = self.local_model(client, t, start=self.x, dual=dual, anchor=self.x)
            self.lambda_i[client.id] += alpha * (self.x - y)
            models.append(y)
        self.h = self.h + alpha / self.num_clients * sum(self.x - y for y in models)
        self.x = weighted_mean(models, cohort_weights(clients)) - self.h / alpha


class FedADMM(Dual):
    """``x_i`` and ``u_i`` [N, d]."""

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        prox_weight,
        variant="W",
        prev="local",
        **options,
    ):
        super().__init__(
            x0, num_clients, gradient, client_lr=client_lr, prox_weight=prox_weight, **options
        )
        self.variant, self.prev = variant, prev
        self.x_i = np.tile(self.x, (num_clients, 1))
        self.u_i = self.client_rows()

    def start(self, client):
        """y_0; only solutions of limited accuracy depend on it."""
        return self.x

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        rho = at(self.rho, t)
        changes = []
        for client in clients:
            i = client.id
            y = self.local_model(
                client, t, start=self.start(client), dual=self.u_i[i], anchor=self.x
            )
            previous = self.x_i[i] if self.prev == "local" else self.x
            u_new = self.u_i[i] + rho * (y - self.x)
            changes.append((y - previous) + (u_new - self.u_i[i]) / rho)
            self.x_i[i], self.u_i[i] = y, u_new
        if self.variant == "W":
            self.x = self.x + sum(changes) / self.num_clients
        else:
            move = weighted_mean(changes, cohort_weights(clients))
            self.x = self.x + at(self.server_lr, t) * move


class FedPD(Dual):
    """``x_i``, ``u_i`` and ``anchor`` [N, d]; ``x`` is the mean that was communicated last.

    ``coin(t)`` says whether round t skips the communication; without it, ``skip_probability`` must
    leave no choice (0 or 1).
    """

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        prox_weight,
        skip_probability=0.0,
        coin=None,
        **options,
    ):
        super().__init__(
            x0, num_clients, gradient, client_lr=client_lr, prox_weight=prox_weight, **options
        )
        if coin is None and skip_probability not in (0, 1):
            raise ValueError("a skip_probability between 0 and 1 needs a coin")
        self.coin = coin or (lambda t: skip_probability == 1)
        self.x_i = np.tile(self.x, (num_clients, 1))
        self.anchor = np.tile(self.x, (num_clients, 1))
        self.u_i = self.client_rows()

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        rho = at(self.rho, t)
        for client in clients:
            i = client.id
            y = self.local_model(
                client, t, start=self.x_i[i], dual=self.u_i[i], anchor=self.anchor[i]
            )
            self.x_i[i] = y
            self.u_i[i] = self.u_i[i] + rho * (y - self.anchor[i])
            self.anchor[i] = y + self.u_i[i] / rho
        if self.coin(t):
            return
        anchors = [self.anchor[client.id] for client in clients]
        self.x = weighted_mean(anchors, cohort_weights(clients))
        for client in clients:
            self.anchor[client.id] = self.x
