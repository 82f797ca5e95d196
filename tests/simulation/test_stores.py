"""Runs with the table of client rows in several places: the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    CohortBatch,
    algorithms,
    build_round,
    data,
    load_run,
    simulate,
    with_attack,
    with_compression,
    with_dp,
    with_personal,
)
from fedjax_lab.clients.host_table import HostTable
from fedjax_lab.simulation.host_store import all_rows
from fedjax_lab.wrappers.attacks import attackers
from tests import federations
from tests.simulation.test_run import assert_same_bits

CLIENTS = 16
SETTINGS = {"rounds": 6, "cohort_size": 6, "local_steps": 2, "batch_size": 4, "eval_every": 3}


def loss_fn(params, examples, key):
    x, y = examples
    return (jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2


def make_clients():
    return federations.regression(CLIENTS, 5)


NOBODY = data.ClientTimes(availability=0.0)
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


def run(name, dp=None, **settings):
    method = METHODS[name] if dp is None else with_dp(METHODS[name], **dp)
    return simulate(method, PARAMS, make_clients(), **{**SETTINGS, **settings})


@pytest.mark.parametrize("name", [pytest.param("scaffold", marks=pytest.mark.methods), *SLOW])
def test_a_sharded_table_gives_the_same_bits(name):
    whole = run(name, client_map="shard_map", client_store="device")
    sharded = run(name, client_map="shard_map")
    assert_same_bits(sharded.state, whole.state)
    assert sharded.history == whole.history
    for leaf in jax.tree.leaves(sharded.state.clients):
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {CLIENTS // 8}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_host_gives_the_same_bits_and_one_device_the_same_but_for_rounding(name):
    whole = run(name, client_map="shard_map", client_store="device")
    host = run(name, client_map="shard_map", client_store="host")
    assert_same_bits(host.state.server, whole.state.server)
    assert host.history == whole.history
    if jax.tree.leaves(whole.state.clients):
        assert_same_bits(host.state.clients.read(np.arange(CLIENTS)), whole.state.clients)
    one = run(name, client_map="scan")
    for actual, expected in zip(
        jax.tree.leaves(whole.state), jax.tree.leaves(one.state), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_sharded_run_goes_on_bit_for_bit(tmp_path):
    settings = {"client_map": "shard_map", "client_store": "sharded"}
    whole = run("scaffold", **settings)
    half = run("scaffold", run_dir=tmp_path, stop_when=lambda row: row["round"] == 3, **settings)
    assert half.stopped == "stop_when"
    resumed = run("scaffold", run_dir=tmp_path, **settings)
    assert_same_bits(resumed.state, whole.state)
    assert resumed.history == whole.history


@pytest.mark.parametrize("client_map", ["scan", pytest.param("vmap", marks=pytest.mark.slow)])
def test_rows_on_the_host_give_the_same_bits(client_map):
    # Chunks of one round with overlapping cohorts: rows that were read ahead are out of date.
    settings = {"client_map": client_map, "eval_every": 1, "rounds": 5}
    whole = run("scaffold", **settings)
    host = run("scaffold", client_store="host", **settings)
    assert_same_bits(host.state.server, whole.state.server)
    assert_same_bits(host.state.clients.read(np.arange(CLIENTS)), whole.state.clients)
    assert host.history == whole.history
    assert 6 < host.state.clients.seen.sum() <= CLIENTS


@pytest.mark.slow
def test_rows_on_the_host_go_on_from_a_checkpoint(tmp_path):
    settings = {"client_map": "scan", "client_store": "host", "eval_every": 2, "cohort_size": 3}
    whole = run("scaffold", **settings)
    half = run("scaffold", run_dir=tmp_path, stop_when=lambda row: row["round"] == 4, **settings)
    resumed = run("scaffold", run_dir=tmp_path, **settings)
    assert half.stopped == "stop_when"
    assert_same_bits(resumed.state.server, whole.state.server)
    everybody = np.arange(CLIENTS)
    assert_same_bits(resumed.state.clients.read(everybody), whole.state.clients.read(everybody))
    np.testing.assert_array_equal(resumed.state.clients.seen, whole.state.clients.seen)
    assert resumed.history == whole.history


@pytest.mark.methods
@pytest.mark.filterwarnings("ignore:no client took a local step")
def test_where_nobody_comes_nothing_is_kept_nor_lost(tmp_path):
    settings = {"client_store": "host", "client_map": "scan", "times": NOBODY, "run_dir": tmp_path}
    settings |= {"cohort_size": 2, "local_steps": 1, "eval_every": 1}
    run("scaffold", rounds=1, **settings)
    resumed = run("scaffold", rounds=2, **settings)
    assert not resumed.state.clients.seen.any()
    assert_same_bits(resumed.params, PARAMS)


@pytest.mark.methods
def test_chunks_to_which_nobody_comes(tmp_path):
    """The first chunk is nobody's: there is no row to keep, nor to save."""
    settings = {"cohort_size": 1, "eval_every": 1, "rounds": 4, "sampling": "poisson"}
    settings["client_map"] = "scan"
    whole = run("scaffold", client_store="device", **settings)
    settings |= {"client_store": "host", "run_dir": tmp_path}
    first = run("scaffold", stop_when=lambda row: True, **settings)
    assert not first.state.clients.seen.any()
    resumed = run("scaffold", **settings)
    assert_same_bits(resumed.state.clients.read(np.arange(CLIENTS)), whole.state.clients)
    assert resumed.history == whole.history
    assert resumed.state.clients.seen.any()


