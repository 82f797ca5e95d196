"""Params, losses and messages of few bits: sums over a cohort, totals and rates do not lose any."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, build_round, data, simulate
from fedjax_lab.clients.results import check_message
from tests.federations import batch_of

CLIENTS = 1000
LOW = (jnp.bfloat16, jnp.float16)


def linear(params, examples, key):
    return examples @ params["w"]


def filled(clients, dtype, steps=1, value=1.0):
    return batch_of(jnp.full((clients, steps, 1, 4), value, dtype))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("client_map", ["scan", "chunk:8", "vmap", "shard_map"])
def test_a_mean_over_a_thousand_clients(dtype, client_map):
    """Every gradient is 1; added up one by one in bfloat16, thousandths stop at 0.5."""
    method = algorithms.fedavg(linear, client_lr=1.0)
    state = method.init({"w": jnp.zeros(4, dtype)}, CLIENTS)
    state, metrics = build_round(method, client_map)(state, filled(CLIENTS, dtype))
    assert state.server.params["w"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(state.server.params["w"], np.float32), -1)
    assert metrics["delta_norm"] == 2
    assert metrics["local_steps"] == 1


def test_totals_and_rates_are_not_those_of_a_low_precision_loss():
    def loss_fn(params, examples, key):
        return linear(params, examples, key).astype(jnp.bfloat16)

    method = algorithms.fedavg(loss_fn, client_lr=0.3)
    state = method.init({"w": jnp.zeros(4)}, 1)
    state, _ = build_round(method)(state, filled(1, jnp.float32))
    np.testing.assert_allclose(state.server.params["w"], -0.3, rtol=1e-6)
    sizes = [3, 5, 7, 11, 13, 40, 61, 80, 90, 17]
    clients = data.from_clients({i: np.ones((n, 4), np.float32) for i, n in enumerate(sizes)})
    how = {"cohort_size": 10, "local_epochs": 1, "batch_size": 1, "eval_every": 20}
    result = simulate(method, {"w": jnp.zeros(4)}, clients, rounds=20, **how)
    assert result.history[-1]["gradients"] == 20 * sum(sizes)


def test_a_weight_that_a_client_learns_is_not_rounded():
    """APFL's inner product of 4.8e-7; the smallest number of float16 is 6e-8."""
    apart = np.float16([3e-4, -2e-4, 5e-4, 4e-4])
    gradient = np.float16([4e-4, 6e-4, 3e-4, 8e-4])
    rate = 2e5
    method = algorithms.apfl(linear, client_lr=rate, mixing=0.5)
    state = method.init({"w": jnp.zeros(4, jnp.float16)}, 1)
    state = state._replace(clients=state.clients._replace(own={"w": jnp.asarray(apart)[None]}))
    state, _ = build_round(method)(state, batch_of(jnp.asarray(gradient)[None, None, None]))
    exact = 0.5 - rate * (np.float64(apart) @ np.float64(gradient))
    assert 0 < exact < 0.45
    np.testing.assert_allclose(state.clients.mixing, [exact], rtol=1e-5)


@pytest.mark.parametrize("where", ["step_transform", "gradient_transform"])
@pytest.mark.parametrize(
    "transform",
    [optax.scale_by_adam(mu_dtype=jnp.float32), optax.trace(0.9, accumulator_dtype=jnp.float32)],
    ids=["adam", "trace"],
)
def test_a_transform_in_float32_moves_params_in_bfloat16(where, transform):
    method = algorithms.fedavg(linear, client_lr=0.5, **{where: transform})
    params = {"w": jnp.zeros(4, jnp.bfloat16)}
    state, _ = build_round(method, "scan")(method.init(params, 3), filled(3, jnp.bfloat16, steps=2))
    expected, memory = params, transform.init(params)
    for _ in range(2):
        gradient = {"w": jnp.ones(4, jnp.bfloat16)}
        step, memory = transform.update(gradient, memory, expected)
        expected = optax.apply_updates(expected, jax.tree.map(lambda u: -0.5 * u, step))
    np.testing.assert_allclose(
        np.asarray(state.server.params["w"], np.float32),
        np.asarray(expected["w"], np.float32),
        rtol=0.01,
    )


@pytest.mark.parametrize(
    ("value", "how", "message"),
    [
        (jnp.zeros(3, jnp.int32), "mean", r"message\['n'\] has int32.* takes a float"),
        (jnp.zeros(3, bool), "mean", r"message\['n'\] has bool.* takes a float"),
        (jnp.zeros(3, bool), "sum", r"message\['n'\] has bool.* takes a number"),
    ],
)
def test_what_cannot_be_averaged_is_refused(value, how, message):
    expected = {"n": jax.ShapeDtypeStruct(value.shape, value.dtype)}
    with pytest.raises(ValueError, match=message):
        check_message({"n": value}, expected, {"n": how})
    check_message({"n": value}, expected, {"n": "stack"})


def test_a_rate_may_be_mapped_around_a_round():
    def after(rate):
        method = algorithms.fedavg(linear, client_lr=rate)
        state = method.init({"w": jnp.zeros(4)}, 2)
        return build_round(method)(state, filled(2, jnp.float32))[0].server.params["w"]

    rates = jnp.array([0.1, 0.2])
    np.testing.assert_allclose(jax.vmap(after)(rates), -np.outer(rates, np.ones(4)), rtol=1e-6)


def test_nobody_waits_for_a_client_without_work():
    clients = data.from_clients({i: np.ones((4, 4), np.float32) for i in range(10)})
    times = data.ClientTimes(step_seconds=1.0, deadline=100.0)
    how = {"cohort_size": 10, "local_steps": [0] + [3] * 9, "batch_size": 1, "eval_every": 1}
    method = algorithms.fedavg(linear, client_lr=0.1)
    result = simulate(method, {"w": jnp.zeros(4)}, clients, rounds=2, times=times, **how)
    assert [row["round_seconds"] for row in result.history] == [3.0, 3.0]
    assert [row["dropped_clients"] for row in result.history] == [0, 0]
