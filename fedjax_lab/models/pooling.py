"""Max-pooling and sums over windows by slices, and the gradient by the position of the maximum.

On CPU, XLA's window reduction is several times slower than the maximum of slices, forward and
backward. On a GPU, a maximum over windows that lie beside one another has this form, too. On a TPU,
XLA's own is kept; neither has been timed there.

The first of several equal maxima gets the gradient, as in PyTorch and in ``jax.lax``.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_lab.checks import check_int
from fedjax_lab.machine.layout import written_out
from fedjax_lab.machine.target import TracedFor, traced_for
from fedjax_lab.models.windows import Window, Windows
from fedjax_lab.tree import wide_dtype


@jax.named_scope("max_pool")
def max_pool(x: jax.Array, size: int = 2, padding: int = 0) -> jax.Array:
    """Max-pool windows of ``size`` x ``size`` with stride 2: [B, H, W, C] -> [B, H', W', C].

    H' = floor((H + 2 padding - size) / 2) + 1, which is H // 2 for the default. ``padding`` adds
    pixels of -inf on every side. Of equal pixels, the first one gets the gradient.

    Args:
      x: [B, H, W, C].
      size: height and width of a window.
      padding: pixels of -inf on every side, fewer than ``size``: no window is without a pixel.

    Raises:
      TypeError: ``size`` or ``padding`` is not an integer.
      ValueError: one of them is out of range, ``x`` is not a batch of images, or the image is too
        small.
    """
    check_int("size", size, minimum=1)
    check_int("padding", padding, minimum=0, maximum=size - 1)
    if x.ndim != 4:
        raise ValueError(f"x has shape {x.shape}; a max-pool takes images [B, H, W, C].")
    if min(x.shape[1:3]) + 2 * padding < size:
        raise ValueError(
            f"x has shape {x.shape} where a max-pool takes {size} x {size} pixels; give larger "
            "images."
        )
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    window, strides = (1, size, size, 1), (1, 2, 2, 1)
    params = {"window_dimensions": window, "window_strides": strides, "padding": around}
    how = traced_for()
    form = None if how.convolution == "lax" else form_of_max(params, [x], how)
    if form is not None:
        return form(x)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, around)


def form_of_max(
    params: Mapping[str, Any], operands: Sequence[Any], how: TracedFor
) -> Callable[[jax.Array], jax.Array] | None:
    """Return the form of a ``reduce_window_max``; None: XLA's own is as fast, or the only one."""
    if (windows := _windows(params, operands[0], how, is_maximum=True)) is None:
        return None
    return functools.partial(_maximum_of, windows=windows, padding=params["padding"])


def form_of_sum(
    params: Mapping[str, Any], operands: Sequence[Any], how: TracedFor
) -> Callable[[jax.Array], jax.Array] | None:
    """Return the form of a ``reduce_window_sum``, of an average; None as in ``form_of_max``."""
    if (windows := _windows(params, operands[0], how)) is None:
        return None
    return functools.partial(_sum_of, windows=windows, padding=params["padding"])


def form_of_max_transpose(
    params: Mapping[str, Any], operands: Sequence[Any], how: TracedFor
) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """Return the form of a ``select_and_scatter_add``, the gradient of a maximum over windows."""
    pool = _pool_of(params, operands, how)
    return pool and (lambda gradient, x: jax.vjp(pool, x)[1](gradient)[0])


def form_of_max_tangent(
    params: Mapping[str, Any], operands: Sequence[Any], how: TracedFor
) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """Return the form of a ``select_and_gather_add``, the tangent of a maximum over windows."""
    pool = _pool_of(params, operands, how)
    return pool and (lambda tangent, x: jax.jvp(pool, (x,), (tangent,))[1])


def _pool_of(params, operands, how):
    """Return the maximum's form, of its gradient's or tangent's params; None: it has none."""
    is_maximum = params["select_prim"].name == "ge"
    return form_of_max(params, operands[1:], how) if is_maximum else None


def _windows(
    params: Mapping[str, Any], x: Any, how: TracedFor, is_maximum: bool = False
) -> Windows | None:
    """Return the windows of a reduction that slices compute faster.

    A slice for each place of a long window takes minutes to compile.
    """
    dims, strides = params["window_dimensions"], params["window_strides"]
    spread = params.get("base_dilation") or (1,) * len(dims)
    dilations = params.get("window_dilation") or (1,) * len(dims)
    windows = tuple(map(Window, dims, strides, dilations))
    lengths = [size + sum(pair) for size, pair in zip(x.shape, params["padding"], strict=True)]
    sliced = [w.size for w in windows if is_maximum or not _is_split(w)]
    is_other = (
        max(sliced, default=1) > _LONGEST
        or not jnp.issubdtype(x.dtype, jnp.floating)
        or max(spread, default=1) > 1
        or sum(window.size > 1 for window in windows) > 3
        or min(map(Window.positions, windows, lengths)) < 1
    )
    is_faster = how.platform == "cpu" or (
        how.platform == "gpu" and is_maximum and all(map(_is_split, windows))
    )
    return windows if is_faster and not is_other else None


_MOST_PLACES = 9
_LONGEST = 32  # window


