"""Exchanges between the devices of a client map, with small leaves sent together.

Sums have a fixed order of addition. The order in which an all-reduce adds depends on the connection
between the devices; between processes it differs from the order within a process. Here each device
gets a share of every device's values, adds them in the order of the devices, and sends the sums to
all devices. This moves as many bytes as a ring all-reduce, and gives the same bits for any number
of processes.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.clients.model_axis import held_layout
from fedjax_lab.types import PyTree

_SMALL = 2**12  # elements
_GATHERED = 2**17  # elements of all devices
_FEW = 16  # devices


def sum_in_order(values: PyTree, axis: str, devices: int) -> PyTree:
    """Sum arrays over a mesh axis; call it inside ``jax.shard_map``.

    Args:
      values: pytree of arrays; each leaf has the same shape on all devices.
      axis: the mesh axis.
      devices: number of devices along the axis.
    """
    if devices == 1:
        return values
    leaves, structure = jax.tree.flatten(values)
    large, small = _by_size(leaves, devices)
    sums = {place: _sum_large(leaves[place], axis, devices) for place in large}
    for places in small:
        added = _sum_small([leaves[place] for place in places], axis)
        sums.update(zip(places, added, strict=True))
    return jax.tree.unflatten(structure, [sums[place] for place in range(len(leaves))])


def send_rows(rows: PyTree, send: Callable[[jax.Array], jax.Array], devices: int) -> PyTree:
    """Send the rows of a cohort, the small leaves of each dtype as one array.

    Args:
      rows: pytree of arrays [S, ...].
      send: [S, ...] -> [T, ...], a collective that does not mix the values of a row.
      devices: number of devices.

    Returns:
      Pytree of arrays [T, ...].
    """
    leaves, structure = jax.tree.flatten(rows)
    large, small = _by_size(leaves, devices)
    sent = {place: send(leaves[place]) for place in large}
    for places in small:
        shapes = [leaves[place].shape[1:] for place in places]
        flat = [leaves[place].reshape(len(leaves[place]), -1) for place in places]
        ends = np.cumsum([part.shape[1] for part in flat])
        together = send(jnp.concatenate(flat, axis=1) if len(flat) > 1 else flat[0])
        for place, shape, end, part in zip(places, shapes, ends, flat, strict=True):
            own = together[:, end - part.shape[1] : end]
            sent[place] = own.reshape(len(together), *shape)
    return jax.tree.unflatten(structure, [sent[place] for place in range(len(leaves))])


def _by_size(leaves: Sequence[jax.Array], devices: int) -> tuple[list[int], list[list[int]]]:
    """Return (places of the leaves that are sent alone, groups of places sent together)."""
    large: list[int] = []
    small: dict[jnp.dtype, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if is_divided(leaf.size, devices):
            large.append(place)
        else:
            small.setdefault(leaf.dtype, []).append(place)
    return large, list(small.values())


def is_divided(size: int, devices: int) -> bool:
    """Return whether a leaf is sent alone, and summed in shares; smaller leaves are sent together.

    A program that sends them together needs two operations in place of about six for each leaf.
    With two devices it moves as many bytes, with more devices up to half as many times as devices.

    Args:
      size: number of elements of the leaf.
      devices: number of devices.
    """
    # With a divided model, joining leaves would gather their parts.
    most = _SMALL if held_layout() is not None else max(_SMALL, _GATHERED // devices)
    return size >= most


def _sum_large(leaf: jax.Array, axis: str, devices: int) -> jax.Array:
    """Sum a leaf in shares of its longest axis, so that its layout need not change."""
    along = max(range(leaf.ndim), key=lambda i: leaf.shape[i])
    length = leaf.shape[along]
    share = -(-length // devices)
    padding = [(0, share * devices - length if i == along else 0) for i in range(leaf.ndim)]
    shape = (*leaf.shape[:along], devices, share, *leaf.shape[along + 1 :])
    shares = jnp.pad(leaf, padding).reshape(shape)
    mine = jax.lax.all_to_all(shares, axis, split_axis=along, concat_axis=0).sum(0)
    whole = jax.lax.all_gather(mine, axis, axis=along, tiled=True)
    return jax.lax.slice_in_dim(whole, 0, length, axis=along)


def _sum_small(leaves: Sequence[jax.Array], axis: str) -> list[jax.Array]:
    together = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    rows = jax.lax.all_gather(together, axis)
    # Written out, since XLA for CPU is slow at sums over a leading axis.
    added = functools.reduce(jnp.add, rows) if len(rows) <= _FEW else rows.sum(0)
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    return [
        added[end - leaf.size : end].reshape(leaf.shape)
        for end, leaf in zip(ends, leaves, strict=True)
    ]
