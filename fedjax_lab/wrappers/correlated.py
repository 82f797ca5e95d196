"""Correlated noise: the noise of a round cancels a part of the noise of earlier rounds.

A server that sums over rounds also sums their noise. If C y = z for independent z, the sums of the
noise y_1, y_2, ... are smaller than those of z. The privacy is that of C x + z, one Gaussian
mechanism for all rounds. C is a banded square root of the matrix of prefix sums:

=========  =====================================================================================
paper      here
=========  =====================================================================================
C          lower triangular Toeplitz, with ``coefficients``: the first ones of (1 - x)^(-1/2)
p          ``bands``, the number of coefficients; 1 is independent noise
b          ``separation``, rounds between two participations of a client
sens       ``sensitivity``
=========  =====================================================================================

Kalinin, Lampert: Banded Square Root Matrix Factorization for Differentially Private Model Training.
NeurIPS 2024. The mechanism: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu: Practical and Private
(Deep) Learning Without Sampling or Shuffling. ICML 2021; Choquette-Choo et al.: (Amplified) Banded
Matrix Factorization. NeurIPS 2023.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.tree import wide_dtype
from fedjax_lab.types import PyTree


def coefficients(bands: int) -> np.ndarray:
    """Compute the coefficients 1, 1/2, 3/8, ...: binomial(2 k, k) / 4^k.

    Args:
      bands: number of coefficients, at least 1.

    Returns:
      float64 [bands], descending.
    """
    k = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


@functools.lru_cache(maxsize=256)
def sensitivity(bands: int, rounds: int, separation: int) -> float:
    """Compute the sensitivity of C x to one client, whose messages have norm at most 1.

    The coefficients are positive and decreasing. In the worst case the client therefore
    participates in the first round and then as often as possible, and sends the same message each
    time (Theorem 2 of the paper).

    Args:
      bands: number of coefficients of C.
      rounds: number of rounds of the run, at least 1.
      separation: least number of rounds between two participations of a client.
    """
    column, total = coefficients(bands), np.zeros(rounds)
    for first in range(0, rounds, separation):
        reached = total[first : first + bands]
        reached += column[: len(reached)]
    return float(np.linalg.norm(total))


def no_noise_yet(like: PyTree, bands: int) -> PyTree:
    """Create the past noise before the first round: leaves [bands - 1, ...]; () for one band.

    Args:
      like: shapes of the values that get noise.
      bands: number of coefficients of C.
    """
    if bands == 1:
        return ()

    def zeros(leaf: Any) -> jax.Array:
        return jnp.zeros((bands - 1, *leaf.shape), wide_dtype(leaf.dtype))

    return jax.tree.map(zeros, like)


def correlate(drawn: PyTree, past: PyTree, bands: int) -> tuple[PyTree, PyTree]:
    """Compute a round's noise y_t = z_t - sum_k c_k y_{t-k}; returns (y_t, past of round t + 1).

    Args:
      drawn: z_t, standard normal.
      past: the previous y, the newest first: leaves [bands - 1, ...].
      bands: number of coefficients of C; with one, y_t is z_t.
    """
    if bands == 1:
        return drawn, past
    weights = coefficients(bands)[1:]

    def noise(z: jax.Array, y: jax.Array) -> jax.Array:
        return z - jnp.tensordot(jnp.asarray(weights, z.dtype), y, 1)

    new = jax.tree.map(noise, drawn, past)
    return new, jax.tree.map(lambda y, rest: jnp.concatenate([y[None], rest[:-1]]), new, past)
