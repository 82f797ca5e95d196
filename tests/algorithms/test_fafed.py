"""FAFED's first estimates and its limits: FedAvg, STEM, centralised STORM."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from fedjax_lab import algorithms, build_round
from tests.algorithms.cases import N
from tests.algorithms.compiled import begin
from tests.algorithms.problem import (
    assert_is_fedavg_after_one_step,
    flat,
    initial_params,
    loss_fn,
    run_rounds,
    to_batch,
    toy_loss,
    toy_path,
    toy_round,
)
from tests.federations import batch_of
from tests.reference import problem as reference

ALL = (0, 1, 2, 3)
OPTIONS = {"client_lr": 0.05, "momentum": 0.3, "second_moment_decay": 0.9, "stability": 0.1}


def constant_preconditioner(loss, lr, momentum):
    """A = sqrt(v) + 1e12 is constant to 12 digits; the learning rate makes up for it."""
    return algorithms.fafed(
        loss,
        client_lr=lr * 1e12,
        momentum=momentum,
        second_moment_decay=0.5,
        stability=1e12,
        precondition_first_step=True,
    )


def draw(rounds, **options):
    return reference.make_rounds(19, rounds, 4, 3, 4, **options)


@pytest.mark.methods
def test_init_takes_the_first_rounds_estimates(x64):
    """With round 0's batch or without, with ragged cohorts, full data given and ignored."""
    drawn = draw(5, full=True)
    algorithm = algorithms.fafed(loss_fn, precondition_first_step=True, **OPTIONS)
    ends = []
    for batch in (None, to_batch(drawn[0][1], 0)):
        state = begin(algorithm, initial_params(), batch)
        assert state.server.started == (batch is not None)
        moved = np.abs(flat(algorithm.params(state)) - flat(initial_params())).max()
        assert (moved > 1e-3) == (batch is not None)
        state, _ = run_rounds(build_round(algorithm, "vmap"), state, drawn)
        ends.append(flat(algorithm.params(state)))
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-12)
    without = [(clients, {k: v for k, v in p.items() if "full" not in k}) for clients, p in drawn]
    state, _ = run_rounds(algorithm.round_fn, begin(algorithm, initial_params()), without)
    np.testing.assert_allclose(flat(algorithm.params(state)), ends[0], rtol=0, atol=1e-12)


@pytest.mark.methods
def test_first_estimates_wait_for_somebody():
    drawn = draw(3, empty_round=0)
    algorithm = algorithms.fafed(loss_fn, **OPTIONS)
    start, round_fn = begin(algorithm, initial_params()), jax.jit(algorithm.round_fn)
    state, _ = round_fn(start, to_batch(drawn[0][1], 0))
    jax.tree.map(np.testing.assert_array_equal, start, state)
    state, _ = round_fn(state, to_batch(drawn[1][1], 1))
    assert state.server.started
    # From a batch without anybody the run starts in the same way.
    given = begin(algorithm, initial_params(), to_batch(drawn[0][1], 0))
    jax.tree.map(np.testing.assert_array_equal, start, given)
    given, _ = run_rounds(algorithm.round_fn, given, drawn[:2])
    jax.tree.map(np.testing.assert_array_equal, state, given)


def primitives(jaxpr):
    """Names of all primitives outside of the branches of conditions, and of those within."""
    outside, within = [], []
    for equation in jaxpr.eqns:
        outside.append(equation.primitive.name)
        for inner in jaxprs_in_params(equation.params):
            names, deeper = primitives(inner)
            (within if equation.primitive.name == "cond" else outside).extend(names)
            within.extend(deeper)
    return outside, within


@pytest.mark.parametrize("client_map", ["vmap", "scan"])
def test_later_rounds_do_not_compute_first_estimates(client_map):
    """They lie in a branch, also where clients are vmapped; after init with a batch nowhere."""
    drawn = draw(1, equal_steps=True)
    batch = to_batch(drawn[0][1], 0)
    batch = batch._replace(num_steps=None, example_mask=None, participates=None)
    algorithm = algorithms.fafed(loss_fn, **OPTIONS)
    round_fn = build_round(algorithm, client_map, "keep")  # "exclude" has a condition itself
    found = []
    for first in (None, batch):
        state = begin(algorithm, initial_params(), first)
        outside, within = primitives(jax.make_jaxpr(round_fn)(state, batch).jaxpr)
        found.append(("exp" in within, "cond" in outside, outside.count("exp")))
    flagged, settled = found
    assert flagged[:2] == (True, True)
    assert settled[:2] == (False, False)
    assert flagged[2] == settled[2] > 0


def test_a_first_exchange_that_is_over_is_left_out_with_the_same_bits():
    batch = to_batch(draw(1)[0][1], 0)._replace(participates=None, num_steps=None)
    algorithm = algorithms.fafed(loss_fn, **OPTIONS)
    first, steps = algorithm.phases

    def broadcast(server, round):  # as if the exchange had been made before
        return server.params, jnp.ones((), bool)

    def server_update(server, messages, cohort):
        return server, {}

    again = first._replace(broadcast=broadcast, server_update=server_update)
    made = dataclasses.replace(algorithm, phases=(again, steps))
    state, ends, sizes = begin(algorithm, initial_params(), batch), [], []
    for method in (algorithm, made):
        round_fn = jax.jit(build_round(method, "scan"))
        ends.append(round_fn(state, batch))
        sizes.append(round_fn.lower(state, batch).as_text().count("stablehlo.while"))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert sizes[0] < sizes[1]


