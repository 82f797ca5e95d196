"""Small leaves of a long vector laid end to end, so that a program has text for few leaves.

A program of inner products has loops and products for each leaf, and its compile time grows with
their number. Most leaves of a model are biases, norms and small kernels, which are copied into one
leaf. Large leaves stay as they are: flattening them would rearrange them on accelerators.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_SMALL = 2**15  # numbers of a leaf that is laid beside others
_MOST = 2**17  # numbers of all of them together, which are copied
FEW_ROWS = 8  # up to here each row is read as a vector of its own

# The leaves, by their places, that make up each leaf of the packed vector.
Groups = list[list[int]]


def groups_of(leaves: Sequence[Any], divided: Sequence[bool] | None = None) -> Groups:
    """Which leaves are laid end to end: small ones of one dtype, as far as their sum is small.

    Args:
      leaves: arrays or shapes.
      divided: which of them devices divide, and which stay alone; None: none.
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
    """Lay the leaves of each group end to end.

    Args:
      leaves: arrays [...].
      groups: as ``groups_of`` says.
    """
    return [
        leaves[group[0]]
        if len(group) == 1
        else jnp.concatenate([jnp.ravel(leaves[index]) for index in group])
        for group in groups
    ]


def packed_rows(leaves: Sequence[jax.Array], groups: Groups) -> list[jax.Array]:
    """Lay the leaves of rows end to end: arrays [C, ...] as ``packed`` does those of one row.

    Args:
      leaves: arrays [C, ...].
      groups: as ``groups_of`` says of one row.
    """
    count = len(leaves[0])
    if count <= FEW_ROWS:  # each is read alone, and the compiler undoes the stack
        rows = [packed([leaf[row] for leaf in leaves], groups) for row in range(count)]
        return [
            leaves[group[0]] if len(group) == 1 else jnp.stack([row[place] for row in rows])
            for place, group in enumerate(groups)
        ]
    return [
        leaves[group[0]]
        if len(group) == 1
        else jnp.concatenate([leaves[index].reshape(count, -1) for index in group], axis=1)
        for group in groups
    ]


def unpacked(
    leaves: Sequence[jax.Array], groups: Groups, like: Sequence[jax.Array]
) -> list[jax.Array]:
    """Take packed leaves apart again.

    Args:
      leaves: as ``packed`` gives them.
      groups: as ``groups_of`` says.
      like: arrays of the shapes that they had.
    """
    found: dict[int, jax.Array] = {}
    for leaf, group in zip(leaves, groups, strict=True):
        if len(group) == 1:
            found[group[0]] = leaf
            continue
        start = 0
        for index in group:
            size, shape = like[index].size, like[index].shape
            found[index] = jax.lax.slice(leaf, [start], [start + size]).reshape(shape)
            start += size
    return [found[index] for index in range(len(like))]
