"""The library's convolution, and its four lowerings.

Axes: B examples, H x W pixels, C channels, F features, h x w kernel; H' x W' outputs.

``jax.lax`` alone would be slow on CPU. XLA computes the gradients of convolutions inside a loop,
where local steps run, at least ten times slower there. With different weights for each client,
convolutions become grouped ones, which are slow there, too.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_lab.checks import check_choice, check_int
from fedjax_lab.machine.layout import written_out
from fedjax_lab.machine.target import Target, TracedFor, traced_for
from fedjax_lab.models import depthwise, row_products, winograd
from fedjax_lab.models.windows import Window
from fedjax_lab.tree import wide_dtype

LOWERINGS = ("auto", "winograd", "gemm", "im2col", "lax")
PADDINGS = ("SAME", "VALID")
_FEW_CHANNELS = 8
_JOINED_AT_ONCE = 9
# Longer kernels are cut into blocks as long as a stride, and more phases are computed at once: a
# product for each weight or phase compiles for long, and is many times slower than XLA's own form.
LONG_KERNEL = 7
FEW_PHASES = 4


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
    on an H100 takes 2.0 to 3.7 times as long (docs/speed.md).

    Args:
      x: float [B, H, W, C].
      kernel: float [h, w, C, F], the dtype of ``x``.
      padding: "VALID" (none: H' = floor((H - h) / stride) + 1) or "SAME" (zeros, one more at the
        end where their number is odd: H' = ceil(H / stride)), or a number of zeros on every side.
      stride: of both axes, or (of H, of W).
      lowering: "auto", "winograd", "gemm", "im2col" or "lax". "winograd" takes a stride of 1 along
        W, kernels of 2 to 7 columns and float32 or float64.

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
        lowering = lowering_of(traced_for())
    if lowering == "lax" or 0 in (*x.shape, *kernel.shape):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, strides, around, dimension_numbers=numbers)
    if around == "SAME":
        around = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, around)
    if not isinstance(around, str):
        x = jnp.pad(x, ((0, 0), *around, (0, 0)))
    return _plain(x, kernel, strides, lowering)


def lowering_for(target: Target, at_once: bool) -> str:
    """Return the lowering of "auto" on a machine; "auto" if it depends on shapes.

    Args:
      at_once: whether several clients run at once, as one batched program.
    """
    return lowering_of(TracedFor(target.platform, target.convolution, at_once))


def lowering_of(how: TracedFor) -> str:
    """Return the lowering of "auto" in a program; "auto" if it depends on shapes."""
    if how.convolution or how.platform == "cpu":
        return how.convolution or "auto"
    return "im2col" if how.platform == "gpu" and how.at_once else "lax"


def _plain(x: jax.Array, kernel: jax.Array, strides: tuple[int, int], lowering: str) -> jax.Array:
    """Correlate padded images: [B, H, W, C], [h, w, C, F] -> [B, H', W', F]."""
    if lowering == "im2col":
        return _all_patches(x, kernel, strides)
    tile = _tile(x, kernel, strides, lowering)
    features = row_products.features(x.transpose(1, 3, 2, 0), kernel, strides, tile)
    return features.transpose(3, 0, 2, 1)


def _tile(x: jax.Array, kernel: jax.Array, strides: tuple[int, int], lowering: str) -> int:
    """Return the outputs of a tile of Winograd's convolution; 0 to use "gemm" instead."""
    num_rows, num_outputs = (
        Window(size, stride).positions(pixels)
        for size, stride, pixels in zip(kernel.shape[:2], strides, x.shape[1:3], strict=True)
    )
    stride, width = strides[1], kernel.shape[1]
    possible = stride == 1 and x.dtype in (jnp.float32, jnp.float64)
    tile = winograd.best_tile(num_outputs, width) if possible else 0
    if lowering == "winograd" and not tile:
        raise ValueError(
            f"lowering is 'winograd', with rows of {num_outputs} outputs, kernels of {width} "
            f"columns, a stride of {stride} along W and {x.dtype}; it takes at least 2 outputs, 2 "
            "to 7 columns, a stride of 1 and float32 or float64. Choose 'auto' or 'gemm'."
        )
    worthwhile = winograd.saves_time((num_rows, num_outputs), x.shape[0], kernel.shape)
    return tile if lowering == "winograd" or (lowering == "auto" and worthwhile) else 0


