"""Sums over devices, next to NumPy's in the order of the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fedjax_lab import algorithms, data
from fedjax_lab.clients.exchange import sum_in_order
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.clients.store import AXIS, client_mesh
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.machine.compiler import figures
from fedjax_lab.round import build_round
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from tests.tiers import few

RNG = np.random.default_rng(0)
DEVICES = 4
# Small leaves travel together, large ones are divided along their longest axis, evenly or not.
SHAPES = {"scalar": (), "small": (8, 1024), "even": (8, 4096), "uneven": (32, 1031)}
SHAPES["flat"] = (34999,)


def summed(values):
    mesh = client_mesh(jax.devices()[:DEVICES])
    add = jax.shard_map(
        lambda tree: sum_in_order(jax.tree.map(lambda leaf: leaf[0], tree), AXIS, DEVICES),
        mesh=mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(add)(values)


def test_sums_are_those_in_the_order_of_the_devices():
    values = {
        name: RNG.normal(scale=10.0 ** RNG.integers(-3, 4, (DEVICES, *shape))).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    found = summed(values)
    for name, parts in values.items():
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    backwards = sum(parts for parts in values["even"][::-1])
    assert (np.asarray(found["even"]) != backwards).any()  # the order makes a difference


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16])
def test_a_leaf_keeps_its_dtype(dtype):
    values = {"a": jnp.ones((DEVICES, 3), dtype), "b": jnp.ones((DEVICES, 30, 2000), dtype)}
    found = summed({**values, "c": jnp.ones((DEVICES, 2), jnp.float32)})
    for name in values:
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], np.full(found[name].shape, DEVICES))


SCHEDULES = {
    "equal steps": {"local_steps": 1},
    "masks": {"local_steps": 3},
    "epochs": {"local_epochs": 2},
    "drop-outs": {"local_steps": 2, "devices": data.Devices(min_local_steps=1, dropout=0.2)},
    "poisson": {"local_steps": 2, "sampling": "poisson"},
}


@pytest.mark.methods
@pytest.mark.parametrize("cohort_size", [8, 6])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_round_exchanges_its_sum_and_who_was_finite(kind, cohort_size):
    # Neither the draw nor a count of the cohort has devices wait for each other.
    rng, key, client_map = np.random.default_rng(1), jax.random.key(0), f"shard_map:{DEVICES}"
    sizes = rng.integers(3, 9, 16)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    clients = data.from_clients({str(i): (normal(n, 3), normal(n)) for i, n in enumerate(sizes)})
    method = algorithms.fedavg(lambda w, xy, _: (xy[0] @ w["w"] - xy[1]) ** 2, client_lr=0.1)
    schedule = Schedule(cohort_size, batch_size=3, **SCHEDULES[kind])
    values = Placement(parse_client_map(client_map)).copies(({"w": jnp.zeros(3)}, clients, key))
    state = jax.eval_shape(Computation(method, schedule).start, *values, ())
    chunk = build_chunk(Computation(method, schedule), Placement(parse_client_map(client_map)))
    program = chunk.lower(state, *values[1:], jnp.int32(0), length=5).compile()
    found = figures(program).collectives
    assert [(c.kind, c.times) for c in found] == [("all-gather", 2 * 5)]


@pytest.mark.methods
def test_equal_steps_are_dealt_to_the_devices_without_a_sort_and_as_with_one():
    rng = np.random.default_rng(2)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    clients = data.from_clients({str(i): (normal(6, 3), normal(6)) for i in range(8)})
    method = algorithms.fedavg(lambda w, xy, _: (xy[0] @ w["w"] - xy[1]) ** 2, client_lr=0.1)
    equal = Schedule(6, batch_size=2, local_steps=3).draw(clients, jax.random.key(0), jnp.int32(0))
    counted = equal._replace(num_steps=jnp.full(6, 3, jnp.int32))
    state = method.init({"w": jnp.zeros(3)}, 8)
    rounds = jax.jit(build_round(method, f"shard_map:{DEVICES}"))
    known, sorts = rounds.lower(state, equal).as_text(), rounds.lower(state, counted).as_text()
    assert (known.count("stablehlo.sort"), sorts.count("stablehlo.sort")) == (0, 2)
    jax.tree.map(np.testing.assert_array_equal, rounds(state, equal), rounds(state, counted))


@pytest.mark.parametrize("make", few(1, [algorithms.scaffold, algorithms.gradma_s]))
def test_pmap_collects_messages_once_and_the_server_exchanges_nothing(make):
    options = {"memory_size": 12} if make is algorithms.gradma_s else {}
    method = make(lambda w, x, _: (jnp.tanh(x @ w["w"]) @ w["v"]) ** 2, client_lr=0.1, **options)
    params = {"w": jnp.ones((5, 7)), "v": jnp.ones(7)}
    clients = data.from_clients({str(i): np.full((6, 5), i, np.float32) for i in range(16)})
    schedule = Schedule(8, batch_size=2, local_steps=3)
    place = Placement(parse_client_map("pmap/vmap"))
    values = place.copies((params, clients, jax.random.key(0)))
    state = jax.eval_shape(Computation(method, schedule).start, *values, ())
    chunk = build_chunk(Computation(method, schedule), place)
    program = chunk.lower(state, *values[1:], jnp.int32(0), length=1).compile()
    found = {c.kind: c.times for c in figures(program).collectives}
    assert found.keys() == {"all-gather", "all-reduce"}
    # Of the sums, and with rows of a number: whether they are finite.
    assert found["all-reduce"] == (2 if make is algorithms.scaffold else 1)
    sent = {c.kind: c.bytes for c in figures(program).collectives}["all-reduce"]
    vectors = 2 if make is algorithms.scaffold else 1  # of 42 numbers; then six metrics
    assert sent <= 4 * (vectors * 42 + 7)
    assert found["all-gather"] <= 2 * len(params) + 1  # rows or messages, and who was finite
