"""Random keys with the bits of JAX's, whose programs compile in a fraction of the time.

JAX draws with the Threefry hash. On CPU, JAX implements the hash as a loop, which compiles to ten
kernels for each draw and each fold. ``compact`` selects an implementation with unrolled rounds: it
is one kernel, and draws three to five times as fast. A barrier after each derived key ensures that
the key is computed once. Without it, the compiler copies the hashes of a chain of keys into every
kernel that uses the last key. ``stored`` does the same for the numbers that are drawn.

Source: Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3. SC 2011.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from fedjax_lab.machine.layout import written_out
from fedjax_lab.types import Key

_NAME = "threefry2x32"  # the name in JAX
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_GROUPS = 5  # groups of four rounds; a key is added after each group
_MOST = 2**32  # largest number of elements of a draw, counted by 32 bits


def seeded(seed: Any) -> Key:
    """Create a key of a seed: Threefry's, whatever ``jax_default_prng_impl`` is.

    The draws of other generators, such as "rbg", depend on how a program maps them: under ``vmap``
    on the other keys. A client's draws would depend on the client map.

    Args:
      seed: integer scalar from 0 to 2^32 - 1.
    """
    return jax.random.key(seed, impl=_NAME)


def threefry(key: Key) -> Key:
    """Convert a key of another generator to a Threefry key; return other keys unchanged.

    "rbg" and "unsafe_rbg" store Threefry's key of the seed twice. So ``threefry`` of their key of
    a seed is Threefry's key of that seed.

    Args:
      key: PRNG keys [...]: typed, or raw bits of the default generator, which become typed if that
        is not Threefry.
    """
    config: Any = jax.config
    if not is_key(key):
        if config.jax_default_prng_impl == _NAME:
            return key
        key = jax.random.wrap_key_data(key)
    if _implementation(key) in (_NAME, _COMPACT, _STORED):
        return key
    words = jax.random.key_data(key).astype(jnp.uint32).reshape(*key.shape, -1)
    if words.shape[-1] % 2:
        words = jnp.concatenate([words, jnp.zeros_like(words[..., :1])], -1)
    first = words[..., :2]
    for place in range(2, words.shape[-1], 2):
        more = words[..., place : place + 2]
        halves = jnp.moveaxis(first, -1, 0), more[..., 0], more[..., 1]
        mixed = jnp.stack(_threefry(*halves), axis=-1)
        first = jnp.where((more == first).all(-1, keepdims=True), first, mixed)
    return jax.random.wrap_key_data(first, impl=_NAME)


def compact(key: Key) -> Key:
    """Convert a key for programs that compile in less time.

    Numbers that ``jax.random`` draws with the result, and keys derived from it, have the same bits
    as with ``key``. The dtype differs; ``plain`` converts back to JAX's own key, which a user's
    function expects.

    Args:
      key: typed PRNG keys [...]. Keys of other kinds are returned unchanged; so are all keys if
        ``jax_threefry_partitionable`` is off.
    """
    config: Any = jax.config  # its attributes are made at run time
    if _implementation(key) != _NAME or not config.jax_threefry_partitionable:
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_COMPACT)


def stored(key: Key) -> Key:
    """Convert a key as ``compact`` does; numbers drawn with the result are written to memory once.

    This is for numbers that several kernels read, such as those of dropout, which the backward pass
    reads again. A compiler would draw them anew in each, and does so slowly where the reader
    transposes: element by element instead of in vectors.

    Args:
      key: typed PRNG keys [...].
    """
    key = compact(key)
    if _implementation(key) != _COMPACT:
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_STORED)


def plain(key: Key) -> Key:
    """Convert the result of ``compact`` or ``stored`` to JAX's own key with the same bits.

    Args:
      key: typed PRNG keys [...]; keys of other kinds are returned unchanged.
    """
    if _implementation(key) not in (_COMPACT, _STORED):
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_NAME)


def is_key(value: Any) -> bool:
    """Return True for an array of typed random keys, or the shape of one."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def fold_in(key: Key, data: Any) -> Key:
    """Compute ``jax.random.fold_in`` with a compact key: the same bits, as JAX's own key."""
    return plain(jax.random.fold_in(compact(key), data))