def _check_arrays(x: jax.Array, kernel: jax.Array, padding: str | int) -> None:
    if x.ndim != 4:
        raise ValueError(f"x has shape {x.shape}; a convolution takes images [B, H, W, C].")
    if kernel.ndim != 4 or kernel.shape[2] != x.shape[3]:
        raise ValueError(
            f"kernel has shape {kernel.shape}; for x of shape {x.shape} it must be "
            f"[h, w, {x.shape[3]}, F]."
        )
    if 0 in kernel.shape[:2]:
        raise ValueError(f"kernel has shape {kernel.shape}; it must have rows and columns.")
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
    rows, columns = map(Window, size, strides)
    under = [
        columns.elements(rows.elements(x, down, i), across, j)
        for i in range(rows.size)
        for j in range(columns.size)
    ]
    return jnp.concatenate(under, axis=0 if planar else -1)


# --- ``jax.lax.conv_general_dilated`` in these forms


def form_of(
    params: Mapping[str, Any], operands: Sequence[Any], how: TracedFor
) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """Return the form of a ``conv_general_dilated``; None: XLA's own is as fast, or the only one.

    One, two or three axes of pixels, any order of axes, strides, paddings, dilations and, on CPU,
    groups of channels.
    """
    if why_not(params, operands, how) is not None:
        return None
    return functools.partial(_general, params=params, lowering=lowering_of(how))


def why_not(params: Mapping[str, Any], operands: Sequence[Any], how: TracedFor) -> str | None:
    """Return why a ``conv_general_dilated`` stays as it is; None: it has a form here."""
    x, kernel = operands
    wide = params["preferred_element_type"] or x.dtype
    if lowering_of(how) == "lax":
        return "it is as fast as any other form there"
    if not jnp.issubdtype(x.dtype, jnp.floating) or not jnp.issubdtype(wide, jnp.floating):
        return f"its operands are {x.dtype}"
    if not 1 <= len(params["window_strides"]) <= 3:
        return f"it has {len(params['window_strides'])} axes of pixels"
    if params["feature_group_count"] > 1 and how.platform != "cpu":
        return "cuDNN has grouped convolutions of its own"
    sizes = [x.shape[i] for i in params["dimension_numbers"].lhs_spec[2:]]
    weights = [kernel.shape[i] for i in params["dimension_numbers"].rhs_spec[2:]]
    positions = map(_Axis.positions, _axes(params), sizes, weights)
    return "it is empty" if 0 in (*x.shape, *kernel.shape) or min(positions) < 1 else None


def described(params: Mapping[str, Any], operands: Sequence[Any]) -> str:
    """Describe a ``conv_general_dilated``: "3 x 3, 64 to 128 channels, stride 2, 32 x 32"."""
    x, kernel = operands
    of_images, of_kernels, _ = params["dimension_numbers"]

    def times(sizes):
        return " x ".join(map(str, sizes))

    groups, axes = params["feature_group_count"], _axes(params)
    parts = [
        times(kernel.shape[i] for i in of_kernels[2:]),
        f"{x.shape[of_images[1]]} to {kernel.shape[of_kernels[0]]} channels",
        f"{groups} groups" if groups > 1 else "",
        *(
            f"{name} {times(values)}" if max(values) > 1 else ""
            for name, values in (
                ("stride", [axis.stride for axis in axes]),
                ("dilation", [axis.dilation for axis in axes]),
                ("transposed", [axis.spread for axis in axes]),
            )
        ),
        f"{times(x.shape[i] for i in of_images[2:])} pixels",
    ]
    return ", ".join(filter(None, parts))


def form_name(params: Mapping[str, Any], operands: Sequence[Any], how: TracedFor) -> str:
    """Name the form of a ``conv_general_dilated`` that has one."""
    lowering = lowering_of(how)
    form = form_of(params, operands, how)
    assert form is not None
    sizes = jax.make_jaxpr(form)(*operands)
    tiles = sorted({e.params["size"].tile for e in sizes.eqns if e.primitive.name == "correlate"})
    if lowering == "im2col":
        return "one product of all patches"
    if not tiles:
        return "sums of products with single weights"
    tile = max(tiles)
    return "products of rows" + (f", in Winograd's tiles of {tile}" if tile else "")


def _general(x, kernel, *, params, lowering):
    of_images, of_kernels, of_results = params["dimension_numbers"]
    wide = params["preferred_element_type"] or x.dtype
    batch, channels, *pixels = of_images
    x = x.transpose(batch, *pixels, channels).astype(wide)
    num_features, channels, *pixels = of_kernels
    kernel = kernel.transpose(*pixels, channels, num_features).astype(wide)
    precision = params["precision"]
    # An algorithm for matrix products in its place (``DotAlgorithmPreset``) means the default.
    name = precision[0].name.lower() if isinstance(precision, tuple) else None
    with jax.default_matmul_precision(name):
        axes, groups = _axes(params), params["feature_group_count"]
        features = _in_batches(x, kernel, axes, groups, params["batch_group_count"], lowering)
    batch, channels, *pixels = of_results
    places = {batch: 0, channels: features.ndim - 1}
    places.update((place, 1 + i) for i, place in enumerate(pixels))
    return features.transpose([places[i] for i in range(features.ndim)])


