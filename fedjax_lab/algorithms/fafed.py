"""FAFED, and the naive adaptive method that it repairs.

Wu, Huang, Hu, Huang: Faster Adaptive Federated Learning. AAAI 2023: FAFED is Algorithm 2, the
naive method Algorithm 1, and the proof of Theorem 1 has three functions from whose optimum the
naive method walks away.

=========================  ==========================================
paper                      here
=========================  ==========================================
x̄_t, m̄_t, v̄_t              ``params``, ``momentum``, ``second_moment`` of the server
x_{t,i}                    local params; before the averaging, the client's row
v_{t,i} (Alg. 1)           the client's row
A_t                        ``sqrt(second_moment) + stability``, fixed within a round
η_t, α_t                   ``client_lr``, ``momentum``
β, ρ                       ``second_moment_decay``, ``stability``
q, t                       K, the global local step round * K + k + 1
=========================  ==========================================

FAFED: one round is q local steps, of which the last synchronises. Down 3d (x, m, v), up 3d (their
differences from the broadcast), client state d. Two gradients a local step on one mini-batch.

The first estimates m_0, v_0 are means over all valid examples of the first round. ``init`` takes
them from its batch; where it got none (or was given one without participants, from which they
are 0), the first round in which somebody takes part begins with them. They cost d down and 2d up
once in a run, which ``uplink``, ``downlink`` and the metrics leave out.

Departures: the paper has all N clients in every round. With a cohort the means are over those who
take part, with the batch's weights, and an absent client keeps its row: its iterate before the
last averaging in which it took part. A client with K_i < q steps takes its last one as its part
of the sync. The first step applies no A_0 (Algorithm 2, line 3) unless
``precondition_first_step`` (the paper's proof). v is clamped at 0, as a compressed difference may
push it below.

Naive method: down d, up d, client state d. Here schedules are of the round.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.first_estimates import (
    first_estimates,
    take_first_estimates,
    until_sync,
)
from fedjax_lab.algorithms.hyper import at_round, at_step
from fedjax_lab.algorithms.server import ParamsServer, ServerSGD, broadcast_params
from fedjax_lab.checks import check_number, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {"alpha_t": "momentum", "beta": "second_moment_decay", "rho": "stability"}


class FAFEDServer(NamedTuple):
    """Server state of FAFED; ``started`` is () where ``init`` took the first estimates."""

    params: Params  # x̄_t
    momentum: Params  # m̄_t
    second_moment: Params  # v̄_t
    started: jax.Array | tuple[()]  # bool, whether there are first estimates


@factory
def fafed(
    loss_fn: LossFn,
    *,
    momentum: ScalarOrSchedule,
    second_moment_decay: Scalar,
    server_lr: ScalarOrSchedule = 1.0,
    stability: Scalar = 0.01,
    precondition_first_step: bool = False,
    **common: Unpack[Common],
) -> Algorithm:
    """FAFED: variance-reduced momentum and a preconditioner that the clients share.

    Args:
      client_lr: η_t, or a schedule of the global local step t.
      momentum: α_t in [0, 1], the paper's: m = g + (1 - α_t)(m - g'), so that 1 is plain
        gradients; or a schedule of the global local step t.
      second_moment_decay: β in [0, 1], the weight of the old second moment.
      server_lr: share of the way from x to the paper's next x, or a schedule of the round.
      stability: ρ, added to sqrt(v), above 0.
      precondition_first_step: apply A_0 to the first step, as the paper's proof does.
    """
    check_scalar_or_schedule("momentum", momentum, maximum=1.0)
    check_number("second_moment_decay", second_moment_decay, minimum=0.0, maximum=1.0)
    check_number("stability", stability, minimum=0.0, exclusive_minimum=True)
    training = LocalTraining(loss_fn, **common)

    def preconditioned(m, v):  # A^{-1} m
        def divide(m, v):  # a step of 0 where the dtype rounds ``stability`` to 0
            root = jnp.sqrt(v) + jnp.asarray(stability, v.dtype)
            return m / jnp.where(root == 0, jnp.inf, root)

        return jax.tree.map(divide, m, v)

    def estimates(g):
        return {"momentum": g, "second_moment": jax.tree.map(jnp.square, g)}

    def first_step(server, means, cohort):
        m, v = means["momentum"], _clamp(means["second_moment"])
        descent = preconditioned(m, v) if precondition_first_step else m
        first_lr = training.rate(jnp.zeros((), jnp.int32))
        params = tree.descend(server.params, first_lr, descent)
        return FAFEDServer(params, m, v, jnp.ones((), bool))

    first_exchange = first_estimates(training.gradient, estimates, first_step)

    def start(params, num_clients, batch):
        zeros = tree.zeros_like(params)
        server = FAFEDServer(params, zeros, zeros, jnp.zeros((), bool))
        clients = one_row_per_client(params, num_clients)
        return take_first_estimates(first_exchange, server, clients, num_clients, batch)

    # A round: q steps, then the sync.

    def broadcast(server, round):
        return server.params, server.momentum, server.second_moment

    def client_update(received, previous, batch):
        x, m, v = received

        def direction(y, step):
            t, m_i, v_i, before = step.memory
            g, report = training.gradient(y, step)
            g_before, _ = training.gradient(before, step)
            alpha = at_step(momentum, t, batch.max_steps)
            m_i = tree.add_scaled(g, 1 - alpha, tree.subtract(m_i, g_before))
            v_i = _average(v_i, g, second_moment_decay)
            return preconditioned(m_i, v), report._replace(memory=(t + 1, m_i, v_i, y))

        first = batch.round * batch.max_steps + 1
        lr = until_sync(training, first, batch.max_steps)
        local = training.steps(x, batch, direction, lr=lr, memory=(first, m, v, previous))
        _, m_i, v_i, _ = local.memory
        message = {
            "delta": tree.subtract(x, local.params),
            "momentum_change": tree.subtract(m_i, m),
            "second_moment_change": tree.subtract(v_i, v),
        }
        return message, local.params, local.report

    def server_update(server, messages, cohort):
        m = tree.add(server.momentum, messages["momentum_change"])
        v = _clamp(tree.add(server.second_moment, messages["second_moment_change"]))
        lr = training.rate_at_step((cohort.round + 1) * cohort.max_steps, cohort.max_steps)
        move = tree.add_scaled(messages["delta"], lr, preconditioned(m, v))
        params = tree.descend(server.params, at_round(server_lr, cohort.round), move)
        metrics = {"delta_norm": tree.norm(messages["delta"]), "momentum_norm": tree.norm(m)}
        metrics["client_lr"] = training.reported_rate(cohort)
        return FAFEDServer(params, m, v, server.started), metrics

    reduce = {"delta": "mean", "momentum_change": "mean", "second_moment_change": "mean"}
    costs = Costs(gradients=2)
    steps = Phase(broadcast, client_update, server_update, reduce, costs=costs)
    return Algorithm("fafed", start, (first_exchange, steps))


@factory
def naive_adaptive_fedavg(
    loss_fn: LossFn,
    *,
    second_moment_decay: Scalar,
    server_lr: ScalarOrSchedule = 1.0,
    initial_second_moment: Scalar = 0.0,
    **common: Unpack[Common],
) -> Algorithm:
    """Naive adaptive FedAvg: each client divides by the root of its own second moment.

    It can move away from the optimum for ever: it is here to be compared with.

    Args:
      second_moment_decay: β in [0, 1], the weight of the old second moment.
      initial_second_moment: every coordinate of v at the start; 0/0 is a step of 0.
    """
    check_number("second_moment_decay", second_moment_decay, minimum=0.0, maximum=1.0)
    check_number("initial_second_moment", initial_second_moment, minimum=0.0)
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        row = jax.tree.map(lambda p: jnp.full_like(p, initial_second_moment), params)
        return ParamsServer(params), one_row_per_client(row, num_clients)

    def client_update(x, v, batch):
        def direction(y, step):
            g, report = training.gradient(y, step)
            v = _average(step.memory, g, second_moment_decay)
            descent = jax.tree.map(lambda g, v: tree.safe_divide(g, jnp.sqrt(v)), g, v)
            return descent, report._replace(memory=v)

        local = training.steps(x, batch, direction, memory=v)
        return {"delta": tree.subtract(x, local.params)}, local.memory, local.report

    phase = Phase(broadcast_params, client_update, ServerSGD(server_lr), reduce={"delta": "mean"})
    return Algorithm("naive_adaptive_fedavg", start, (phase,))


def _average(v: PyTree, g: PyTree, decay: Scalar) -> PyTree:
    """Compute decay v + (1 - decay) g²."""
    return tree.average(v, jax.tree.map(jnp.square, g), decay)


def _clamp(v: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.maximum(leaf, 0), v)
