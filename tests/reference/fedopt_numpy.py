"""Server optimisers on the mean descent direction D_t = sum_i w_i d_i of local SGD.

FedAvgM: Hsu, Qi, Brown 2019, in the heavy-ball form of GradMA's Algorithm 5 (CVPR 2023).
FedAdagrad, FedYogi, FedAdam: Reddi et al., ICLR 2021, Algorithm 2 (no bias correction).
FedAMS, FedAMSGrad: Wang, Lin, Chen, ICML 2022, Algorithm 1, options 1 and 2.
FedOptSGD, FedOptAdam: FedOpt with the optax optimisers sgd and adam, D_t being the gradient.

    FedAvgM     m = beta m + D ;                    x <- x - eta_g m
    others      m = b1 m + (1 - b1) D ;             x <- x - eta_g m / (sqrt(v) + tau)
    FedAdagrad  v = v + D^2                         v_{-1} = tau^2
    FedYogi     v = v - (1 - b2) D^2 sign(v - D^2)  v_{-1} = tau^2
    FedAdam     v = b2 v + (1 - b2) D^2             v_{-1} = tau^2
    FedAMS      v as FedAdam, v_{-1} = 0
                option 1: vhat = max(vhat, v, tau) ;  x <- x - eta_g m / sqrt(vhat)
                option 2: vhat = max(vhat, v) ;       x <- x - eta_g m / (sqrt(vhat) + tau)

tau of FedAMS is the papers' epsilon: under option 1 a floor under v, a square.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


class ServerOptimizer(Twin):
    """Local SGD, then ``server_step(D_t, t)``."""

    def round(self, clients, t):
        clients = participants(clients)
        if not clients:
            return
        mean = weighted_mean([self.local_sgd(c, t) for c in clients], cohort_weights(clients))
        self.server_step(mean, t)

    def server_step(self, mean, t):
        raise NotImplementedError


class FedAvgM(ServerOptimizer):
    def __init__(self, x0, num_clients, gradient, *, client_lr, momentum, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.beta = momentum
        self.m = np.zeros_like(self.x)

    def server_step(self, mean, t):
        self.m = at(self.beta, t) * self.m + mean
        self.x = self.x - at(self.server_lr, t) * self.m


class Adaptive(ServerOptimizer):
    """First moment, and a second moment that starts at tau^2 and that subclasses update."""

    def __init__(
        self, x0, num_clients, gradient, *, client_lr, beta1=0.9, beta2=0.99, tau=1e-3, **options
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.beta1, self.beta2, self.tau = beta1, beta2, tau
        self.m = np.zeros_like(self.x)
        self.v = np.full_like(self.x, tau**2)

    def second_moment(self, square):
        raise NotImplementedError

    def server_step(self, mean, t):
        self.m = self.beta1 * self.m + (1 - self.beta1) * mean
        self.v = self.second_moment(mean**2)
        self.x = self.x - at(self.server_lr, t) * self.m / (np.sqrt(self.v) + self.tau)


class FedAdam(Adaptive):
    """``initial_second_moment`` in place of tau^2."""

    def __init__(self, *arguments, initial_second_moment=None, **options):
        super().__init__(*arguments, **options)
        if initial_second_moment is not None:
            self.v = np.full_like(self.x, initial_second_moment)

    def second_moment(self, square):
        return self.beta2 * self.v + (1 - self.beta2) * square


class FedYogi(Adaptive):
    def second_moment(self, square):
        return self.v - (1 - self.beta2) * square * np.sign(self.v - square)


class FedAdagrad(Adaptive):
    def __init__(self, x0, num_clients, gradient, *, client_lr, beta1=0.0, tau=1e-3, **options):
        super().__init__(
            x0, num_clients, gradient, client_lr=client_lr, beta1=beta1, tau=tau, **options
        )

    def second_moment(self, square):
        return self.v + square


class FedAMS(ServerOptimizer):
    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        beta1=0.9,
        beta2=0.99,
        tau=1e-3,
        option=1,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.beta1, self.beta2, self.tau, self.option = beta1, beta2, tau, option
        self.m, self.v, self.vhat = (np.zeros_like(self.x) for _ in range(3))

    def server_step(self, mean, t):
        self.m = self.beta1 * self.m + (1 - self.beta1) * mean
        self.v = self.beta2 * self.v + (1 - self.beta2) * mean**2
        self.vhat = np.maximum(self.vhat, self.v)
        if self.option == 1:
            self.vhat = np.maximum(self.vhat, self.tau)
            denominator = np.sqrt(self.vhat)
        else:
            denominator = np.sqrt(self.vhat) + self.tau
        self.x = self.x - at(self.server_lr, t) * self.m / denominator


class FedOptSGD(ServerOptimizer):
    """FedOpt with optax.sgd(learning_rate); a schedule sees the count of updates so far."""

    def __init__(self, x0, num_clients, gradient, *, client_lr, learning_rate, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.learning_rate = learning_rate
        self.count = 0

    def server_step(self, mean, t):
        self.x = self.x - at(self.learning_rate, self.count) * mean
        self.count += 1


class FedOptAdam(ServerOptimizer):
    """FedOpt with optax.adam: bias corrected, eps outside the square root.

    m = b1 m + (1 - b1) D ;  v = b2 v + (1 - b2) D^2 ;  n counts updates from 1
    x <- x - lr m/(1 - b1^n) / (sqrt(v/(1 - b2^n)) + eps)
    """

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        learning_rate,
        b1=0.9,
        b2=0.999,
        eps=1e-8,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.learning_rate = learning_rate
        self.b1, self.b2, self.eps = b1, b2, eps
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)
        self.count = 0

    def server_step(self, mean, t):
        rate = at(self.learning_rate, self.count)
        self.count += 1
        self.m = self.b1 * self.m + (1 - self.b1) * mean
        self.v = self.b2 * self.v + (1 - self.b2) * mean**2
        m_hat = self.m / (1 - self.b1**self.count)
        v_hat = self.v / (1 - self.b2**self.count)
        self.x = self.x - rate * m_hat / (np.sqrt(v_hat) + self.eps)