def bits_at(key: Key, high: jax.Array, low: jax.Array) -> jax.Array:
    """Draw random bits at given positions of a key's stream, a pure function of (key, high, low).

    A draw indexed by (client, step) is one kernel; keys folded by client and step need two or more.

    Args:
      key: a PRNG key; consumed.
      high, low: integers [...], which broadcast together.

    Returns:
      uint32 [...]
    """
    high, low = jnp.broadcast_arrays(jnp.asarray(high, jnp.uint32), jnp.asarray(low, jnp.uint32))
    is_threefry = _implementation(key) in (_NAME, _COMPACT, _STORED)
    words = jax.random.key_data(key) if is_threefry else jax.random.bits(key, (2,), jnp.uint32)
    first, second = _threefry(words, high, low)
    return first ^ second


def below(bits: jax.Array, bound: jax.Array) -> jax.Array:
    """Map uniform bits to integers in [0, bound): the upper half of a 32 by 32 bit product.

    The probabilities of two integers differ by at most 2^-32.

    Args:
      bits: uint32 [...].
      bound: integers [...] from 1 to 2^31, which broadcast with the bits.

    Returns:
      int32 [...]
    """
    bound = jnp.asarray(bound).astype(jnp.uint32)
    low, high = bits & np.uint32(0xFFFF), bits >> np.uint32(16)
    bound_low, bound_high = bound & np.uint32(0xFFFF), bound >> np.uint32(16)
    middle = high * bound_low + (low * bound_low >> np.uint32(16))
    carry = (low * bound_high + (middle & np.uint32(0xFFFF))) >> np.uint32(16)
    return (high * bound_high + (middle >> np.uint32(16)) + carry).astype(jnp.int32)


def _implementation(key: Key) -> Any:
    return jax.random.key_impl(key) if is_key(key) else None


def _threefry(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hash counters, two uint32 [...], with a key, uint32 [2]."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(_PARITY))
    high, low = high + keys[0], low + keys[1]
    for group in range(_GROUPS):
        for bits in _ROTATIONS[group % 2]:
            high = high + low
            low = high ^ ((low << np.uint32(bits)) | (low >> np.uint32(32 - bits)))
        high = high + keys[(group + 1) % 3]
        low = low + keys[(group + 2) % 3] + np.uint32(group + 1)
    return high, low


def _counters(shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Return the flat indices of an array's elements, as two halves uint32 [...]."""
    # Axis by axis, so that a compiler can shard them over devices without communication.
    places = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]))
        places = places + stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return jnp.zeros(shape, jnp.uint32), places


def _derived(halves: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jax.lax.optimization_barrier(jnp.stack(halves, axis=-1))


def _seed(seed: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed, impl=_NAME))


def _split(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    return _derived(_threefry(key, *_counters(shape)))


def _fold_in(key: jax.Array, data: Any) -> jax.Array:
    low = jnp.asarray(data, jnp.uint32)
    return _derived(_threefry(key, jnp.zeros_like(low), low))


def _random_bits(key: jax.Array, bit_width: int, shape: Sequence[int]) -> jax.Array:
    if math.prod(shape) >= _MOST:
        own = jax.random.wrap_key_data(key, impl=_NAME)
        return jax.random.bits(own, tuple(shape), f"uint{bit_width}")
    high, low = _threefry(key, *_counters(shape))
    if bit_width == 64:
        return (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{bit_width}")


def _stored_bits(key: jax.Array, bit_width: int, shape: Sequence[int]) -> jax.Array:
    return written_out(_random_bits(key, bit_width, shape))


_SHARED: Any = {"key_shape": (2,), "seed": _seed, "split": _split, "fold_in": _fold_in}
_COMPACT: Any = define_prng_impl(
    **_SHARED, random_bits=_random_bits, name="compact_threefry2x32", tag="fryc"
)
_STORED: Any = define_prng_impl(
    **_SHARED, random_bits=_stored_bits, name="stored_threefry2x32", tag="frys"
)
