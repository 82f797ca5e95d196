"""Checks that a model has a logit for every label, without running the model.

A label without one has no loss: it is NaN, or another class's. What a loss makes of its examples
before it compares them with logits (augmentation, other params, frozen weights) does not matter:
its labels are those that ``cross_entropy`` is called with.

Axes: n examples, B examples of a mini-batch.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from fedjax_lab.types import PyTree

Seen = list[tuple[int, jax.Array]]  # number of logits, labels
# Between the check and ``cross_entropy`` lies the user's loss, a function of params, examples and
# key: it hands no value on, and to mark labels in what it is given would change what it computes.
_SEEN: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("labels", default=None)


def note_labels(number: int, labels: jax.Array) -> None:
    """Note which labels a loss compares with logits.

    Args:
      number: of logits.
      labels: integers of any shape.
    """
    seen = _SEEN.get()
    if seen is not None:
        seen.append((number, labels))


def check_labels(
    run: Callable[[PyTree], Any], examples: PyTree, places: np.ndarray, batch_size: int
) -> None:
    """Check that each label that ``run`` compares with logits has a logit.

    ``run`` is traced with one mini-batch; of what it computes, its labels alone are. Nothing is
    checked where they do not come out of its trace, such as from a function that is jitted inside.

    Args:
      run: examples [B, ...] -> anything; a loss, or a function that counts.
      examples: pytree [n, ...] of arrays, or of shapes where no label depends on the values.
      places: int [m], the examples to check.
      batch_size: B.

    Raises:
      ValueError: a label is out of range.
    """
    size = min(batch_size, len(places))
    rows = np.resize(places, (-(-len(places) // size), size)).astype(np.int32)
    given = [not isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(examples)]
    numbers: list[int] = []

    def labels_of(batch):
        with _watched() as seen:
            run(batch)
        numbers.extend(number for number, _ in seen)
        return [labels for _, labels in seen]

    def one(leaf):
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)

    try:
        traced = jax.make_jaxpr(labels_of)(jax.tree.map(one, examples))
    except jax.errors.UnexpectedTracerError:
        return
    if not numbers or traced.effects:
        return
    labels_from = jaxpr_as_fun(traced)

    @jax.jit
    def ranges(arrays, rows):
        known = iter(arrays)

        def of_batch(rows):
            batch = [
                next(known)[rows] if is_given else jnp.zeros((size, *leaf.shape[1:]), leaf.dtype)
                for leaf, is_given in zip(jax.tree.leaves(examples), given, strict=True)
            ]
            return [(labels.min(), labels.max()) for labels in labels_from(*batch)]

        return jax.lax.map(of_batch, rows)

    arrays = [leaf for leaf, known in zip(jax.tree.leaves(examples), given, strict=True) if known]
    try:
        with jax.ensure_compile_time_eval():
            found = jax.device_get(ranges(arrays, rows))
    except jax.errors.UnexpectedTracerError:  # labels of an inner vmap
        return
    for number, (lowest, highest) in zip(numbers, found, strict=True):
        if not 0 <= lowest.min() <= highest.max() < number:
            raise ValueError(
                f"examples.y has labels from {lowest.min()} to {highest.max()}; the model has "
                f"{number} logits, for 0 to {number - 1}."
            )


@contextlib.contextmanager
def _watched() -> Iterator[Seen]:
    seen: Seen = []
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)
