"""MIFA and MIFA-M: the server averages the latest change of every client, old ones included.

MIFA: Gu, Huang, Zhang, Huang: Fast Federated Learning in the Presence of Arbitrary Device
Unavailability. NeurIPS 2021, Algorithm 1. MIFA-M: GradMA (CVPR 2023), Algorithm 6.

=========================  ==========================================
paper                      here
=========================  ==========================================
w_t, w^i_{t,K}             server params x_t, local params
G^i                        the client's row; d_i = x_t - x^i_K, or d_i / client_lr (``table``)
(1/N) sum_i G^i            ``mean_row`` of the server, kept as a running mean
η_t                        ``client_lr``; the server's step has it too where rows are gradients
m_t, β_1 (GradMA)          ``momentum`` of the server, argument ``momentum``
=========================  ==========================================

Down d, up d (the change of the row), client state d. All sums are over clients / N: the batch's
weights are not used, in either paper.

Departures: a client's row stays with the client, as in GradMA. With ``start="wait"`` (MIFA's
first phase) rows fill up at x_0 as clients take part, and the model moves from the round on in
which the last of them has; the published code runs all clients at once then. A round in which
nobody takes part leaves the model as it is, like any other method's; the paper's server steps on.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.algorithms.server import broadcast_params
from fedjax_lab.checks import check_choice, check_number
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {"beta_1": "momentum"}


class MIFAServer(NamedTuple):
    """Server state of MIFA and MIFA-M; what a variant does not need is ()."""

    params: Params  # x_t
    mean_row: Params  # (1/N) sum_i G_i
    momentum: PyTree  # m_t
    seen: jax.Array | tuple[()]  # bool [N], who has taken part


@factory
def mifa(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    table: str = "displacement",
    start: str = "zeros",
    **common: Unpack[Common],
) -> Algorithm:
    """MIFA: x_{t+1} = x_t - server_lr * mean over all N clients of their latest change.

    Args:
      table: what is remembered of a client: its "displacement" x_t - x^i_K (GradMA), or the
        "gradient", which is that divided by the round's client_lr, and multiplied by the
        present one when it is used (MIFA). They differ where client_lr falls.
      start: "zeros": clients not seen yet count as a change of 0; "wait": the model waits at
        x_0 until all have taken part, which a client without data never does; ``server_updates``
        is 0 until then.
    """
    return _mifa("mifa", LocalTraining(loss_fn, **common), server_lr, table, start)


@factory
def mifam(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    momentum: Scalar = 0.9,
    table: str = "displacement",
    start: str = "zeros",
    **common: Unpack[Common],
) -> Algorithm:
    """MIFA-M: MIFA whose server descends m <- momentum * m + mean_row.

    With ``table="gradient"`` m is a gradient too, multiplied by the present client_lr.

    Args:
      momentum: in [0, 1]; 0 is MIFA.
      table: what is remembered of a client: "displacement" or "gradient", as in ``mifa``.
      start: what clients not seen yet count as: "zeros" or "wait", as in ``mifa``.
    """
    check_number("momentum", momentum, minimum=0.0, maximum=1.0)
    return _mifa("mifam", LocalTraining(loss_fn, **common), server_lr, table, start, momentum)


def _mifa(name, training, server_lr, table, start, momentum=None):
    check_choice("table", table, ("displacement", "gradient"))
    check_choice("start", start, ("wait", "zeros"))
    keeps_gradients, waits = table == "gradient", start == "wait"

    def start_state(params, num_clients, batch):
        zeros = tree.zeros_like(params)
        m = () if momentum is None else zeros
        seen = jnp.zeros(num_clients, bool) if waits else ()
        return MIFAServer(params, zeros, m, seen), zero_row_per_client(params, num_clients)

    def client_update(x, row, batch):
        lr = training.rate(batch.round)
        local = training.steps(x, batch, lr=lr)
        new = tree.subtract(x, local.params)
        if keeps_gradients:
            new = tree.scale(new, tree.safe_divide(1.0, lr))
        return {"row_change": tree.subtract(new, row)}, new, local.report

    def server_update(server, messages, cohort):
        mean_row = tree.add_scaled(server.mean_row, cohort.client_share, messages["row_change"])
        m, seen = (), ()
        step = mean_row
        if momentum is not None:
            step = m = tree.add_scaled(mean_row, momentum, server.momentum)
        unit = training.rate(cohort.round) if keeps_gradients else 1.0
        rate = at_round(server_lr, cohort.round) * unit
        params = tree.descend(server.params, rate, step)
        metrics = {"delta_norm": unit * tree.norm(mean_row)}
        if waits:
            seen = server.seen.at[cohort.client_ids].max(cohort.participates, mode="drop")
            still = server.params, server.momentum
            params, m = tree.where(seen.all(), (params, m), still)
            steps = seen.all() & cohort.participates.any()
            metrics["server_updates"] = steps.astype(cohort.weights.dtype)
        return MIFAServer(params, mean_row, m, seen), metrics

    phase = Phase(broadcast_params, client_update, server_update, reduce={"row_change": "sum"})
    return Algorithm(name, start_state, (phase,))
