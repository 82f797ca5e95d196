"""The memory of GradMA's server: which clients it holds, and the sum of what each has sent.

GradMA (CVPR 2023), Algorithm 4 (``admit_cohort``), and the memory's lines of Algorithm 3
(``correct_by_memory``). ``gradma`` has the table of symbols.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.algorithms.gradma_correction import Correction
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.qp import ConeInfo
from fedjax_lab.qp.joined_leaves import separate_leaves
from fedjax_lab.types import Cohort, Params, PyTree, Scalar

_NOBODY = -1


class Slots(NamedTuple):
    """Clients of the m slots of the server's buffer."""

    owner: jax.Array  # int32 [m], the client, or _NOBODY
    seen: jax.Array  # int32 [m], c(i): cohorts of which the owner was part since it entered
    order: jax.Array  # int32 [m], when the owner entered
    entered: jax.Array  # int32, how many clients have entered so far


class Memory(NamedTuple):
    """The server's buffer: D's row c is ``scale[c] * rows[c]``.

    Decay changes the scales only. The QP depends on directions only, so it works on ``rows``. A
    round changes the cohort's rows: their inner products are computed, and the others are kept.
    """

    rows: PyTree  # [m, ...] like the params; a row's largest number is in [1, 2), or all are 0
    scale: jax.Array  # float [m]
    products: jax.Array  # float [1 or leaves, m, m], the rows' inner products
    slots: Slots


def empty_memory(params: Params, size: int, correction: Correction) -> Memory:
    """Create an empty memory.

    Args:
      params: the global model.
      size: m, at least 1.
      correction: of the server.
    """
    zeros = jnp.zeros(size, jnp.int32)
    slots = Slots(zeros + _NOBODY, zeros, zeros, jnp.zeros((), jnp.int32))
    rows = zero_row_per_client(params, size)
    products = jax.eval_shape(correction.inner_products, rows, rows)
    scale = jnp.zeros(size, products.dtype)
    return Memory(rows, scale, jnp.zeros(products.shape, products.dtype), slots)


def correct_by_memory(
    memory: Memory,
    deltas: PyTree,
    cohort: Cohort,
    decay: Scalar,
    p: PyTree,
    correction: Correction,
) -> tuple[Memory, PyTree, ConeInfo]:
    """Run Algorithm 4, then the memory's lines of Algorithm 3: D <- β_2 D (+ d^i), p <- QP_g(p, D).

    Args:
      memory: as the last round left it.
      deltas: what the cohort sent, [S, ...], joined by ``correction``.
      cohort: who took part; if nobody did, the memory is unchanged.
      decay: β_2.
      p: the vector to correct, joined.
      correction: of the server.

    Returns:
      (the memory, the corrected vector, what the quadratic program reports).

    Raises:
      ValueError: the memory is smaller than the cohort.
    """
    slots, slot, is_new = admit_cohort(memory.slots, cohort.client_ids, cohort.participates)
    dtype = memory.scale.dtype
    decay = jnp.where(cohort.participates.any(), jnp.asarray(decay, dtype), 1)
    # A row that decays below the range of floats keeps its direction.
    floor = jnp.where((memory.scale > 0) & (decay > 0), jnp.finfo(dtype).tiny, 0)
    scale = jnp.maximum(decay * memory.scale, floor)
    kept = jnp.where(is_new, 0, scale.at[slot].get(mode="clip"))

    held = jax.tree.map(lambda table: table.at[slot].get(mode="clip"), memory.rows)
    held = tree.scale_rows(correction.joined(held, axes=1), kept)
    new, units = _scaled(jax.tree.map(jnp.add, held, deltas))

    def put(table, values):
        return table.at[slot].set(values, mode="drop")

    rows = jax.tree.map(put, memory.rows, separate_leaves(new))
    joined = correction.joined(rows, axes=1)
    p, unit = _scaled(jax.tree.map(lambda leaf: leaf[None], p))
    with_new = correction.inner_products(joined, new, p)
    with_new, with_p = with_new[..., :-1], with_new[..., -1]
    products = memory.products.at[:, slot].set(with_new.mT, mode="drop")
    products = products.at[:, :, slot].set(with_new, mode="drop")
    square = correction.inner_products(p, p)[:, 0, 0]
    p, unit = jax.tree.map(lambda leaf: leaf[0], (p, unit))
    scale = put(scale, units.astype(dtype))
    q, info = correction.project(p, joined, scale > 0, (products, with_p, square))
    return Memory(rows, scale, products, slots), tree.scale(q, unit), info


