"""GradMA: quadratic programs align updates with a memory of gradients.

Luo, Li, Lan, Gao: GradMA: A Gradient-Memory-based Accelerated Federated Learning with
Alleviated Catastrophic Forgetting. CVPR 2023, Algorithms 1 to 4.

=========================  ==========================================
paper                      here
=========================  ==========================================
x_t, x^(i)_τ               server params, local params
d^(i)                      ``delta`` = x_t - x^(i)_I
m, m̃ (Alg. 3)              ``momentum``: the corrected one is kept and carried on
D (Alg. 3)                 ``Memory``: ``scale * rows``, [m, ...], one row per buffered client
buf, c(i) (Alg. 4)         ``Slots.owner`` and ``Slots.seen``
QP_l, QP_g                 ``qp.project_to_cone``
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

from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import qp, tree
from fedjax_lab.algorithms.factory import Common, LocalTraining, factory
from fedjax_lab.algorithms.hyper import at_round
from fedjax_lab.checks import check_choice, check_int, check_number
from fedjax_lab.clients.store import one_row_per_client, zero_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import Cohort, LossFn, Params, PyTree, Scalar, ScalarOrSchedule

_NOBODY = -1


class Slots(NamedTuple):
    """Which client each of the m slots of the server's buffer holds."""

    owner: jax.Array  # int32 [m], the client, or _NOBODY
    seen: jax.Array  # int32 [m], c(i): cohorts of which the owner was part since it entered
    order: jax.Array  # int32 [m], when the owner entered
    entered: jax.Array  # int32, how many clients have entered so far


class Memory(NamedTuple):
    """The server's buffer: D's row c is ``scale[c] * rows[c]``.

    Decay changes the scales alone. The QP sees directions only, so it works on ``rows``, of which
    a round changes the cohort's; so many inner products are new, and the others are kept.
    """

    rows: PyTree  # [m, ...] like the params; a row's largest number is in [1, 2), or all are 0
    scale: jax.Array  # float [m]
    products: jax.Array  # float [1 or leaves, m, m], the rows' inner products
    slots: Slots


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
        margin,
        qp_scope,
        qp_solver,
        memory_size=memory_size,
        server_momentum=server_momentum,
        memory_decay=memory_decay,
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
    training, given = LocalTraining(loss_fn, **common), (server_lr, margin, qp_scope, qp_solver)
    return _gradma("gradma_w", training, *given, keep_local_model=keep_local_model)


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
        margin,
        qp_scope,
        qp_solver,
        memory_size=memory_size,
        server_momentum=server_momentum,
        memory_decay=memory_decay,
    )


