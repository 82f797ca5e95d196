"""Checks that a model has a logit for every label, without running the model.

A label without a logit has no valid loss: the loss is NaN, or that of another class. The labels of
a loss are those that it passes to ``cross_entropy``, whatever it does with its examples before
(augmentation, other params, frozen weights).

Axes: n examples, B examples of a mini-batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_lab.machine.keys import is_key, seeded
from fedjax_lab.types import PyTree

Range = tuple[Any, Any]  # the least and the largest label
_MARK = "labels, of so many logits: "


def mark_labels(number: int, labels: jax.Array) -> jax.Array:
    """Mark the labels that a loss compares with logits; the compiled program stays the same."""
    return checkpoint_name(labels, f"{_MARK}{number}")


def check_labels(
    traced: ClosedJaxpr, examples: PyTree, places: np.ndarray, batch_size: int
) -> None:
    """Check that each label that a function compares with logits has a logit.

    Only the labels are computed. Labels marked inside another program, such as a jitted function
    that the traced one calls, are not checked.

    Args:
      traced: the function, a loss or one that counts, traced with a mini-batch of ``batch_size``
        examples and then with anything on which no label depends.
      examples: pytree [n, ...] of arrays; or of shapes, if no label depends on values.
      places: int [m], the examples to check.
      batch_size: B, at most m.

    Raises:
      ValueError: a label is out of range.
    """
    marks = [
        operation
        for operation in traced.jaxpr.eqns
        if operation.primitive.name == "name" and operation.params["name"].startswith(_MARK)
    ]
    if not marks or traced.effects:
        return
    labels = [mark.invars[0] for mark in marks]
    traced = traced.replace(jaxpr=traced.jaxpr.replace(outvars=labels))
    arrays = jax.tree.leaves(examples)
    found = _ranges_of_inputs(traced.jaxpr, arrays, places)
    if found is None:
        rows = np.resize(places, (-(-len(places) // batch_size), batch_size)).astype(np.int32)
        needed, _ = dce_jaxpr(traced.jaxpr, [True] * len(labels), instantiate=True)
        found = _computed_ranges(traced.replace(jaxpr=needed), arrays, rows)
    for mark, (lowest, highest) in zip(marks, found, strict=True):
        number = int(mark.params["name"].removeprefix(_MARK))
        if not 0 <= lowest <= highest < number:
            raise ValueError(
                f"examples.y has labels from {lowest} to {highest}; the model has "
                f"{number} logits, for 0 to {number - 1}."
            )


def _ranges_of_inputs(jaxpr: Any, arrays: list[Any], places: np.ndarray) -> list[Range] | None:
    """Compute the ranges of labels that are inputs, without a program; None for other labels."""
    of_batch = jaxpr.invars[: len(arrays)]
    inputs = {id(variable): array for variable, array in zip(of_batch, arrays, strict=True)}
    labels = [inputs.get(id(variable)) for variable in jaxpr.outvars]
    if not all(_is_at_hand(array) for array in labels):
        return None
    held = [np.asarray(array)[places] for array in labels]
    return [(array.min(), array.max()) for array in held]


def _is_at_hand(array: Any) -> bool:
    """Return True if NumPy can read it: no shape, tracer or array of several processes."""
    if isinstance(array, jax.Array):
        return not isinstance(array, jax.core.Tracer) and array.is_fully_addressable
    return isinstance(array, np.ndarray)


def _computed_ranges(traced: Any, leaves: list[Any], rows: np.ndarray) -> list[Range]:
    """Compute the ranges of labels that a program derives from mini-batches of examples."""
    labels_from = jaxpr_as_fun(traced)
    others = [variable.aval for variable in traced.jaxpr.invars[len(leaves) :]]
    given = [not isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    size = rows.shape[1]

    @jax.jit
    def ranges(arrays, rows):
        known = iter(arrays)

        blank = [_blank(like) for like in others]

        def of_batch(rows):
            batch = [
                next(known)[rows] if is_given else jnp.zeros((size, *leaf.shape[1:]), leaf.dtype)
                for leaf, is_given in zip(leaves, given, strict=True)
            ]
            return [(labels.min(), labels.max()) for labels in labels_from(*batch, *blank)]

        return jax.lax.map(of_batch, rows)

    arrays = [leaf for leaf, known in zip(leaves, given, strict=True) if known]
    with jax.ensure_compile_time_eval():
        found = jax.device_get(ranges(arrays, rows))
    return [(lowest.min(), highest.max()) for lowest, highest in found]


def _blank(like: Any) -> jax.Array:
    """Return zeros, or keys, of a shape; nothing depends on the values."""
    if is_key(like):
        return jnp.broadcast_to(seeded(0), like.shape)
    return jnp.zeros(like.shape, like.dtype)
