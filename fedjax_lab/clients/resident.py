"""Resident examples: one copy on the device, from which local steps gather their mini-batches.

Axes: n examples, B examples of a mini-batch, F values of an example.
"""

import dataclasses

import jax

from fedjax_lab.types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatExamples:
    """Resident examples, each flattened to one row.

    Attributes:
      rows: [n, F].
      shape: shape of an example.
    """

    rows: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def flatten_examples(source: PyTree) -> PyTree:
    """Flatten each example with at least two axes to one row, for ``gather``.

    On a TPU arrays have tiles of 8 x 128, so small images would be mostly padding.

    Args:
      source: pytree [n, ...] of resident examples.
    """

    def flat(leaf):
        if leaf.ndim < 3:
            return leaf
        return FlatExamples(leaf.reshape(leaf.shape[0], -1), leaf.shape[1:])

    return jax.tree.map(flat, source)


def gather(examples: PyTree, source: PyTree) -> PyTree:
    """Gather examples from ``source``; without a source, ``examples`` are returned.

    Args:
      examples: pytree [..., B, ...]; with ``source``, integer indices into it.
      source: pytree [n, ...] of resident examples, or the result of ``flatten_examples``; or None.
    """

    def rows(leaf):
        if isinstance(leaf, FlatExamples):
            return leaf.rows[examples].reshape(*examples.shape, *leaf.shape)
        return leaf[examples]

    if source is None:
        return examples
    return jax.tree.map(rows, source, is_leaf=lambda leaf: isinstance(leaf, FlatExamples))