def _gradma(
    name,
    training,
    server_lr,
    margin,
    qp_scope,
    qp_solver,
    *,
    memory_size=None,
    server_momentum=None,
    memory_decay=None,
    keep_local_model=False,
):
    """All three methods: each half is either corrected or plain."""
    corrects_client, corrects_server = name != "gradma_s", name != "gradma_w"
    check_number("margin", margin, minimum=0.0, maximum=1.0)
    check_choice("qp_scope", qp_scope, ("global", "per_leaf"))
    check_choice("qp_solver", qp_solver, qp.SOLVERS)
    if corrects_server:
        check_int("memory_size", memory_size, minimum=0)
        check_number("server_momentum", server_momentum, minimum=0.0, maximum=1.0)
        check_number("memory_decay", memory_decay, minimum=0.0, maximum=1.0)

    is_global = qp_scope == "global"

    def inner_products(rows, *others):  # [1 or leaves, m, k]
        products = qp.inner_products(rows, *others)
        return products.sum(0, keepdims=True) if is_global else products

    def project(p, rows, mask=None, products=None):
        if is_global:
            products = products and tuple(product[0] for product in products)
        cone = qp.project_to_cone if is_global else qp.project_to_cone_per_leaf
        q, info = cone(p, rows, mask, margin, products=products, solver=qp_solver)
        return tree.where(info.feasible, q, p), info

    def start(params, num_clients, batch):
        rows = one_row_per_client(params, num_clients) if keep_local_model else ()
        if not corrects_server:
            return GradMAServer(params, (), ()), rows
        check_int("memory_size", memory_size, minimum=0, maximum=num_clients)
        memory = _empty_memory(params, memory_size, inner_products) if memory_size else ()
        return GradMAServer(params, tree.zeros_like(params), memory), rows

    def broadcast(server, round):
        return server.params

    def corrected_client_update(x, last_local, batch):  # Algorithm 2
        def direction(y, step):
            g, report = training.gradient(y, step)
            previous, _ = training.gradient(step.memory, step)  # at x_{k-1}
            at_server, _ = training.gradient(x, step)
            constraints = tree.stack([previous, at_server, tree.subtract(y, x)])
            corrected, info = project(g, constraints)
            metrics = {"client_qp_residual": info.kkt_residual, "client_qp_active": _active(info)}
            return corrected, report._replace(memory=y, metrics={**report.metrics, **metrics})

        before = last_local if keep_local_model else x
        local = training.steps(x, batch, direction, memory=before)
        row = local.params if keep_local_model else ()
        return {"delta": tree.subtract(x, local.params)}, row, local.report

    def plain_server_update(server, messages, cohort):
        delta = messages["delta"]
        params = tree.descend(server.params, at_round(server_lr, cohort.round), delta)
        return server._replace(params=params), {"delta_norm": tree.norm(delta)}

    def corrected_server_update(server, messages, cohort):  # Algorithm 3
        delta = tree.weighted_sum(messages["delta"], cohort.weights)
        m = tree.add_scaled(delta, server_momentum, server.momentum)
        memory, metrics = server.memory, {"delta_norm": tree.norm(delta)}
        if memory_size:
            memory, with_m = _remember(
                memory, messages["delta"], cohort, memory_decay, m, inner_products
            )
            m, info = project(m, memory.rows, memory.scale > 0, (memory.products, with_m))
            metrics["server_qp_residual"] = info.kkt_residual
            metrics["server_qp_active"] = _active(info)
            metrics["server_qp_iterations"] = info.iterations.astype(metrics["delta_norm"].dtype)
        params = tree.descend(server.params, at_round(server_lr, cohort.round), m)
        return _unless_nobody(cohort, GradMAServer(params, m, memory), server), metrics

    phase = Phase(
        broadcast,
        corrected_client_update if corrects_client else training.client_update,
        corrected_server_update if corrects_server else plain_server_update,
        reduce={"delta": "stack" if corrects_server else "mean"},
        keeps_if_nobody=corrects_server,
    )
    return Algorithm(
        name,
        start,
        (phase,),
        lambda state: state.server.params,
        gradients_per_step=3 if corrects_client else 1,
    )


def _active(info) -> jax.Array:
    """How many constraints pull on the solution, as a float."""
    return (info.z > 0).sum(dtype=info.kkt_residual.dtype)


def _empty_memory(params: Params, size: int, inner_products) -> Memory:
    zeros = jnp.zeros(size, jnp.int32)
    slots = Slots(zeros + _NOBODY, zeros, zeros, jnp.zeros((), jnp.int32))
    rows = zero_row_per_client(params, size)
    products = jax.eval_shape(inner_products, rows, rows)
    scale = jnp.zeros(size, products.dtype)
    return Memory(rows, scale, jnp.zeros(products.shape, products.dtype), slots)


