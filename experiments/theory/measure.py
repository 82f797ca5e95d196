"""Runs of a method on a problem, and slopes on logarithmic axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import build_round
from fedjax_lab.estimates import estimate

SEEDS = tuple(range(1, 11))


@functools.partial(jax.jit, static_argnames=("make", "look", "rounds", "cohort_size", "steps"))
def trace(make, problem, seeds, *, rounds, cohort_size, steps, look=None, most=None, **settings):
    """Run a method with several seeds at once; returns what ``look`` sees, [seeds, rounds, ...].

    Args:
      make: (loss, **settings) -> ``Algorithm``.
      problem: a ``Separable`` or ``Logistic``.
      seeds: int32 [R]; a seed decides cohorts and noise.
      rounds: T.
      cohort_size: S.
      steps: K.
      look: (problem, algorithm, state, metrics of the round) -> array; None: ||grad f||^2 of the
        model before the round.
      most: the clients take between 1 and so many local steps at random; None: K.
      **settings: numbers that ``make`` takes, such as rates; they may differ without compiling
        anew.
    """
    algorithm = make(problem.loss, **settings)
    round_fn = build_round(algorithm, "vmap")

    draw = functools.partial(batch_of, problem, cohort_size=cohort_size, steps=steps, most=most)

    def one(seed):
        key = jax.random.key(seed)

        def one_round(state, t):
            after, metrics = round_fn(state, draw(key, t))
            seen = squared_gradient(problem, algorithm, state)
            return after, seen if look is None else look(problem, algorithm, after, metrics)

        first = draw(key, jnp.int32(rounds))
        state = algorithm.init(problem.params(), problem.num_clients, first)
        return jax.lax.scan(one_round, state, jnp.arange(rounds))[1]

    return jax.vmap(one)(seeds)


def batch_of(problem, key, t, *, cohort_size, steps, most=None):
    """Draw the batch of round ``t``; arguments as in ``trace``."""
    counts = None
    if most is not None:
        of_counts = jax.random.fold_in(jax.random.fold_in(key, t), 1)
        counts = jax.random.randint(of_counts, (cohort_size,), 1, most + 1)
    return problem.batch(key, t, cohort_size, steps, counts)


def squared_gradient(problem, algorithm, state):
    """Return ||grad f||^2 at the global model."""
    return jnp.sum(problem.gradient(algorithm.params(state)) ** 2)


def slope(x, y):
    """Fit log y = c + slope log x by least squares for each seed; returns their ``Estimate``.

    Args:
      x: numbers above 0, [X].
      y: numbers above 0, [X, seeds].
    """
    across = np.log(np.asarray(x, np.float64))
    across -= across.mean()
    return estimate(across @ np.log(np.asarray(y, np.float64)) / np.square(across).sum())


def rounds_until(values, limit):
    """Return the first round from which on a trace [T] stays at most ``limit``; inf: none."""
    above = np.flatnonzero(~(np.asarray(values) <= limit))
    first = above[-1] + 1 if above.size else 0
    return float(first) if first < len(values) else np.inf
