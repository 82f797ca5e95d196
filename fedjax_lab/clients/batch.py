"""The first stage of a round: its batch is checked, completed and arranged for a client map.

Axes: N clients, S slots of the cohort, T slots of a client map, K local steps, B examples of a
mini-batch.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_lab import tree
from fedjax_lab.checks import KNOWN, is_traced
from fedjax_lab.clients.mapping import ClientMap, whole
from fedjax_lab.types import Cohort, CohortBatch, PyTree

Drawn = TypeVar("Drawn", Cohort, CohortBatch)


class Slots(NamedTuple):
    """The slots of a cohort as a client map runs them: padded to its multiple, and in its order.

    Attributes:
      client_ids: int32 [T]; N in a padded slot.
      fields: field of a ``ClientBatch`` -> pytree [T, ...].
      lengths: int32 [T], the number of steps after which each client has finished; None: no client
        skips a step.
      place: pytree [S, ...] -> [T, ...], with zeros in padded slots.
      restore: pytree [T, ...] -> [S, ...].
    """

    client_ids: jax.Array
    fields: dict[str, PyTree]
    lengths: jax.Array | None
    place: Callable[[PyTree], PyTree]
    restore: Callable[[PyTree], PyTree]


def complete_batch(
    batch: CohortBatch, num_clients: jax.Array, client_map: ClientMap
) -> tuple[Cohort, Slots]:
    """Check a batch, determine which clients participate, and arrange them for a client map.

    Without stragglers, absent clients and padded slots there is no step mask, and local steps need
    no condition. A step whose examples are all masked is then computed, and its result discarded.

    Args:
      batch: the batch of a round; only the shapes of traced fields are checked.
      num_clients: int32 scalar N.

    Raises:
      TypeError: a field is a list.
      ValueError: a field's shape does not match the other fields, or a number is out of range.
    """
    batch = _known_to_all(client_map.mesh, batch)
    cohort, step_mask = _participation(batch, num_clients, client_map.multiple)
    cohort = _known_to_all(client_map.mesh, cohort)
    fields = {
        "examples": batch.examples,
        "example_mask": batch.example_mask,
        "step_mask": step_mask,
        "num_steps": cohort.num_steps,  # known to all, else devices count their part
        "full_examples": batch.full_examples,
        "full_mask": batch.full_mask,
    }
    # If only padded slots take fewer steps, their order is known when the round is traced.
    equal_steps = batch.num_steps is None and batch.participates is None
    size = cohort.client_ids.shape[0]
    extra = -size % client_map.multiple
    lengths = order = None

    def pad(leaf, value=0):
        padding = jnp.full((extra, *leaf.shape[1:]), value, leaf.dtype)
        return jnp.concatenate([leaf, padding]) if extra else leaf

    def sort(leaf):
        return leaf if order is None else leaf[order]

    if step_mask is not None:
        numbers = jnp.arange(1, step_mask.shape[1] + 1)
        lengths = jnp.where(pad(step_mask), numbers[None], 0).max(1)
        if client_map.sort is not None and equal_steps:
            order = client_map.sort(np.arange(size + extra) < size)
        elif client_map.sort is not None:
            order = whole(client_map.sort(lengths), client_map.mesh)
        lengths = sort(lengths)

    def place(values):
        return jax.tree.map(lambda leaf: sort(pad(leaf)), values)

    def restore(values):
        if order is not None:
            back = (np if equal_steps else jnp).argsort(order)
            values = jax.tree.map(lambda leaf: leaf[back], values)
        return jax.tree.map(lambda leaf: leaf[:size], values)

    ids = sort(pad(cohort.client_ids, cohort.num_clients))
    return cohort, Slots(ids, {**place(fields), "client_id": ids}, lengths, place, restore)


def _known_to_all(mesh: Mesh | None, drawn: Drawn) -> Drawn:
    """Make each device sample a batch or a cohort by itself, without communication.

    Otherwise the compiler divides the work: the devices then exchange sums of S numbers, and wait
    for each other in the loop that samples.
    """
    if not is_traced(drawn.client_ids):  # already computed
        return drawn
    names = ["client_ids", "participates", "weights", "num_steps"]
    if getattr(drawn, "source", None) is not None:  # examples are indices
        names += ["examples", "example_mask", "full_examples", "full_mask"]
    return drawn._replace(**whole({name: getattr(drawn, name) for name in names}, mesh))


def _participation(
    batch: CohortBatch, num_clients: jax.Array, multiple: int
) -> tuple[Cohort, jax.Array | None]:
    """Check a batch; returns (cohort, step mask bool [S, K] or None if no client skips a step)."""
    slots, max_steps = check_values(batch, num_clients)
    participates = batch.client_ids < num_clients
    step_mask, num_steps = None, jnp.full(slots, max_steps, jnp.int32)
    skips = slots % multiple or batch.num_steps is not None or batch.participates is not None
    if skips:
        if batch.participates is not None:
            participates = participates & batch.participates
        step_mask = jnp.broadcast_to(participates[:, None], (slots, max_steps))
        if batch.num_steps is not None:
            step_mask = step_mask & (jnp.arange(max_steps)[None] < batch.num_steps[:, None])
        if batch.example_mask is not None:
            step_mask = step_mask & batch.example_mask.any(-1)
        num_steps = step_mask.sum(-1, dtype=jnp.int32)
        participates = participates & (num_steps > 0)
    elif batch.example_mask is not None:
        num_steps = batch.example_mask.any(-1).sum(-1, dtype=jnp.int32)
        num_steps = jnp.where(participates, num_steps, 0)
        participates = num_steps > 0
    weights = jnp.ones(slots) if batch.weights is None else batch.weights
    weights = jnp.where(participates, weights, 0).astype(jnp.result_type(float))
    total_weight = weights.sum()
    weights = tree.safe_divide(weights, total_weight)
    if batch.expected_size is not None:  # means are NaN where clients are missing
        weights = jnp.where(jnp.isnan(batch.expected_size), jnp.nan, weights)
    cohort = Cohort(
        batch.client_ids,
        participates,
        weights,
        batch.round,
        num_clients,
        max_steps,
        num_steps,
        batch.key,
        batch.weights is None,
        batch.expected_size,
        total_weight,
        batch.seconds,
    )
    return cohort, step_mask


def check_values(batch: CohortBatch, num_clients: jax.Array) -> tuple[int, int]:
    """Check the shapes of a batch, and its values that are not traced; returns (S, K).

    Raises:
      TypeError, ValueError: as in ``complete_batch``.
    """
    slots, max_steps = _batch_shape(batch)
    _check_concrete(batch, num_clients, max_steps)
    return slots, max_steps


def note_count(after: jax.Array, before: jax.Array) -> None:
    """Note that a round left N as it was."""
    KNOWN.add(after, _count(before))


def _count(num_clients) -> int:
    known = KNOWN.get(num_clients)
    return int(np.asarray(num_clients)) if known is None else known


def _batch_shape(batch: CohortBatch) -> tuple[int, int]:
    """Check the shapes of all fields; returns (S, K)."""
    leaves = jax.tree.leaves(batch.examples)
    if not leaves or any(jnp.ndim(leaf) < 3 for leaf in leaves):
        raise ValueError("examples must be a pytree of arrays [S, K, B, ...].")
    slots, steps, size = leaves[0].shape[:3]
    if batch.source is not None and not all(
        jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves
    ):
        raise ValueError("with source, examples must be integer indices into it.")
    expected = {
        "client_ids": (slots,),
        "example_mask": (slots, steps, size),
        "num_steps": (slots,),
        "weights": (slots,),
        "participates": (slots,),
        "seconds": (slots,),
    }
    for name, shape in expected.items():
        value = getattr(batch, name)
        if isinstance(value, (list, tuple)):
            raise TypeError(f"{name} is {value!r}; it must be an array {list(shape)}.")
        if value is not None and jnp.shape(value) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(value)}; it must be {shape}.")
    for leaf in leaves:
        if leaf.shape[:3] != (slots, steps, size):
            raise ValueError(
                f"examples has leaves of shapes {leaves[0].shape} and {leaf.shape}; "
                "all must begin with the same [S, K, B]."
            )
    if 0 in (slots, steps, size):
        raise ValueError(f"examples begins with [S, K, B] = {[slots, steps, size]}; none may be 0.")
    if (batch.full_examples is None) != (batch.full_mask is None):
        raise ValueError("full_examples and full_mask must be given together.")
    return slots, steps


def _check_concrete(batch: CohortBatch, num_clients, max_steps: int) -> None:
    """Check the client ids, step counts and weights that are not traced."""
    if not is_traced((batch.client_ids, num_clients)):
        # NumPy, because inside a jitted function JAX would trace even a comparison of constants.
        count = _count(num_clients)
        if _must_be_read(batch.client_ids, count):
            _check_ids(np.asarray(batch.client_ids), count)
    if _must_be_read(batch.num_steps, max_steps):
        counts = np.asarray(batch.num_steps)
        if counts.min() < 0 or counts.max() > max_steps:
            raise ValueError(
                f"num_steps is {counts.tolist()}; each must lie between 0 and {max_steps}."
            )
    if _must_be_read(batch.weights, max_steps):
        weights = np.asarray(batch.weights)
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError(f"weights is {weights.tolist()}; each must be finite and at least 0.")


def _must_be_read(values, valid_for: int) -> bool:
    return not (values is None or is_traced(values) or KNOWN.get(values) == valid_for)


def _check_ids(ids: np.ndarray, count: int) -> None:
    if ids.min() < 0 or ids.max() > count:
        raise ValueError(
            f"client_ids is {ids.tolist()}; ids must lie between 0 and {count - 1} "
            f"(or be {count} for a padded slot)."
        )
    real = ids[ids < count]
    if np.unique(real).size != real.size:
        raise ValueError(f"client_ids is {ids.tolist()}; ids must be distinct in a round.")