def _remember(memory, deltas: PyTree, cohort: Cohort, decay: Scalar, p: PyTree, inner_products):
    """Algorithm 4, then the memory's lines of Algorithm 3: D <- β_2 D (+ d^i).

    Returns the memory and its rows' inner products with ``p``, [1 or leaves, m].
    """
    slots, slot, is_new = _admit(memory.slots, cohort.client_ids, cohort.participates)
    dtype, decay = memory.scale.dtype, jnp.asarray(decay, memory.scale.dtype)
    # A row that decays below the range of floats keeps its direction.
    floor = jnp.where((memory.scale > 0) & (decay > 0), jnp.finfo(dtype).tiny, 0)
    scale = jnp.maximum(decay * memory.scale, floor)
    kept = jnp.where(is_new, 0, scale.at[slot].get(mode="clip"))

    def sum_up(rows, delta):
        return _times(kept, rows.at[slot].get(mode="clip")) + delta

    sums = jax.tree.map(sum_up, memory.rows, deltas)
    sizes = [jnp.abs(leaf).max(range(1, leaf.ndim), initial=0) for leaf in jax.tree.leaves(sums)]
    largest = jnp.max(jnp.stack(sizes), 0).astype(dtype)
    power = _power_of_two(largest)
    new = jax.tree.map(partial(_times, 1 / power), sums)
    new_scale = jnp.where(largest == 0, 0, power)

    def put(table, values):
        return table.at[slot].set(values, mode="drop")

    rows = jax.tree.map(put, memory.rows, new)
    with_new = inner_products(rows, new, jax.tree.map(lambda leaf: leaf[None], p))
    with_new, with_p = with_new[..., :-1], with_new[..., -1]
    products = memory.products.at[:, slot].set(with_new.mT, mode="drop")
    products = products.at[:, :, slot].set(with_new, mode="drop")
    return Memory(rows, put(scale, new_scale), products, slots), with_p


def _unless_nobody(cohort: Cohort, new: GradMAServer, old: GradMAServer) -> GradMAServer:
    """``new``, or ``old`` where nobody took part, and so wrote no row of the memory."""
    if not new.memory:
        return tree.where(cohort.participates.any(), new, old)

    def without_rows(server):
        return server._replace(memory=server.memory._replace(rows=()))

    kept = tree.where(cohort.participates.any(), without_rows(new), without_rows(old))
    return kept._replace(memory=kept.memory._replace(rows=new.memory.rows))


def _power_of_two(x: jax.Array) -> jax.Array:
    """The largest power of two up to x >= 0, within 2^-125 to 2^125: its exponent's bits alone."""
    exponent = np.uint32(0x7F800000) if x.dtype.itemsize == 4 else np.uint64(0x7FF << 52)
    bits = jax.lax.bitcast_convert_type(x, exponent.dtype) & exponent
    return jnp.clip(jax.lax.bitcast_convert_type(bits, x.dtype), 2.0**-125, 2.0**125)


def _times(factors: jax.Array, rows: jax.Array) -> jax.Array:
    """Each row times its factor."""
    return factors.astype(rows.dtype).reshape(-1, *[1] * (rows.ndim - 1)) * rows


def _admit(slots: Slots, client_ids: jax.Array, participates: jax.Array):
    """mem_red (Algorithm 4), in cohort order.

    Returns the new ``Slots``; where each client of the cohort is held, int32 [S] (m if it did
    not take part); and whether it is new there, bool [S].
    """
    size = slots.owner.shape[0]
    if client_ids.shape[0] > size:
        raise ValueError(
            f"memory_size is {size}; it must be at least the cohort's {client_ids.shape[0]} slots "
            "(or 0 for no memory)."
        )
    never = jnp.iinfo(jnp.int32).max

    def admit(slots: Slots, client):
        client_id, takes_part = client
        held, free = slots.owner == client_id, slots.owner == _NOBODY
        # Discard the least counted among those outside the present cohort, the oldest first.
        present = ((slots.owner[:, None] == client_ids[None]) & participates[None]).any(-1)
        seen = jnp.where(present, never, slots.seen)
        oldest = jnp.argmin(jnp.where(seen == seen.min(), slots.order, never))
        vacant = jnp.where(free.any(), jnp.argmax(free), oldest)
        known = held.any()
        slot = jnp.where(known, jnp.argmax(held), vacant)
        target = jnp.where(takes_part, slot, size)

        def write(table, value):
            return table.at[target].set(value, mode="drop")

        slots = Slots(
            owner=write(slots.owner, client_id),
            seen=write(slots.seen, jnp.where(known, slots.seen[slot] + 1, 1)),
            order=write(slots.order, jnp.where(known, slots.order[slot], slots.entered)),
            entered=slots.entered + (takes_part & ~known),
        )
        return slots, (target, ~known)

    slots, (held_at, is_new) = jax.lax.scan(admit, slots, (client_ids, participates))
    return slots, held_at, is_new
