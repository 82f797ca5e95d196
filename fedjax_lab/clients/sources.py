"""The arguments of a round, moved to the devices of its client map.

A round that runs on several devices needs all examples on each of them. JAX copies an array of one
device whenever the program is called, and that may take longer than the round. Arrays that lie on
several other devices, such as the state after a round of a smaller cohort, it refuses.
"""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_lab.machine.keys import is_key
from fedjax_lab.types import PyTree


class Sources:
    """The examples of the last call, and their copies."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._of: list[weakref.ref[Any]] = []
        self._copies: PyTree = None
        self._mesh: Mesh | None = None

    def on_all(self, mesh: Mesh | None, source: PyTree) -> PyTree:
        """Return examples with a copy on each device.

        Args:
          mesh: the devices; None: one device.
          source: arrays. Those of NumPy, which may change, and those that are on several devices
            stay as they are, also where several processes run.
        """
        leaves = jax.tree.leaves(source)
        if mesh is None or mesh.size == 1 or jax.process_count() > 1:
            return source
        if not leaves or not all(map(_is_on_one_device, leaves)):
            return source
        known = [reference() for reference in self._of]
        is_known = mesh == self._mesh and len(known) == len(leaves)
        if not is_known or any(a is not b for a, b in zip(known, leaves, strict=True)):
            self._mesh = mesh
            self._copies = jax.device_put(source, NamedSharding(mesh, PartitionSpec()))
            self._of = [weakref.ref(leaf, self._forget) for leaf in leaves]
        return self._copies

    def _forget(self, _: Any) -> None:
        self._of, self._copies = [], None


def _is_on_one_device(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) == 1


def on_devices(mesh: Mesh | None, values: PyTree) -> PyTree:
    """Copy arrays that are bound to other devices to each device of a mesh.

    Args:
      mesh: the devices; None: one device, or, if all arrays share theirs, those of the arrays.
      values: pytree of arrays; where several processes run, they stay as they are.
    """
    if jax.device_count() == 1 or jax.process_count() > 1:
        return values
    places = {leaf.sharding for leaf in jax.tree.leaves(values) if _is_bound(leaf)}
    if mesh is None and len({frozenset(place.device_set) for place in places}) < 2:
        return values
    there = jax.devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec())
    devices = None if mesh is None else {*mesh.devices.flat}

    def moved(leaf: Any) -> Any:
        if not _is_bound(leaf) or leaf.sharding == there:
            return leaf
        is_divided_here = leaf.sharding.device_set == devices and not leaf.is_fully_replicated
        return leaf if is_divided_here else jax.device_put(leaf, there)

    return jax.tree.map(moved, values)


def on_any_device(values: PyTree) -> PyTree:
    """Return a new tree of arrays that JAX may use together with those of any device.

    Args:
      values: pytree of arrays. If devices divide one of them, or several processes run, all stay
        as they are.
    """
    bound = [leaf for leaf in jax.tree.leaves(values) if _is_bound(leaf)]
    stay = jax.device_count() == 1 or jax.process_count() > 1
    stay = stay or not all(leaf.is_fully_replicated for leaf in bound)

    def free(leaf: Any) -> Any:
        if stay or is_key(leaf) or not _is_bound(leaf):
            return leaf
        return jnp.asarray(np.asarray(leaf))

    return jax.tree.map(free, values)


def _is_bound(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed
