"""Max-pooling, by slices on CPU and by the position of the maximum on other platforms.

On CPU, XLA's window reduction is several times slower than the maximum of slices, forward and
backward. On a TPU, the gradient of that maximum is padded and added once for each slice. With the
position of the maximum instead, a local step of a LeNet-5 moves less than half the bytes
(docs/accelerators.md).
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fedjax_lab.machine.layout import written_out
from fedjax_lab.machine.target import traced_for


@jax.named_scope("max_pool")
def max_pool(x: jax.Array, size: int = 2, padding: int = 0) -> jax.Array:
    """Max-pool windows of ``size`` x ``size`` with stride 2: [B, H, W, C] -> [B, H', W', C].

    H' = floor((H + 2 padding - size) / 2) + 1, which is H // 2 for the default. ``padding`` adds
    pixels of -inf on every side. On CPU and for overlapping windows, equal pixels share the
    gradient; otherwise the first one gets it, as in PyTorch.

    Args:
      x: [B, H, W, C].
      size: height and width of a window.
      padding: pixels of -inf on every side.

    Raises:
      ValueError: the image is too small.
    """
    if min(x.shape[1:3]) + 2 * padding < size:
        raise ValueError(
            f"x has shape {x.shape} where a max-pool takes {size} x {size} pixels; give larger "
            "images."
        )
    if (size, padding) == (2, 0) and traced_for().platform != "cpu":
        return _of_pairs(x)
    # In the layout of the convolutions on CPU: XLA then cancels the transposes between the two.
    x = x.transpose(1, 3, 2, 0)
    if (size, padding) == (2, 0):
        return _on_cpu(x).transpose(3, 0, 2, 1)
    if padding:
        around = (padding, padding)
        x = jnp.pad(x, (around, (0, 0), around, (0, 0)), constant_values=-jnp.inf)
    rows, columns = ((length - size) // 2 for length in (x.shape[0], x.shape[2]))
    x = functools.reduce(jnp.maximum, [x[i : i + 2 * rows + 1 : 2] for i in range(size)])
    x = functools.reduce(jnp.maximum, [x[:, :, j : j + 2 * columns + 1 : 2] for j in range(size)])
    return x.transpose(3, 0, 2, 1)


@jax.custom_jvp
def _on_cpu(x: jax.Array) -> jax.Array:
    """Pool on CPU: [H, C, W, B] -> [H', C, W', B]."""
    return written_out(functools.reduce(jnp.maximum, _corners(x)))


@_on_cpu.defjvp
def _on_cpu_jvp(primals, tangents):
    (x,), (change,) = primals, tangents
    y = _on_cpu(x)

    def pairs(x):
        """Split both axes of pixels into pairs: [H, C, W, B] -> [H', 2, C, W', 2, B]."""
        x = x[: 2 * y.shape[0], :, : 2 * y.shape[2]]
        return x.reshape(y.shape[0], 2, x.shape[1], y.shape[2], 2, -1)

    chosen = pairs(x) == y[:, None, :, :, None]
    change = jnp.where(chosen, pairs(change), 0).sum((1, 4))
    ways = functools.reduce(jnp.add, [(corner == y).astype(x.dtype) for corner in _corners(x)])
    return y, written_out(change / jnp.maximum(ways, 1))


def _corners(x: jax.Array) -> list[jax.Array]:
    """Return the four pixels of each window: [H, C, W, B] -> [H', C, W', B] each."""
    height, width = (length // 2 * 2 for length in (x.shape[0], x.shape[2]))
    return [x[i:height:2, :, j:width:2] for i in (0, 1) for j in (0, 1)]


@jax.custom_jvp
def _of_pairs(x: jax.Array) -> jax.Array:
    return _largest(x)[0]


@_of_pairs.defjvp
def _of_pairs_jvp(primals, tangents):
    (x,), (change,) = primals, tangents
    y, place = _largest(x)
    batch, height, width, channels = y.shape
    change = change[:, : 2 * height, : 2 * width]
    change = change.reshape(batch, height, 2, width, 2, channels)
    places = jnp.arange(4, dtype=place.dtype).reshape(1, 1, 2, 1, 2, 1)
    chosen = place[:, :, None, :, None] == places
    return y, jnp.where(chosen, change, 0).sum((2, 4))


def _largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first largest of 2 x 2 pixels, or a NaN, and its place, uint8, row by row."""
    height, width = (length // 2 * 2 for length in x.shape[1:3])
    x = x[:, :height, :width]
    pixels = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    best = functools.reduce(jnp.maximum, pixels)
    place = jnp.full(best.shape, 3, jnp.uint8)
    for n in (2, 1, 0):
        place = jnp.where((pixels[n] == best) | jnp.isnan(pixels[n]), jnp.uint8(n), place)
    return best, checkpoint_name(place, "place")  # saved for the gradient instead of ``x``
