"""Joins the small leaves of a long vector, so that programs are small.

A program of inner products has loops and products for each leaf, so its compile time grows with the
number of leaves. Most leaves of a model are biases, norms and small kernels, which are copied into
one leaf. Large leaves are unchanged, because flattening would rearrange them on accelerators.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.clients.model_axis import held_layout
from fedjax_lab.tree import Joined
from fedjax_lab.types import PyTree

_SMALL = 2**15  # largest number of elements of a leaf that is joined
_MOST = 2**17  # largest number of elements of all these leaves together
FEW_ROWS = 8  # up to this number, each row is read as a separate vector


def are_small(leaves: Sequence[Any], divided: Sequence[bool] | None = None) -> list[bool]:
    """Choose the leaves to join: small ones, up to a limit for their sum.

    Args:
      leaves: arrays or shapes.
      divided: for each leaf, whether devices divide it; such leaves stay alone. None: none.
    """
    total, small = 0, []
    for index, leaf in enumerate(leaves):
        fits = leaf.size <= _SMALL and total + leaf.size <= _MOST
        small.append(fits and not (divided is not None and divided[index]))
        total += leaf.size if small[-1] else 0
    return small


def joined_rows(leaves: Sequence[jax.Array], small: Sequence[bool]) -> list[jax.Array]:
    """Join the leaves of rows.

    Args:
      leaves: arrays [C, ...].
      small: for each leaf, whether it is joined.
    """
    count = len(leaves[0])
    if count > FEW_ROWS:
        return Joined.of(list(leaves), small, axes=1).arrays
    # Each row is read separately, and the compiler removes the stack.
    rows = [Joined.of([leaf[row] for leaf in leaves], small) for row in range(count)]
    return [
        leaves[group[0]] if len(group) == 1 else jnp.stack([row.arrays[place] for row in rows])
        for place, group in enumerate(rows[0].groups)
    ]


def join_leaves(values: PyTree, axes: int) -> PyTree:
    """Join the small leaves of vectors, unless devices divide the model.

    Args:
      values: pytree [..., *shape of a leaf].
      axes: number of leading axes, which all leaves share: 0 for a vector, 1 for rows.

    Returns:
      ``Joined``, or ``values``.
    """
    if held_layout() is not None:
        return values
    leaves = jax.tree.leaves(values)
    shapes = [jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype) for leaf in leaves]
    return Joined.of(values, are_small(shapes), axes)


def separate_leaves(joined: PyTree) -> PyTree:
    """Undo ``join_leaves``, with any number of leading axes.

    Args:
      joined: as ``join_leaves`` returns it.
    """
    return joined.separate() if isinstance(joined, Joined) else joined