STORES = [("chunk:2", "host"), ("pmap", "device"), ("shard_map:2", "sharded")]
ALL_STORES = [("scan", "host"), ("shard_map:2", "host"), ("shard_map:2x2", "sharded")]


@pytest.mark.parametrize(
    ("client_map", "store"),
    [
        *(pytest.param(*some, marks=pytest.mark.methods) for some in STORES),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ALL_STORES),
    ],
)
def test_leaves_without_values_change_no_bit(tmp_path, client_map, store):
    settings = {"client_map": client_map, "client_store": store, "rounds": 4, "eval_every": 2}
    plain = run("scaffold", **settings)
    params = {**PARAMS, "none": jnp.zeros((0, 3))}
    settings |= {**SETTINGS, **settings, "run_dir": tmp_path}
    stop = {"stop_when": lambda row: True}
    half = simulate(METHODS["scaffold"], params, make_clients(), **settings, **stop)
    assert half.stopped == "stop_when"
    result = simulate(METHODS["scaffold"], params, make_clients(), **settings)
    table = result.state.clients
    table = table.read(np.arange(CLIENTS)) if store == "host" else table
    assert table.pop("none").shape == (CLIENTS, 0, 3)
    expected = plain.state.clients
    assert_same_bits(table, expected.read(np.arange(CLIENTS)) if store == "host" else expected)
    assert [row["loss"] for row in result.history] == [row["loss"] for row in plain.history]
    saved = load_run(tmp_path)
    assert saved.params.pop("none").shape == (0, 3)
    assert_same_bits(saved.params, plain.params)


