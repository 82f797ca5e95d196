"""FedProx and FedProxM: a proximal term holds local models near the server's.

FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous
Networks. MLSys 2020, Algorithm 2. FedProxM: the same under the server momentum of GradMA
(CVPR 2023), Algorithm 5.

=========================  ==========================================
paper                      here
=========================  ==========================================
w^t, w^t_k                 server params x_t, local params
μ                          ``prox_weight``: the term is μ/2 ||y - x_t||², its gradient μ (y - x_t)
γ_k (inexact solutions)    as many local steps as the batch gives
β_1 (GradMA)               ``momentum``
=========================  ==========================================

Down d, up d, no client state. Departures: the paper draws clients by their sizes and averages
them evenly; here the cohort and the weights are the batch's.
"""

from typing import Unpack

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.algorithms.server import MomentumServer, ServerSGD, broadcast_params
from fedjax_lab.checks import check_number, check_scalar_or_schedule
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Scalar, ScalarOrSchedule

SYMBOLS = {"mu": "prox_weight", "beta_1": "momentum"}


@factory
def fedprox(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    prox_weight: ScalarOrSchedule = 0.1,
    **common: Unpack[Common],
) -> Algorithm:
    """FedProx: local steps descend g + prox_weight * (y - x_t); averaging as in FedAvg.

    Args:
      prox_weight: weight of the proximal term, or a schedule of the round; 0 is FedAvg.
      gradient_transform: optax transformation of each mini-batch gradient, without the
        proximal term.
    """
    training = LocalTraining(loss_fn, **common)
    return _fedprox("fedprox", training, prox_weight, ServerSGD(server_lr))


@factory
def fedproxm(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    prox_weight: ScalarOrSchedule = 0.1,
    momentum: Scalar = 0.9,
    **common: Unpack[Common],
) -> Algorithm:
    """FedProxM: FedProx under m <- momentum * m + delta;  x <- x - server_lr * m.

    Args:
      prox_weight: weight of the proximal term, or a schedule of the round; 0 is FedAvgM.
      momentum: in [0, 1]; 0 is FedProx.
      gradient_transform: optax transformation of each mini-batch gradient, without the proximal
        term.
    """
    training = LocalTraining(loss_fn, **common)
    check_number("momentum", momentum, minimum=0.0, maximum=1.0)
    return _fedprox("fedproxm", training, prox_weight, ServerSGD(server_lr, momentum))


def _fedprox(name, training, prox_weight, server_sgd):
    check_scalar_or_schedule("prox_weight", prox_weight)

    def start(params, num_clients, batch):
        return MomentumServer(params, server_sgd.first_momentum(params)), ()

    def client_update(x, row, batch):
        mu = at_round(prox_weight, batch.round)

        def direction(y, step):
            g, report = training.gradient(y, step)
            return tree.add_scaled(g, mu, tree.subtract(y, x)), report

        local = training.steps(x, batch, direction)
        return {"delta": tree.subtract(x, local.params)}, row, local.report

    phase = Phase(broadcast_params, client_update, server_sgd, reduce={"delta": "mean"})
    return Algorithm(name, start, (phase,))
