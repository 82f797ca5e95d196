"""Runs with the table of client rows in several places: the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, data, simulate
from tests.simulation.test_run import assert_same_bits

CLIENTS = 16
SETTINGS = {"rounds": 6, "cohort_size": 6, "local_steps": 2, "batch_size": 4, "eval_every": 3}


def loss_fn(params, examples, key):
    x, y = examples
    return (jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2


def make_clients():
    rng = np.random.default_rng(1)
    return data.from_clients(
        {
            str(i): (
                rng.normal(size=(n, 5)).astype(np.float32),
                rng.normal(size=n).astype(np.float32),
            )
            for i, n in enumerate(rng.integers(6, 15, CLIENTS))
        }
    )


PARAMS = {"w": jnp.linspace(-1, 1, 5), "b": jnp.zeros(())}
METHODS = {
    "fedavg": algorithms.fedavg(loss_fn, client_lr=0.1),
    "scaffold": algorithms.scaffold(loss_fn, client_lr=0.1),
    "gradma": algorithms.gradma(
        loss_fn, client_lr=0.1, server_momentum=0.9, memory_decay=0.5, memory_size=12
    ),
    "fedmoswa": algorithms.fedmoswa(loss_fn, client_lr=0.1),
    "fedspeed": algorithms.fedspeed(loss_fn, client_lr=0.1, server_dual="all"),
    "fafed": algorithms.fafed(loss_fn, client_lr=0.1, momentum=0.9, second_moment_decay=0.9),
    "cfedavg": algorithms.cfedavg(loss_fn, client_lr=0.1, compressor="top_k:0.5"),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "scaffold"]


def run(name, **settings):
    return simulate(METHODS[name], PARAMS, make_clients(), **{**SETTINGS, **settings})


@pytest.mark.parametrize("name", ["scaffold", *SLOW])
def test_a_sharded_table_gives_the_same_bits(name):
    whole = run(name, client_map="shard_map", client_store="device")
    sharded = run(name, client_map="shard_map")
    assert_same_bits(sharded.state, whole.state)
    assert sharded.history == whole.history
    for leaf in jax.tree.leaves(sharded.state.clients):
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {CLIENTS // 8}
    # Against one device, rounding aside.
    one = run(name, client_map="scan")
    for actual, expected in zip(
        jax.tree.leaves(sharded.state), jax.tree.leaves(one.state), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_sharded_run_goes_on_bit_for_bit(tmp_path):
    settings = {"client_map": "shard_map", "client_store": "sharded"}
    whole = run("scaffold", **settings)
    run("scaffold", run_dir=tmp_path, stop_when=lambda row: row["round"] == 3, **settings)
    resumed = run("scaffold", run_dir=tmp_path, **settings)
    assert_same_bits(resumed.state, whole.state)
    assert resumed.history == whole.history


def test_a_table_without_room_is_refused_by_simulate(monkeypatch):
    monkeypatch.setattr("fedjax_lab.simulation.stores.device_memory", lambda: 400)
    with pytest.raises(ValueError, match="scaffold keeps 24 bytes for each of 16 clients"):
        run("scaffold", client_map="scan")


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_model_of_a_billion_parameters_is_traced(name):
    params = {"w": jax.ShapeDtypeStruct((2**30,), jnp.float32)}
    method = getattr(algorithms, name)(lambda p, e, key: e[:, 0] * p["w"][0], client_lr=0.1)
    shape = jax.ShapeDtypeStruct

    def one_round(params, examples, key):
        from fedjax_lab import CohortBatch

        ids = jnp.arange(2, dtype=jnp.int32)
        batch = CohortBatch(ids, examples, key, jnp.zeros((), jnp.int32))
        return build_round(method, client_map="scan")(method.init(params, 4), batch)

    key = jax.eval_shape(lambda: jax.random.key(0))
    _, metrics = jax.eval_shape(one_round, params, shape((2, 1, 3, 1), jnp.float32), key)
    assert metrics["bytes_up"].dtype == jnp.float32
    up = 2**32 * (2 if name == "scaffold" else 1)
    assert method.uplink(params) == up
