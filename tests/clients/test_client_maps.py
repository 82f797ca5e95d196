"""Every client map gives the twin's numbers, for each kind of exchange that a method can have."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab import with_compression
from fedjax_lab.clients import mapping, store
from tests.algorithms.cases.base import Problem
from tests.algorithms.compiled import both, case_of
from tests.algorithms.problem import CLIENT_MAPS, loss_fn

METHODS = pytest.mark.methods
# What a round's plumbing has to carry -> a method that has it.
KINDS = {
    "a mean": "fedavg",
    "a sum and client rows": "scaffold",
    "messages one by one": "gradma_s",
    "two exchanges": "mime",
    "rows that depend on the mean": "fedpd",
    "first estimates": "fafed",
    "compressed messages and residuals": "cfedavg",
    "a gradient of a second model": "moon",
}


# Clients one by one, some at a time, and over devices. Options of methods run under scan, too,
# and pmap differs from shard_map in how it cuts arrays. `make test-methods` has the rest.
AT_ONCE = {
    ("messages one by one", "chunk:2"),
    ("two exchanges", "chunk:2"),
    ("a sum and client rows", "shard_map"),
}
PAIRS = [
    pytest.param(kind, client_map, marks=() if (kind, client_map) in AT_ONCE else METHODS)
    for kind, client_map in (
        *((kind, client_map) for kind in KINDS for client_map in ("chunk:2", "shard_map")),
        *(("a sum and client rows", client_map) for client_map in ("scan", "pmap")),
    )
]


@pytest.mark.parametrize(("kind", "client_map"), PAIRS)
def test_maps_agree_with_the_twin(kind, client_map, x64):
    ours, theirs = both(case_of(KINDS[kind]), client_map)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "client_map",
    [pytest.param(m, marks=() if m == "shard_map" else pytest.mark.slow) for m in CLIENT_MAPS],
)
@pytest.mark.methods
def test_float32(client_map):
    ours, theirs = both(case_of("scaffold"), client_map)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_the_kinds_are_of_the_kind():
    """The table above says what is so."""
    phases = {kind: case_of(name).build(loss_fn).phases for kind, name in KINDS.items()}
    rules = {kind: {how for p in ps for how in p.reduce.values()} for kind, ps in phases.items()}
    assert rules["a mean"] == {"mean"}
    assert "sum" in rules["a sum and client rows"]
    assert rules["messages one by one"] == {"stack"}
    assert len(phases["two exchanges"]) == len(phases["rows that depend on the mean"]) == 2
    assert [phase.once for phase in phases["first estimates"]] == [True, False]
    assert case_of(KINDS["a gradient of a second model"]).problem != Problem()
    plain = case_of("fedavg").build(loss_fn)
    names = {phase.client_update.__qualname__ for phase in with_compression(plain, "sign").phases}
    assert {p.client_update.__qualname__ for p in phases["compressed messages and residuals"]} == (
        names
    )


def test_the_device_count_is_what_the_maps_need():
    assert jax.device_count() == 8


def test_pmap_runs_in_a_program_of_the_meshs_devices(monkeypatch):
    """On a TPU the mesh has another order than ``jax.devices()``; here it is turned around."""
    monkeypatch.setattr(
        mapping, "client_mesh", lambda devices, parts: store.client_mesh(devices[::-1], parts)
    )
    mapped = mapping.parse_client_map("pmap")
    assert list(mapped.mesh.devices.flat) == jax.local_devices()[::-1]
    clients = jax.device_put(
        np.arange(2.0 * len(mapped.devices)),
        NamedSharding(mapped.mesh, PartitionSpec("clients")),
    )

    def run(clients):
        ones = {"sum": np.ones(len(clients))}
        return mapped.run(lambda _, x, __: ({"sum": x}, x**2), (), clients, ones, None)

    sums, squares = jax.jit(run)(clients)
    assert float(sums["sum"]) == sum(range(len(clients)))
    np.testing.assert_array_equal(squares, np.arange(len(clients)) ** 2)


@pytest.mark.parametrize(
    ("steps", "of_devices"),
    [
        ([3, 9, 6, 7, 5, 4], [[1, 4, 0], [3, 2, 5]]),  # 17 steps each
        ([1, 100, 1, 1], [[1, 3], [0, 2]]),  # each device has two places
        ([2, 2, 2, 2, 2, 0], [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_devices_get_equal_sums_of_steps(steps, of_devices):
    sort = mapping.parse_client_map("shard_map:2").sort
    order = np.asarray(sort(jax.numpy.array(steps)))
    np.testing.assert_array_equal(order.reshape(2, -1), of_devices)


def test_a_device_that_runs_its_clients_at_once_waits_for_the_longest():
    sort = mapping.parse_client_map("shard_map:2/vmap").sort
    np.testing.assert_array_equal(sort(np.array([3, 9, 6, 7])), [1, 2, 3, 0])
