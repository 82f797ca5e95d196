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

from typing import Unpack

from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.server import ServerSGD, broadcast_params, start_with_params
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, ScalarOrSchedule


@factory
def fedavg(
    loss_fn: LossFn, *, server_lr: ScalarOrSchedule = 1.0, **common: Unpack[Common]
) -> Algorithm:
    """FedAvg: x_{t+1} = x_t - server_lr * mean_i (x_t - x^i_K).

    The mean is plain by default: every client of the cohort counts once, as in most papers of the
    catalogue. McMahan et al. weight each client by its number of examples, n_k / n:
    ``simulate(..., weights="examples")``.

    Args:
      server_lr: server learning rate, or a schedule of the round; 1 is plain averaging.
    """
    training = LocalTraining(loss_fn, **common)

    phase = Phase(
        broadcast_params, training.client_update, ServerSGD(server_lr), reduce={"delta": "mean"}
    )
    return Algorithm("fedavg", start_with_params, (phase,))