@pytest.mark.methods
def test_compressed_messages_without_personal_leaves():
    """Their residuals have no columns where a leaf is never sent."""
    personal = with_personal(METHODS["fedavg"], lambda path: path == "b")
    settings = {**SETTINGS, "rounds": 2, "eval_every": 1, "local_steps": 1}
    method = with_compression(personal, "sign")
    result = simulate(method, PARAMS, make_clients(), client_map="shard_map:2", **settings)
    (residuals,) = result.state.clients.residuals
    assert jax.tree.map(jnp.shape, residuals["delta"]) == {"w": (CLIENTS, 5), "b": (CLIENTS, 0)}
    for leaf in jax.tree.leaves(result.state.clients):
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {CLIENTS // 2}
    assert result.history[-1]["bytes_up"] == 2 * 6 * (4 + 1)  # a scale, and a bit for each sign


def test_rows_that_differ_somewhere_are_refused_on_the_host():
    # The first and the last client are honest, so that their rows are alike.
    seed = next(s for s in range(99) if not {0, CLIENTS - 1} & set(attackers(CLIENTS, 0.2, s)))
    attacked = with_attack(METHODS["scaffold"], "sign_flip", share=0.2, seed=seed)
    with pytest.raises(ValueError, match=r"the clients of .* start with different rows"):
        simulate(attacked, PARAMS, make_clients(), client_store="host", **SETTINGS)


@pytest.mark.filterwarnings("ignore:in round 0 of scaffold 6 of 6 clients")
def test_a_model_that_is_not_finite_diverges_on_the_host_as_elsewhere():
    broken = {**PARAMS, "b": jnp.full((), jnp.nan)}
    for store in ("device", "host"):
        with pytest.warns(UserWarning, match="diverged: in round 0 no client was finite"):
            result = simulate(
                METHODS["scaffold"], broken, make_clients(), client_store=store, **SETTINGS
            )
        assert result.stopped == "diverged"


def test_what_needs_all_rows_is_refused_on_the_host():
    personal = with_personal(METHODS["fedavg"], lambda path: path == "b")
    with pytest.raises(ValueError, match=r"the global model of .* depends on the rows of all"):
        simulate(personal, PARAMS, make_clients(), client_store="host", **SETTINGS)
    with pytest.raises(ValueError, match=r"client_store is 'host', .* diagnose needs them"):
        run("scaffold", client_store="host", diagnose=lambda state: {})
    with pytest.raises(ValueError, match="client_map='measure' needs them"):
        run("scaffold", client_store="host", client_map="measure")


def test_a_table_without_room_is_refused_by_simulate(monkeypatch):
    monkeypatch.setattr("fedjax_lab.simulation.placement.device_memory", lambda: 400)
    with pytest.raises(ValueError, match="scaffold keeps 24 bytes for each of 16 clients"):
        run("scaffold", client_map="scan")


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_model_of_a_billion_parameters_is_traced(name):
    params = {"w": jax.ShapeDtypeStruct((2**30,), jnp.float32)}
    method = getattr(algorithms, name)(lambda p, e, key: e[:, 0] * p["w"][0], client_lr=0.1)
    shape = jax.ShapeDtypeStruct

    def one_round(params, examples, key):
        ids = jnp.arange(2, dtype=jnp.int32)
        batch = CohortBatch(ids, examples, key, jnp.zeros((), jnp.int32))
        return build_round(method, client_map="scan")(method.init(params, 4), batch)

    key = jax.eval_shape(lambda: jax.random.key(0))
    _, metrics = jax.eval_shape(one_round, params, shape((2, 1, 3, 1), jnp.float32), key)
    assert metrics["bytes_up"].dtype == jnp.float32
    up = 2**32 * (2 if name == "scaffold" else 1)
    assert method.uplink(params) == up


@pytest.mark.parametrize("name", ["scaffold", "fedspeed"])
def test_a_run_starts_from_a_state_wherever_its_rows_are(tmp_path, name):
    method, clients = METHODS[name], make_clients()
    host, device = (run(name, client_store=store) for store in ("host", "device"))
    assert isinstance(host.state.clients, HostTable)
    settings = {**SETTINGS, "seed": 5, "state": device.state}
    expected = simulate(method, None, clients, client_store="device", **settings)
    settings["state"] = host.state
    for store in ("device", "host"):
        again = simulate(method, None, clients, client_store=store, **settings)
        rows = again.state.clients
        rows = all_rows(rows) if store == "host" else rows
        assert_same_bits(again.state._replace(clients=rows), expected.state)
    for rounds in (3, 6):  # interrupted in between
        settings["rounds"] = rounds
        again = simulate(
            method, None, clients, client_store="host", run_dir=tmp_path / "run", **settings
        )
    assert_same_bits(again.state._replace(clients=all_rows(again.state.clients)), expected.state)
