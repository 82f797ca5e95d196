"""Where the numbers of an array lie in memory."""

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def written_out(x: jax.Array) -> jax.Array:
    """``x``, made once and stored with its last axis minor, before anything reads it.

    XLA would otherwise keep a transposed image as it was and fuse the transpose, with the gather
    and scaling of a mini-batch before it, into every reader: a stride between neighbours, and the
    work done anew for each of the columns of a kernel.

    Args:
      x: [...].
    """
    return lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
