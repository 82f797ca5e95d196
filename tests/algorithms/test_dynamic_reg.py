"""FedDyn, FedADMM and FedPD: exact local solutions, conserved means, the coin and its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, tree
from tests.algorithms.cases import N
from tests.algorithms.problem import (
    flat,
    initial_params,
    loss_fn,
    run_rounds,
    stack_rounds,
    toy_loss,
    toy_round,
)
from tests.reference import problem as reference

ALPHA = 0.5


def solve_exactly(algorithm, cohorts, state=None):
    """Rounds of the toy whose local steps converge: (state, x after each round)."""
    state = algorithm.init(jnp.asarray(reference.TOY_X0), 4) if state is None else state
    round_fn, path = jax.jit(algorithm.round_fn), []
    for t, cohort in enumerate(cohorts):
        state, _ = round_fn(state, toy_round(t, cohort, steps=120))
        path.append(np.asarray(algorithm.params(state)))
    return state, np.array(path)


def test_feddyn_with_exact_solutions_follows_the_closed_form(x64):
    """y_i = (a b + λ_i + α x) / (a + α), where the new λ_i is the gradient at y_i."""
    algorithm = algorithms.feddyn(toy_loss, client_lr=0.4, prox_weight=ALPHA)
    cohorts = reference.TOY_COHORTS * 4
    state, path = solve_exactly(algorithm, cohorts)
    x, h, duals = reference.TOY_X0, np.zeros(2), np.zeros((4, 2))
    for cohort, actual in zip(cohorts, path, strict=True):
        i = list(cohort)
        a, b = reference.TOY_A[i], reference.TOY_B[i]
        y = (a * b + duals[i] + ALPHA * x) / (a + ALPHA)
        duals[i] = a * (y - b)
        h = duals.mean(0)
        x = y.mean(0) - h / ALPHA
        np.testing.assert_allclose(actual, x, atol=1e-10)
    np.testing.assert_allclose(state.clients, duals, atol=1e-10)
    np.testing.assert_allclose(state.server.mean_dual, h, atol=1e-10)


@pytest.mark.methods
def test_with_exact_solutions_fedpd_is_feddyn(x64):
    """And both reach the optimum, where FedAvg stalls."""
    ends = []
    for factory in (algorithms.feddyn, algorithms.fedpd):
        algorithm = factory(toy_loss, client_lr=0.4, prox_weight=ALPHA)
        ends.append(solve_exactly(algorithm, [range(4)] * 60)[1])
    np.testing.assert_allclose(*ends, atol=1e-10)
    np.testing.assert_allclose(ends[0][-1], reference.TOY_OPTIMUM, atol=1e-6)


@pytest.mark.methods
def test_the_means_that_ragged_rounds_conserve(x64):
    """FedDyn: h = mean λ_i. FedADMM-W: x = mean of x_i + y_i / ρ."""
    drawn = reference.make_rounds(2, 8, cohort_size=4, max_steps=3, batch_size=4)
    options = {"client_lr": 0.2, "prox_weight": ALPHA}

    def end(algorithm):
        state = algorithm.init(initial_params(), N)
        return run_rounds(algorithm.round_fn, state, drawn)[0]

    def mean(rows):
        return flat(jax.tree.map(lambda leaf: leaf.mean(0), rows))

    state = end(algorithms.feddyn(loss_fn, **options))
    np.testing.assert_allclose(flat(state.server.mean_dual), mean(state.clients), atol=1e-12)
    state = end(algorithms.fedadmm(loss_fn, **options))
    z = tree.add_scaled(state.clients.params, 1 / ALPHA, state.clients.dual)
    np.testing.assert_allclose(flat(state.server.params), mean(z), atol=1e-12)


def test_fedpd_counts_bytes_where_the_coin_lets_it_communicate():
    batches = stack_rounds(reference.make_rounds(2, 20, cohort_size=4, max_steps=1, batch_size=4))

    @jax.jit
    def run(skip):
        algorithm = algorithms.fedpd(loss_fn, client_lr=0.2, skip_probability=skip)
        state = algorithm.init(initial_params(), N)
        state, metrics = jax.lax.scan(algorithm.round_fn, state, batches)
        return algorithm.params(state), metrics

    for skip, least, most in ((0.0, 20, 20), (0.4, 6, 18), (1.0, 0, 0)):
        params, metrics = run(skip)
        talks = np.asarray(metrics["communicated"])
        assert least <= talks.sum() <= most
        for name, each in (("bytes_up", 72), ("bytes_down", 2 * 72 + 1)):
            np.testing.assert_array_equal(metrics[name], metrics["participants"] * talks * each)
    np.testing.assert_array_equal(flat(params), flat(initial_params()))  # nobody heard of anyone
