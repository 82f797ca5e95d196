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
    row: jax.Array  # int32, the row to enter or leave; C: none, refine
    enters: jax.Array  # bool, whether it enters
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

    size = len(r0)

    def entering(basis, dz, r, barred):  # the row to enter; the largest |r| on the support
        error = jnp.max(jnp.where(basis.support, jnp.abs(r), 0))
        outside = valid & ~basis.support & ~barred
        noise = jnp.maximum(_noise(dz, eps), 2 * error)
        wrong = jnp.where(z0 + dz > 0, -jnp.abs(r), r)  # or one with z > 0 for no reason
        worst, row = _smallest(jnp.where(outside, wrong, 0))
        return jnp.where(worst < -noise, row, size), error

    def step(state):
        z = z0 + state.dz
        basis = _sweep(state.basis, state.row, state.enters)
        target = step_on_support(basis, state.r)
        # How far z may move before an entry becomes negative; that row leaves next.
        blocking = basis.support & (z + target < 0)
        length, leaving = _smallest(jnp.where(blocking, z / jnp.where(blocking, -target, 1), 1))
        leaving = jnp.where(length < 1, leaving, size)
        dz = jnp.maximum(state.dz + length * target, -z0)
        dz = jnp.where(_is_row(leaving, size), -z0, dz)
        r = r0 + matvec(gram, dz)
        # A row that leaves when it enters depends on the others, up to rounding.
        fails = state.enters & (leaving == state.row)
        barred = state.barred | (fails & _is_row(leaving, size))
        barred = barred & ~(state.enters & ~fails)
        row, error = entering(basis, dz, r, barred)
        enters = (leaving == size) & (row < size)
        row = jnp.where(leaving < size, leaving, row)
        # Written so that an error of NaN ends the loop.
        rests = ~((error > _noise(dz, eps)) & (error <= 0.5 * state.error))
        ended = (row == size) & rests
        error = jnp.where(row < size, jnp.inf, error)
        return _State(dz, r, basis, row, enters, barred, error, ended, state.iterations + 1)

    dz, none = jnp.zeros_like(z0), jnp.zeros_like(valid)
    row, _ = entering(basis, dz, r0, none)
    infinite = jnp.asarray(jnp.inf, r0.dtype)
    first = _State(dz, r0, basis, row, row < size, none, infinite, jnp.bool_(False), iterations)
    last = lax.while_loop(lambda s: ~s.ended & (s.iterations < max_iterations), step, first)
    return last.dz, last.basis, last.iterations


def _noise(dz: jax.Array, eps: float) -> jax.Array:
    """Estimate the rounding error of G dz."""
    return 2 * eps * jnp.sum(jnp.abs(dz))


def _smallest(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the smallest of some values [C] and the first index of it; NaN is the smallest.

    One kernel computes both; ``jnp.min`` and ``jnp.argmin`` are two.
    """

    def smaller(some, others):
        (value, index), (other, place) = some, others
        is_smaller = (value < other) | (value != value) | ((value == other) & (index < place))
        return jnp.where(is_smaller, value, other), jnp.where(is_smaller, index, place)

    indices = jnp.arange(len(values), dtype=jnp.int32)
    start = jnp.asarray(jnp.inf, values.dtype), jnp.int32(len(values))
    return lax.reduce((values, indices), start, smaller, (0,))


def _is_row(row: jax.Array, size: int) -> jax.Array:
    """Mark a row by its number, bool [C]."""
    return jnp.arange(size) == row


def _sweep(basis: Basis, row: jax.Array, enters: jax.Array) -> Basis:
    """Add a row to the support if it enters, else remove it; C is no row."""
    support, swept = basis
    row = _is_row(row, len(support))
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
        least, row = _smallest(-changes(basis))
        return _sweep(basis, jnp.where(least < 0, row, len(support)), support[row])

    return lax.while_loop(lambda basis: jnp.any(changes(basis) > 0), change, basis)


def matvec(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """Compute ``matrix @ vector`` for a symmetric matrix, as float32 sums.

    Args:
      matrix: float [C, C], symmetric.
      vector: float [C].
    """
    return jnp.sum(matrix * vector[:, None], axis=0)
