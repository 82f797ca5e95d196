"""The table of client rows: how rounds read and write it, whole or sharded."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab import algorithms
from fedjax_lab.clients.store import client_mesh, one_row_per_client, sharded_rows
from fedjax_lab.simulation.placement import Request

N, S = 16, 8


def make_table():
    """Rows of several dtypes, with what a sum of floats would change: -0, NaN with a payload."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(N, 3)).astype(np.float32)
    values[3] = -0.0
    values[5] = np.array(0x7FC12345, np.uint32).view(np.float32)
    return {
        "float": values,
        "more": rng.normal(size=(N, 2, 5)).astype(np.float32),
        "large": rng.normal(size=(N, 20_000)).astype(np.float32),
        "count": rng.integers(-9, 9, N).astype(np.int32),
        "half": jnp.asarray(rng.normal(size=(N, 2, 2)), jnp.bfloat16),
        "seen": rng.integers(0, 2, N).astype(bool),
    }


def test_a_row_of_numbers():
    table = one_row_per_client({"age": 3, "seen": False, "loss": 0.5}, 4)
    assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, table)) == {
        "age": [3] * 4,
        "seen": [False] * 4,
        "loss": [0.5] * 4,
    }


def same_bits(actual, expected):
    def bits(leaf):
        return np.asarray(leaf).tobytes()

    assert jax.tree.map(bits, actual) == jax.tree.map(bits, expected)


@pytest.mark.parametrize("devices", [2, 8])
def test_a_sharded_table_is_read_and_written_bit_for_bit(devices):
    mesh = client_mesh(jax.devices()[:devices])
    split = NamedSharding(mesh, PartitionSpec("clients"))
    table, rows = make_table(), sharded_rows(mesh)
    ids = np.array([3, 15, 0, 5, 9, N, 7, N], np.int32)  # with two padded slots
    participates = np.array([1, 1, 0, 1, 1, 0, 1, 0], bool)
    placed = jax.device_put(table, split)
    taken = jax.jit(rows.take)(placed, ids)
    same_bits(
        taken, {name: np.asarray(leaf)[np.minimum(ids, N - 1)] for name, leaf in table.items()}
    )
    assert all(leaf.sharding.spec == PartitionSpec("clients") for leaf in taken.values())

    new = jax.tree.map(lambda leaf: leaf[::-1], taken)
    written = jax.jit(rows.put)(placed, ids, new, participates)
    expected = {name: np.array(leaf) for name, leaf in table.items()}
    for slot in np.flatnonzero(participates):
        for name in expected:
            expected[name][ids[slot]] = np.asarray(new[name])[slot]
    same_bits(written, expected)
    assert all(leaf.sharding == split for leaf in written.values())


def test_what_moves_is_the_cohorts_rows():
    clients, d = 800, 32
    mesh = client_mesh(jax.devices())
    split = NamedSharding(mesh, PartitionSpec("clients"))
    table = jax.ShapeDtypeStruct((clients, d), jnp.float32, sharding=split)
    rows = sharded_rows(mesh)

    def there_and_back(table, ids):
        return rows.put(table, ids, rows.take(table, ids) + 1, ids < clients)

    ids = jax.ShapeDtypeStruct((S,), jnp.int32)
    text = jax.jit(there_and_back, donate_argnums=0).lower(table, ids).compile().as_text()
    moved = re.findall(r"= \(?(\w+)\[([\d,]+)\]\S* (\S*(?:all-|reduce-scatter)[\w-]*)\(", text)
    sizes = [np.prod([int(n) for n in shape.split(",")]) for _, shape, _ in moved]
    assert moved
    assert max(sizes) <= S * d  # not N d
    assert len(moved) == 2


def test_small_leaves_move_together():
    mesh = client_mesh(jax.devices()[:2])
    split = NamedSharding(mesh, PartitionSpec("clients"))
    table, rows = jax.device_put(make_table(), split), sharded_rows(mesh)
    text = jax.jit(rows.take).lower(table, np.zeros(S, np.int32)).compile().as_text()
    # One for each of four dtypes, and one for the large leaf.
    assert len(re.findall(r" reduce-scatter(?:-start)?\(", text)) == 5


def state_shapes(num_clients, d):
    method = algorithms.scaffold(lambda params, examples, key: examples, client_lr=0.1)
    params = {"w": jax.ShapeDtypeStruct((d,), jnp.float32)}
    return jax.eval_shape(functools.partial(method.init, num_clients=num_clients), params)


@pytest.mark.parametrize(
    ("client_store", "client_map", "num_clients", "expected"),
    [
        ("auto", "scan", 16, "device"),
        ("auto", "shard_map", 16, "sharded"),
        ("auto", "shard_map:4/vmap", 20, "sharded"),
        ("auto", "shard_map", 20, "device"),
        ("auto", "pmap", 16, "device"),
        ("device", "shard_map", 16, "device"),
        ("sharded", "shard_map:2", 6, "sharded"),
    ],
)
def test_where_a_table_stands(client_store, client_map, num_clients, expected):
    asked = Request.of(client_map, client_store)
    assert asked.store_on_devices(num_clients) == expected


@pytest.mark.parametrize(
    ("client_store", "client_map", "num_clients", "message"),
    [
        ("sharded", "vmap", 16, "client_store is 'sharded' with client_map 'vmap'"),
        ("sharded", "pmap", 16, "with client_map 'pmap'"),
        ("sharded", "shard_map", 20, "and 20 clients; .* divides the number of clients, .*:5"),
        ("sharded", "shard_map", 11, r"and 11 clients; .* the number of clients\."),
        ("device", "scan", 10**6, "scaffold keeps 40,000,000 bytes for each of 1,000,000 clients"),
        (
            "sharded",
            "shard_map",
            10**6,
            "a table of 37,252.9 GiB, .* What helps: ",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_before_it_is_allocated(
    client_store, client_map, num_clients, message
):
    shapes = state_shapes(num_clients, 10**7 if num_clients > 100 else 4)

    def resolve():
        asked = Request.of(client_map, client_store)
        store = asked.store_on_devices(num_clients)
        asked.placement(store, {}, ()).check_memory(shapes, "scaffold")

    with pytest.raises(ValueError, match=message):
        resolve()


def test_what_fills_more_than_half_of_a_device_stays_on_the_host(monkeypatch):
    shapes = state_shapes(16, 100)  # 6,400 bytes
    for memory, expected in ((1500, True), (1700, False)):  # of each of 8 devices
        monkeypatch.setattr("fedjax_lab.simulation.placement.device_memory", lambda m=memory: m)
        assert Request.of("scan", "auto").keeps_rows_on_host(shapes) == expected
    assert Request.of("scan", "host").keeps_rows_on_host(shapes)
    assert not Request.of("scan", "sharded").keeps_rows_on_host(shapes)
    with pytest.raises(ValueError, match=r"client_store is 'disk'; .*auto, device, host, sharded"):
        Request.of("scan", "disk")
