"""A model that devices divide: the same numbers as on one device, and parts that stay parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fedjax_lab
from fedjax_lab import algorithms, build_round, data, model_shardings, simulate, with_frozen
from fedjax_lab.clients.model_axis import shard_largest
from fedjax_lab.simulation.evaluate import build_client_evaluation, build_evaluation
from tests import federations
from tests.simulation.test_run import assert_same_bits

CLIENTS = 8
SETTINGS = {"rounds": 4, "cohort_size": 4, "local_steps": 2, "batch_size": 4, "eval_every": 2}


def loss_fn(params, examples, key):
    x, y = examples
    hidden = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"][None])
    return (hidden @ params["out"] + params["shift"] - y) ** 2


@functools.cache
def make_clients():
    return federations.regression(CLIENTS, 6)


def make_params(width=8):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    inner = {"w": normal(6, width) / 3, "b": normal(width)}
    return {"in": inner, "out": normal(width), "shift": jnp.ones(())}


def counts(params, examples, *frozen):
    whole = {**frozen[0], **params} if frozen else params
    losses = loss_fn(whole, examples, None)
    return (losses < 1).astype(jnp.float32), losses


# Of the leaves, by ``shard_largest``; a scalar is whole.
SPECS = {"in": {"w": P(None, "model"), "b": P("model")}, "out": P("model"), "shift": P()}
METHODS = {
    "fedavg": {},
    "scaffold": {},
    "gradma": {"server_momentum": 0.9, "memory_decay": 0.5, "memory_size": 6},
    "fedspeed": {"server_dual": "all"},
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "scaffold"]


def run(name, client_map, params=None, **settings):
    method = getattr(algorithms, name)(loss_fn, client_lr=0.1, **METHODS[name])
    params = make_params() if params is None else params
    return simulate(
        method, params, make_clients(), client_map=client_map, **{**SETTINGS, **settings}
    )


def assert_close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def assert_lie(values, specs, leading=()):
    """Each array lies in parts, of the size that its spec says, on the mesh of 2 x 2 devices."""
    mesh = {"clients": 2, "model": 2}

    def check(spec, leaf):
        axes = [*leading, *spec, *[None] * leaf.ndim][: leaf.ndim]
        part = tuple(n // mesh.get(axis, 1) for n, axis in zip(leaf.shape, axes, strict=True))
        assert {shard.data.shape for shard in leaf.addressable_shards} == {part}
        assert dict(leaf.sharding.mesh.shape) == mesh

    jax.tree.map(check, specs, values, is_leaf=lambda s: isinstance(s, P))


@pytest.mark.parametrize("name", [pytest.param("scaffold", marks=pytest.mark.methods), *SLOW])
def test_two_by_two_devices_agree_with_one(name):
    evaluate = build_evaluation(counts, make_clients(), batch_size=16)
    one = run(name, "scan", evaluate=evaluate)
    four = run(name, "shard_map:2x2", evaluate=evaluate)
    assert_close(four.state, one.state)
    for row, other in zip(four.history, one.history, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert_lie(four.params, SPECS)
    if name == "scaffold":  # its server has the params and the control, its rows a control each
        assert len(jax.tree.leaves(four.state.clients)) == 4
        assert_lie(jax.tree.leaves(four.state.clients), jax.tree.leaves(SPECS), ["clients"])
        assert_lie(jax.tree.leaves(four.state.server), 2 * jax.tree.leaves(SPECS))


@pytest.mark.slow
def test_the_memory_of_a_server_is_divided_like_the_model():
    four = run("gradma", "shard_map:2x2")
    assert_lie(four.state.server.memory.rows, SPECS, [None])
    assert_lie(four.state.server.momentum, SPECS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "gradma"])
@pytest.mark.parametrize(
    ("client_map", "client_store"),
    [
        ("shard_map:2x2/vmap", "device"),
        ("shard_map:2x2/chunk:2", "sharded"),
        ("shard_map:2x2", "host"),
        ("shard_map:1x4", "auto"),
        ("shard_map:8x1", "auto"),
    ],
)
def test_other_shares_and_stores_agree(name, client_map, client_store):
    one = run(name, "scan")
    other = run(name, client_map, client_store=client_store)
    assert_close(other.state.server, one.state.server)
    if client_store == "host" and name == "scaffold":
        assert_close(other.state.clients.read(np.arange(CLIENTS)), one.state.clients)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["sharded", "host"])
def test_a_run_goes_on_bit_for_bit_and_divided(tmp_path, store):
    settings = {"client_store": store}
    whole = run("scaffold", "shard_map:2x2", **settings)
    first = {"stop_when": lambda row: row["round"] == 2, "run_dir": tmp_path}
    assert run("scaffold", "shard_map:2x2", **first, **settings).stopped == "stop_when"
    resumed = run("scaffold", "shard_map:2x2", run_dir=tmp_path, **settings)
    assert_same_bits(resumed.state.server, whole.state.server)
    assert resumed.history == whole.history
    assert_lie(resumed.params, SPECS)
    if store == "sharded":
        assert_same_bits(resumed.state.clients, whole.state.clients)
        assert_lie(jax.tree.leaves(resumed.state.clients), jax.tree.leaves(SPECS), ["clients"])
    with pytest.raises(FileExistsError):
        run(
            "scaffold",
            "shard_map:2x2",
            run_dir=tmp_path,
            params_sharding=lambda path, leaf: P(),
            **settings,
        )


@pytest.mark.slow
def test_a_state_is_gone_on_with_divided():
    half = run("scaffold", "shard_map:2x2", rounds=2)
    method = algorithms.scaffold(loss_fn, client_lr=0.1)
    go_on = functools.partial(simulate, method, None, make_clients(), **SETTINGS)
    one = go_on(state=jax.tree.map(np.asarray, half.state), client_map="scan")
    four = go_on(state=half.state, client_map="shard_map:2x2")
    assert_close(four.state, one.state)
    assert_lie(four.params, SPECS)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((6, 8), 1),
        ((8, 8), 1),
        ((12, 8), 0),
        ((8, 3, 7), 0),
        ((3, 5), None),
        ((), None),
        ((0,), None),
    ],
)
def test_the_longest_axis_that_can_be_is_divided(shape, axes):
    spec = shard_largest(jax.ShapeDtypeStruct(shape, jnp.float32), 4)
    assert spec == (P() if axes is None else P(*[None] * axes, "model"))


def test_a_model_is_made_in_parts():
    shapes = jax.eval_shape(make_params)
    places = model_shardings(shapes, "shard_map:2x2")
    params = jax.jit(make_params, out_shardings=places)()
    assert_lie(params, SPECS)
    with pytest.raises(ValueError, match="client_map is 'vmap'; it must be 'shard_map:CxM'"):
        model_shardings(shapes, "vmap")


def in_rows(path, leaf):
    return P("model") if path == "in/w" else P()


@pytest.mark.slow
@pytest.mark.parametrize(
    "params_sharding", [in_rows, {"in": {"w": P("model"), "b": P()}, "out": P(), "shift": P()}]
)
def test_the_caller_says_how(params_sharding):
    specs = {"in": {"w": P("model"), "b": P()}, "out": P(), "shift": P()}
    one = run("fedavg", "scan")
    four = run("fedavg", "shard_map:2x2", params_sharding=params_sharding)
    assert_close(four.params, one.params)
    assert_lie(four.params, specs)


def frozen_method(frozen):
    def with_body(params, examples, key, frozen):
        return loss_fn({**frozen, **params}, examples, key)

    build = functools.partial(algorithms.fedavg, client_lr=0.1)
    return with_frozen(build, with_body, frozen)


@pytest.mark.slow
def test_frozen_weights_are_divided_likewise():
    whole = make_params()
    body, head = {"in": whole["in"]}, {"out": whole["out"], "shift": whole["shift"]}
    evaluate = build_evaluation(counts, make_clients(), batch_size=16, frozen=body)
    of_clients = build_client_evaluation(counts, make_clients(), frozen=body)
    runs = {
        client_map: simulate(
            frozen_method(body),
            head,
            make_clients(),
            evaluate=evaluate,
            client_map=client_map,
            params_sharding=sharding,
            **SETTINGS,
        )
        for client_map, sharding in (
            ("scan", None),
            ("shard_map:2x2", (P(), {"in": {"w": P("model"), "b": P()}})),
        )
    }
    one, four = runs.values()
    assert_close(four.params, one.params)
    assert four.history[-1] == pytest.approx(one.history[-1], rel=1e-4)
    assert_lie(four.state.frozen, {"in": {"w": P("model"), "b": P()}})
    assert_close(of_clients(four.params), of_clients(one.params))


@pytest.mark.slow
def test_a_round_of_ones_own_loop():
    method = algorithms.scaffold(loss_fn, client_lr=0.1)
    batch = data.draw_batch(
        make_clients(), jax.random.key(1), 0, cohort_size=4, local_steps=2, batch_size=4
    )
    state = method.init(make_params(), CLIENTS)
    one, metrics = jax.jit(build_round(method, "scan"))(state, batch)
    four, others = jax.jit(build_round(method, "shard_map:2x2"))(state, batch)
    assert_close(four, one)
    assert_close(others, metrics)
    assert_lie(four.server, type(four.server)(SPECS, SPECS))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows", "sums"), [("gradma", 2, 0), ("scaffold", 2, 2)])
def test_no_model_is_gathered(name, rows, sums):
    shape = jax.ShapeDtypeStruct
    inner = {"w": shape((6, 8192), jnp.float32), "b": shape((8192,), jnp.float32)}
    params = {"in": inner, "out": shape((8192,), jnp.float32), "shift": shape((), jnp.float32)}
    found = fedjax_lab.plan(
        getattr(algorithms, name)(loss_fn, client_lr=0.1, **METHODS[name]),
        params,
        make_clients(),
        target="cpu:4",
        client_map="shard_map:2x2",
        **{key: SETTINGS[key] for key in ("cohort_size", "local_steps", "batch_size")},
    )
    moved = {c.kind: c.bytes / found.model_bytes for c in found.figures.collectives}
    # Where rows are written (SCAFFOLD's owners, GradMA's memory), the cohort's four come together,
    # of which each device has a half. A mean over the cohort is half a model, summed and handed on.
    assert moved.pop("all-gather") < rows + 0.01
    assert sum(moved.values()) < sums + 0.01


@pytest.mark.parametrize(
    ("client_map", "params_sharding", "told"),
    [
        ("scan", in_rows, "params_sharding is set, but the client map does not divide models"),
        ("auto", in_rows, "client_map must be 'shard_map:CxM'"),
        ("shard_map", {"w": P()}, "params_sharding is set, but the client map does not divide"),
        ("pmap:2x2", None, "client_map is 'pmap:2x2'"),
        ("shard_map:2x", None, "M in shard_map:CxM must be at least 1"),
        ("shard_map:4x4", None, "there are 8 cpu devices"),
        ("shard_map:2x4", lambda p, x: P("heads"), r"each of its axes must be None or 'model'"),
        ("shard_map:2x4", lambda p, x: P("clients"), r"each of its axes must be None or 'model'"),
        ("shard_map:2x4", lambda p, x: P("model"), r"in/b, \[6\]; 4 devices do not divide 6"),
        ("shard_map:1x2", lambda p, x: P("model"), r"shift, \[\]; the array has fewer axes"),
        ("shard_map:1x2", {"in": P(), "out": P()}, "another structure than params"),
        ("shard_map:1x2", P("model", "model"), "fewer axes|must occur only once"),
    ],
)
def test_what_does_not_fit_is_refused(client_map, params_sharding, told):
    with pytest.raises(ValueError, match=told):
        run("fedavg", client_map, make_params(6), params_sharding=params_sharding)
    if "shard_map:" not in client_map:
        with pytest.raises(ValueError, match=told):
            build_round(algorithms.fedavg(loss_fn, client_lr=0.1), client_map, "exclude",
                        params_sharding=params_sharding)  # fmt: skip


def test_specs_of_the_wrong_kind_are_refused():
    with pytest.raises(TypeError, match=r"has 'model' for in/b, .*must be a jax.sharding.Partit"):
        run("fedavg", "shard_map:1x2", params_sharding=lambda path, leaf: "model")
    method, params = frozen_method({"in": make_params()["in"]}), {"out": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"a pair of trees \(for the params, for the frozen"):
        simulate(method, params, make_clients(), client_map="shard_map:1x2", params_sharding=P(),
                 **SETTINGS)  # fmt: skip
    shapes = frozen_method(jax.eval_shape(lambda: {"in": make_params()["in"]}))
    with pytest.raises(TypeError, match=r"the frozen weights are shapes, which .*plan takes alone"):
        simulate(shapes, params, make_clients(), client_map="scan", **SETTINGS)
