"""The dual of GradMA's quadratic program on its Gram matrix: C unknowns, whatever d is.

How it is solved, and why so, stands in ``fedjax_lab.qp.project``, which measures and refines.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

_ENUMERATED = 3  # up to here all supports are tried
_JOINT_STEPS = 5  # active set steps that exchange many rows at once, before and after
_GRADIENT_STEPS = 50  # as many projected gradient steps; then rows are exchanged one at a time


def solve(
    gram: jax.Array,
    z0: jax.Array,
    r0: jax.Array,
    iterations: jax.Array,
    *,
    valid: jax.Array,
    max_iterations: int,
) -> tuple[jax.Array, jax.Array]:
    """Return dz >= -z0 [C] that minimises 1/2 dz' G dz + r0' dz, and the iteration count.

    The unknown is the correction dz: near the solution it is far smaller than z0 + dz.

    Args:
      gram: float [C, C], G, the inner products of unit rows.
      z0: float [C], the dual solution so far.
      r0: float [C], the residual G z0 + b, as measured.
      iterations: int32 scalar, active set steps so far.
      valid: bool [C], which rows are constraints.
      max_iterations: cap on the count.
    """
    solver = _try_all_supports if len(z0) <= _ENUMERATED else _exchange_rows
    return solver(gram, z0, r0, iterations, valid, max_iterations)


def _try_all_supports(gram, z0, r0, iterations, valid, max_iterations):
    """``solve`` for a few rows: the best of the 2^C solutions, counted as one iteration."""
    size = len(z0)
    ridge = _ridge(gram)

    def solution(support):  # and its largest |min(z, r)|
        support = support & valid
        system = jnp.where(support[:, None] & support[None, :], gram, 0)
        factor = _cholesky(system + jnp.diag(jnp.where(support, ridge, 1)))
        dz = jnp.where(support, 0, -z0)
        for _ in range(2):  # the second solve takes back most of the ridge
            dz = dz - _cholesky_solve(factor, jnp.where(support, r0 + matvec(gram, dz), 0))
        return residual(jnp.maximum(dz, -z0))

    def residual(dz):
        error = jnp.where(valid, jnp.minimum(z0 + dz, r0 + matvec(gram, dz)), 0)
        return dz, jnp.max(jnp.abs(error))

    supports = jnp.asarray(list(itertools.product((False, True), repeat=size)))
    solutions, errors = jax.vmap(solution)(supports)
    _, start = residual(jnp.zeros_like(z0))
    best = jnp.argmin(jnp.where(jnp.isfinite(errors), errors, jnp.inf))
    unsolved = (start > 0) & (iterations < max_iterations)
    dz = jnp.where(unsolved & (errors[best] < start), solutions[best], 0)
    return dz, iterations + unsolved


def _cholesky(matrix: jax.Array) -> list[list[jax.Array]]:
    """The lower factor of a few rows, written out: LAPACK's calls take longer than the sums."""
    factor: list[list[jax.Array]] = []
    for i in range(len(matrix)):
        row: list[jax.Array] = []
        for j in range(i):
            rest = matrix[i, j] - sum(a * b for a, b in zip(row, factor[j], strict=False))
            row.append(rest / factor[j][j])
        factor.append([*row, jnp.sqrt(matrix[i, i] - sum(a * a for a in row))])
    return factor


def _cholesky_solve(factor: list[list[jax.Array]], right: jax.Array) -> jax.Array:
    size = len(factor)
    x = list(right)
    for i in range(size):
        x[i] = (x[i] - sum(factor[i][j] * x[j] for j in range(i))) / factor[i][i]
    for i in reversed(range(size)):
        x[i] = (x[i] - sum(factor[j][i] * x[j] for j in range(i + 1, size))) / factor[i][i]
    return jnp.stack(x)


def least_pivot(gram: jax.Array, support: jax.Array) -> jax.Array:
    """The least distance of a unit row of the support to the span of those before it, or NaN."""
    system = jnp.where(
        support[:, None] & support[None, :], gram, jnp.eye(len(gram), dtype=gram.dtype)
    )
    if len(gram) <= _ENUMERATED:
        pivots = jnp.stack([row[-1] for row in _cholesky(system)])
    else:
        pivots = jnp.diagonal(jnp.linalg.cholesky(system))
    return jnp.min(pivots)


def _ridge(gram: jax.Array) -> float:
    """What rounding does to the smallest eigenvalue."""
    return 0.5 * float(jnp.finfo(gram.dtype).eps) * math.sqrt(gram.shape[0])


