"""STEM's first estimate and its limits that take full gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms
from tests.algorithms.cases import N
from tests.algorithms.problem import (
    assert_is_fedavg_after_one_step,
    initial_params,
    loss_fn,
    to_batch,
    toy_loss,
    toy_path,
    toy_round,
)
from tests.reference import problem as reference

ALL = (0, 1, 2, 3)


@pytest.mark.methods
def test_without_memory_it_is_fedavg_after_one_gradient_step(x64):
    """The gradient step is that of ``init`` with round 0's batch."""
    drawn = reference.make_rounds(23, 4, N, 3, 4, equal_steps=True, weighted=False)
    stem = algorithms.stem(loss_fn, client_lr=0.2, momentum=1.0)
    state = jax.jit(stem.init, static_argnums=1)(initial_params(), N, to_batch(drawn[0][1], 0))
    assert_is_fedavg_after_one_step(stem, state, drawn, atol=1e-12)


def gradient_descent(a, b, rate, steps):
    x = reference.TOY_X0
    for _ in range(steps):
        x = x - rate * np.mean(a * (x - b), axis=0)
    return x


@pytest.mark.parametrize("momentum", [0.0, 0.4])
def test_with_full_gradients_and_one_step_it_is_gradient_descent(momentum, x64):
    stem = algorithms.stem(toy_loss, client_lr=0.1, momentum=momentum)
    batches = [toy_round(t, ALL, steps=1) for t in range(4)]
    state, round_fn = stem.init(jnp.asarray(reference.TOY_X0), 4), jax.jit(stem.round_fn)
    for batch in batches:
        state, _ = round_fn(state, batch)
    expected = gradient_descent(reference.TOY_A, reference.TOY_B, 0.1, 5)
    np.testing.assert_allclose(stem.params(state), expected, rtol=0, atol=1e-12)


def test_with_one_client_it_is_gradient_descent(x64):
    stem = algorithms.stem(toy_loss, client_lr=0.1, momentum=0.4)
    path = toy_path(stem, [(2,)] * 3)
    for r in range(3):
        expected = gradient_descent(reference.TOY_A[2:3], reference.TOY_B[2:3], 0.1, 3 * r + 4)
        np.testing.assert_allclose(path[r], expected, rtol=0, atol=1e-12)


@pytest.mark.methods
def test_with_identical_clients_it_is_gradient_descent(x64):
    """Whether a client looks back at its own iterate or at the mean."""
    expected = gradient_descent(reference.TOY_A[:1], reference.TOY_B[:1], 0.1, 7)
    examples = tuple(
        jnp.tile(jnp.asarray(table)[None, None, :1], (3, 3, 1, 1))
        for table in (reference.TOY_A, reference.TOY_B)
    )
    for prev in ("local", "mean"):
        stem = algorithms.stem(toy_loss, client_lr=0.1, momentum=0.4, prev_at_sync=prev)
        state, round_fn = stem.init(jnp.asarray(reference.TOY_X0), 3), jax.jit(stem.round_fn)
        for t in range(2):
            state, _ = round_fn(state, toy_round(t, (0, 1, 2))._replace(examples=examples))
        np.testing.assert_allclose(stem.params(state), expected, rtol=0, atol=1e-12)
