"""A loop of one's own over devices: examples are copied to them once."""

import gc

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab import algorithms, build_round, data, models, simulate
from fedjax_lab.clients import sources
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.clients.sources import Sources
from tests.tiers import few


@pytest.fixture
def mesh():
    return parse_client_map("shard_map:2").mesh


def test_examples_are_copied_once_and_forgotten_with_the_original(mesh):
    held, x = Sources(), {"x": jax.numpy.arange(6.0), "y": jax.numpy.arange(3)}
    first = held.on_all(mesh, x)
    assert first["x"].sharding.device_set == set(mesh.devices.flat)
    np.testing.assert_array_equal(first["x"], np.arange(6.0))
    assert held.on_all(mesh, dict(x)) is first
    wider = held.on_all(parse_client_map("shard_map:4").mesh, x)
    assert len(wider["x"].sharding.device_set) == 4
    other = held.on_all(mesh, {"x": x["x"] + 1})
    assert other["x"][0] == 1
    del first, wider, other
    x.clear()
    gc.collect()
    assert held._copies is None


def test_what_may_change_or_is_spread_stays(mesh):
    held = Sources()
    mutable = {"x": np.arange(3)}
    assert held.on_all(mesh, mutable) is mutable
    spread = {"x": jax.device_put(np.arange(4), NamedSharding(mesh, PartitionSpec("clients")))}
    assert held.on_all(mesh, spread) is spread
    alone = {"x": jax.numpy.arange(3)}
    assert held.on_all(None, alone) is alone


@pytest.mark.parametrize("client_map", few(1, ["scan", "auto", "shard_map", "shard_map:2"]))
def test_a_loop_of_ones_own_copies_once_and_agrees_with_simulate(client_map, monkeypatch):
    rng = np.random.default_rng(0)
    clients = data.partition(
        (rng.normal(size=(40, 4)).astype(np.float32), rng.integers(0, 2, 40)),
        "iid",
        num_clients=8,
        seed=0,
    )
    model = models.build("linear", num_classes=2)
    params = jax.jit(model.init)(jax.random.key(0), clients.examples.x[:1])
    algorithm = algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.1)
    how = {"cohort_size": 4, "local_steps": 2, "batch_size": 2}
    copied = []
    put = jax.device_put
    monkeypatch.setattr(sources.jax, "device_put", lambda *a: copied.append(1) or put(*a))
    round_fn = build_round(algorithm, client_map)
    state = algorithm.init(params, num_clients=8)
    for t in range(3):
        batch = data.draw_batch(clients, jax.random.key(5), t, **how)
        state, _ = round_fn(state, batch)
    monkeypatch.undo()
    assert len(copied) <= 1
    assert (client_map.startswith("shard_map")) <= bool(copied)
    expected = simulate(algorithm, params, clients, rounds=3, client_map="scan", seed=5, **how)
    for ours, theirs in zip(
        jax.tree.leaves(algorithm.params(state)), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
