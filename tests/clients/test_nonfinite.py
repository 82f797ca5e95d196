"""Every method, one broken client, each way of mapping clients: the others go on without it."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, tree
from fedjax_lab.types import CohortBatch
from tests.algorithms.cases import MAIN, N
from tests.algorithms.compiled import begin
from tests.algorithms.problem import initial_params, loss_fn, to_batch
from tests.reference import problem as reference

MAPS = ("vmap", "scan", "shard_map:2")
SLOT = 1


def rounds():
    drawn = reference.make_rounds(11, 3, cohort_size=4, max_steps=3, batch_size=4, equal_steps=True)
    return [to_batch(padded, t) for t, (_, padded) in enumerate(drawn)]


def spoilt(batch, value):
    x = np.array(batch.examples["x"])
    x[SLOT] = value
    return batch._replace(examples=batch.examples | {"x": jax.device_put(x)})


def absent(batch):
    taking = np.ones(4, bool)
    taking[SLOT] = False
    return batch._replace(participates=jax.device_put(taking))


@pytest.mark.slow
@pytest.mark.parametrize("client_map", MAPS)
@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.id)
def test_it_is_left_out_and_counted(case, client_map):
    algorithm = case.build(loss_fn)
    round_fn = jax.jit(build_round(algorithm, client_map))
    first, second, third = rounds()
    start, _ = round_fn(begin(algorithm, initial_params(), num_clients=N), first)

    def end(batch):
        state, metrics = round_fn(start, batch)
        return round_fn(state, third)[0], metrics

    expected, metrics = end(absent(second))
    assert metrics["nonfinite_clients"] == 0
    for value in (np.nan, np.inf):
        state, metrics = end(spoilt(second, value))
        assert metrics["nonfinite_clients"] == 1
        chex.assert_trees_all_close(state, expected, rtol=1e-5, atol=1e-6)
    # A finite 1e30 may overflow in one client or, through what the server broadcasts in a second
    # exchange, in all of them: the model stays finite, and whoever was left out is counted.
    state, metrics = round_fn(start, spoilt(second, 1e30))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(algorithm.params(state)))
    assert metrics["nonfinite_clients"] + metrics["participants"] == 4


@pytest.mark.parametrize("client_map", MAPS)
def test_weights_of_zero_and_absent_clients_reach_no_sum(client_map):
    """Also where clients that are not finite are kept."""
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.2)
    round_fn = jax.jit(build_round(algorithm, client_map, "keep"))
    (batch, *_) = rounds()
    state = begin(algorithm, initial_params())
    weights = np.array([1.0, 0.0, 2.0, 1.0], np.float32)
    weighted = batch._replace(weights=jax.device_put(weights))
    expected, _ = round_fn(state, weighted)
    actual, metrics = round_fn(state, spoilt(weighted, np.nan))
    chex.assert_trees_all_equal(actual.server, expected.server)
    assert "nonfinite_clients" not in metrics
    expected, _ = round_fn(state, absent(batch))
    actual, _ = round_fn(state, absent(spoilt(batch, np.nan)))
    chex.assert_trees_all_equal(actual, expected)
    broken, _ = round_fn(state, spoilt(batch, np.nan))
    assert np.isnan(algorithm.params(broken)["W"]).all()


def test_healthy_cohorts_are_run_once_also_where_runs_are_batched():
    """Under vmap a condition on a batch would compute both of its branches, for every cohort."""
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.2)
    (batch, *_) = rounds()
    state = begin(algorithm, initial_params())
    states = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), state)
    batched = jax.vmap(build_round(algorithm, "vmap"), in_axes=(0, None))
    text = str(jax.make_jaxpr(batched)(states, batch))
    assert text.count("cond[") == 1  # whether to look at each client
    (condition,) = re.findall(r"cond_jaxpr=.*?cond_nconsts", text, re.DOTALL)
    assert "reduce_and" in condition
    assert "reduce_or" not in condition  # which ends a loop with a batch of conditions
    alone, metrics = jax.jit(build_round(algorithm, "vmap"))(state, spoilt(batch, np.nan))
    together, counts = jax.jit(batched)(states, spoilt(batch, np.nan))
    chex.assert_trees_all_close(jax.tree.map(lambda leaf: leaf[1], together), alone, atol=1e-6)
    np.testing.assert_array_equal(counts["nonfinite_clients"], [1, 1])
    assert metrics["nonfinite_clients"] == 1


def test_a_round_that_leaves_out_clients_has_derivatives():
    """By central differences, along a direction of the params, the examples and the rate."""
    (batch, *_) = rounds()
    start = (initial_params(), batch.examples["x"], 0.2)
    start = jax.tree.map(lambda x: np.asarray(x, float), start)
    direction = jax.tree.map(np.cos, start)

    def moved(by):
        return jax.tree.map(lambda a, b: jnp.asarray(a + by * b), start, direction)

    @jax.jit
    def norm(point):
        params, x, client_lr = point
        algorithm = algorithms.fedavg(loss_fn, client_lr=client_lr)
        examples = {"x": x, "y": batch.examples["y"]}
        state, _ = algorithm.round_fn(algorithm.init(params, N), batch._replace(examples=examples))
        return tree.norm(algorithm.params(state), squared=True)

    with jax.enable_x64(True):
        expected = (norm(moved(1e-6)) - norm(moved(-1e-6))) / 2e-6
        gradient = jax.jit(jax.grad(norm))(moved(0.0))
        actual = sum(map(np.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_leaving_out_clients_takes_less_memory_than_another_model():
    side = 256

    def loss(params, examples, key):
        return jnp.square(jnp.tanh(examples @ params["a"]) @ params["b"]).mean(-1)

    params = {"a": jnp.ones((side, side)), "b": jnp.ones((side, side))}
    batch = CohortBatch(jnp.arange(2), jnp.ones((2, 2, 1, side)), jax.random.key(0), jnp.int32(0))
    algorithm = algorithms.fedavg(loss, client_lr=0.1)
    state = algorithm.init(params, 2)

    def temporary(how):
        round_fn = jax.jit(build_round(algorithm, "scan", how), donate_argnums=0)
        return round_fn.lower(state, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporary("exclude") - temporary("keep") < 2 * 4 * side**2
