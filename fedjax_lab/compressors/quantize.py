"""Compressors that send a small code for each coordinate, and one scale for all of them.

A coordinate is decompressed to scale * code / levels. ``scale`` and norms are float32 (float64 for
float64 vectors). They are robust: squares of 1e-20 or 1e15 neither underflow nor overflow.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_int
from fedjax_lab.compressors import wire
from fedjax_lab.compressors.base import (
    STATIC,
    Array,
    Compressor,
    relative_to_largest,
    size_of,
)
from fedjax_lab.machine.keys import compact
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.tree import wide_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes:
    """A message with a small integer for each coordinate.

    Attributes:
      codes: int8 or int16 [d], between -levels and levels.
      scale: float scalar, the value of code ``levels``.
      dtype: dtype of the vector.
      d: the vector's size.
    """

    codes: Array
    scale: Array
    dtype: np.dtype = dataclasses.field(metadata=STATIC)
    d: int = dataclasses.field(metadata=STATIC)


@suggest_keywords
def sign() -> Compressor:
    """Send the sign of each coordinate, and mean |v| as the size of all.

    ||C(v) - v||^2 = ||v||^2 - ||v||_1^2 / d, at most (1 - 1/d) ||v||^2. The sign of 0 is +.
    One scale for the whole vector: ``scope="per_leaf"`` of ``with_compression`` gives each
    array its own. Karimireddy, Rebjock, Stich, Jaggi, ICML 2019.
    """

    def encode(key, v):
        largest, relative = relative_to_largest(v)
        return jnp.where(v >= 0, 1, -1), largest * jnp.abs(relative).mean()

    return _coded("sign", {}, 1, encode, lambda d: 1 - 1 / d, step=2)


@suggest_keywords
def qsgd(levels: int = 15, *, scaled: bool = False) -> Compressor:
    """Round |v_i| / ||v|| at random to a neighbouring multiple of 1/levels, without bias.

    E||C(v) - v||^2 <= w ||v||^2 with w = min(d / (4 levels^2), sqrt(d) / levels): the paper's
    bound, sharpened by f (1 - f) <= 1/4. w may exceed 1. Alistarh, Grubic, Li, Tomioka,
    Vojnovic, NeurIPS 2017, with fixed-width codes instead of Elias'.

    Args:
      levels: steps between 0 and ||v||; a code takes ceil(log2(2 levels + 1)) bits.
      scaled: divide by 1 + w. The bound becomes w / (1 + w) < 1 and the result is biased:
        the form to use with error feedback.

    Raises:
      ValueError: ``levels`` lies outside 1 to 32767.
    """
    levels = check_int("levels", levels, minimum=1, maximum=2**15 - 1)

    def encode(key, v):
        largest, relative = relative_to_largest(v)
        norm = jnp.sqrt(jnp.square(relative).sum())
        exact = jnp.abs(relative) / jnp.maximum(norm, 1) * levels  # the norm is 0 or at least 1
        return _round_at_random(key, exact, levels) * jnp.sign(relative), largest * norm

    def variance(d):
        return min(d / (4 * levels**2), math.sqrt(d) / levels)

    options = {"levels": levels, "scaled": scaled}
    return _coded("qsgd", options, levels, encode, variance, unbiased=True, scaled=scaled)


@suggest_keywords
def terngrad(*, scaled: bool = False) -> Compressor:
    """Send 0 or +-max |v|, with probability |v_i| / max |v| of not 0, without bias.

    E||C(v) - v||^2 <= w ||v||^2 with w = (sqrt(d) - 1) / 2, which some v attains and which may
    exceed 1. Wen, Xu, Yan, Wu, Wang, Chen, Li, NeurIPS 2017. Two bits a coordinate.

    Args:
      scaled: divide by 1 + w, as in ``qsgd``.
    """

    def encode(key, v):
        largest, relative = relative_to_largest(v)
        return _round_at_random(key, jnp.abs(relative), 1) * jnp.sign(relative), largest

    def variance(d):
        return (math.sqrt(d) - 1) / 2

    options = {"scaled": scaled}
    return _coded("terngrad", options, 1, encode, variance, unbiased=True, scaled=scaled)


@suggest_keywords
def int8() -> Compressor:
    """Round each coordinate to the nearest multiple of max |v| / 127.

    ||C(v) - v||^2 <= (d - 1) / (254^2 + d - 1) ||v||^2, which some v attains.
    """

    def encode(key, v):
        largest, relative = relative_to_largest(v)
        return jnp.round(relative * 127), largest

    return _coded("int8", {}, 127, encode, lambda d: (d - 1) / (254**2 + d - 1))


def _round_at_random(key, exact: jax.Array, levels: int) -> jax.Array:
    """Round to floor(exact) or the next integer, with mean ``exact``, at most ``levels``."""
    below = jnp.floor(exact)
    up = jax.random.uniform(compact(key), exact.shape, exact.dtype) < exact - below
    return jnp.minimum(below + up, levels)


def _coded(
    name: str,
    options: dict,
    levels: int,
    encode: Callable,
    bound: Callable[[int], float],
    *,
    step: int = 1,
    unbiased: bool = False,
    scaled: bool = False,
) -> Compressor:
    """Build a compressor that sends a code for each coordinate, and a scale.

    Codes are -levels, -levels + step, ..., levels.

    ``encode``: (key, v) -> (codes, scale). With ``scaled``, ``bound`` is w and the scale is
    divided by 1 + w. Packed: the scale, then the codes.
    """
    largest = 2 * levels // step  # symbol; the smallest is 0
    width = wire.width_of(largest + 1)
    code_dtype: Any = jnp.int8 if levels < 128 else jnp.int16

    def shrink(d):
        return 1 / (1 + bound(d)) if scaled else 1.0

    def compress(key, v):
        d = size_of(v)
        codes, scale = encode(key, v)
        scale = scale * jnp.asarray(shrink(d), scale.dtype)
        return Codes(codes.astype(code_dtype), scale, jnp.dtype(v.dtype), d)

    def decompress(message):
        scale = jnp.asarray(message.scale)
        relative = jnp.asarray(message.codes, scale.dtype) / levels
        return (scale * relative).astype(message.dtype)

    def pack(message):
        symbols = (np.asarray(message.codes, np.int32) + levels) // step
        return wire.pack_floats(message.scale) + wire.pack_bits(symbols, width)

    def unpack(data, d, dtype="float32"):
        reader = wire.Reader(data)
        scale = reader.floats(1, wide_dtype(dtype))[0]
        symbols = reader.bits(d, width)
        reader.end()
        if symbols.max() > largest:
            raise ValueError(
                f"the packed message has the code {symbols.max()}; the largest is {largest}."
            )
        codes = symbols.astype(np.int32) * step - levels
        return Codes(codes.astype(code_dtype), scale, jnp.dtype(dtype), d)

    def size(d, dtype="float32"):
        return wide_dtype(dtype).itemsize + wire.section_bytes(d, width)

    return Compressor(
        name,
        options,
        compress,
        decompress,
        pack,
        unpack,
        size,
        snr_bound=lambda d: bound(d) * shrink(d),
        unbiased=unbiased and not scaled,
    )
