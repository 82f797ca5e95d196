"""FedAvg: average the results of local SGD.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data. AISTATS 2017, Algorithm 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
w_t                        ``params``, the server model x_t
w^k_{t+1}                  local params after K_i steps
η                          ``client_lr``
n_k / n                    ``weights`` of the batch, normalised over the cohort
=========================  ==========================================

Down d, up d (d parameters). Departures: a server learning rate; weights are normalised over
those who take part.
"""

from typing import NamedTuple

import optax

from fedjax_lab import tree
from fedjax_lab.algorithms.hyper import at_round, check_lrs, factory
from fedjax_lab.clients.local import Gradient, local_steps
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, ScalarOrSchedule


class FedAvgServer(NamedTuple):
    """Server state of FedAvg."""

    params: Params  # x_t


def local_sgd(gradient: Gradient, client_lr: ScalarOrSchedule):
    """Client half shared by the methods whose clients run plain local SGD.

    The message is ``delta`` = x_t - x^i_K, a descent direction.

    Args:
      gradient: what the local steps descend.
      client_lr: local learning rate, or a schedule of the round.
    """

    def client_update(params, row, batch):
        lr = at_round(client_lr, batch.round)
        local = local_steps(gradient, gradient, params, batch, lr)
        return {"delta": tree.subtract(params, local.params)}, row, local.report

    return client_update


@factory
def fedavg(
    loss_fn: LossFn,
    *,
    client_lr: ScalarOrSchedule,
    server_lr: ScalarOrSchedule = 1.0,
    gradient_transform: optax.GradientTransformation | None = None,
) -> Algorithm:
    """FedAvg: x_{t+1} = x_t - server_lr * mean_i (x_t - x^i_K).

    Args:
      loss_fn: (params, examples [B, ...], key) -> per-example losses, float [B].
      client_lr: local learning rate, or a schedule of the round.
      server_lr: server learning rate, or a schedule of the round; 1 is plain averaging.
      gradient_transform: optax transformation of each mini-batch gradient.

    Raises:
      ValueError: a learning rate is negative or not finite.
    """
    check_lrs(client_lr=client_lr, server_lr=server_lr)
    gradient = Gradient(loss_fn, gradient_transform)

    def start(params, num_clients, batch):
        return FedAvgServer(params), ()

    def broadcast(server, round):
        return server.params

    def server_update(server, messages, cohort):
        delta = messages["delta"]
        params = tree.descend(server.params, at_round(server_lr, cohort.round), delta)
        return FedAvgServer(params), {"delta_norm": tree.norm(delta)}

    client_update = local_sgd(gradient, client_lr)
    phase = Phase(broadcast, client_update, server_update, reduce={"delta": "mean"})
    return Algorithm("fedavg", start, (phase,), lambda state: state.server.params)
