"""Weighted sums over the cohort's stacked messages."""

import jax
import jax.numpy as jnp

from fedjax_lab.types import PyTree


def weighted_mean(stacked: PyTree, weights: jax.Array) -> PyTree:
    """sum_i weights[i] * stacked[i]; the weights [S] add up to 1, 0 for absent slots."""

    def mean(leaf):
        coefficients = weights.astype(leaf.dtype)
        return jnp.tensordot(coefficients, leaf, axes=1, precision=jax.lax.Precision.HIGHEST)

    return jax.tree.map(mean, stacked)
