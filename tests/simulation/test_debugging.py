"""JAX's settings for debugging: a run obeys them, or says what to do instead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, data, plan, simulate, sweep, tune
from fedjax_lab.data import Devices
from tests.federations import of_sizes

N = 4
SETTINGS = {"cohort_size": 2, "local_steps": 1, "batch_size": 2, "replace": True}
PARAMS = {"w": jnp.ones(())}


def falling(params, examples, key):
    """Its gradient is 1, so that w falls by the learning rate, and its root is NaN below 0."""
    return jnp.sqrt(params["w"]) * 0 + params["w"] + 0 * examples.x[:, 0]


def build(client_lr):
    return algorithms.fedavg(falling, client_lr=client_lr)


@functools.cache
def make_clients():
    return of_sizes([2] * N, np.ones((8, 1), np.float32))


def run(client_lr=0.4, **changes):
    options = {"rounds": 6, "eval_every": 6, "client_map": "scan", **SETTINGS} | changes
    return simulate(build(client_lr), PARAMS, make_clients(), **options)


def test_a_value_that_is_not_a_number_is_an_error_that_names_the_round():
    """w is 1, 0.6, 0.2 and -0.2 before the rounds 0 to 3."""
    raises = pytest.raises(FloatingPointError, match="in round 3 of fedavg: invalid value")
    with jax.debug_nans(True), raises:
        run()


@pytest.mark.methods
def test_in_a_sweep_the_error_names_the_chunk():
    points = {"client_lr": [0.1, 0.4]}
    options = {"rounds": 6, "eval_every": 2, "seeds": (0,), "run_map": "scan", **SETTINGS}
    raises = pytest.raises(FloatingPointError, match="in rounds 2 to 3 of a run: invalid value")
    with jax.debug_nans(True), raises:
        sweep(build, PARAMS, make_clients(), points=points, **options)


@pytest.mark.methods
@pytest.mark.parametrize(
    "changes", [{}, {"client_store": "host"}, {"devices": Devices(dropout=0.9)}]
)
def test_a_run_without_such_a_value_is_the_same_run(changes):
    expected = run(0.1, **changes)
    with jax.debug_nans(True):
        actual = run(0.1, **changes)
    assert float(actual.params["w"]) == pytest.approx(float(expected.params["w"]), rel=1e-6)
    assert [row["bytes_up"] for row in actual.history] == [expected.history[-1]["bytes_up"]]


def test_without_compilation_there_is_no_run():
    options = {"rounds": 2, **SETTINGS}
    with jax.disable_jit():
        for call, name in (
            (run, "simulate"),
            (lambda: sweep(build, PARAMS, make_clients(), points={"client_lr": [1]}, **options),
             "sweep"),
            (lambda: tune({"a": build}, {"client_lr": [1]}, PARAMS, make_clients(), **options),
             "tune"),
            (lambda: plan(build(0.1), PARAMS, make_clients(), **SETTINGS), "plan"),
        ):  # fmt: skip
            message = rf"jax_disable_jit is True; {name} .* under jax.disable_jit\(\): state, metr"
            with pytest.raises(ValueError, match=message):
                call()


@pytest.mark.methods
def test_without_compilation_there_is_a_round_as_the_message_says():
    algorithm, clients = build(0.1), make_clients()
    with jax.disable_jit():
        state = algorithm.init(PARAMS, clients.num_clients)
        batch = data.draw_batch(clients, jax.random.key(0), 0, **SETTINGS)
        state, metrics = build_round(algorithm, "scan")(state, batch)
    assert float(metrics["loss"]) == 1
    assert float(state.server.params["w"]) == pytest.approx(0.9)


@pytest.mark.methods
def test_guards_of_transfers_and_of_keys_do_not_stop_a_run():
    expected = run(0.1)
    with jax.transfer_guard("disallow"):
        assert run(0.1).history == expected.history
    warns = pytest.warns(UserWarning, match="jax_debug_key_reuse is True; simulate runs without")
    with jax.debug_key_reuse(True), warns:
        assert run(0.1).history == expected.history
