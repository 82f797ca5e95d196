"""Ditto: each client keeps a model of its own, drawn to the one that all train together.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML
2021, Algorithm 1, with FedAvg for the common model.

=========================  ==========================================
paper                      here
=========================  ==========================================
w^t                        ``params``, the server model x_t
v_k                        the client's row
λ                          ``prox_weight``
η (of v_k)                 ``personal_lr``
s                          K_i, as many as the steps of the common model
=========================  ==========================================

Down d, up d, client state d; a step takes two gradients. The server's part is FedAvg bit for bit.
Client i uses v_i. Departures: both models take the same mini-batches (and the same dropout); a
server learning rate. The transforms act on the steps of both models, each with a state of its own,
a ``gradient_transform`` without the proximal term.
"""

from typing import Unpack

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.algorithms.own_models import OWN_ROW, start_with_own_models
from fedjax_lab.algorithms.server import ServerSGD, broadcast_params
from fedjax_lab.checks import check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, ScalarOrSchedule

SYMBOLS = {"lambda": "prox_weight", "eta": "personal_lr"}


@factory
def ditto(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    prox_weight: ScalarOrSchedule = 0.1,
    personal_lr: ScalarOrSchedule | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """Ditto: FedAvg, beside which client i trains v_i by g(v_i) + prox_weight * (v_i - x_t).

    Args:
      prox_weight: λ, at least 0, or a schedule of the round; 0 is training alone.
      personal_lr: learning rate of v_i, or a schedule of the round. None: ``client_lr``.
    """
    check_scalar_or_schedule("prox_weight", prox_weight)
    if personal_lr is not None:
        check_scalar_or_schedule("personal_lr", personal_lr)
    training = LocalTraining(loss_fn, **common)
    own_lr = training.client_lr if personal_lr is None else personal_lr

    def client_update(x, v, batch):
        weight = at_round(prox_weight, batch.round)

        def towards_x(v, step):
            g, report = training.gradient(v, step)
            return tree.add_scaled(g, weight, tree.subtract(v, x)), report

        common_model = training.steps(x, batch)
        own = training.steps(v, batch, towards_x, lr=at_round(own_lr, batch.round))
        delta = tree.subtract(x, common_model.params)
        return {"delta": delta}, own.params, common_model.report

    phase = Phase(
        broadcast_params,
        client_update,
        ServerSGD(server_lr),
        reduce={"delta": "mean"},
        costs=Costs(gradients=2),
    )
    return Algorithm("ditto", start_with_own_models, (phase,), personal=OWN_ROW)
