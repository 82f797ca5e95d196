"""Compression by a matrix of low rank.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization. NeurIPS 2019. Departures: a vector is reshaped to one nearly square matrix (the paper
uses each layer's matrix), and every message starts from a new random matrix (the paper starts from
the last round's).
"""

import dataclasses
import math

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
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.tree import wide_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factors:
    """A message with the factors of left @ right.T, which is read row by row, without the padding.

    Attributes:
      left: float [n, r], orthonormal columns.
      right: float [m, r].
      dtype: dtype of the vector.
      d: the vector's size, at most n m.
    """

    left: Array
    right: Array
    dtype: np.dtype = dataclasses.field(metadata=STATIC)
    d: int = dataclasses.field(metadata=STATIC)


@suggest_keywords
def low_rank(rank: int) -> Compressor:
    """Project the vector, as an n x m matrix M, onto the range of M G, G random [m, rank].

    n = floor(sqrt(d)), m = ceil(d / n), zeros at the end. With r = min(rank, n),
    E||C(v) - v||^2 <= (1 - r/n) ||v||^2, because the projection favours large singular values.
    A message has r (n + m) floats, which saves bytes only for r below about sqrt(d) / 2.

    Args:
      rank: columns of G.

    Raises:
      ValueError: ``rank`` is below 1.
    """
    rank = check_int("rank", rank, minimum=1)
    product = jax.lax.Precision.HIGHEST

    def shape(d):
        rows = math.isqrt(d)
        return rows, -(-d // rows), min(rank, rows)

    def compress(key, v):
        d = size_of(v)
        n, m, r = shape(d)
        largest, relative = relative_to_largest(v)
        matrix = jnp.pad(relative, (0, n * m - d)).reshape(n, m)
        start = jax.random.normal(key, (m, r), matrix.dtype)
        left, _ = jnp.linalg.qr(jnp.matmul(matrix, start, precision=product))
        right = largest * jnp.matmul(matrix.T, left, precision=product)
        return Factors(left, right, jnp.dtype(v.dtype), d)

    def decompress(message):
        left, right = jnp.asarray(message.left), jnp.asarray(message.right)
        matrix = jnp.matmul(left, right.T, precision=product)
        return matrix.reshape(-1)[: message.d].astype(message.dtype)

    def unpack(data, d, dtype="float32"):
        n, m, r = shape(d)
        reader = wire.Reader(data)
        left, right = (reader.floats(rows * r, wide_dtype(dtype)) for rows in (n, m))
        reader.end()
        return Factors(left.reshape(n, r), right.reshape(m, r), jnp.dtype(dtype), d)

    def size(d, dtype="float32"):
        n, m, r = shape(d)
        return r * (n + m) * wide_dtype(dtype).itemsize

    def snr_bound(d):
        n, _, r = shape(d)
        return 1 - r / n

    return Compressor(
        "low_rank",
        {"rank": rank},
        compress,
        decompress,
        pack=lambda message: wire.pack_floats(message.left) + wire.pack_floats(message.right),
        unpack=unpack,
        bytes=size,
        snr_bound=snr_bound,
    )
