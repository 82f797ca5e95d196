"""Results as those of a call, from one trace; a round traces a loss once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round
from fedjax_lab.machine.trace_once import trace_once
from tests.federations import batch_of
from tests.tiers import few


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


@pytest.mark.parametrize("client_map", few(2, ["scan", "chunk:2", "vmap", "shard_map/chunk:2"]))
@pytest.mark.parametrize("has_steps", [False, True])
def test_a_round_traces_the_loss_once(client_map, has_steps):
    calls = []

    def loss_fn(params, examples, key):
        calls.append(key)
        return (params - examples) ** 2

    slots, steps = 4, 3
    num_steps = jnp.array([1, 2, 3, 3]) if has_steps else None
    batch = batch_of(jnp.ones((slots, steps, 2)), num_steps=num_steps)
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    state = algorithm.init(jnp.float32(0), num_clients=8)
    jax.jit(build_round(algorithm, client_map=client_map)).lower(state, batch)
    assert len(calls) == 1
