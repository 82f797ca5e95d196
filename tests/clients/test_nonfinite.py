"""Every method, one broken client, each way of mapping clients: the others go on without it."""

import chex
import jax
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round
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
    assert text.count("cond[") == 2  # whether to run, and whether to look at each client
    alone, metrics = jax.jit(build_round(algorithm, "vmap"))(state, spoilt(batch, np.nan))
    together, counts = jax.jit(batched)(states, spoilt(batch, np.nan))
    chex.assert_trees_all_close(jax.tree.map(lambda leaf: leaf[1], together), alone, atol=1e-6)
    np.testing.assert_array_equal(counts["nonfinite_clients"], [1, 1])
    assert metrics["nonfinite_clients"] == 1