def _scaled(rows: PyTree) -> tuple[PyTree, jax.Array]:
    """Divide rows [k, ...] by units [k], powers of two, so that largest numbers are in [1, 2).

    The unit of a row of zeros is 0.
    """
    sizes = [jnp.abs(leaf).max(range(1, leaf.ndim), initial=0) for leaf in jax.tree.leaves(rows)]
    dtype = jnp.result_type(jnp.float32, *sizes)
    largest = jnp.max(jnp.stack([size.astype(dtype) for size in sizes]), 0)
    power = _power_of_two(largest)

    def divide(leaf):
        return (tree.along(1 / power, leaf) * leaf).astype(leaf.dtype)

    return jax.tree.map(divide, rows), jnp.where(largest == 0, 0, power)


def _power_of_two(x: jax.Array) -> jax.Array:
    """Return the largest power of two up to x >= 0, within 2^-125 to 2^125: its exponent bits."""
    exponent = np.uint32(0x7F800000) if x.dtype.itemsize == 4 else np.uint64(0x7FF << 52)
    bits = jax.lax.bitcast_convert_type(x, exponent.dtype) & exponent
    return jnp.clip(jax.lax.bitcast_convert_type(bits, x.dtype), 2.0**-125, 2.0**125)


def admit_cohort(
    slots: Slots, client_ids: jax.Array, participates: jax.Array
) -> tuple[Slots, jax.Array, jax.Array]:
    """Assign slots to a cohort in its order: mem_red (Algorithm 4).

    Args:
      slots: as the last round left them.
      client_ids: int32 [S].
      participates: bool [S].

    Returns:
      (the new ``Slots``; the slot of each client, int32 [S], m if it did not take part; whether it
      took part and is new there, bool [S]).

    Raises:
      ValueError: there are fewer slots than S.
    """
    size = slots.owner.shape[0]
    if client_ids.shape[0] > size:
        raise ValueError(
            f"memory_size is {size}; it must be at least the cohort's {client_ids.shape[0]} slots "
            "(or 0 for no memory)."
        )
    held = slots.owner[None] == client_ids[:, None]  # [S, m]
    known, place = held.any(1), jnp.arange(len(client_ids), dtype=jnp.int32)
    is_new = participates & ~known
    number = jnp.sum(is_new[None] & (place[None] < place[:, None]), axis=1, dtype=jnp.int32)
    # Empty slots are taken first. Then the least counted leave, the oldest first, of those outside
    # the present cohort.
    empty, present = slots.owner == _NOBODY, (held & participates[:, None]).any(0)
    index = jnp.arange(size, dtype=jnp.int32)
    turn = jnp.where(empty, 0, jnp.where(present, 2, 1))
    seen, order = jnp.where(empty, 0, slots.seen), jnp.where(empty, index, slots.order)
    *_, vacant = jax.lax.sort((turn, seen, order, index), num_keys=3)
    slot = jnp.where(known, jnp.argmax(held, axis=1), vacant[number])
    target = jnp.where(participates, slot, size)

    def write(table, value):
        return table.at[target].set(value, mode="drop")

    slots = Slots(
        owner=write(slots.owner, client_ids),
        seen=write(slots.seen, jnp.where(known, slots.seen[slot] + 1, 1)),
        order=write(slots.order, jnp.where(known, slots.order[slot], slots.entered + number)),
        entered=slots.entered + jnp.sum(is_new, dtype=jnp.int32),
    )
    return slots, target, is_new
