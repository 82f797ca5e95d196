"""A loop of one's own over devices: examples are copied to them once."""

import functools
import gc

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab import algorithms, build_round, data, models, simulate
from fedjax_lab.clients import sources
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.clients.sources import Sources, on_any_device, on_devices
from fedjax_lab.simulation.evaluate import build_client_evaluation
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


def test_copies_on_other_devices_are_moved_and_parts_on_the_same_ones_stay(mesh):
    wide = parse_client_map("shard_map:4").mesh
    copies, parts = PartitionSpec(), PartitionSpec("clients")
    x = np.arange(8.0)
    values = {
        "here": jax.device_put(x, NamedSharding(mesh, copies)),
        "parts": jax.device_put(x, NamedSharding(mesh, parts)),
        "there": jax.device_put(x, NamedSharding(wide, copies)),
        "parts there": jax.device_put(x, NamedSharding(wide, parts)),
        **{"alone": jax.numpy.asarray(x), "numpy": x},
    }
    moved = on_devices(mesh, values)
    for name in ("here", "parts", "alone", "numpy"):
        assert moved[name] is values[name], name
    for name in ("there", "parts there"):
        assert moved[name].sharding == NamedSharding(mesh, copies)
        np.testing.assert_array_equal(moved[name], x)
    bound = jax.device_put(x, jax.devices()[3])
    assert on_devices(mesh, [bound])[0].sharding == NamedSharding(mesh, copies)
    assert not any(leaf.committed for leaf in on_any_device([values["here"], bound]))
    assert all(leaf.committed for leaf in on_any_device([values["here"], values["parts"]]))
    same = {"a": values["here"], "b": values["parts"], "c": values["alone"]}
    assert on_devices(None, same)["b"] is same["b"]
    assert on_devices(None, values)["there"].devices() == {jax.devices()[0]}


def federation():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)).astype(np.float32)
    return data.partition((x, rng.integers(0, 2, 40)), "iid", num_clients=8, seed=0)


@pytest.mark.methods
def test_a_loop_may_change_its_cohorts_by_what_the_model_does():
    """Each size of a cohort has devices of its own, and evaluations use all of them."""
    clients, model = federation(), models.build("linear", num_classes=2)
    algorithm = algorithms.scaffold(models.classification_loss(model.apply), client_lr=0.1)
    params = jax.jit(model.init)(jax.random.key(0), clients.examples.x[:1])
    how = {"local_steps": 2, "batch_size": 2}
    accuracy_of = build_client_evaluation(models.accuracy_counts(model.apply), clients)

    def worst(accuracy, size, key, round):
        return jax.numpy.argsort(accuracy)[:size]

    def run(client_map, bring):
        first = simulate(
            algorithm, params, clients, rounds=2, client_map=client_map, cohort_size=3, **how
        )
        state, round_fn = bring(first.state), build_round(algorithm, client_map)
        for t, size in enumerate((3, 8, 2, 5)):
            accuracy = bring(accuracy_of(algorithm.params(state)))
            batch = data.draw_batch(
                *(clients, jax.random.key(1), t),
                **how,
                cohort_size=size,
                sample_cohort=functools.partial(worst, accuracy, size),
            )
            batch = batch._replace(weights=bring(1.5 - accuracy[batch.client_ids]))
            state, _ = round_fn(state, batch)
        return state

    found = run("auto", lambda values: values)
    expected = run("scan", lambda values: jax.tree.map(np.asarray, values))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.methods
def test_models_of_runs_on_other_devices_go_together():
    """A cohort of 1 runs on one device, one of 8 on all."""
    clients, model = federation(), models.build("linear", num_classes=2)
    algorithm = algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.1)
    params = jax.jit(model.init)(jax.random.key(0), clients.examples.x[:1])
    how = {"local_steps": 2, "batch_size": 2, "rounds": 2}
    one, two, many = (
        simulate(algorithm, params, clients, cohort_size=size, **how) for size in (1, 2, 8)
    )
    means = jax.tree.map(lambda a, b, c: (a + b + c) / 3, one.params, two.params, many.params)
    leaves = [np.asarray(jax.tree.leaves(run.params)[0]) for run in (one, two, many)]
    np.testing.assert_allclose(jax.tree.leaves(means)[0], np.mean(leaves, axis=0), rtol=1e-6)

    def distance(from_model, params):
        apart = jax.tree.map(lambda a, b: jax.numpy.abs(a - b).max(), from_model, params)
        return {"distance": jax.numpy.stack(jax.tree.leaves(apart)).max()}

    everybody = jax.make_mesh(
        (jax.device_count(),), ("mine",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    x = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
    divided = jax.device_put(x, NamedSharding(everybody, PartitionSpec("mine")))

    @jax.jit
    def mean_logit(params, x):
        return model.apply(params, x, None).mean()

    for size in (1, 8):
        evaluate = lambda params: {"logit": mean_logit(params, divided)}  # noqa: E731
        run = simulate(algorithm, params, clients, cohort_size=size, evaluate=evaluate, **how)
        assert run.history[-1]["logit"] == pytest.approx(float(mean_logit(run.params, x)), rel=1e-5)

    for size, before in ((1, many), (2, many), (8, one)):
        evaluate = functools.partial(distance, before.params)
        run = simulate(algorithm, params, clients, cohort_size=size, evaluate=evaluate, **how)
        expected = distance(before.params, run.params)["distance"]
        assert run.history[-1]["distance"] == pytest.approx(float(expected))


@pytest.mark.parametrize("client_map", few(1, ["scan", "auto", "shard_map", "shard_map:2"]))
def test_a_loop_of_ones_own_copies_once_and_agrees_with_simulate(client_map, monkeypatch):
    clients, model = federation(), models.build("linear", num_classes=2)
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


def test_a_mesh_of_the_caller_is_told():
    """JAX has one mesh in effect, and ended with an error about abstract meshes."""
    mine = jax.make_mesh((2,), ("mine",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mine), pytest.raises(ValueError, match="has set a mesh with the axes mine"):
        parse_client_map("shard_map:2")
    assert parse_client_map("shard_map:2").shares == 2
