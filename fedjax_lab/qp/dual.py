"""The dual of GradMA's quadratic program on its Gram matrix: C unknowns for any d.

``fedjax_lab.qp.project`` explains the method; it also measures residuals and refines the solution.
Rows are selected by bool [C], and matrices are multiplied as sums of products. So the loop consists
of elementwise operations and sums only: every compiler fuses them, and no matrix unit rounds.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Basis(NamedTuple):
    """The support, which is the rows that may change q, and the Gram matrix swept on it.

    Attributes:
      support: bool [C].
      swept: float [C, C], symmetric. With G the Gram matrix, S the support and N the other rows:
        -G_SS^-1 on S; G_SS^-1 G_SN between S and N; and on N G_NN - G_NS G_SS^-1 G_SN, the inner
        products of the rows' components orthogonal to the span of the support.
    """

    support: jax.Array
    swept: jax.Array


class _State(NamedTuple):
    dz: jax.Array  # float [C], the correction so far
    r: jax.Array  # float [C], r0 + G dz
    basis: Basis
    row: jax.Array  # bool [C], the row to enter or leave; all False: refine
    barred: jax.Array  # bool [C], rows that may not enter, because they left at once
    error: jax.Array  # float, the largest |r| on the last step's support, if that refined
    ended: jax.Array  # bool
    iterations: jax.Array  # int32


def empty_basis(gram: jax.Array) -> Basis:
    """Return the basis with an empty support for a Gram matrix [C, C] of unit rows.

    Args:
      gram: float [C, C], G.
    """
    size = gram.shape[0]
    return Basis(jnp.zeros(size, bool), gram + _ridge(gram) * jnp.eye(size, dtype=gram.dtype))


def _ridge(gram: jax.Array) -> float:
    """Return the size of rounding errors in the smallest eigenvalue."""
    return 0.5 * float(jnp.finfo(gram.dtype).eps) * math.sqrt(gram.shape[0])


def step_on_support(basis: Basis, r: jax.Array) -> jax.Array:
    """Compute the change of z, float [C], with which r is 0 on the support.

    Args:
      basis: the support.
      r: float [C], the residual.
    """
    return jnp.where(basis.support, matvec(basis.swept, jnp.where(basis.support, r, 0)), 0)


def distances(basis: Basis) -> jax.Array:
    """Compute each unit row's distance from the span of the support's other rows, float [C].

    Args:
      basis: the support.
    """
    diagonal = jnp.diagonal(basis.swept)
    squares = jnp.where(basis.support, -1 / diagonal, diagonal)
    return jnp.sqrt(jnp.maximum(squares, _ridge(basis.swept)))


def solve(
    gram: jax.Array,
    z0: jax.Array,
    r0: jax.Array,
    basis: Basis,
    iterations: jax.Array,
    *,
    valid: jax.Array,
    max_iterations: int,
) -> tuple[jax.Array, Basis, jax.Array]:
    """Find dz >= -z0 [C] that minimises 1/2 dz' G dz + r0' dz; return dz, its basis, and the count.

    The unknown is the correction dz, which is far smaller than z0 + dz near the solution.

    Args:
      gram: float [C, C], G, the inner products of unit rows.
      z0: float [C], the dual solution so far.
      r0: float [C], the measured residual G z0 + b.
      basis: the support of z0.
      iterations: int32 scalar, steps so far.
      valid: bool [C], True for rows that are constraints.
      max_iterations: upper bound of the count.
    """
    eps = float(jnp.finfo(gram.dtype).eps)

    def entering(basis, dz, r, barred):  # the row to enter; the largest |r| on the support
        error = jnp.max(jnp.where(basis.support, jnp.abs(r), 0))
        outside = valid & ~basis.support & ~barred
        noise = jnp.maximum(_noise(dz, eps), 2 * error)
        wrong = jnp.where(z0 + dz > 0, -jnp.abs(r), r)  # or one with z > 0 for no reason
        return _least(jnp.where(outside, wrong, 0), -noise), error

    def step(state):
        z = z0 + state.dz
        basis = _sweep(state.basis, state.row)
        target = step_on_support(basis, state.r)
        # How far z may move before an entry becomes negative; that row leaves next.
        blocking = basis.support & (z + target < 0)
        ratio = jnp.where(blocking, z / jnp.where(blocking, -target, 1), 1)
        leaving = _least(ratio, 1)
        dz = jnp.maximum(state.dz + jnp.min(ratio) * target, -z0)
        dz = jnp.where(leaving, -z0, dz)
        r = r0 + matvec(gram, dz)
        # A row that leaves when it enters depends on the others, up to rounding.
        enters = state.row & ~state.basis.support
        fails = enters & leaving
        entered = jnp.any(enters & ~leaving)
        barred = jnp.where(entered, False, state.barred | fails)
        row, error = entering(basis, dz, r, barred)
        row = jnp.where(jnp.any(leaving), leaving, row)
        # Written so that an error of NaN ends the loop.
        rests = ~((error > _noise(dz, eps)) & (error <= 0.5 * state.error))
        ended = ~jnp.any(row) & rests
        error = jnp.where(jnp.any(row), jnp.inf, error)
        return _State(dz, r, basis, row, barred, error, ended, state.iterations + 1)

    dz, none = jnp.zeros_like(z0), jnp.zeros_like(valid)
    row, _ = entering(basis, dz, r0, none)
    infinite = jnp.asarray(jnp.inf, r0.dtype)
    first = _State(dz, r0, basis, row, none, infinite, jnp.bool_(False), iterations)
    last = lax.while_loop(lambda s: ~s.ended & (s.iterations < max_iterations), step, first)
    return last.dz, last.basis, last.iterations


def _noise(dz: jax.Array, eps: float) -> jax.Array:
    """Estimate the rounding error of G dz."""
    return 2 * eps * jnp.sum(jnp.abs(dz))


def _least(values: jax.Array, bound: jax.Array | float) -> jax.Array:
    """Mark the first of the smallest values, bool [C], if it is below the bound."""
    index = jnp.arange(values.shape[0])
    return (index == jnp.argmin(values)) & (jnp.min(values) < bound)


def _sweep(basis: Basis, row: jax.Array) -> Basis:
    """Add a row to the support, or remove it: bool [C] with at most one True."""
    support, swept = basis
    enters = jnp.any(row & ~support)
    column = jnp.sum(jnp.where(row[:, None], swept, 0), axis=0)
    pivot = jnp.sum(jnp.where(row, column, 0))
    # The square of a row's distance to the others is at most 1; its rounding error grows with the
    # others' contribution to the row.
    others = jnp.sum(jnp.where(support, column**2, 0))
    least = 4 * _ridge(swept) * (1 + others)
    pivot = jnp.where(enters, jnp.maximum(pivot, least), jnp.minimum(pivot, -0.5))
    ratio = column / pivot
    across = jnp.where(enters, ratio, -ratio)
    rest = swept - column[:, None] * ratio[None, :]
    new = jnp.where(row[:, None], across[None, :], jnp.where(row[None, :], across[:, None], rest))
    new = jnp.where(row[:, None] & row[None, :], -1 / pivot, new)
    return Basis(support ^ row, new)


def moved_to(basis: Basis, support: jax.Array) -> Basis:
    """Move the basis to these rows, the farthest first, without those that depend on the others.

    Args:
      basis: any basis.
      support: bool [C], the new support.
    """

    def changes(basis):  # the importance of changing each row, 0 for no change
        diagonal = jnp.diagonal(basis.swept)
        others = jnp.sum(jnp.where(basis.support[:, None], basis.swept**2, 0), axis=0)
        depends = diagonal <= 4 * _ridge(basis.swept) * (1 + others)
        enters = support & ~basis.support & ~depends
        return jnp.where(basis.support & ~support, jnp.inf, jnp.where(enters, diagonal, 0))

    def change(basis):
        return _sweep(basis, _least(-changes(basis), 0))

    return lax.while_loop(lambda basis: jnp.any(changes(basis) > 0), change, basis)


def matvec(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """Compute ``matrix @ vector`` for a symmetric matrix, as float32 sums.

    Args:
      matrix: float [C, C], symmetric.
      vector: float [C].
    """
    return jnp.sum(matrix * vector[:, None], axis=0)
