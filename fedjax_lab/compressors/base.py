"""The compressor interface, and the identity compressor.

A message is a dataclass pytree of fixed shapes. The vector's size d is static; so is its dtype, if
the message's arrays do not imply it. A packed message is the bytes that would be sent.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.compressors import wire
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Key

Packed = bytes
Array = jax.Array | np.ndarray  # in a message: NumPy after unpacking
STATIC = {"static": True}  # metadata of a message's static fields


class Positions(NamedTuple):
    """Positions of the coordinates that a sparsifier of fixed size keeps.

    Attributes:
      kept: d -> k, the number of kept coordinates.
      pack: message -> bytes of the positions.
      unpack: (reader, d) -> message whose ``values`` are still None.
      bytes: d -> size of the positions.
    """

    kept: Callable[[int], int]
    pack: Callable[[Any], Packed]
    unpack: Callable[[wire.Reader, int], Any]
    bytes: Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class Compressor:
    """A map C from vectors to small messages, and back.

    ``compress`` and ``decompress`` are jax.numpy kernels; ``pack`` and ``unpack`` run on the
    host. ``unpack(pack(message), d)`` decompresses to the same bits as ``message``.

    Attributes:
      name: name of the factory.
      options: arguments of the factory.
      compress: (key, v [d]) -> message.
      decompress: message -> C(v) [d], in the dtype of v.
      pack: message -> bytes.
      unpack: (bytes, d, dtype="float32") -> message, for v of that dtype.
      bytes: (d, dtype="float32") -> size of the packed message; for ``random_drop`` its
        expectation.
      snr_bound: d -> the smallest known b with E||C(v) - v||^2 <= b ||v||^2 for all v, the
        1/gamma of CFedAvg's Definition 1, which asks for b < 1. Up to rounding.
      unbiased: whether E C(v) = v.
      positions: encoding of the positions of a sparsifier of fixed size; None for others.
      direct: (key, v [d]) -> C(v) [d], the same bits computed without a message; or None.
      direct_parts: (key, arrays of one dtype and any shapes, which together are v) -> C(v) in
        arrays of these shapes, with the same bits; or None.
    """

    recorded_as_text: ClassVar[bool] = True  # among the hyperparameters of a method

    name: str
    options: Mapping[str, Any]
    compress: Callable[[Key, jax.Array], Any]
    decompress: Callable[[Any], jax.Array]
    pack: Callable[[Any], Packed]
    unpack: Callable[..., Any]
    bytes: Callable[..., int]
    snr_bound: Callable[[int], float]
    unbiased: bool = False
    positions: Positions | None = None
    direct: Callable[[Key, jax.Array], jax.Array] | None = None
    direct_parts: Callable[[Key, list[jax.Array]], list[jax.Array]] | None = None

    def apply(self, key: Key, v: jax.Array) -> jax.Array:
        """Compute C(v) [d] in the dtype of v: the bits of ``decompress(compress(key, v))``.

        A simulation uses this when it does not need the bytes of a message.

        Args:
          key: typed PRNG key; consumed.
          v: floating-point [d].

        Raises:
          ValueError: ``decompress`` or ``direct`` returns another number of coordinates.
        """
        function = "decompress" if self.direct is None else "direct"
        sent = self.direct(key, v) if self.direct else self.decompress(self.compress(key, v))
        if getattr(sent, "size", None) != v.size:
            found = f"{sent.dtype}{list(sent.shape)}" if hasattr(sent, "shape") else repr(sent)
            raise ValueError(
                f"{function} of the compressor {self} returned {found}; it must return C(v), "
                f"{v.dtype}{list(v.shape)}."
            )
        return sent

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.options.items())})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """A message with all coordinates.

    Attributes:
      values: float [d].
      dtype: dtype of the vector.
      d: the vector's size.
    """

    values: Array
    dtype: np.dtype = dataclasses.field(metadata=STATIC)
    d: int = dataclasses.field(metadata=STATIC)


def size_of(v: jax.Array) -> int:
    """Check a vector to be compressed and return its size d.

    Args:
      v: floating-point [d].

    Raises:
      ValueError: ``v`` is not a floating-point vector, is empty, or is too long for int32 indices.
    """
    if v.ndim != 1 or not jnp.issubdtype(v.dtype, jnp.floating):
        raise ValueError(f"v is {v.dtype}{list(v.shape)}; it must be a floating-point vector [d].")
    if not 1 <= v.size < 2**31:
        raise ValueError(f"v has {v.size} coordinates; it must have between 1 and 2**31 - 1.")
    return v.size


def relative_to_largest(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scale a vector by its largest magnitude, so that squares neither vanish nor overflow.

    A vector without a normal number counts as zero. Results are at least float32.

    Args:
      v: floating-point [d].

    Returns:
      (max |v|, a scalar; v / max |v|, [d]).
    """
    v = v.astype(tree.wide_dtype(v.dtype))
    largest = jnp.abs(v).max()
    largest = jnp.where(largest >= jnp.finfo(v.dtype).tiny, largest, 0)
    return largest, tree.safe_divide(v, jnp.broadcast_to(largest, v.shape))


@suggest_keywords
def identity() -> Compressor:
    """Send the vector unchanged."""
    return _dense("identity", lambda dtype: jnp.dtype(dtype), lambda d: 0.0, unbiased=True)


@suggest_keywords
def bfloat16() -> Compressor:
    """Round every coordinate to bfloat16: 16 bits, 8 of them significant."""
    return _dense("bfloat16", lambda dtype: jnp.dtype(jnp.bfloat16), lambda d: 257.0**-2)


def _dense(name, sent_dtype, snr_bound, unbiased=False) -> Compressor:
    """Build a compressor that casts each coordinate."""

    def compress(key, v):
        return Dense(v.astype(sent_dtype(v.dtype)), jnp.dtype(v.dtype), size_of(v))

    def unpack(data, d, dtype="float32"):
        reader = wire.Reader(data)
        message = Dense(reader.floats(d, sent_dtype(dtype)), jnp.dtype(dtype), d)
        reader.end()
        return message

    return Compressor(
        name,
        {},
        compress,
        decompress=lambda message: jnp.asarray(message.values, message.dtype),
        pack=lambda message: wire.pack_floats(np.asarray(message.values)),
        unpack=unpack,
        bytes=lambda d, dtype="float32": d * sent_dtype(dtype).itemsize,
        snr_bound=snr_bound,
        unbiased=unbiased,
    )
