"""Leaving out the clients that are not finite, at the cost of looking at the sums alone.

To look at every client's message takes a pass over it, a tenth of a round of a small model. But
as long as a cohort's sums are finite, so is each of its clients. Only a cohort whose sums are not
is run once more, client by client looked at.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import jaxpr_as_fun

from fedjax_lab import tree
from fedjax_lab.machine.program import UNLESS_FINITE
from fedjax_lab.types import PyTree


def run_until_finite(
    run: Callable[[jax.Array], PyTree], looked_at: Callable[[PyTree], PyTree]
) -> PyTree:
    """``run(False)`` if what is looked at in it is finite, else ``run(True)``.

    The program has ``run`` once. Where several runs are batched, all are run again if one must.

    Args:
      run: whether to look at each client -> the cohort's results.
      looked_at: results -> the part of them that has to be finite.
    """
    traced, shapes = jax.make_jaxpr(run, return_shape=True)(jnp.asarray(False))
    structure = jax.tree.structure(shapes)

    def attempt(carry, look):
        def again(_):
            results = jax.tree.unflatten(structure, jaxpr_as_fun(traced)(look))
            return results, tree.all_finite(looked_at(results))

        results, done = carry
        with jax.named_scope(UNLESS_FINITE):
            return jax.lax.cond(_everywhere(done), lambda same: same, again, (results, done)), None

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    looks = jnp.array([False, True])
    (results, _), _ = jax.lax.scan(attempt, (nothing, jnp.asarray(False)), looks)
    return results


def is_finite(values: PyTree, look: jax.Array) -> jax.Array:
    """Whether all of ``values`` are finite; without a look, they are taken to be.

    Args:
      values: pytree of arrays.
      look: bool scalar, the same for all clients.
    """
    return jax.lax.cond(look, tree.all_finite, lambda _: jnp.asarray(True), values)


@custom_vmap
def _everywhere(done: jax.Array) -> jax.Array:
    return done


@_everywhere.def_vmap
def _everywhere_of_a_batch(axis_size, in_batched, done):
    del axis_size
    return (_everywhere(done.all()) if in_batched[0] else _everywhere(done)), False
