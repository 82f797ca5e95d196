"""Concatenates the small leaves of a long vector, so that programs are small.

A program of inner products has loops and products for each leaf, so its compile time grows with the
number of leaves. Most leaves of a model are biases, norms and small kernels, which are copied into
one leaf. Large leaves are unchanged, because flattening would rearrange them on accelerators.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.clients.model_axis import held_layout
from fedjax_lab.types import PyTree

_SMALL = 2**15  # largest number of elements of a leaf that is concatenated
_MOST = 2**17  # largest number of elements of all these leaves together
FEW_ROWS = 8  # up to this number, each row is read as a separate vector

# The indices of the leaves that make up each leaf of the packed vector.
Groups = list[list[int]]


def groups_of(leaves: Sequence[Any], divided: Sequence[bool] | None = None) -> Groups:
    """Choose the leaves to concatenate: small ones of one dtype, up to a limit for their sum.

    Args:
      leaves: arrays or shapes.
      divided: for each leaf, whether devices divide it; such leaves stay separate. None: none.
    """
    alone: Groups = []
    small: dict[Any, list[int]] = {}
    total = 0
    for index, leaf in enumerate(leaves):
        fits = leaf.size <= _SMALL and total + leaf.size <= _MOST
        if not fits or (divided is not None and divided[index]):
            alone.append([index])
        else:
            small.setdefault(leaf.dtype, []).append(index)
            total += leaf.size
    return [*alone, *small.values()]


def packed(leaves: Sequence[jax.Array], groups: Groups) -> list[jax.Array]:
    """Concatenate the leaves of each group.

    Args:
      leaves: arrays [...].
      groups: as ``groups_of`` returns them.
    """
    return _concatenated(leaves, groups, 0)


def _concatenated(leaves, groups, axes):
    def flat(leaf):
        return leaf.reshape(*leaf.shape[:axes], -1)

    return [
        leaves[group[0]]
        if len(group) == 1
        else jnp.concatenate([flat(leaves[index]) for index in group], axis=axes)
        for group in groups
    ]


def packed_rows(leaves: Sequence[jax.Array], groups: Groups) -> list[jax.Array]:
    """Concatenate the leaves of rows: ``packed`` for arrays [C, ...].

    Args:
      leaves: arrays [C, ...].
      groups: as ``groups_of`` returns them for one row.
    """
    count = len(leaves[0])
    if count <= FEW_ROWS:  # each row is read separately, and the compiler removes the stack
        rows = [packed([leaf[row] for leaf in leaves], groups) for row in range(count)]
        return [
            leaves[group[0]] if len(group) == 1 else jnp.stack([row[place] for row in rows])
            for place, group in enumerate(groups)
        ]
    return _concatenated(leaves, groups, 1)


def unpacked(leaves: Sequence[jax.Array], groups: Groups, like: Sequence[Any]) -> list[jax.Array]:
    """Split packed leaves into the original ones.

    Args:
      leaves: as ``packed`` or ``packed_rows`` returns them.
      groups: as ``groups_of`` returns them.
      like: arrays or shapes of one row.
    """
    found: dict[int, jax.Array] = {}
    for leaf, group in zip(leaves, groups, strict=True):
        if len(group) == 1:
            found[group[0]] = leaf
            continue
        start = 0
        for index in group:
            size, shape = like[index].size, like[index].shape
            part = jax.lax.slice_in_dim(leaf, start, start + size, axis=-1)
            found[index] = part.reshape(*leaf.shape[:-1], *shape)
            start += size
    return [found[index] for index in range(len(like))]


def join_leaves(values: PyTree, axes: int) -> PyTree:
    """Join the small leaves of vectors, unless devices divide the model.

    Args:
      values: pytree [..., *shape of a leaf].
      axes: number of leading axes, which all leaves share: 0 for a vector, 1 for rows.

    Returns:
      a list of longer leaves, or ``values``.
    """
    if held_layout() is not None:
        return values
    leaves = jax.tree.leaves(values)
    shapes = [jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype) for leaf in leaves]
    return _concatenated(leaves, groups_of(shapes), axes)


def separate_leaves(joined: PyTree, like: PyTree) -> PyTree:
    """Undo ``join_leaves``, with any number of leading axes.

    Args:
      joined: as ``join_leaves`` returns it.
      like: arrays or shapes of one vector.
    """
    if held_layout() is not None:
        return joined
    leaves, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, unpacked(joined, groups_of(leaves), leaves))