def _exchange_rows(gram, z0, r0, iterations, valid, max_iterations):
    """``solve`` for any number of rows: active set steps, projected gradient where they cycle."""
    eps = float(jnp.finfo(gram.dtype).eps)
    ridge = _ridge(gram)
    zero, index = jnp.zeros_like(z0), jnp.arange(gram.shape[0])

    def slope(dz):
        return r0 + matvec(gram, dz)

    def measure(dz):  # the largest |min(z, r)|
        return jnp.max(jnp.abs(jnp.where(valid, jnp.minimum(z0 + dz, slope(dz)), 0)))

    start = measure(zero)

    def floor(dz):  # G dz itself is no more accurate than eps ||dz||_1
        return jnp.maximum(1e-2 * start, 2 * eps * jnp.sum(jnp.abs(dz)))

    def solve_on(support, dz):  # r = 0 on the support, z = 0 off it
        system = jnp.where(support[:, None] & support[None, :], gram, 0)
        system = system + jnp.diag(jnp.where(support, ridge, 1))
        factor = jax.scipy.linalg.cho_factor(system, lower=True)
        dz = jnp.where(support, dz, -z0)
        for _ in range(2):  # the second solve takes back most of the ridge
            dz = dz - jax.scipy.linalg.cho_solve(factor, jnp.where(support, slope(dz), 0))
        return dz

    lipschitz = jnp.max(jnp.sum(jnp.abs(gram), axis=1))  # >= the largest eigenvalue

    def gradient_step(state):
        x, y, t, count = state
        new_x = jnp.where(valid, jnp.maximum(y - slope(y) / lipschitz, -z0), 0)
        restart = jnp.vdot(y - new_x, new_x - x) > 0
        new_t = jnp.where(restart, 1, (1 + jnp.sqrt(1 + 4 * t * t)) / 2)
        new_y = new_x + jnp.where(restart, 0, (t - 1) / new_t) * (new_x - x)
        return new_x, new_y, new_t, count + 1

    def projected_gradient(dz, steps):
        state = (dz, dz, jnp.ones((), gram.dtype), jnp.int32(0))
        return lax.while_loop(lambda s: s[3] < steps, gradient_step, state)[0]

    first_joint, last_joint = iterations, iterations + 2 * _JOINT_STEPS

    def active_set_step(state):
        dz, best, best_residual, barred, settled, _, count = state
        joint = count < last_joint
        cycles = count == first_joint + _JOINT_STEPS
        dz = jnp.where(cycles, best, dz)
        dz = projected_gradient(dz, jnp.where(cycles, _GRADIENT_STEPS, 0))
        r = slope(dz)
        # Joint exchange, a primal-dual active set step: z may be negative in between.
        joint_support = valid & (z0 + dz > r)
        # Single exchange, a Lawson-Hanson step: z stays >= 0 and the objective falls.
        support = valid & (z0 + dz > 0)
        outside = jnp.where(valid & ~support & ~barred, r, 0)
        complete = ~joint & settled & (jnp.min(outside) >= -floor(dz))
        entering = (index == jnp.argmin(outside)) & settled & ~complete
        support = jnp.where(joint, joint_support, support | entering)
        target = solve_on(support, dz)
        # How far z may go towards the target before an entry turns negative.
        blocking = support & (z0 + target <= 0)
        ratio = jnp.where(blocking, (z0 + dz) / jnp.where(blocking, dz - target, 1), jnp.inf)
        ratio = jnp.where(blocking & entering, 0, ratio)  # it depends on the rows of the support
        length = jnp.minimum(jnp.min(ratio), 1)
        new = jnp.where(ratio <= length, -z0, dz + length * (target - dz))
        new = jnp.where(jnp.all(jnp.isfinite(new)), new, dz)
        entered = entering & (z0 + new > 0)
        barred = jnp.where(jnp.any(entered), False, barred | entering)

        candidate = jnp.where(joint, jnp.maximum(target, -z0), new)
        residual = measure(candidate)
        better = residual < best_residual  # False where the factorisation failed
        best = jnp.where(better, candidate, best)
        best_residual = jnp.where(better, residual, best_residual)
        ended = complete | (best_residual <= floor(best))
        dz = jnp.where(joint, jnp.where(count + 1 < last_joint, target, 0), new)
        return dz, best, best_residual, barred, ~joint & (length == 1), ended, count + 1

    false = jnp.zeros_like(valid)
    state = (zero, zero, start, false, jnp.bool_(False), ~(start > 0), iterations)
    state = lax.while_loop(lambda s: ~s[5] & (s[6] < max_iterations), active_set_step, state)
    return state[1], state[6]


def matvec(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """``matrix @ vector`` in full precision."""
    return jnp.matmul(matrix, vector, precision=lax.Precision.HIGHEST)
