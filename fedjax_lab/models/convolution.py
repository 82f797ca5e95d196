"""The library's convolution, and its four lowerings.

Axes: B examples, H x W pixels, C channels, F features, h x w kernel; H' x W' outputs.

``jax.lax`` alone would be slow on CPU. XLA computes convolutions inside a loop, where local steps
run, at least ten times slower there. With different weights for each client, they become grouped
convolutions, which are slow there, too.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_lab.checks import check_choice, check_int
from fedjax_lab.machine.layout import written_out
from fedjax_lab.machine.target import Target, traced_for
from fedjax_lab.models import winograd

LOWERINGS = ("auto", "winograd", "gemm", "im2col", "lax")
PADDINGS = ("SAME", "VALID")
_FEW_CHANNELS = 8
_JOINED_AT_ONCE = 9


def convolution(
    x: jax.Array,
    kernel: jax.Array,
    padding: str | int = "VALID",
    *,
    stride: int | tuple[int, int] = 1,
    lowering: str = "auto",
) -> jax.Array:
    """Correlate images with kernels; all lowerings have the same values and gradients.

    - "gemm" multiplies matrices whose minor axis is the batch, one output row at a time.
    - "winograd" does the same with fewer multiplications (see ``winograd``). Its float32 error is
      about 1e-6 of the largest output, instead of 1e-7.
    - "im2col" multiplies all patches at once (a batched product, if mapped over kernels).
    - "lax" is ``jax.lax.conv_general_dilated``.

    On CPU "auto" is "winograd" if the shapes promise a gain, and otherwise "gemm"; inside a loop,
    both are many times faster than "lax". On other platforms "auto" is "lax", with one exception:
    on a GPU, clients that a client map runs at once take "im2col". "lax" becomes a grouped
    convolution there, which cuDNN computes group by group, with up to ten kernels for each. A round
    on an H100 takes 2.0 to 3.7 times as long (docs/on_a_gpu.md).

    Args:
      x: float [B, H, W, C].
      kernel: float [h, w, C, F], the dtype of ``x``.
      padding: "VALID" (none: H' = floor((H - h) / stride) + 1) or "SAME" (zeros, one more at the
        end where their number is odd: H' = ceil(H / stride)), or a number of zeros on every side.
      stride: of both axes, or (of H, of W).
      lowering: "auto", "winograd", "gemm", "im2col" or "lax". The first three have no forward-mode
        derivative on CPU. "winograd" takes a stride of 1 along W, kernels of 2 to 7 columns and
        float32 or float64.

    Returns:
      float [B, H', W', F].

    Raises:
      ValueError: a shape does not fit, the image is smaller than a kernel without padding, or
        an option is unknown.
      TypeError: the dtypes differ or are not floats, or a stride or a padding is not an integer.
    """
    around: str | list[tuple[int, int]]
    if isinstance(padding, str):
        around = check_choice("padding", padding, PADDINGS)
    else:
        around = [(check_int("padding", padding, minimum=0),) * 2] * 2
    check_choice("lowering", lowering, LOWERINGS)
    strides = stride if isinstance(stride, tuple) else (stride, stride)
    if len(strides) != 2:
        raise ValueError(f"stride is {stride}; it must be one number or two, of H and of W.")
    for step in strides:
        check_int("stride", step, minimum=1)
    _check_arrays(x, kernel, padding)

    if lowering == "auto":
        lowering = _lowering_of(*traced_for())
    if lowering == "lax":
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, strides, around, dimension_numbers=numbers)
    if around == "SAME":
        around = list(map(_zeros_around, x.shape[1:3], kernel.shape, strides))
    if not isinstance(around, str):
        x = jnp.pad(x, ((0, 0), *around, (0, 0)))
    if lowering == "im2col":
        return _all_patches(x, kernel, strides)
    inner = x.transpose(1, 3, 2, 0)
    if tile := _tile(x, kernel, strides[1], lowering):
        features = winograd.correlate(inner, kernel, strides[0], tile)
    else:
        features = _by_rows(inner, kernel, strides)
    return features.transpose(3, 0, 2, 1)


def lowering_for(target: Target, at_once: bool) -> str:
    """Return the lowering of "auto" on a machine; "auto" if it depends on shapes.

    Args:
      target: a machine.
      at_once: whether several clients run at once, as one batched program.
    """
    return _lowering_of(target.platform, target.convolution, at_once)


def _lowering_of(platform: str, chosen: str | None, at_once: bool) -> str:
    if chosen or platform == "cpu":
        return chosen or "auto"
    return "im2col" if platform == "gpu" and at_once else "lax"


def _tile(x: jax.Array, kernel: jax.Array, stride: int, lowering: str) -> int:
    """Return the outputs of a tile of Winograd's convolution; 0 to use "gemm" instead."""
    num_outputs, width = x.shape[2] - kernel.shape[1] + 1, kernel.shape[1]
    possible = stride == 1 and x.dtype in (jnp.float32, jnp.float64)
    tile = winograd.best_tile(num_outputs, width) if possible else 0
    if lowering == "winograd" and not tile:
        raise ValueError(
            f"lowering is 'winograd', with rows of {num_outputs} outputs, kernels of {width} "
            f"columns, a stride of {stride} along W and {x.dtype}; it takes at least 2 outputs, 2 "
            "to 7 columns, a stride of 1 and float32 or float64. Choose 'auto' or 'gemm'."
        )
    worthwhile = winograd.saves_time(num_outputs, x.shape[0], kernel.shape)
    return tile if lowering == "winograd" or (lowering == "auto" and worthwhile) else 0


def _check_arrays(x: jax.Array, kernel: jax.Array, padding: str | int) -> None:
    if x.ndim != 4:
        raise ValueError(f"x has shape {x.shape}; a convolution takes images [B, H, W, C].")
    if kernel.ndim != 4 or kernel.shape[2] != x.shape[3]:
        raise ValueError(
            f"kernel has shape {kernel.shape}; for x of shape {x.shape} it must be "
            f"[h, w, {x.shape[3]}, F]."
        )
    if x.dtype != kernel.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x has dtype {x.dtype} and kernel {kernel.dtype}; both must be one float.")
    height, width = kernel.shape[:2]
    zeros = 0 if isinstance(padding, str) else 2 * padding
    if padding != "SAME" and (x.shape[1] + zeros < height or x.shape[2] + zeros < width):
        without = f"with a padding of {padding}" if zeros else "without padding"
        raise ValueError(
            f"x has shape {x.shape} where a {height} x {width} convolution {without} needs "
            f"at least {height - zeros} x {width - zeros} pixels; give larger images or "
            'padding="SAME".'
        )


def _zeros_around(size: int, kernel_size: int, stride: int) -> tuple[int, int]:
    """Return the number of zeros that "SAME" puts before and after an axis."""
    outputs = -(-size // stride)
    total = max((outputs - 1) * stride + kernel_size - size, 0)
    return total // 2, total - total // 2


def _all_patches(x: jax.Array, kernel: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """Multiply all patches, a matrix of h w C columns, by the kernel as one matrix [h w C, F].

    A GPU has forms of its own, which move up to twice the bytes on a TPU. With few channels,
    the positions are the minor axis of the patches, because a GPU writes many short rows slowly.
    """
    *size, num_channels, num_features = kernel.shape
    matrix = kernel.reshape(-1, num_features)
    if traced_for().platform != "gpu":
        return _joined(x, size, strides, False) @ matrix
    if num_channels >= _FEW_CHANNELS:
        return _patches(x, tuple(size), strides, False) @ matrix
    patches = _patches(x.transpose(3, 0, 1, 2), tuple(size), strides, True)
    features = jnp.tensordot(patches.reshape(len(matrix), -1), matrix, (0, 0))
    return features.reshape(*patches.shape[1:], num_features)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _patches(x, size, strides, planar):
    """Collect patches [B, H', W', h w C] of images [B, H, W, C]; planar: C and h w C come first.

    The columns of a large kernel are collected before its rows: on a GPU, joining five arrays twice
    takes half of the time of joining 25. The gradient adds them up at once, which is faster there.
    """
    if math.prod(size) <= _JOINED_AT_ONCE:
        return _joined(x, size, strides, planar)
    columns = written_out(_joined(x, (1, size[1]), (1, strides[1]), planar))
    return _joined(columns, (size[0], 1), (strides[0], 1), planar)


@_patches.defjvp
def _patches_jvp(size, strides, planar, primals, tangents):
    (x,), (tangent,) = primals, tangents
    return _patches(x, size, strides, planar), _joined(tangent, size, strides, planar)


def _joined(x, size, strides, planar):
    """Join the pixels under each place of a kernel along the channels."""
    down, across = (2, 3) if planar else (1, 2)
    under = [
        _windows(_windows(x, down, i, size[0], strides[0]), across, j, size[1], strides[1])
        for i in range(size[0])
        for j in range(size[1])
    ]
    return jnp.concatenate(under, axis=0 if planar else -1)


def _windows(x: jax.Array, axis: int, offset: int, kernel_size: int, stride: int) -> jax.Array:
    """Return the pixels at ``offset`` in each position of a kernel along an axis."""
    last = offset + (x.shape[axis] - kernel_size) // stride * stride
    return lax.slice_in_dim(x, offset, last + 1, stride, axis)


# --- "gemm": images are [H, C, W, B] and features [H', F, W', B], so that the minor axis is a long
# row of B. The operand of an output row, h rows of columns, is then contiguous in memory and fits
# into a cache. Images are already padded.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _by_rows(x: jax.Array, kernel: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """Compute each output row [F, W' B]: the kernel, a matrix [F, h w C], times its columns."""
    height, width, _, num_features = kernel.shape
    columns = _columns(written_out(x), width, strides[1])
    matrix = kernel.reshape(-1, num_features).T

    def row(top):
        return matrix @ lax.dynamic_slice_in_dim(columns, top, height).reshape(matrix.shape[1], -1)

    rows = lax.map(row, jnp.arange(0, x.shape[0] - height + 1, strides[0]))
    return rows.reshape(-1, num_features, *columns.shape[3:])


def _columns(x: jax.Array, width: int, stride: int) -> jax.Array:
    """Return the pixels under each of a kernel's w columns: [H, C, W, B] -> [H, w, C, W', B]."""
    return jnp.stack([_windows(x, 2, j, width, stride) for j in range(width)], axis=1)


def _by_rows_forward(x, kernel, strides):
    return _by_rows(x, kernel, strides), (x, kernel)


def _by_rows_backward(strides, residuals, gradient):
    """Run two loops over output rows; XLA removes the one whose result is not used."""
    x, kernel = residuals
    height, width, _, num_features = kernel.shape
    columns, columns_to_x = jax.vjp(lambda x: _columns(x, width, strides[1]), written_out(x))
    matrix = kernel.reshape(-1, num_features)
    tops = jnp.arange(0, x.shape[0] - height + 1, strides[0])
    gradient = gradient.reshape(len(tops), num_features, -1)

    def add_to_kernel(total, row):
        top, gradient = row
        patches = lax.dynamic_slice_in_dim(columns, top, height).reshape(matrix.shape[0], -1)
        return total + lax.dot_general(gradient, patches, (((1,), (1,)), ((), ()))), None

    def add_to_columns(total, row):
        top, gradient = row
        patches = (matrix @ gradient).reshape(height, *columns.shape[1:])
        rows = lax.dynamic_slice_in_dim(total, top, height) + patches
        return lax.dynamic_update_slice_in_dim(total, rows, top, 0), None

    to_kernel, _ = lax.scan(add_to_kernel, jnp.zeros_like(matrix.T), (tops, gradient))
    to_columns, _ = lax.scan(add_to_columns, jnp.zeros_like(columns), (tops, gradient))
    return *columns_to_x(to_columns), to_kernel.T.reshape(kernel.shape)


_by_rows.defvjp(_by_rows_forward, _by_rows_backward)
