"""The memory layout of arrays."""

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def written_out(x: jax.Array) -> jax.Array:
    """Compute ``x`` once and store it with its last axis minor, before it is read.

    Without this, XLA fuses a transpose of images, together with the gather and scaling of the
    mini-batch before it, into every reader. Neighbours are then not adjacent in memory, and the
    work is repeated for each column of a kernel.

    Args:
      x: [...].
    """
    return lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
