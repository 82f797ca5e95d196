"""How a window, such as a kernel's weights or those of a pooling, passes along an axis."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Window(NamedTuple):
    """How windows pass along an axis.

    Attributes:
      size: elements of a window.
      stride: elements between two windows.
      dilation: distance of the elements of a window.
    """

    size: int = 1
    stride: int = 1
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Elements between the first and the last one of a window."""
        return (self.size - 1) * self.dilation

    def positions(self, length: int) -> int:
        """Return the number of windows on an axis."""
        return (length - self.reach - 1) // self.stride + 1

    def starts(self, length: int) -> jax.Array:
        """Return the place of the first element of each window on an axis."""
        return jnp.arange(0, length - self.reach, self.stride)

    def elements(self, x: jax.Array, axis: int, place: int) -> jax.Array:
        """Return the element at ``place`` in each window."""
        first = place * self.dilation
        last = first + (self.positions(x.shape[axis]) - 1) * self.stride
        return lax.slice_in_dim(x, first, last + 1, self.stride, axis)


Windows = tuple[Window, ...]  # one for each axis
