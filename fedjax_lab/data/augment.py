"""From stored images to model inputs, on the device: scaling, augmentation, normalisation.

Axes: B examples of a mini-batch, H height, W width, C channels (last).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_channels_last, check_int, check_number
from fedjax_lab.data.dtypes import to_device
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.sampler import check_key
from fedjax_lab.data.sources import Examples
from fedjax_lab.machine.keys import compact
from fedjax_lab.signatures import suggest_keywords

_CHUNK = 4096
_ROUNDING = 1e-12  # of float64 sums, as a share of the mean
_LARGE = 2**23  # from here, float32 holds few more digits than an integer's


class Normalization(NamedTuple):
    """Statistics of the training inputs, after division by ``scale``.

    Attributes:
      mean: float64 [C]; [1] for x [n] and for images without a channel axis [n, H, W].
      std: float64, as ``mean``; 1 for a channel that is constant.
      scale: divisor of the stored values, applied first.
    """

    mean: np.ndarray
    std: np.ndarray
    scale: float


def normalization(train: Any, scale: float | None = None) -> Normalization:
    """Compute mean and standard deviation of each channel over all training examples and pixels.

    The computation is in float64 and in pieces, so that the images are never all in memory as
    floats. Use it as ``preprocess(*normalization(train))``.

    Args:
      train: ``Examples`` with ``x`` [n, ..., C], channels last. x [n], and images [n, H, W], have
        one channel; [n, C] has a column for each. Or clients with such examples: the examples
        that they hold count, and not those of other parts that share the arrays.
      scale: as in ``preprocess``.

    Raises:
      TypeError: the examples have no ``x``.
      ValueError: no examples, ``scale`` is not positive, or images are channels first.
    """
    is_clients = isinstance(train, FederatedArrays)
    examples = train.examples if is_clients else train
    if not hasattr(examples, "x"):
        raise TypeError(
            f"train is {type(train).__name__} without inputs x; it must be data.Examples, or "
            "clients that data.partition or data.from_clients made of pairs (x, y)."
        )
    x = np.asarray(examples.x)
    check_channels_last("train.x", x.shape)
    rows = np.asarray(train.indices) if is_clients else np.arange(len(x))
    if x.size == 0 or len(rows) == 0:
        raise ValueError(f"train has examples of shape {x.shape}; there must be at least one.")
    scale = _scale_of(x.dtype, scale)
    channels = 1 if x.ndim in (1, 3) else x.shape[-1]

    def pieces() -> Iterator[np.ndarray]:
        for start in range(0, len(rows), _CHUNK):
            yield x[rows[start : start + _CHUNK]].reshape(-1, channels)

    count = len(rows) * (x[0].size // channels)
    mean = sum(piece.sum(0, dtype=np.float64) for piece in pieces()) / count
    # Second pass around the mean: a difference of large squares would cancel.
    variance = sum(np.square(piece - mean).sum(0) for piece in pieces()) / count
    std = np.sqrt(variance) / scale
    # Of a constant channel, the sums' rounding may leave a little.
    is_constant = std <= _ROUNDING * np.abs(mean / scale)
    return Normalization(mean / scale, np.where(is_constant, 1.0, std), scale)


@suggest_keywords
def preprocess(
    mean: Any = None,
    std: Any = None,
    scale: float | None = None,
    *,
    flip: bool = False,
    crop: int = 0,
) -> Callable[[Examples, jax.Array | None], Examples]:
    """Build a function from stored examples to model inputs, for use inside jit.

    It applies, in this order: random crop, random flip (both only with a key), division by
    ``scale``, ``(x - mean) / std``. The crop's padding is therefore 0 in raw pixels (black).

    Args:
      mean: scalar, [1] or [C], after division by ``scale``; None: 0.
      std: scalar, [1] or [C], positive; None: 1.
      scale: positive; None: 255 for uint8, 1 for other dtypes.
      flip: whether each image is mirrored left to right with probability 1/2.
      crop: number of pixels by which each image is padded on each side before it is cropped to its
        size at a random place; 0: no crop.

    Returns:
      ``function(examples, key)``. ``examples.x`` [B, H, W, C], with any leading axes, becomes
      float32, or keeps its dtype if it is floating-point. Other fields are unchanged. With key=None
      there is no augmentation, as for evaluation.

    Raises:
      TypeError, ValueError: an argument has the wrong type, shape or range; or, when called, the
        key is not a single typed one.
    """
    crop = check_int("crop", crop, minimum=0)
    if scale is not None:
        check_number("scale", scale, minimum=0, exclusive_minimum=True)
    mean = _check_statistic("mean", 0.0 if mean is None else mean)
    std = _check_statistic("std", 1.0 if std is None else std)
    if not (std > 0).all():
        raise ValueError(f"std is {std}; it must be positive.")

    def apply(examples: Examples, key: jax.Array | None = None) -> Examples:
        x = to_device("examples.x", examples.x)
        if key is not None and (flip or crop):
            check_key(key)
            if x.ndim < 4:
                raise ValueError(
                    f"examples.x has shape {x.shape}; flip and crop need images [B, H, W, C]: give "
                    "gray images an axis of one channel, x[..., None]."
                )
            check_channels_last("examples.x", x.shape)
            images = x.reshape(-1, *x.shape[-3:])
            crop_key, flip_key = jax.random.split(compact(key))
            if crop:
                check_int("crop", crop, minimum=0, maximum=min(images.shape[-3:-1]))
                images = _random_crop(crop_key, images, crop)
            if flip:
                images = _random_flip(flip_key, images)
            x = images.reshape(x.shape)
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.dtype(jnp.float32)
        divisor = _scale_of(x.dtype, scale)
        centre, whole = mean, np.rint(mean * divisor)
        is_wide = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4
        if is_wide and _LARGE <= np.abs(whole).max() < 2**32:
            x, centre = _less(x, whole), mean - whole / divisor
        x = x.astype(dtype)
        if divisor != 1:
            x = x / jnp.asarray(divisor, dtype)
        return examples._replace(x=(x - _like(centre, x)) / _like(std, x))

    return apply


def _less(x: jax.Array, whole: np.ndarray) -> jax.Array:
    """Subtract integers from integers of 32 bits or more that float32 would round.

    The upper and the lower 16 bits are subtracted apart, so that nothing overflows.
    """
    signed = jnp.int64 if x.dtype.itemsize > 4 else jnp.int32
    high, low = divmod(whole.astype(np.int64), 2**16)
    above = (x >> 16).astype(signed) - _like(high, x).astype(signed)
    below = (x & 0xFFFF).astype(signed) - _like(low, x).astype(signed)
    return above.astype(jnp.float32) * 2**16 + below.astype(jnp.float32)


def _scale_of(dtype: Any, scale: float | None) -> float:
    if scale is None:
        return 255.0 if dtype == np.uint8 else 1.0
    return float(check_number("scale", scale, minimum=0, exclusive_minimum=True))


def _check_statistic(argument: str, value: Any) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if array.ndim > 1 or not np.isfinite(array).all():
        raise ValueError(f"{argument} is {value}; it must be a finite number or vector [C].")
    return array


def _like(statistic: np.ndarray, x: jax.Array) -> jax.Array:
    if statistic.shape not in ((), (1,), x.shape[-1:]):
        raise ValueError(
            f"mean or std has shape {statistic.shape}; examples.x of shape {x.shape} needs "
            f"{x.shape[-1:]} or a number."
        )
    shape = (1,) * (x.ndim - 1) + (statistic.size,)
    return jnp.asarray(statistic.reshape(shape), x.dtype)


def _random_crop(key: jax.Array, images: jax.Array, pad: int) -> jax.Array:
    offsets = jax.random.randint(key, (len(images), 2), 0, 2 * pad + 1, jnp.int32)
    padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))

    def cut(image, offset):
        start = offset[0], offset[1], jnp.int32(0)  # of one dtype in every mode
        return jax.lax.dynamic_slice(image, start, images.shape[1:])

    return jax.vmap(cut)(padded, offsets)


def _random_flip(key: jax.Array, images: jax.Array) -> jax.Array:
    mirrored = jax.random.bernoulli(key, jnp.float32(0.5), (len(images), 1, 1, 1))
    return jnp.where(mirrored, images[:, :, ::-1], images)
