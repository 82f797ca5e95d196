"""A convolution of images as matrix products of rows, whose minor axis is the batch.

Images are [H, C, W, B] and features [H', F, W', B]. The operand of an output row, h rows of
columns, is then contiguous in memory and fits into a cache, and every product has a long minor
axis W' B. Where that takes fewer products, rows are computed in Winograd's tiles (``winograd``).

Its three functions are one operation of JAX, ``correlate`` (see ``bilinear``).

Axes: B examples, H x W pixels, C channels, F features, h x w kernel; H' x W' outputs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_lab.machine.layout import written_out
from fedjax_lab.models import winograd
from fedjax_lab.models.bilinear import Bilinear
from fedjax_lab.models.windows import Window
from fedjax_lab.tree import wide_dtype

# Of a kernel of one pixel whose rows are one product. It is copied for each row, so that with more
# weights the loop is faster. (A round of the zoo's inverted residuals takes 0.95 of the time, its
# first row 0.9.)
_MOST_WEIGHTS = 8192


class Sizes(NamedTuple):
    """What the three functions share.

    Attributes:
      image: (H, W) of padded images.
      kernel: (h, w).
      strides: along H and along W.
      tile: outputs of a tile of Winograd's; 0: none. Tiles take a stride of 1 along W.
    """

    image: tuple[int, int]
    kernel: tuple[int, int]
    strides: tuple[int, int]
    tile: int = 0

    @property
    def tops(self) -> jax.Array:
        """The first image row under the kernel for each output row."""
        return Window(self.kernel[0], self.strides[0]).starts(self.image[0])


def features(x: jax.Array, kernel: jax.Array, strides: tuple[int, int], tile: int = 0) -> jax.Array:
    """Correlate images with kernels: [H, C, W, B], [h, w, C, F] -> [H', F, W', B].

    Args:
      kernel: one float dtype with ``x``.
      tile: as ``winograd.best_tile`` returns it; 0: direct sums.
    """
    height, _, width, _ = x.shape
    size = Sizes((height, width), (kernel.shape[0], kernel.shape[1]), strides, tile)
    return correlate("features", x, kernel, size)


# --- The three functions for one model


def _features(x: jax.Array, kernel: jax.Array, size: Sizes) -> jax.Array:
    if size.tile:
        return winograd.features(x, kernel, size.strides[0], size.tile)
    matrix = _matrix(kernel).T
    if _is_one_product(size, matrix.size):
        pixels = _pixels(x, size)
        rows = _for_each_row(matrix, pixels) @ pixels.reshape(*pixels.shape[:2], -1)
        return rows.reshape(len(rows), len(matrix), *pixels.shape[2:])
    columns = _columns(written_out(x), size)

    def row(top):
        return matrix @ _under(columns, top, size)

    rows = lax.map(row, size.tops)
    return rows.reshape(len(rows), len(matrix), *columns.shape[3:])


def _images_of(features: jax.Array, kernel: jax.Array, size: Sizes) -> jax.Array:
    """The images' gradient, of features' [H', F, W', B]."""
    if size.tile:
        return winograd.images_of(features, kernel, size.image, size.strides[0], size.tile)
    (height, width), batch, num_channels = size.image, features.shape[-1], kernel.shape[2]
    matrix = _matrix(kernel)
    rows = features.reshape(len(features), features.shape[1], -1)
    if _is_one_product(size, matrix.size):
        images = jax.ShapeDtypeStruct((height, num_channels, width, batch), kernel.dtype)
        to_pixels = functools.partial(_pixels, size=size)
        pixels = jax.eval_shape(to_pixels, images)
        products = _for_each_row(matrix, rows) @ rows
        return jax.linear_transpose(to_pixels, images)(products.reshape(pixels.shape))[0]
    images = jax.ShapeDtypeStruct((height, num_channels, width, batch), wide_dtype(kernel.dtype))
    to_columns = functools.partial(_columns, size=size)
    columns = jax.eval_shape(to_columns, images)

    def add(total, row):
        top, features = row
        patches = (matrix @ features).reshape(size.kernel[0], *columns.shape[1:])
        rows = lax.dynamic_slice_in_dim(total, top, size.kernel[0]) + patches
        return lax.dynamic_update_slice_in_dim(total, rows, top, 0), None

    start = jnp.zeros(columns.shape, columns.dtype)
    total, _ = lax.scan(add, start, (size.tops, rows))
    return jax.linear_transpose(to_columns, images)(total)[0].astype(kernel.dtype)


def _kernel_of(x: jax.Array, features: jax.Array, size: Sizes) -> jax.Array:
    """The kernel's gradient, of features' [H', F, W', B]."""
    if size.tile:
        return winograd.kernel_of(x, features, size.kernel, size.strides[0], size.tile)
    num_features, num_channels = features.shape[1], x.shape[1]
    rows = features.reshape(len(features), num_features, -1)
    if _is_one_product(size, num_features * num_channels):
        pixels = _pixels(x, size).reshape(len(rows), num_channels, -1)
        # The smaller operand is the one that is turned for the product.
        is_wider = num_features > num_channels
        left, right = (rows, pixels) if is_wider else (pixels, rows)
        total = (left @ right.swapaxes(1, 2)).sum(0)
        return (total.T if is_wider else total).reshape(1, 1, num_channels, num_features)
    columns = _columns(written_out(x), size)

    def add(total, row):
        top, features = row
        # With the patches turned instead, a round of the zoo's 3-D CNN takes 1.03 times as long.
        products = lax.dot_general(_under(columns, top, size), features, (((1,), (1,)), ((), ())))
        return total + products, None

    shape = size.kernel[0] * size.kernel[1] * num_channels, num_features
    total, _ = lax.scan(add, jnp.zeros(shape, wide_dtype(x.dtype)), (size.tops, rows))
    return total.reshape(*size.kernel, num_channels, num_features).astype(x.dtype)


def _is_one_product(size: Sizes, num_weights: int) -> bool:
    return size.kernel == (1, 1) and num_weights <= _MOST_WEIGHTS


def _pixels(x: jax.Array, size: Sizes) -> jax.Array:
    """Return the pixels under a kernel of one pixel: [H, C, W, B] -> [H', C, W', B]."""
    down, across = map(Window, size.kernel, size.strides)
    return across.elements(down.elements(x, 0, 0), 2, 0)


def _for_each_row(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.broadcast_to(matrix, (len(rows), *matrix.shape))


def _matrix(kernel: jax.Array) -> jax.Array:
    return kernel.reshape(-1, kernel.shape[-1])


def _under(columns: jax.Array, top: jax.Array, size: Sizes) -> jax.Array:
    """Return the operand of an output row, [h w C, W' B]."""
    rows = lax.dynamic_slice_in_dim(columns, top, size.kernel[0])
    return rows.reshape(rows.shape[0] * rows.shape[1] * rows.shape[2], -1)


def _columns(x: jax.Array, size: Sizes) -> jax.Array:
    """Return the pixels under each of a kernel's w columns: [H, C, W, B] -> [H, w, C, W', B]."""
    window = Window(size.kernel[1], size.strides[1])
    return jnp.stack([window.elements(x, 2, j) for j in range(window.size)], axis=1)


correlate = Bilinear(
    "correlate",
    {"features": _features, "images_of": _images_of, "kernel_of": _kernel_of},
    beside_left={"features": (3, 3), "images_of": (3, 3), "kernel_of": (1, 2)},
    beside_right={"features": (3, 1), "kernel_of": (1, 3)},
)
