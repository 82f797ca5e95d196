"""FedProx (Li et al., MLSys 2020, Algorithm 2) and FedProxM, which has a heavy-ball server.

    y_{k+1} = y_k - eta_l ( g_i(y_k) + mu (y_k - x_t) )
    FedProx   x_{t+1} = x_t - eta_g sum_i w_i d_i
    FedProxM  m <- beta m + sum_i w_i d_i ;  x_{t+1} = x_t - eta_g m       (CVPR 2023, Algorithm 5)

mu is ``prox_weight``: the local objective gains (mu/2) ||y - x_t||^2. beta is ``momentum``.
"""

from __future__ import annotations

from tests.reference.base import at
from tests.reference.fedavg_numpy import FedAvg
from tests.reference.fedopt_numpy import FedAvgM


class Proximal:
    """Replaces the local SGD of a twin that has a server."""

    def __init__(self, x0, num_clients, gradient, *, client_lr, prox_weight, **options):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.mu = prox_weight

    def local_sgd(self, client, t):
        y, S = self.x.copy(), self.new_step()
        for minibatch in client.minibatches:
            pull = at(self.mu, t) * (y - self.x)
            y = y - at(self.client_lr, t) * S(self.grad(y, minibatch) + pull, y)
        return self.x - y


class FedProx(Proximal, FedAvg):
    pass


class FedProxM(Proximal, FedAvgM):
    pass
