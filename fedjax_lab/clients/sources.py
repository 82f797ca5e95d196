"""Examples that all rounds share, copied to the devices of a client map once.

A round that runs on several devices needs all examples on each of them. JAX copies an array of one
device whenever the program is called, and that may take longer than the round.
"""

import weakref
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
