"""Results as those of a call, from one trace; a round traces a loss once, and copies no message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from fedjax_lab import algorithms, build_round
from fedjax_lab.machine.traced import trace_once, with_ending
from fedjax_lab.types import CohortBatch


def test_it_traces_once_and_computes_the_same():
    calls = []

    def function(tree, mask):
        calls.append(mask)
        return {"sum": tree["a"].sum() + tree["b"], "twice": (2 * tree["a"], None)}

    first = {"a": jnp.ones(3), "b": jnp.float32(1)}
    run, shapes = trace_once(function, first, None)
    second = {"a": jnp.arange(3.0), "b": jnp.float32(5)}
    results = run(second, None)
    assert len(calls) == 1
    assert jax.tree.structure(shapes) == jax.tree.structure(results)
    assert shapes["twice"][0].shape == (3,)
    np.testing.assert_array_equal(results["sum"], 8)
    np.testing.assert_array_equal(results["twice"][0], [0, 2, 4])


def test_it_may_close_over_values_of_an_outer_trace():
    def outer(scale, xs):
        def body(total, x):
            run, shape = trace_once(lambda x: scale * jnp.sin(x), x)
            assert shape.shape == ()
            return total + run(x), run(2 * x)

        return jax.lax.scan(body, 0.0, xs)

    scales, xs = jnp.array([2.0, 3.0]), jnp.arange(4.0)
    sums, each = jax.jit(jax.vmap(outer, in_axes=(0, None)))(scales, xs)
    np.testing.assert_allclose(sums, np.asarray(scales) * np.sin(xs).sum(), rtol=1e-6)
    np.testing.assert_allclose(each[1], 3 * np.sin(2 * np.asarray(xs)), rtol=1e-6)
    slope = jax.grad(lambda scale: outer(scale, xs)[0])(2.0)
    np.testing.assert_allclose(slope, np.sin(xs).sum(), rtol=1e-6)


@pytest.mark.parametrize("client_map", ["scan", "chunk:2", "vmap", "shard_map/chunk:2"])
@pytest.mark.parametrize("has_steps", [False, True])
def test_a_round_traces_the_loss_once(client_map, has_steps):
    calls = []

    def loss_fn(params, examples, key):
        calls.append(key)
        return (params - examples) ** 2

    slots, steps = 4, 3
    batch = CohortBatch(
        client_ids=jnp.arange(slots),
        examples=jnp.ones((slots, steps, 2)),
        key=jax.random.key(0),
        round=jnp.int32(0),
        num_steps=jnp.array([1, 2, 3, 3]) if has_steps else None,
    )
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    state = algorithm.init(jnp.float32(0), num_clients=8)
    jax.jit(build_round(algorithm, client_map=client_map)).lower(state, batch)
    assert len(calls) == 1


def _primitives(jaxpr):
    return [equation.primitive.name for equation in jaxpr.eqns]


def _conditions(jaxpr):
    """All conditions of a program, also those in its loops and calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            yield jaxpr, equation
        for inner in jaxprs_in_params(equation.params):
            yield from _conditions(inner)


def test_an_ending_is_computed_from_what_loops_and_arguments_leave():
    calls = []

    def function(x, y):
        calls.append(x)
        moved, _ = jax.lax.scan(lambda c, _: (c * 1.5 - y, None), x, length=3)
        ordered = jnp.sort(x)
        return {"move": jnp.where(y > 0, x - moved, 0), "order": 2 * ordered, "same": y}

    def condition(x, y, look):
        result, again = with_ending(function, x, y)
        twice = jax.lax.cond(look, again, lambda: jax.tree.map(jnp.zeros_like, result))
        return result, twice

    x, y = jnp.array([3.0, -1.0, 2.0]), jnp.array([1.0, -2.0, 0.25])
    result, twice = jax.jit(condition)(x, y, True)
    moved = 1.5**3 * np.asarray(x) - (1 + 1.5 + 1.5**2) * np.asarray(y)
    for found in (result, twice):
        np.testing.assert_allclose(found["move"], np.where(y > 0, x - moved, 0), rtol=1e-6)
        np.testing.assert_array_equal(found["order"], [-2, 4, 6])
        np.testing.assert_array_equal(found["same"], y)
    assert len(calls) == 1
    traced = jax.make_jaxpr(condition)(x, y, True).jaxpr
    ((_, equation),) = [found for found in _conditions(traced)]
    names = _primitives(equation.params["branches"][1].jaxpr)
    # What is sorted is not in memory before, so its double is handed over.
    assert "sub" in names
    assert not {"mul", "sort", "scan"} & set(names)
    batched = jax.vmap(condition, in_axes=(0, None, None))(jnp.stack([x, 2 * x]), y, True)
    for found, once in zip(batched, (result, twice), strict=True):
        first = jax.tree.map(lambda leaf: leaf[0], found)
        jax.tree.map(np.testing.assert_array_equal, first, once)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fafed"])
def test_the_check_of_a_client_makes_no_copy_of_its_message(name):
    options = {"momentum": 0.5, "second_moment_decay": 0.9} if name == "fafed" else {}
    algorithm = algorithms.ALGORITHMS[name](
        lambda params, examples, key: (params[None] - examples).sum(-1) ** 2,
        client_lr=0.1,
        **options,
    )
    batch = CohortBatch(
        client_ids=jnp.arange(2), examples=jnp.ones((2, 3, 2, 7)), key=jax.random.key(0), round=0
    )
    state = algorithm.init(jnp.zeros(7), num_clients=4)
    traced = jax.make_jaxpr(build_round(algorithm, "scan"))(state, batch)
    checks = 0
    for outer, equation in _conditions(traced.jaxpr):
        if "sub" not in _primitives(equation.params["branches"][1].jaxpr):
            continue
        checks += 1
        differences = {v for e in outer.eqns if e.primitive.name == "sub" for v in e.outvars}
        assert not differences & {v for v in equation.invars if v.aval.shape == (7,)}
    assert checks == 1
