"""GradMA: quadratic programs align updates with a memory of gradients.

Luo, Li, Lan, Gao: GradMA: A Gradient-Memory-based Accelerated Federated Learning with
Alleviated Catastrophic Forgetting. CVPR 2023, Algorithms 1 to 4.

=========================  ==========================================
paper                      here
=========================  ==========================================
x_t, x^(i)_τ               server params, local params
d^(i)                      ``delta`` = x_t - x^(i)_I
m, m̃ (Alg. 3)              ``momentum``: the corrected one is kept and carried on
D (Alg. 3)                 ``gradma_memory.Memory``: ``scale * rows``, [m, ...]
buf, c(i) (Alg. 4)         ``Slots.owner`` and ``Slots.seen``
QP_l, QP_g                 ``gradma_correction``, on ``qp.project_to_cone``
η_l, η_g                   ``client_lr``, ``server_lr``
β_1, β_2                   ``server_momentum``, ``memory_decay``
m                          ``memory_size``
=========================  ==========================================

Down d, up d. Client state 0, or d with ``keep_local_model``; server state d + m d.
Three gradients a local step in ``gradma`` and ``gradma_w``, all on one mini-batch.
Departures: x_{-1} is x_t (the code of GradMA) unless ``keep_local_model`` (the paper, and the
code of GradMA-W); the counters live in the slots, as c(i) is 0 for a client without one; the
mean of the deltas takes the batch's weights (uniform: the paper; example counts: the code).
"""

from typing import NamedTuple, Unpack

from fedjax_lab import tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.gradma_correction import Correction
from fedjax_lab.algorithms.gradma_memory import Memory, correct_by_memory, empty_memory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.algorithms.server import ServerSGD, broadcast_params
from fedjax_lab.checks import check_int, check_number
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.qp.joined_leaves import separate_leaves
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import LossFn, Params, PyTree, Scalar, ScalarOrSchedule

SYMBOLS = {"beta_1": "server_momentum", "beta_2": "memory_decay", "m": "memory_size"}


class GradMAServer(NamedTuple):
    """Server state of GradMA; ``momentum`` and ``memory`` are () in GradMA-W."""

    params: Params  # x_t
    momentum: PyTree  # m̃
    memory: Memory | tuple[()]


@factory
def gradma(
    loss_fn: LossFn,
    *,
    memory_size: int,
    server_lr: ScalarOrSchedule = 1.0,
    server_momentum: Scalar = 0.9,
    memory_decay: Scalar = 0.5,
    keep_local_model: bool = False,
    margin: Scalar = 0.0,
    qp_scope: str = "global",
    qp_solver: str = "auto",
    **common: Unpack[Common],
) -> Algorithm:
    """GradMA: corrected local steps (``gradma_w``) and a corrected server step (``gradma_s``).

    Args:
      memory_size: clients that the server's memory holds: at least the cohort's slots, at
        most N; 0 is no memory.
      server_momentum: weight of the last corrected momentum, in [0, 1].
      memory_decay: factor on every memory row in every round, in [0, 1].
      keep_local_model: keep each client's last local model and take it as x_{-1}; else x_t.
      margin: constraints are <q, M> >= margin ||p|| ||M||; where that is infeasible the
        vector stays uncorrected.
      qp_scope: "global": one QP over all parameters (the paper); "per_leaf": one for each
        parameter array (the published code).
      qp_solver: "active_set", "projected_gradient", or "auto" (``qp.project_to_cone``).

    Raises:
      ValueError: a hyper-parameter is out of range; ``memory_size`` exceeds N (at ``init``)
        or is below the number of slots (when the round is traced).
    """
    return _gradma(
        "gradma",
        LocalTraining(loss_fn, **common),
        server_lr,
        Correction(margin, qp_scope, qp_solver),
        corrects_client=True,
        memory=(memory_size, server_momentum, memory_decay),
        keep_local_model=keep_local_model,
    )


@factory
def gradma_w(
    loss_fn: LossFn,
    *,
    server_lr: ScalarOrSchedule = 1.0,
    keep_local_model: bool = False,
    margin: Scalar = 0.0,
    qp_scope: str = "global",
    qp_solver: str = "auto",
    **common: Unpack[Common],
) -> Algorithm:
    """GradMA-W: corrected local steps (Algorithm 2), plain averaging on the server.

    Args:
      keep_local_model: keep each client's last local model and take it as x_{-1}; else x_t.
      margin: constraints are <q, M> >= margin ||p|| ||M||.
      qp_scope: "global": one QP over all parameters; "per_leaf": one for each parameter array.
      qp_solver: "active_set", "projected_gradient", or "auto" (``qp.project_to_cone``).
    """
    return _gradma(
        "gradma_w",
        LocalTraining(loss_fn, **common),
        server_lr,
        Correction(margin, qp_scope, qp_solver),
        corrects_client=True,
        keep_local_model=keep_local_model,
    )


