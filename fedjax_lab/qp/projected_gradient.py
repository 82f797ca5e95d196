"""The dual of GradMA's quadratic program by projected gradient steps, finished by ``qp.dual``.

Nesterov's acceleration (Beck and Teboulle, SIAM J. Imaging Sci. 2009) with the restarts of
O'Donoghue and Candes (Found. Comput. Math. 2015), with steps of 1 / L, where L is the largest sum
of |G| over a row. The support (the z above 0) is known long before the values of z, so the steps
stop when the support no longer changes. Then z is solved for on this support. If the support is
still wrong, for example with nearly parallel rows, the active-set steps that follow correct it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_lab.qp import dual

_AT_REST = 10  # steps without a change of the support, after which it counts as final


class _State(NamedTuple):
    dz: jax.Array  # float [C]
    ahead: jax.Array  # float [C], dz plus momentum, the point of the next gradient
    age: jax.Array  # int32, steps since the momentum was restarted
    rests: jax.Array  # int32, steps since the support changed
    moves: jax.Array  # bool, whether the last step was longer than rounding
    iterations: jax.Array  # int32


def solve(
    gram: jax.Array,
    z0: jax.Array,
    r0: jax.Array,
    basis: dual.Basis,
    iterations: jax.Array,
    *,
    valid: jax.Array,
    max_iterations: int,
) -> tuple[jax.Array, dual.Basis, jax.Array]:
    """Solve as ``dual.solve`` does, from a support that projected gradient steps find.

    Args:
      gram: float [C, C], G, the inner products of unit rows.
      z0: float [C], the dual solution so far.
      r0: float [C], the measured residual G z0 + b.
      basis: the support of z0.
      iterations: int32 scalar, steps so far; if there are any, the support counts as found.
      valid: bool [C], True for rows that are constraints.
      max_iterations: upper bound of the count.
    """
    eps = float(jnp.finfo(gram.dtype).eps)
    largest = jnp.maximum(jnp.max(jnp.sum(jnp.abs(gram), axis=0)), 1)  # at least G's eigenvalues
    is_first = iterations == 0

    def step(state):
        slope = r0 + dual.matvec(gram, state.ahead)
        dz = jnp.where(valid, jnp.maximum(state.ahead - slope / largest, -z0), 0)
        moved = dz - state.dz
        age = jnp.where(jnp.sum((state.ahead - dz) * moved) > 0, 0, state.age + 1)
        ahead = dz + age / (age + 3) * moved
        same = jnp.all((z0 + dz > 0) == (z0 + state.dz > 0))
        rests = jnp.where(same, state.rests + 1, 0)
        moves = jnp.max(jnp.abs(dz - state.ahead)) > eps * (1 + jnp.max(z0 + dz))
        return _State(dz, ahead, age, rests, moves, state.iterations + 1)

    def goes_on(state):
        return state.moves & (state.rests < _AT_REST) & (state.iterations < max_iterations)

    none, zero = jnp.zeros_like(z0), jnp.int32(0)
    start = _State(none, none, zero, zero, is_first, iterations)
    last = lax.while_loop(goes_on, step, start)
    basis = dual.moved_to(basis, jnp.where(is_first, valid & (z0 + last.dz > 0), basis.support))
    dz, basis, iterations = dual.solve(
        gram,
        z0 + last.dz,
        r0 + dual.matvec(gram, last.dz),
        basis,
        last.iterations,
        valid=valid,
        max_iterations=max_iterations,
    )
    return last.dz + dz, basis, iterations