@pytest.mark.methods
def test_without_momentum_and_preconditioner_it_is_fedavg_from_x1(x64):
    drawn = reference.make_rounds(19, 5, N, 3, 4, equal_steps=True, weighted=False)
    fafed = constant_preconditioner(loss_fn, 0.2, momentum=1.0)
    state = begin(fafed, initial_params(), to_batch(drawn[0][1], 0))
    assert_is_fedavg_after_one_step(fafed, state, drawn, atol=1e-10)


@pytest.mark.methods
def test_without_preconditioner_it_is_stem(x64):
    """Against STEM's golden trajectory with each client's own previous iterate."""
    algorithm = constant_preconditioner(toy_loss, 0.1, momentum=0.5)
    state = begin(algorithm, jnp.asarray(reference.TOY_X0), toy_round(0, ALL), 4)
    np.testing.assert_allclose(algorithm.params(state), [0.525, -0.35], atol=1e-9)
    golden = "0.5818906250 -0.0079531250 0.6204946875 0.2225005469 0.6465958629 0.3780153600"
    path = toy_path(algorithm, [ALL] * 3, state)
    np.testing.assert_allclose(path.ravel(), np.array(golden.split(), float), atol=1e-9)


def test_one_client_is_centralised_storm(x64):
    q, rho, beta, size = 3, 0.01, 0.9, 4

    def eta(t):
        return 0.05 / (1 + t) ** (1 / 3)

    def alpha(t):
        return 0.9 / (1 + 0.1 * t)

    rng = np.random.default_rng(20)
    a = rng.uniform(0.5, 2.0, size=(3, q, size, 2))
    b = rng.normal(size=(3, q, size, 2))

    def gradient(y, a, b):
        return np.mean(a * (y - b), axis=0)

    algorithm = algorithms.fafed(
        toy_loss,
        client_lr=eta,
        momentum=alpha,
        second_moment_decay=beta,
        stability=rho,
        precondition_first_step=True,
    )
    state = begin(algorithm, jnp.asarray(reference.TOY_X0), num_clients=1)
    round_fn = jax.jit(algorithm.round_fn)
    old = reference.TOY_X0
    m = gradient(old, a[0].reshape(-1, 2), b[0].reshape(-1, 2))
    v = m**2
    x = old - eta(0) * m / (np.sqrt(v) + rho)
    preconditioner = np.sqrt(v) + rho
    for r in range(3):
        examples = (jnp.asarray(a[r])[None], jnp.asarray(b[r])[None])
        state, _ = round_fn(state, batch_of(examples, r))
        for k in range(q):
            t = r * q + k + 1
            g = gradient(x, a[r, k], b[r, k])
            m = g + (1 - alpha(t)) * (m - gradient(old, a[r, k], b[r, k]))
            v = beta * v + (1 - beta) * g**2
            if t % q == 0:
                preconditioner = np.sqrt(v) + rho
            old, x = x, x - eta(t) * m / preconditioner
        np.testing.assert_allclose(algorithm.params(state), x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.clients[0], old, rtol=0, atol=1e-12)


def test_naive_method_follows_its_golden_trajectory_and_is_sign_descent_without_memory(x64):
    naive = algorithms.naive_adaptive_fedavg
    golden = "0.5017923104 -0.2972555539 0.4993348544 -0.1615083139 0.4988350566 -0.0526991762"
    algorithm = naive(toy_loss, client_lr=0.1, second_moment_decay=0.5, initial_second_moment=1.0)
    path = toy_path(algorithm, [ALL] * 3)
    np.testing.assert_allclose(path.ravel(), np.array(golden.split(), float), atol=1e-9)
    signs = toy_path(naive(toy_loss, client_lr=0.01, second_moment_decay=0.0), [(2,)])
    slope = reference.TOY_A[2] * (reference.TOY_X0 - reference.TOY_B[2])
    np.testing.assert_allclose(signs[0], reference.TOY_X0 - 0.03 * np.sign(slope), atol=1e-12)


def test_a_stability_that_half_precision_rounds_to_zero_stops_coordinates_without_a_gradient():
    """0 / 0 is a step of 0; the other coordinate takes the step of sign descent."""

    def slope_of_the_first(params, examples, key):
        return examples * params[0]

    algorithm = algorithms.fafed(
        slope_of_the_first,
        client_lr=0.125,
        momentum=1.0,
        second_moment_decay=0.0,
        stability=1e-9,
        precondition_first_step=True,
    )
    assert np.float16(1e-9) == 0
    examples = jnp.full((1, 3, 2), 0.5, jnp.float16)
    state = begin(algorithm, jnp.array([1, 1], jnp.float16), num_clients=1)
    state, metrics = jax.jit(algorithm.round_fn)(state, batch_of(examples))
    # A first step from the first estimates, and three of the round.
    np.testing.assert_array_equal(algorithm.params(state), [1 - 4 * 0.125, 1])
    assert metrics["nonfinite_clients"] == 0
