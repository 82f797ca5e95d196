"""Correlated noise: what a round adds takes back a part of what earlier rounds added.

A server that sums its noised rounds sums their noise. With noise y_1, y_2, ... such that C y = z
for independent z, the sums of y are smaller than those of z, and the mechanism is that of C x + z:
one Gaussian mechanism for all rounds. C is a banded square root of the matrix of prefix sums:

=========  =====================================================================================
paper      here
=========  =====================================================================================
C          lower triangular Toeplitz, of ``coefficients``: those of (1 - x)^(-1/2), cut off
p          ``bands``, how many there are; 1 is independent noise
b          ``separation``, rounds after which a client comes back
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

from fedjax_lab.types import PyTree


def coefficients(bands: int) -> np.ndarray:
    """1, 1/2, 3/8, ...: binomial(2 k, k) / 4^k.

    Args:
      bands: how many, at least 1.

    Returns:
      float64 [bands], falling.
    """
    k = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


@functools.lru_cache(maxsize=256)
def sensitivity(bands: int, rounds: int, separation: int) -> float:
    """How far all rounds' C x move where one client's messages, of norm 1 at most, move from 0.

    Since the coefficients are positive and fall, the worst client is in the first round, comes back
    as soon as it can, and sends the same each time (Theorem 2 of the paper).

    Args:
      bands: coefficients of C.
      rounds: of the run, at least 1.
      separation: rounds from one to the next in which a client takes part, at least.
    """
    column, total = coefficients(bands), np.zeros(rounds)
    for first in range(0, rounds, separation):
        reached = total[first : first + bands]
        reached += column[: len(reached)]
    return float(np.linalg.norm(total))


def no_noise_yet(like: PyTree, bands: int) -> PyTree:
    """The noise of the rounds before the first one: leaves [bands - 1, ...], () for one band.

    Args:
      like: shapes of what noise is added to.
      bands: coefficients of C.
    """
    if bands == 1:
        return ()

    def zeros(leaf: Any) -> jax.Array:
        return jnp.zeros((bands - 1, *leaf.shape), jnp.promote_types(leaf.dtype, jnp.float32))

    return jax.tree.map(zeros, like)


def correlate(drawn: PyTree, past: PyTree, bands: int) -> tuple[PyTree, PyTree]:
    """One round's noise y_t = z_t - sum_k c_k y_{t-k}, and the noise that is kept for the next one.

    Args:
      drawn: z_t, standard normal.
      past: the last y, the newest first: leaves [bands - 1, ...].
      bands: coefficients of C; with one, y_t is z_t.
    """
    if bands == 1:
        return drawn, past
    weights = coefficients(bands)[1:]

    def noise(z: jax.Array, y: jax.Array) -> jax.Array:
        return z - jnp.tensordot(jnp.asarray(weights, z.dtype), y, 1)

    new = jax.tree.map(noise, drawn, past)
    return new, jax.tree.map(lambda y, rest: jnp.concatenate([y[None], rest[:-1]]), new, past)
