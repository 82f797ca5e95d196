"""Three functions from whose optimum naive adaptive FedAvg walks away, and FAFED does not.

f_1 = 3 x^2, and 6|x| - 3 where |x| > 1; f_2 = f_3 = -x^2, and -2|x| + 1 where |x| > 1. Their mean
is x^2 / 3, and (2|x| - 1) / 3 where |x| > 1: 0 is its only stationary point. (The paper prints
6|x| - 2 and (3/3)|x|; the gradients are the same, up to the latter.)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import CohortBatch, algorithms

START = jnp.float32(10.0)


def loss_fn(x, clients, key):
    del key
    square, line = x**2, 2 * jnp.abs(x) - 1
    size = jnp.where(jnp.abs(x) <= 1, square, line)
    return jnp.where(clients == 0, 3 * size, -size)


def path(algorithm, rounds, steps, cohort=(0, 1, 2)):
    """x after each round, from x = 10 on all clients."""
    examples = jnp.broadcast_to(jnp.array(cohort)[:, None, None], (len(cohort), steps, 1))

    def body(state, t):
        batch = CohortBatch(jnp.array(cohort), examples, jax.random.key(0), t)
        state, _ = algorithm.round_fn(state, batch)
        return state, algorithm.params(state)

    state = algorithm.init(jnp.asarray(10.0), 3)
    return jax.lax.scan(body, state, jnp.arange(rounds, dtype=jnp.int32))[1]


def naive(client_lr, second_moment_decay):
    return algorithms.naive_adaptive_fedavg(
        loss_fn, client_lr=client_lr, second_moment_decay=second_moment_decay
    )


def test_the_functions():
    """Values and slopes of the docstring, and that they are continuous."""
    values = jax.vmap(loss_fn, in_axes=(0, None, None))
    xs = jnp.array([0.5, 1.0, 1.0 + 1e-6, -4.0])
    each = values(xs, jnp.array([0, 1, 2]), None)
    np.testing.assert_allclose(each[:, 0], [0.75, 3, 3, 21], rtol=1e-5)
    np.testing.assert_allclose(each[:, 1], [-0.25, -1, -1, -7], rtol=1e-5)
    np.testing.assert_allclose(each.mean(1), [0.25 / 3, 1 / 3, 1 / 3, 7 / 3], rtol=1e-5)
    slopes = jax.jacobian(loss_fn)(jnp.float32(10), jnp.array([0, 1, 2]), None)
    np.testing.assert_allclose(slopes, [6, -2, -2])


@pytest.mark.methods
def test_the_papers_numbers(x64):
    for client, after in enumerate([9.8585786438, 10.1414213562, 10.1414213562]):
        np.testing.assert_allclose(path(naive(0.1, 0.5), 1, 1, (client,)), [after], atol=1e-9)
    expected = [10.0471404521, 10.0856304700, 10.1212653023, 10.1556918209]
    np.testing.assert_allclose(path(naive(0.1, 0.5), 4, 1), expected, atol=1e-9)
    np.testing.assert_allclose(path(naive(0.1, 0.5), 3, 5)[-1], 10.5234162945, atol=1e-9)


@pytest.mark.parametrize("q", [1, *(pytest.param(q, marks=pytest.mark.methods) for q in (5, 10))])
def test_the_naive_method_walks_away_for_a_thousand_steps(q, x64):
    """By eta / (3 sqrt(1 - beta^t)) in step t, whatever its parameters are."""
    grid = np.array([(eta, beta) for eta in (0.001, 0.01, 0.1) for beta in (0.0, 0.1, 0.5, 0.99)])

    def run(parameters):
        return path(naive(*parameters), 1000 // q, q)

    paths = jax.jit(jax.vmap(run))(jnp.asarray(grid))
    t = np.arange(1, 1001)
    for (eta, beta), xs in zip(grid, np.asarray(paths), strict=True):
        expected = 10 + np.cumsum(eta / (3 * np.sqrt(1 - beta**t)))
        np.testing.assert_allclose(xs, expected[q - 1 :: q], rtol=1e-9)
        assert (np.diff(xs) > 0).all()


@pytest.mark.parametrize("q", [1, pytest.param(5, marks=pytest.mark.methods)])
def test_fafed_walks_to_the_optimum(q, x64):
    algorithm = algorithms.fafed(loss_fn, client_lr=0.1, momentum=0.5, second_moment_decay=0.5)
    xs = np.asarray(jax.jit(lambda: path(algorithm, 3000 // q, q))())
    assert xs[0] < 10
    assert (np.diff(xs[xs > 1.5]) < 0).all()
    # With q = 5 the clients' drift under a fixed step remains.
    assert np.abs(xs[-1]) < (0.1 if q == 1 else 1.0)