def _in_batches(x, kernel, axes, groups, batches, lowering):
    """Correlate each of several batches, which stand beside one another, with its own features."""
    if batches == 1:
        return _over(x, kernel, axes, groups, lowering)
    x = x.reshape(batches, -1, *x.shape[1:])
    kernel = kernel.reshape(*kernel.shape[:-1], batches, -1)
    one = functools.partial(_over, axes=axes, groups=groups, lowering=lowering)
    features = jax.vmap(one, (0, -2), -2)(x, kernel)
    return features.reshape(*features.shape[:-2], -1)


class _Axis(NamedTuple):
    """How a kernel passes along an axis of pixels.

    Attributes:
      stride: pixels between two positions of the kernel.
      padding: (pixels of zeros before, after); negative: pixels left out.
      spread: distance of the image's pixels, between which there are zeros.
      dilation: distance of the pixels that the kernel's weights read.
    """

    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    spread: int = 1
    dilation: int = 1

    def positions(self, size: int, weights: int) -> int:
        """Return the number of positions of a kernel of ``weights`` on ``size`` pixels."""
        length = (size - 1) * self.spread + 1 + sum(self.padding)
        return self.window(weights).positions(length)

    def window(self, weights: int) -> Window:
        """Return how a kernel of ``weights`` passes along padded pixels."""
        return Window(weights, self.stride, self.dilation)


def _axes(params: Mapping[str, Any]) -> list[_Axis]:
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
    return [_Axis(*axis) for axis in zip(*map(params.__getitem__, names), strict=True)]


def _over(x, kernel, axes, groups, lowering):
    """Correlate [B, pixels, C] with [pixels, C / groups, F] -> [B, pixels, F]."""
    for i, axis in enumerate(axes):
        if axis.spread > 1 and axis.stride == axis.dilation == 1:
            many = axis.spread > FEW_PHASES and groups == 1
            return (_all_phases if many else _phases)(x, kernel, axes, i, groups, lowering)
    if any(axis.padding != (0, 0) or axis.spread > 1 for axis in axes):
        zeros = [(*axis.padding, axis.spread - 1) for axis in axes]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *zeros, (0, 0, 0)])
        axes = [axis._replace(padding=(0, 0), spread=1) for axis in axes]
    if groups > 1 and kernel.shape[-2] == 1:
        return _each_channel(x, kernel, axes)
    if groups > 1:
        x = x.reshape(*x.shape[:-1], groups, -1)
        kernel = kernel.reshape(*kernel.shape[:-1], groups, -1)
        one = functools.partial(_folded, axes=axes, lowering=lowering)
        features = jax.vmap(one, (-2, -2), -2)(x, kernel)
        return features.reshape(*features.shape[:-2], -1)
    return _folded(x, kernel, axes, lowering)


