"""The dual of GradMA's quadratic program on its Gram matrix: C unknowns, whatever d is.

How it is solved, and why so, stands in ``fedjax_lab.qp.project``, which measures and refines.
Rows are pointed at by bool [C] and matrices multiplied as sums of products: so the loop is made of
elementwise operations and sums alone, which every compiler fuses, and no product unit rounds.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Basis(NamedTuple):
    """The rows that may pull on q, and the Gram matrix swept on them.

    Attributes:
      support: bool [C].
      swept: float [C, C], symmetric. With G the Gram matrix, S the support and N the other rows:
        -G_SS^-1 on S; G_SS^-1 G_SN between S and N; and on N G_NN - G_NS G_SS^-1 G_SN, the inner
        products of what is left of the rows beside the span of the support.
    """

    support: jax.Array
    swept: jax.Array


class _State(NamedTuple):
    dz: jax.Array  # float [C], the correction so far
    r: jax.Array  # float [C], r0 + G dz
    basis: Basis
    row: jax.Array  # bool [C], the row that is to enter or leave; none: refine
    barred: jax.Array  # bool [C], rows that may not enter, since they left at once
    error: jax.Array  # float, the largest |r| on the support of the last step, if that refined
    ended: jax.Array  # bool
    iterations: jax.Array  # int32


def empty_basis(gram: jax.Array) -> Basis:
    """The basis without rows, of a Gram matrix [C, C] of unit rows.

    Args:
      gram: float [C, C], G.
    """
    size = gram.shape[0]
    return Basis(jnp.zeros(size, bool), gram + _ridge(gram) * jnp.eye(size, dtype=gram.dtype))


def _ridge(gram: jax.Array) -> float:
    """What rounding does to the smallest eigenvalue."""
    return 0.5 * float(jnp.finfo(gram.dtype).eps) * math.sqrt(gram.shape[0])


def step_on_support(basis: Basis, r: jax.Array) -> jax.Array:
    """The change of z, float [C], that takes r to 0 on the support.

    Args:
      basis: the support.
      r: float [C], the residual.
    """
    return jnp.where(basis.support, matvec(basis.swept, jnp.where(basis.support, r, 0)), 0)


def distances(basis: Basis) -> jax.Array:
    """How far each unit row is from the span of the support's other rows, float [C].

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
    """Return dz >= -z0 [C] that minimises 1/2 dz' G dz + r0' dz, its basis, and the count.

    The unknown is the correction dz: near the solution it is far smaller than z0 + dz.

    Args:
      gram: float [C, C], G, the inner products of unit rows.
      z0: float [C], the dual solution so far.
      r0: float [C], the residual G z0 + b, as measured.
      basis: the support of z0.
      iterations: int32 scalar, steps so far.
      valid: bool [C], which rows are constraints.
      max_iterations: cap on the count.
    """
    eps = float(jnp.finfo(gram.dtype).eps)

    def entering(basis, dz, r, barred):  # a row that q violates; the largest |r| on the support
        error = jnp.max(jnp.where(basis.support, jnp.abs(r), 0))
        outside = valid & ~basis.support & ~barred
        noise = jnp.maximum(_noise(dz, eps), 2 * error)
        wrong = jnp.where(z0 + dz > 0, -jnp.abs(r), r)  # or one that pulls for nothing
        return _least(jnp.where(outside, wrong, 0), -noise), error

    def step(state):
        z = z0 + state.dz
        basis = _sweep(state.basis, state.row)
        target = step_on_support(basis, state.r)
        # How far z may go before an entry turns negative; that row leaves next.
        blocking = basis.support & (z + target < 0)
        ratio = jnp.where(blocking, z / jnp.where(blocking, -target, 1), 1)
        leaving = _least(ratio, 1)
        dz = jnp.maximum(state.dz + jnp.min(ratio) * target, -z0)
        dz = jnp.where(leaving, -z0, dz)
        r = r0 + matvec(gram, dz)
        # A row that leaves as it enters depends on the others, up to rounding.
        enters = state.row & ~state.basis.support
        fails = enters & leaving
        entered = jnp.any(enters & ~leaving)
        barred = jnp.where(entered, False, state.barred | fails)
        row, error = entering(basis, dz, r, barred)
        row = jnp.where(jnp.any(leaving), leaving, row)
        # Written so that an error that is no number ends it.
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
    """How accurate G dz is."""
    return 2 * eps * jnp.sum(jnp.abs(dz))


def _least(values: jax.Array, bound: jax.Array | float) -> jax.Array:
    """Where the first of the least values is, bool [C], if that lies below the bound."""
    index = jnp.arange(values.shape[0])
    return (index == jnp.argmin(values)) & (jnp.min(values) < bound)


def _sweep(basis: Basis, row: jax.Array) -> Basis:
    """Take the row, bool [C] with one True or none, into the support or out of it."""
    support, swept = basis
    enters = jnp.any(row & ~support)
    column = jnp.sum(jnp.where(row[:, None], swept, 0), axis=0)
    pivot = jnp.sum(jnp.where(row, column, 0))
    # The square of a row's distance to the others is 1 at most; what rounding does to it grows with
    # what the others contribute to the row.
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
    """The basis of these rows, the farthest first; without those that depend on the others.

    Args:
      basis: any.
      support: bool [C].
    """

    def changes(basis):  # how much it matters, 0 where nothing is to change
        diagonal = jnp.diagonal(basis.swept)
        others = jnp.sum(jnp.where(basis.support[:, None], basis.swept**2, 0), axis=0)
        depends = diagonal <= 4 * _ridge(basis.swept) * (1 + others)
        enters = support & ~basis.support & ~depends
        return jnp.where(basis.support & ~support, jnp.inf, jnp.where(enters, diagonal, 0))

    def change(basis):
        return _sweep(basis, _least(-changes(basis), 0))

    return lax.while_loop(lambda basis: jnp.any(changes(basis) > 0), change, basis)


def matvec(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """``matrix @ vector`` of a symmetric matrix, as float32 sums.

    Args:
      matrix: float [C, C], symmetric.
      vector: float [C].
    """
    return jnp.sum(matrix * vector[:, None], axis=0)
