"""pFedMe: the model of a client minimises its loss near a local copy of the server's.

T. Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020,
Algorithm 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
w_t                        ``params``, the server model x_t
w^t_{i,r}                  local params w, which start at x_t and are sent
θ̃_i                        θ, the client's row
R                          K_i, the local steps, each on a mini-batch of its own
K                          ``inner_steps``
λ, η                       ``prox_weight``, ``client_lr``
β                          ``server_lr``: x <- (1 - β) x + β mean_i w_i
=========================  ==========================================

Down d, up d, client state d; a step takes ``inner_steps`` gradients. Client i uses θ_i. Departures:
the paper asks of θ̃ a gradient below ν; here it is a fixed number of steps of rate
``personal_lr``, as in its experiments, which start at the last θ: in a client's first step of a
round at that of its row, so that an absent client's model is taken up where it was left. Weights
are the batch's. A ``gradient_transform`` takes part in each step of θ and keeps its state between
them; a ``step_transform`` acts on λ (w - θ).
"""

from typing import Unpack

import jax

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.algorithms.own_models import OWN_ROW, start_with_own_models
from fedjax_lab.algorithms.server import ServerSGD, broadcast_params
from fedjax_lab.checks import check_int, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, ScalarOrSchedule

SYMBOLS = {"K": "inner_steps", "lambda": "prox_weight", "beta": "server_lr"}


@factory
def pfedme(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    prox_weight: ScalarOrSchedule = 15.0,
    personal_lr: ScalarOrSchedule = 0.05,
    inner_steps: int = 5,
    **common: Unpack[Common],
) -> Algorithm:
    """pFedMe: θ descends g(θ) + prox_weight * (θ - w); then w descends prox_weight * (w - θ).

    Args:
      client_lr: η of the local w, or a schedule of the round; with ``prox_weight`` at most 1 in
        product, w stays between where it was and θ.
      server_lr: β, or a schedule of the round; 1 is plain averaging.
      prox_weight: λ, at least 0, or a schedule of the round.
      personal_lr: learning rate of the steps of θ, or a schedule of the round; below
        2 / (prox_weight + the loss's smoothness).
      inner_steps: steps of θ in each local step, all on its mini-batch, at least 1.

    Raises:
      TypeError: ``inner_steps`` is no integer.
      ValueError: a hyper-parameter is outside what is allowed.
    """
    check_scalar_or_schedule("prox_weight", prox_weight)
    check_scalar_or_schedule("personal_lr", personal_lr)
    check_int("inner_steps", inner_steps, minimum=1)
    training = LocalTraining(loss_fn, **common)

    def client_update(x, theta, batch):
        weight, rate = (at_round(value, batch.round) for value in (prox_weight, personal_lr))

        def away_from_theta(w, step):
            def nearer(theta, transform_state):
                now = step._replace(transform_state=transform_state)
                g, report = training.gradient(theta, now)
                pulled = tree.add_scaled(g, weight, tree.subtract(theta, w))
                return tree.descend(theta, rate, pulled), report

            def again(_, carry):
                theta, report = nearer(*carry)
                return theta, report.transform_state

            theta, report = nearer(step.memory, step.transform_state)
            carry = theta, report.transform_state
            theta, transform_state = jax.lax.fori_loop(1, inner_steps, again, carry)
            away = tree.scale(tree.subtract(w, theta), weight)
            return away, report._replace(memory=theta, transform_state=transform_state)

        local = training.steps(x, batch, away_from_theta, memory=theta)
        return {"delta": tree.subtract(x, local.params)}, local.memory, local.report

    phase = Phase(
        broadcast_params,
        client_update,
        ServerSGD(server_lr),
        reduce={"delta": "mean"},
        costs=Costs(gradients=inner_steps),
    )
    return Algorithm("pfedme", start_with_own_models, (phase,), personal=OWN_ROW)
