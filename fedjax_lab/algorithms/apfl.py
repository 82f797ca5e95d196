"""APFL: each client mixes a model of its own with the common one, by a weight that it learns.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. 2020, Algorithm 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
w, w_i                     ``params``, the server model x_t; local params
v_i                        ``own`` of the client's row
α_i                        ``mixing`` of the client's row, at first the factory's
v̄_i = α_i v_i + (1-α_i) w  m, what client i uses; outside of a round with x_t for w
η_t                        ``client_lr``
=========================  ==========================================

Down d, up d, client state d and a number; a step takes two gradients. The server's part is FedAvg
bit for bit. The metric ``mixing`` is the mean α_i of those that took part, before the round.

Departures: α_i learns once a round, from the gradient at m of the client's first step, with the v,
w and α with which that step began; v moves in that step by the α of before. A server learning rate.
A ``step_transform`` acts on the steps of w and on those of v, each with a state of its own.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.own_models import own_row
from fedjax_lab.algorithms.server import ParamsServer, ServerSGD, broadcast_params
from fedjax_lab.checks import check_number
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.clients.transforms import initial_state
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, Personal, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {"alpha_i": "mixing"}


class APFLRow(NamedTuple):
    """A client's row in APFL."""

    own: Params  # v_i
    mixing: jax.Array  # α_i, float scalar

    @staticmethod
    def of_arguments(hyperparameters):
        """Name the fields that a run takes from its method, not from an earlier state.

        Args:
          hyperparameters: of the method, as it records them.
        """
        return () if hyperparameters["adaptive_mixing"] else ("mixing",)


class _Memory(NamedTuple):
    """State carried from step to step, in addition to w."""

    row: APFLRow
    is_first: jax.Array  # bool scalar
    transform_state: PyTree  # of the steps of v


@factory
def apfl(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    mixing: Scalar = 0.5,
    adaptive_mixing: bool = True,
    **common: Unpack[Common],
) -> Algorithm:
    """APFL: w descends g(w), v descends α g(m), where m = α v + (1 - α) w is the client's model.

    Args:
      mixing: α_i at first, in [0, 1]; the weight of the client's own v. Fixed at 0 it is FedAvg,
        at 1 training alone.
      adaptive_mixing: whether α_i descends <v - w, g(m)> in the first step of a round, within
        [0, 1].

    Raises:
      TypeError: ``adaptive_mixing`` is neither True nor False.
      ValueError: a hyper-parameter is outside what is allowed.
    """
    check_number("mixing", mixing, minimum=0.0, maximum=1.0)
    training = LocalTraining(loss_fn, **common)
    transform = training.step_transform or optax.identity()

    def start(params, num_clients, batch):
        row = APFLRow(params, jnp.asarray(mixing, jnp.result_type(float)))
        return ParamsServer(params), one_row_per_client(row, num_clients)

    def client_update(x, row, batch):
        lr = training.rate(batch.round)

        def direction(w, step):
            (v, alpha), is_first, state = step.memory
            g, report = training.gradient(w, step)
            mixed_g, _ = training.gradient(tree.average(v, w, alpha), step)
            descent, state = transform.update(tree.scale(mixed_g, alpha), state, v)
            new_alpha = alpha
            if adaptive_mixing:
                slope = optax.tree.vdot(*tree.widen((tree.subtract(v, w), mixed_g)))
                learned = alpha - jnp.asarray(lr, alpha.dtype) * slope.astype(alpha.dtype)
                new_alpha = jnp.where(is_first, learned.clip(0, 1), alpha)
            new_row = APFLRow(tree.descend(v, lr, descent), new_alpha)
            return g, report._replace(memory=_Memory(new_row, jnp.zeros((), bool), state))

        memory = _Memory(row, jnp.ones((), bool), initial_state(transform, row.own, batch.key))
        local = training.steps(x, batch, direction, memory=memory)
        report = {**local.report, "mixing": (row.mixing, jnp.ones_like(row.mixing))}
        return {"delta": tree.subtract(x, local.params)}, local.memory.row, report

    def params_of_client(state, client):
        own, alpha = own_row(state, client)
        return tree.average(own, state.server.params, alpha)

    phase = Phase(
        broadcast_params,
        client_update,
        ServerSGD(server_lr),
        reduce={"delta": "mean"},
        costs=Costs(gradients=2),
    )
    return Algorithm("apfl", start, (phase,), personal=Personal(params_of_client))
