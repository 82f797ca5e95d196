"""Winograd's convolution along rows: fewer products than outputs times weights.

A tile of m outputs y_i = sum_j d_{i + j} g_j of a row of w weights takes P = m + w - 1 products
in place of m w: a sum like this is the transpose of a product of polynomials of degrees m - 1 and
w - 1, which is known from its values at P points (one of them infinity: the leading coefficient):

    y = A^T [(G g) * (B^T d)],   * element by element.

The products are first summed over channels and kernel rows, which makes them matrix products. The
linear maps A^T, G and B^T cost little in comparison. Source: S. Winograd, Arithmetic Complexity of
Computations, 1980; for convolutional networks A. Lavin, S. Gray: Fast Algorithms for Convolutional
Neural Networks, CVPR 2016, who nest the method along both axes. Here it is applied along one axis,
so rounding errors grow once instead of twice, and the matrix products include the kernel's rows.

Axes: images [H, C, W, B] and features [H', F, W', B], as in ``convolution``; T tiles of m outputs,
kernel h x w.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_lab.machine.layout import written_out
from fedjax_lab.models.windows import Window

# Small numbers with small differences, which keep rounding errors small; infinity follows them.
_POINTS = (0.0, 1.0, -1.0, 2.0, -0.5, -2.0, 0.5)
_MAX_TILE = 4  # float32: an error of 1e-6 of the largest output; 1e-5 with tiles of 5
# Measured on one core of an x86 server.
_FEW_COLUMNS = 16
_MOST_COLUMNS = 4096
_IN_CACHE = 2**21  # numbers
_SMALL_PRODUCT = 60_000  # multiplications
_MANY_COLUMNS, _SMALL_OF_MANY_COLUMNS = 64, 20_000


class _Maps(NamedTuple):
    """The three linear maps, float64: A^T [m, P], G [P, w], B^T [P, P]."""

    outputs: np.ndarray
    kernel: np.ndarray
    pixels: np.ndarray


@functools.cache
def _maps(tile: int, width: int) -> _Maps:
    points = np.array(_POINTS[: tile + width - 2])
    others = [np.delete(points, i) for i in range(len(points))]
    # Rows of Lagrange's polynomials, zero at the other points; infinity's is zero at all points.
    pixels = np.zeros((len(points) + 1, len(points) + 1))
    for i, roots in enumerate(others):
        pixels[i, :-1] = np.poly(roots)[::-1]
    pixels[-1] = np.poly(points)[::-1]

    def values(length):
        """Compute the monomials below that degree at the points: [P, length]."""
        return np.vstack([np.vander(points, length, increasing=True), np.eye(length)[-1]])

    kernel = values(width)
    kernel[:-1] /= np.array([np.prod(p - q) for p, q in zip(points, others, strict=True)])[:, None]
    return _Maps(values(tile).T, kernel, pixels)


def best_tile(num_outputs: int, width: int) -> int:
    """Return the tile that takes the fewest products for a row of outputs.

    Args:
      num_outputs: W', at least 1.
      width: w, at least 1.

    Returns:
      m; 0 if no tile takes fewer products than the direct sums (``num_outputs`` times ``width``):
      for one output, for one column of weights, or for more than seven.
    """
    tiles = range(2, min(_MAX_TILE, len(_POINTS) + 2 - width) + 1)
    costs = {tile: -(-num_outputs // tile) * (tile + width - 1) for tile in tiles}
    best = min(costs, key=lambda tile: costs[tile], default=0)
    return best if best and costs[best] < num_outputs * width else 0


def saves_time(outputs: tuple[int, int], batch: int, kernel: tuple[int, ...]) -> bool:
    """Return True if tiles are expected to be faster than the direct sums.

    They are wherever all rows are multiplied at once. Elsewhere the estimate models one core's work
    on an output row: a number read or written by the linear maps costs as much as two
    multiplications in a matrix product, and small products are slow, most of all those of few
    columns. Of 116 measured shapes (``experiments/benchmarks/tiles.py``) it chose tiles on none
    where they are slower by a tenth, and left them out on three where they are faster by up to 0.3.

    Args:
      outputs: (H', W').
      kernel: (h, w, C, F).
    """
    height, width, channels, features = kernel
    num_rows, num_outputs = outputs
    tile = best_tile(num_outputs, width)
    if not tile:
        return False
    num_tiles, num_points = -(-num_outputs // tile), tile + width - 1
    columns = num_tiles * batch
    if _at_once(num_rows, columns, (num_points, height * channels, features)):
        return True
    product = height * channels * features
    maps = 2 * (num_points * channels + tile * features)
    saved = num_outputs * width * product - num_tiles * num_points * (product + maps)
    small = _SMALL_OF_MANY_COLUMNS if columns >= _MANY_COLUMNS else _SMALL_PRODUCT
    return columns * product >= small and saved > 0.09 * num_outputs * width * product


def features(x: jax.Array, kernel: jax.Array, stride: int, tile: int) -> jax.Array:
    """Correlate by tiles: P products of [F, h C] and [h C, T B] for each output row.

    Args:
      x: [H, C, W, B], padded.
      kernel: [h, w, C, F].
      stride: stride along H; along W it is 1.

    Returns:
      [H', F, W', B].
    """
    height, width, _, num_features = kernel.shape
    points, matrices = _to_points(written_out(x), width, tile), _to_matrices(kernel, tile)
    window, (num_tiles, batch) = Window(height, stride), points.shape[3:]
    num_rows = window.positions(x.shape[0])
    at_once = _at_once(num_rows, num_tiles * batch, matrices.shape)
    images_first = num_tiles * batch <= num_features
    if not images_first:  # each feature's weights are then read in a row
        matrices = written_out(matrices.swapaxes(1, 2))

    def rows(under):
        """[P, h C, R T B] -> R rows of features, [R, F, T, m, B]."""
        if images_first:  # the weights are then read as they lie in memory
            products = _product(under, matrices, (1, 1))
            products = products.reshape(len(products), -1, num_tiles, batch, num_features)
            products = jnp.moveaxis(products, -1, 2)
        else:
            products = _product(matrices, under, (2, 1))
            products = products.reshape(*products.shape[:2], -1, num_tiles, batch).swapaxes(1, 2)
        return _combine(_maps(tile, width).outputs, _unstack(products, 0), axis=3)

    if at_once:
        found = rows(_all_rows(points, window))
    else:
        found = lax.map(lambda top: rows(_rows(points, top, height)), window.starts(x.shape[0]))
    num_outputs = x.shape[2] - width + 1
    return found.reshape(-1, num_features, num_tiles * tile, batch)[:, :, :num_outputs]


def images_of(
    features: jax.Array, kernel: jax.Array, image: tuple[int, int], stride: int, tile: int
) -> jax.Array:
    """Compute the transpose of ``features`` in the images: [H', F, W', B] -> [H, C, W, B].

    Args:
      features: [H', F, W', B].
      kernel: [h, w, C, F].
    """
    height, width, num_channels, _ = kernel.shape
    matrices, tiles = _to_matrices(kernel, tile), _tiles(features, tile)
    num_points, num_tiles, batch = tile + width - 1, tiles.shape[2], features.shape[3]
    window = Window(height, stride)

    def under(tiles):
        return _product(matrices, _to_products(tiles, tile, width), (2, 1))

    def add_to_points(total, row):
        top, tiles = row
        rows = under(tiles[None]).reshape(num_points, height, *total.shape[2:]).swapaxes(0, 1)
        rows = lax.dynamic_slice_in_dim(total, top, height) + rows
        return lax.dynamic_update_slice_in_dim(total, rows, top, 0), None

    points = jnp.zeros((image[0], num_points, num_channels, num_tiles, batch), kernel.dtype)
    if _at_once(len(tiles), num_tiles * batch, matrices.shape):
        all_rows = functools.partial(_all_rows, window=window)
        (points,) = jax.linear_transpose(all_rows, points)(under(tiles))
    else:
        points, _ = lax.scan(add_to_points, points, (window.starts(image[0]), tiles))
    return _to_pixels(points, image[1], width, tile)


def kernel_of(
    x: jax.Array, features: jax.Array, kernel: tuple[int, int], stride: int, tile: int
) -> jax.Array:
    """Compute the transpose of ``features`` in the kernel: -> [h, w, C, F].

    Args:
      x: [H, C, W, B], padded.
      features: [H', F, W', B].
    """
    height, width = kernel
    points, tiles = _to_points(written_out(x), width, tile), _tiles(features, tile)
    window = Window(height, stride)

    def matrices_of(under, tiles):
        return _product(under, _to_products(tiles, tile, width), (2, 2))

    def add_to_matrices(total, row):
        top, tiles = row
        return total + matrices_of(_rows(points, top, height), tiles[None]), None

    shape = tile + width - 1, height * x.shape[1], features.shape[1]
    columns = points.shape[3] * points.shape[4]
    if _at_once(len(tiles), columns, shape):
        matrices = matrices_of(_all_rows(points, window), tiles)
    else:
        rows = window.starts(x.shape[0]), tiles
        matrices, _ = lax.scan(add_to_matrices, jnp.zeros(shape, x.dtype), rows)
    matrices = matrices.reshape(shape[0], height, x.shape[1], shape[2])
    return _combine(_maps(tile, width).kernel.T, _unstack(matrices, 0), axis=1)


def _at_once(num_rows: int, columns: int, matrices: tuple[int, ...]) -> bool:
    """Return True if all output rows are multiplied at once, which copies the rows under each.

    One row at a time reads all matrices for a row's columns. That is slow where they do not fit
    into a cache, or where columns are few.

    Args:
      num_rows: H'.
      columns: T B, of a row.
      matrices: (P, h C, F).
    """
    is_large = math.prod(matrices) > _IN_CACHE and columns <= matrices[2]
    return (is_large or columns < _FEW_COLUMNS) and num_rows * columns <= _MOST_COLUMNS


def _tiles(features: jax.Array, tile: int) -> jax.Array:
    """Divide rows of features into tiles: [H', F, W', B] -> [H', F, T, m, B]."""
    past_end = -features.shape[2] % tile
    features = jnp.pad(features, ((0, 0), (0, 0), (0, past_end), (0, 0)))
    return features.reshape(*features.shape[:2], -1, tile, features.shape[3])


def _to_products(tiles: jax.Array, tile: int, width: int) -> jax.Array:
    """Apply the transpose of A^T to rows of features: [R, F, T, m, B] -> [P, F, R T B]."""
    products = _combine(_maps(tile, width).outputs.T, _unstack(tiles, 3), axis=0).swapaxes(1, 2)
    return products.reshape(*products.shape[:2], -1)


def _rows(points: jax.Array, top: jax.Array, height: int) -> jax.Array:
    """Return the image rows under the kernel of an output row: -> [P, h C, T B]."""
    rows = lax.dynamic_slice_in_dim(points, top, height).swapaxes(0, 1)
    return rows.reshape(rows.shape[0], height * rows.shape[2], -1)


def _all_rows(points: jax.Array, window: Window) -> jax.Array:
    """Return the image rows under the kernel of each output row: -> [P, h C, H' T B]."""
    rows = jnp.stack([window.elements(points, 0, i) for i in range(window.size)])
    rows = rows.transpose(2, 0, 3, 1, 4, 5)  # [P, h, C, H', T, B]
    return written_out(rows.reshape(len(rows), window.size * rows.shape[2], -1))


def _product(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Compute P matrix products, each summed over one axis of either operand."""
    return lax.dot_general(left, right, (((axes[0],), (axes[1],)), ((0,), (0,))))


def _to_matrices(kernel: jax.Array, tile: int) -> jax.Array:
    """Apply G to the kernel: [h, w, C, F] -> [P, h C, F]."""
    weights = _maps(tile, kernel.shape[1]).kernel
    matrices = _combine(weights, _unstack(kernel, 1), axis=0)
    return matrices.reshape(len(matrices), -1, kernel.shape[3])


def _to_points(x: jax.Array, width: int, tile: int) -> jax.Array:
    """Apply B^T to the image: [H, C, W, B] -> [H, P, C, T, B]."""
    num_tiles = -(-(x.shape[2] - width + 1) // tile)
    missing = num_tiles * tile + width - 1 - x.shape[2]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))
    window = Window(tile + width - 1, tile)
    pixels = [window.elements(x, 2, i) for i in range(window.size)]
    return _combine(_maps(tile, width).pixels, pixels, axis=1)


def _to_pixels(points: jax.Array, num_pixels: int, width: int, tile: int) -> jax.Array:
    """Apply the transpose of ``_to_points``; the w - 1 pixels where tiles overlap are added."""
    weights, parts = _maps(tile, width).pixels.T, _unstack(points, 1)
    num_blocks = -(-len(weights) // tile)  # of m pixels each
    blocks = []
    for i in range(num_blocks):
        block = _combine(weights[i * tile : (i + 1) * tile], parts, axis=3)
        around = ((i, num_blocks - 1 - i), (0, tile - block.shape[3]))
        blocks.append(jnp.pad(block, ((0, 0), (0, 0), *around, (0, 0))))
    total = functools.reduce(jnp.add, blocks)
    return total.reshape(*total.shape[:2], -1, total.shape[4])[:, :, :num_pixels]


def _combine(weights: np.ndarray, parts, axis: int) -> jax.Array:
    """Compute the parts' weighted sums, one for each row of ``weights``, along a new axis."""
    sums = [
        functools.reduce(jnp.add, [float(w) * p for w, p in zip(row, parts, strict=True) if w])
        for row in weights
    ]
    return jnp.stack(sums, axis)


def _unstack(x: jax.Array, axis: int) -> list[jax.Array]:
    """Return the slices along an axis."""
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
