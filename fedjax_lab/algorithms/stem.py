"""STEM: variance-reduced momentum on the clients, averaged with the model every q steps.

Khanduri, Sharma, Yang, Hong, Liu, Rajawat, Varshney: STEM: A Stochastic Two-Sided Momentum
Algorithm Achieving Near-Optimal Sample and Communication Complexities for Federated Learning.
NeurIPS 2021, Algorithm 1.

=========================  ==========================================
paper                      here
=========================  ==========================================
x̄_t, d̄_t                   ``params``, ``momentum`` m of the server
x^(k)_t, d^(k)_t           local params, the steps' memory m_i
x^(k)_{t-1}                the row at a round's first step, then the memory
η_t, a_t                   ``client_lr``, ``momentum``
I, t                       K, the global local step round * K + k + 1
=========================  ==========================================

One round is I local steps, of which the last synchronises. Down 2d (x, m), up 2d (their
differences from the broadcast), client state d. With ``prev_at_sync="mean"`` one d more down: the
mean, once all have sent theirs. Two gradients a local step on one mini-batch. The first estimate
m_0, the mean gradient over all valid examples of the first round, is taken as in FAFED: by ``init``
where it is given a batch, else before the first round in which somebody takes part; it costs d
down and d up once in a run.

Departures: the paper has all N clients in every round. With a cohort the means are over those who
take part, with the batch's weights, and an absent client keeps its row, its own iterate or the mean
of its last round. A client with K_i < I steps
takes its last one as its part of the sync.
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
from fedjax_lab.algorithms.hyper import at_step
from fedjax_lab.algorithms.server import keep_server
from fedjax_lab.checks import check_choice, check_scalar_or_schedule
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, ScalarOrSchedule

SYMBOLS = {"a_t": "momentum"}


class STEMServer(NamedTuple):
    """Server state of STEM; ``started`` is () where ``init`` took the first estimate."""

    params: Params  # the common next iterate
    momentum: Params  # m
    mean: PyTree  # of the iterates before the common step; () with prev_at_sync="local"
    started: jax.Array | tuple[()]  # bool, whether there is a first estimate


@factory
def stem(
    loss_fn: LossFn,
    *,
    momentum: ScalarOrSchedule,
    prev_at_sync: str = "local",
    **common: Unpack[Common],
) -> Algorithm:
    """STEM: m_i <- g + (1 - a_t)(m_i - g'), with g' at the iterate before, and y <- y - η_t m_i.

    Args:
      client_lr: η_t, or a schedule of the global local step t.
      momentum: a_t in [0, 1]; 1 is plain gradients; or a schedule of the global local step t.
      prev_at_sync: the iterate before a round's first step: "local": the client's own before
        the averaging (the paper); "mean": their mean.
    """
    check_scalar_or_schedule("momentum", momentum, maximum=1.0)
    check_choice("prev_at_sync", prev_at_sync, ("local", "mean"))
    keeps_own = prev_at_sync == "local"
    training = LocalTraining(loss_fn, **common)

    def estimates(g):
        return {"momentum": g}

    def first_step(server, means, cohort):
        m, first_lr = means["momentum"], training.rate(jnp.zeros((), jnp.int32))
        params = tree.descend(server.params, first_lr, m)
        return server._replace(params=params, momentum=m, started=jnp.ones((), bool))

    first_exchange = first_estimates(training.gradient, estimates, first_step)

    def start(params, num_clients, batch):
        zeros = tree.zeros_like(params)
        server = STEMServer(params, zeros, () if keeps_own else params, jnp.zeros((), bool))
        clients = one_row_per_client(params, num_clients)
        return take_first_estimates(first_exchange, server, clients, num_clients, batch)

    def broadcast(server, round):
        return server.params, server.momentum

    def client_update(received, previous, batch):
        x, m = received

        def direction(y, step):
            t, m_i, before = step.memory
            g, report = training.gradient(y, step)
            g_before, _ = training.gradient(before, step)
            m_i = tree.add_scaled(
                g, 1 - at_step(momentum, t, batch.max_steps), tree.subtract(m_i, g_before)
            )
            return m_i, report._replace(memory=(t + 1, m_i, y))

        first = batch.round * batch.max_steps + 1
        lr = until_sync(training, first, batch.max_steps)
        local = training.steps(x, batch, direction, lr=lr, memory=(first, m, previous))
        _, m_i, _ = local.memory
        message = {
            "delta": tree.subtract(x, local.params),
            "momentum_change": tree.subtract(m_i, m),
        }
        return message, local.params if keeps_own else previous, local.report

    def server_update(server, messages, cohort):
        m = tree.add(server.momentum, messages["momentum_change"])
        mean = tree.subtract(server.params, messages["delta"])
        lr = training.rate_at_step((cohort.round + 1) * cohort.max_steps, cohort.max_steps)
        params = tree.descend(mean, lr, m)
        metrics = {"delta_norm": tree.norm(messages["delta"]), "momentum_norm": tree.norm(m)}
        metrics["client_lr"] = training.reported_rate(cohort)
        return STEMServer(params, m, () if keeps_own else mean, server.started), metrics

    def broadcast_mean(server, round):
        return server.mean

    def keep_mean(mean, row, batch):
        return {}, mean, {}

    reduce = {"delta": "mean", "momentum_change": "mean"}
    costs = Costs(gradients=2)
    phases = [first_exchange, Phase(broadcast, client_update, server_update, reduce, costs=costs)]
    if not keeps_own:
        phases.append(Phase(broadcast_mean, keep_mean, keep_server, reduce={}))
    return Algorithm("stem", start, tuple(phases))