@factory
def gradma_s(
    loss_fn: LossFn,
    *,
    memory_size: int,
    server_lr: ScalarOrSchedule = 1.0,
    server_momentum: Scalar = 0.9,
    memory_decay: Scalar = 0.5,
    margin: Scalar = 0.0,
    qp_scope: str = "global",
    qp_solver: str = "auto",
    **common: Unpack[Common],
) -> Algorithm:
    """GradMA-S: plain local SGD, corrected server step (Algorithms 3 and 4).

    ``memory_size=0`` is FedAvgM.

    Args:
      memory_size: clients that the server's memory holds: at least the cohort's slots, at most N.
      server_momentum: weight of the last corrected momentum, in [0, 1].
      memory_decay: factor on every memory row in every round, in [0, 1].
      margin: constraints are <q, M> >= margin ||p|| ||M||.
      qp_scope: "global": one QP over all parameters; "per_leaf": one for each parameter array.
      qp_solver: "active_set", "projected_gradient", or "auto" (``qp.project_to_cone``).

    Raises:
      ValueError: a hyper-parameter is out of range; ``memory_size`` exceeds N (at ``init``) or is
        below the number of slots (when the round is traced).
    """
    return _gradma(
        "gradma_s",
        LocalTraining(loss_fn, **common),
        server_lr,
        Correction(margin, qp_scope, qp_solver),
        corrects_client=False,
        memory=(memory_size, server_momentum, memory_decay),
    )


def _gradma(
    name, training, server_lr, correction, *, corrects_client, memory=None, keep_local_model=False
):
    """Build one of the three methods; each half is corrected or plain (a server without memory)."""
    if memory is not None:
        size, server_momentum, memory_decay = memory
        check_int("memory_size", size, minimum=0)
        check_number("server_momentum", server_momentum, minimum=0.0, maximum=1.0)
        check_number("memory_decay", memory_decay, minimum=0.0, maximum=1.0)

    def start(params, num_clients, batch):
        rows = one_row_per_client(params, num_clients) if keep_local_model else ()
        if memory is None:
            return GradMAServer(params, (), ()), rows
        check_int("memory_size", size, minimum=0, maximum=num_clients)
        held = empty_memory(params, size, correction) if size else ()
        return GradMAServer(params, tree.zeros_like(params), held), rows

    def corrected_client_update(x, last_local, batch):  # Algorithm 2
        def direction(y, step):
            g, report = training.gradient(y, step)
            previous, _ = training.gradient(step.memory, step)  # at x_{k-1}
            at_server, _ = training.gradient(x, step)
            constraints = tree.stack([previous, at_server, tree.subtract(y, x)])
            corrected, info = correction.project(g, constraints)
            metrics = {"client_qp_residual": info.kkt_residual, "client_qp_active": _active(info)}
            return corrected, report._replace(memory=y, metrics={**report.metrics, **metrics})

        before = last_local if keep_local_model else x
        local = training.steps(x, batch, direction, memory=before)
        row = local.params if keep_local_model else ()
        return {"delta": tree.subtract(x, local.params)}, row, local.report

    def corrected_server_update(server, messages, cohort):  # Algorithm 3
        deltas = correction.joined(messages["delta"], axes=1)
        delta = tree.weighted_sum(deltas, cohort.weights)
        m = tree.add_scaled(delta, server_momentum, correction.joined(server.momentum))
        held, metrics = server.memory, {"delta_norm": tree.norm(delta)}
        if size:
            held, m, info = correct_by_memory(held, deltas, cohort, memory_decay, m, correction)
            metrics["server_qp_residual"] = info.kkt_residual
            metrics["server_qp_active"] = _active(info)
            metrics["server_qp_iterations"] = info.iterations.astype(metrics["delta_norm"].dtype)
        m = separate_leaves(m)
        params = tree.descend(server.params, at_round(server_lr, cohort.round), m)
        old = server.params, server.momentum
        params, m = tree.where(cohort.participates.any(), (params, m), old)
        return GradMAServer(params, m, held), metrics

    phase = Phase(
        broadcast_params,
        corrected_client_update if corrects_client else training.client_update,
        ServerSGD(server_lr) if memory is None else corrected_server_update,
        reduce={"delta": "mean" if memory is None else "stack"},
        costs=Costs(gradients=3 if corrects_client else 1),
        if_nobody="restored" if memory is None else "unchanged",
    )
    return Algorithm(name, start, (phase,))


def _active(info):
    """Count the active constraints, as a float."""
    return (info.z > 0).sum(dtype=info.kkt_residual.dtype)