def _phases(x, kernel, axes, i, groups, lowering):
    """Correlate an image with zeros between its pixels, as a transposed convolution does.

    Every ``spread``-th result along the axis reads the same weights, and the pixels beside one
    another. So these results are a convolution by themselves.
    """
    axis, size = axes[i], x.shape[1 + i]
    total = axis.positions(size, kernel.shape[i])
    length = -(-total // axis.spread)
    phases = []
    for phase in range(axis.spread):
        first = (axis.padding[0] - phase) % axis.spread
        weights = lax.slice_in_dim(kernel, min(first, kernel.shape[i]), None, axis.spread, i)
        number = -(-(total - phase) // axis.spread)
        reach = weights.shape[i]
        before = (axis.padding[0] - phase - first) // axis.spread
        after = number + reach - 1 - before - size
        own = _with_axis(axes, i, _Axis(padding=(before, after)))
        if reach and number:
            features = _over(x, weights, own, groups, lowering)
        else:  # no weight of this phase meets a pixel
            sizes = map(_Axis.positions, axes, x.shape[1:], kernel.shape)
            shape = [len(x), *sizes, kernel.shape[-1]]
            shape[1 + i] = number
            features = jnp.zeros(shape, x.dtype)
        missing = [(0, 0)] * features.ndim
        missing[1 + i] = (0, length - number)
        phases.append(jnp.pad(features, missing))
    return _interleaved(jnp.stack(phases, 2 + i), i, total)


def _all_phases(x, kernel, axes, i, groups, lowering):
    """As ``_phases``, for many phases: one convolution that gives all of them beside one another.

    The result at ``spread * q + phase`` reads weight ``spread * t + late - phase`` at the pixel
    ``q + t - before``.
    """
    axis, size, spread = axes[i], x.shape[1 + i], axes[i].spread
    total = axis.positions(size, kernel.shape[i])
    before, late = divmod(axis.padding[0], spread)
    length, reach = -(-total // spread), -(-(kernel.shape[i] + spread - 1 - late) // spread)
    zeros = [(0, 0)] * kernel.ndim
    zeros[i] = (spread - 1 - late, reach * spread - kernel.shape[i] - (spread - 1 - late))
    weights = jnp.pad(kernel, zeros)
    weights = weights.reshape(*weights.shape[:i], reach, spread, *weights.shape[i + 1 :])
    weights = jnp.moveaxis(jnp.flip(weights, i + 1), i + 1, -2)
    weights = weights.reshape(*weights.shape[:-2], -1)  # [pixels, C, phases and F]
    own = _with_axis(axes, i, _Axis(padding=(before, length + reach - 1 - before - size)))
    features = _over(x, weights, own, groups, lowering)
    features = features.reshape(*features.shape[:-1], spread, -1)
    return _interleaved(jnp.moveaxis(features, -2, 2 + i), i, total)


def _interleaved(features, i, total):
    """Make one axis of the pixels along an axis and of the phases behind it: ``total`` pixels."""
    shape = [*features.shape]
    shape[1 + i : 3 + i] = [shape[1 + i] * shape[2 + i]]
    return lax.slice_in_dim(features.reshape(shape), 0, total, 1, 1 + i)


def _with_axis(axes, i, axis):
    return [*axes[:i], axis, *axes[i + 1 :]]


def _each_channel(x, kernel, axes):
    """Correlate each channel by itself (depthwise)."""
    many = kernel.shape[-1] // x.shape[-1]
    wide = wide_dtype(x.dtype)
    x = (jnp.repeat(x, many, -1) if many > 1 else x).astype(wide)
    weights = kernel.reshape(*kernel.shape[:-2], -1).astype(wide)
    windows = tuple(map(_Axis.window, axes, kernel.shape))
    images = jnp.moveaxis(x, 0, -1)  # [pixels, C, B]
    features = depthwise.features(jnp.moveaxis(images, -2, -3), weights, windows)
    return jnp.moveaxis(jnp.moveaxis(features, -3, -2), -1, 0).astype(kernel.dtype)


def _strides_as_channels(x, kernel, i, stride):
    """Make the pixels between two positions of a kernel channels: [n, C] -> [n / stride, stride C].

    The kernel then has a weight for each of its strides, and passes along all of them.
    """
    reach = -(-kernel.shape[i] // stride)
    blocks = (x.shape[1 + i] - kernel.shape[i]) // stride + reach
    x = lax.slice_in_dim(x, 0, min(x.shape[1 + i], blocks * stride), 1, 1 + i)

    def joined(array, axis, number, channels):
        zeros = [(0, 0)] * array.ndim
        zeros[axis] = (0, number * stride - array.shape[axis])
        array = jnp.pad(array, zeros)
        array = array.reshape(*array.shape[:axis], number, stride, *array.shape[axis + 1 :])
        array = jnp.moveaxis(array, axis + 1, channels - 1)
        return array.reshape(
            *array.shape[: channels - 1], -1, *array.shape[array.ndim + channels + 1 :]
        )

    return joined(x, 1 + i, blocks, -1), joined(kernel, i, reach, -2)


def _folded(x, kernel, axes, lowering):
    """Correlate in two axes of pixels; the weights of a third or dilated axis become channels."""
    for i, axis in enumerate(axes):
        size = kernel.shape[i]
        if axis.dilation == 1 < axis.stride and size > LONG_KERNEL:
            x, kernel = _strides_as_channels(x, kernel, i, axis.stride)
            axis, size = _Axis(), kernel.shape[i]
            axes = _with_axis(axes, i, axis)
        if (len(axes) > 2 and not i) or (axis.dilation > 1 and size > 1):
            window = axis.window(size)
            x = jnp.concatenate([window.elements(x, 1 + i, j) for j in range(size)], -1)
            kernel = jnp.moveaxis(kernel, i, -3)
            kernel = kernel.reshape(*kernel.shape[:-3], -1, kernel.shape[-1])
            kernel = jnp.expand_dims(kernel, i)
            axes = _with_axis(axes, i, _Axis())
    strides = [axis.stride for axis in axes]
    if len(axes) == 1:
        return _plain(x[:, None], kernel[None], (1, *strides), lowering)[:, 0]
    if len(axes) == 2:
        return _plain(x, kernel, tuple(strides), lowering)
    features = _plain(x.reshape(-1, *x.shape[2:]), kernel[0], tuple(strides[1:]), lowering)
    return features.reshape(*x.shape[:2], *features.shape[1:])