def _maximum_of(x, windows, padding):
    x, order = _inner(x, windows, padding, -jnp.inf)
    windows = tuple(windows[i] for i in order)
    while sum(w.size > 1 for w in windows) > 1 and _count(windows) > _MOST_PLACES:
        # The last axis by itself: of equal maxima, the first one of the first rows remains.
        i = max(i for i, window in enumerate(windows) if window.size > 1)
        x = _maximum(x, tuple(w if j == i else Window() for j, w in enumerate(windows)))
        windows = tuple(Window() if j == i else w for j, w in enumerate(windows))
    return _back(_maximum(x, windows), order)


def _sum_of(x, windows, padding):
    dtype = x.dtype
    x, order = _inner(x.astype(wide_dtype(dtype)), windows, padding, 0)
    for i, window in enumerate(windows[j] for j in order):
        if _is_split(window) and window.size > 1:
            x = _pairs(x, {i: window}).sum(i + 1)
        elif window.size > 1 or window.stride > 1:
            x = functools.reduce(
                jnp.add, [window.elements(x, i, place) for place in range(window.size)]
            )
    return _back(x, order).astype(dtype)


def _back(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Put axes that stand in an order back in their places."""
    return x.transpose([order.index(i) for i in range(x.ndim)])


def _inner(x, windows, padding, value):
    """Pad, and put the axes in the order of the convolutions on CPU; XLA cancels the transposes.

    That order is [H, C, W, B], or [C, W, B]: the last axis of windows stands before the batch.
    """
    if any(pair != (0, 0) for pair in padding):
        config = [(*pair, 0) for pair in padding]
        x = lax.pad(x, jnp.asarray(value, x.dtype), config)
    along = [i for i, window in enumerate(windows) if window.size > 1]
    others = [i for i in range(x.ndim) if i not in along]
    order = tuple(range(x.ndim))
    if along and len(others) == 2 and len(along) < 3 and _is_on_cpu():
        order = (*along[:-1], others[1], along[-1], others[0])
    return x.transpose(order), order


def _is_split(window: Window) -> bool:
    """Return True if windows lie beside one another."""
    return window.stride == window.size and window.dilation == 1


def _pairs(x: jax.Array, windows: Mapping[int, Window]) -> jax.Array:
    """Split axes into windows that lie beside one another: [.., W, ..] -> [.., W', size, ..]."""
    shape = []
    for i in range(x.ndim):
        if i in windows:
            count = windows[i].positions(x.shape[i])
            x = lax.slice_in_dim(x, 0, count * windows[i].size, 1, i)
            shape += [count, windows[i].size]
        else:
            shape.append(x.shape[i])
    return x.reshape(shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _maximum(x: jax.Array, windows: Windows) -> jax.Array:
    return _stored(functools.reduce(jnp.maximum, _places(x, windows)))


@_maximum.defjvp
def _maximum_jvp(windows, primals, tangents):
    (x,), (change,) = primals, tangents
    y = _maximum(x, windows)
    split = {i: w for i, w in enumerate(windows) if w.size > 1 or w.stride > 1}
    if all(map(_is_split, split.values())):
        # Compared all at once, which the gradient writes at once, too.
        place = _stored(_first(_places(x, windows), y))
        if not _is_on_cpu():  # saved for the gradient in place of ``x``
            y, place = lax.optimization_barrier((y, place))
        axes = [i + n + 1 for n, i in enumerate(split)]
        places = jnp.arange(_count(windows), dtype=place.dtype)
        places = places.reshape([w.size for w in split.values()])
        places = jnp.expand_dims(places, [i for i in range(x.ndim + len(split)) if i not in axes])
        chosen = jnp.expand_dims(place, axes) == places
        change = jnp.where(chosen, _pairs(change, split), 0).sum(axes)
        return y, _stored(change)
    taken, parts = None, []
    for pixels, of_change in zip(_places(x, windows), _places(change, windows), strict=True):
        is_largest = pixels == y
        parts.append(jnp.where(is_largest if taken is None else is_largest & ~taken, of_change, 0))
        taken = is_largest if taken is None else taken | is_largest
    return y, functools.reduce(jnp.add, parts)


def _count(windows: Windows) -> int:
    return math.prod(window.size for window in windows)


def _places(x: jax.Array, windows: Windows) -> list[jax.Array]:
    """Return the elements at each place of the windows, row by row."""
    found = []
    for places in itertools.product(*(range(window.size) for window in windows)):
        pixels = x
        for i, (window, place) in enumerate(zip(windows, places, strict=True)):
            if window.size > 1 or window.stride > 1:
                pixels = window.elements(pixels, i, place)
        found.append(pixels)
    return found


def _first(pixels: Sequence[jax.Array], best: jax.Array) -> jax.Array:
    """Return the number of the first that equals ``best``; a CPU selects faster with one dtype."""
    dtype = best.dtype if _is_on_cpu() else jnp.dtype(jnp.uint8)
    place = jnp.full(best.shape, len(pixels) - 1, dtype)
    for n in range(len(pixels) - 2, -1, -1):
        place = jnp.where(pixels[n] == best, dtype.type(n), place)
    return place


def _is_on_cpu() -> bool:
    return traced_for().platform == "cpu"


def _stored(x: jax.Array) -> jax.Array:
    return written_out(x) if _is_on_cpu() else x
