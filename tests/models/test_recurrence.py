"""Loops that multiply their state by weights, against the same loops as JAX runs them."""

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.machine.target import named, tracing_for, tracing_with
from fedjax_lab.models.lowering import lowered
from tests.tiers import few


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def layer(cell, **options):
    """A recurrent layer of flax: (function of params and inputs, params)."""
    module = nn.RNN(cell(4, param_dtype=jnp.float64), **options)
    x = normal(0, 3, 5, 2)
    params = jax.jit(module.init)(jax.random.key(0), x)
    lengths = np.array([5, 2, 4])
    params = jax.tree.map(lambda leaf: leaf.astype(float), params)
    return (lambda params, x: module.apply(params, x, seq_lengths=lengths)), params, x


def weights_first(params, x):
    """As equinox has it: weights times a vector, mapped over examples; a matrix used twice."""

    def of_one(x):
        def step(state, x):
            state = jnp.tanh(params["w"] @ state + params["b"] * x.sum() + params["w"] @ x)
            return state, params["w"].T @ state

        return lax.scan(step, jnp.zeros(4), x, reverse=True, unroll=2)[1]

    return jax.vmap(of_one)(x)


def with_counts(params, x):
    """Integers, a key and constants in the state; nested functions; two loops inside another."""

    @jax.jit
    def multiply(state, w):
        return jnp.einsum("bi,ij->bj", state, w)

    def step(carry, inputs):
        count, key, state = carry
        x, number = inputs
        key, own = jax.random.split(key)
        noise = jax.random.normal(own, state.shape)
        state = nn.tanh(multiply(state, 2 * params["w"]) + x @ params["w"] + 0.1 * noise)
        return (count + number, key, state), state * count

    def outer(total, factor):
        carry = jnp.zeros((), int), jax.random.key(1), factor * jnp.ones((3, 4))
        numbers = jnp.arange(x.shape[1])
        return total + lax.scan(step, carry, (x.swapaxes(0, 1), numbers))[1].sum(0), None

    return lax.scan(outer, jnp.zeros((3, 4)), jnp.arange(1.0, 3.0))[0]


OWN = {"w": normal(1, 4, 4) / 2, "b": normal(2, 4)}
CASES = {
    "simple": lambda: layer(nn.SimpleCell, time_major=False, return_carry=True),
    "lstm": lambda: layer(nn.LSTMCell),
    "optimized lstm": lambda: layer(nn.OptimizedLSTMCell, reverse=True),
    "gru": lambda: layer(nn.GRUCell, unroll=2),
    "weights first": lambda: (weights_first, OWN, normal(3, 3, 5, 4)),
    "counts": lambda: (with_counts, OWN, normal(3, 3, 5, 4)),
}


@pytest.mark.parametrize("name", few(1, CASES))
def test_values_and_derivatives_are_those_of_the_loop(x64, name):
    function, params, x = CASES[name]()
    along = jax.tree.map(lambda leaf: normal(5, *leaf.shape), (params, x))

    def derivatives(function):
        def loss(params, x):
            leaves = jax.tree.leaves(function(params, x))
            factors = [jnp.cos(jnp.arange(1.0 * leaf.size)).reshape(leaf.shape) for leaf in leaves]
            return sum(map(jnp.vdot, map(jnp.sin, leaves), factors))

        def slope(params, x):
            gradient = jax.grad(loss, (0, 1))(params, x)
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, along)))

        several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
        return (
            function(params, x),
            jax.grad(loss, (0, 1))(params, x),
            jax.grad(slope, (0, 1))(params, x),
            jax.vmap(jax.grad(loss), (0, None))(several, x),
            jax.jvp(jax.grad(loss), (params, x), along)[1],
        )

    expected, got = jax.jit(lambda: (derivatives(function), derivatives(lowered(function))))()
    for theirs, ours in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


READERS = {
    "a factor": lambda h, w: h * w,
    "recomputed": lambda h, w: jax.checkpoint(lambda h, w: jnp.sin(h @ w))(h, w),
    "an inner loop": lambda h, w: lax.fori_loop(0, 2, lambda i, h: jnp.sin(h @ w), h),
    "a branch": lambda h, w: lax.cond(h.sum() > -99, lambda h: h @ w, lambda h: h, h),
    "a solution": lambda h, w: jnp.linalg.solve(w + 3 * jnp.eye(4), h),
    "a result": None,
}


@pytest.mark.parametrize("name", READERS)
def test_weights_that_are_read_elsewhere_too(x64, name):
    """Products alone do not make their gradient: against the loop, and against differences."""
    reader, start = READERS[name], normal(7, 4, 4)

    def loss(w):
        def step(h, _):
            more = 0 if reader is None else reader(h, w)
            return jnp.tanh(h @ w + more), w if reader is None else h

        end, rows = lax.scan(step, start, None, length=3)
        return end.sum() + (rows**2).sum()

    w, along = normal(8, 4, 4) / 3, normal(9, 4, 4)
    got = jax.jit(jax.grad(lowered(loss)))(w)
    np.testing.assert_allclose(got, jax.jit(jax.grad(loss))(w), rtol=1e-10, atol=1e-10)
    ahead, behind = (loss(w + step * along) for step in (1e-6, -1e-6))
    np.testing.assert_allclose((got * along).sum(), (ahead - behind) / 2e-6, rtol=1e-5)


def products(program):
    """The products of a program and of those inside it."""
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inside in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")
        ):
            if hasattr(inside, "eqns"):
                yield from products(inside)


def shapes_of_products(program):
    """{result of a product: how many}."""
    return Counter(equation.outvars[0].aval.shape for equation in products(program))


def test_inputs_and_gradients_of_weights_are_one_product(x64):
    """Of 5 steps, 3 examples and 4 gates of 4 units, with 2 inputs."""
    function, params, x = layer(nn.OptimizedLSTMCell)
    program = jax.make_jaxpr(jax.grad(lambda p: lowered(function)(p, x).sum()))(params)
    loops = [e for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    inside = [shapes_of_products(loop.params["jaxpr"]) for loop in loops]
    assert inside == [{(3, 16): 1}, {(3, 4): 1}]  # the state's product, and its transpose
    whole = shapes_of_products(program.jaxpr)
    assert whole[(5, 3, 16)] == 1
    assert whole.get((4, 16), 0) + whole.get((16, 4), 0) == 1


@pytest.mark.parametrize(("target", "backward"), [("cpu", (0,)), ("h100", (1,))])
def test_a_cpu_reads_weights_along_their_rows_in_both_directions(x64, target, backward):
    function, params, x = layer(nn.OptimizedLSTMCell)
    with tracing_for(named(target)):
        program = jax.make_jaxpr(jax.grad(lambda p: lowered(function)(p, x).sum()))(params)
    loops = [e.params["jaxpr"] for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    summed = [[e.params["dimension_numbers"][0][1] for e in products(loop)] for loop in loops]
    assert summed == [[(0,)], [backward]]


def test_the_program_is_always_the_same(x64):
    function, params, x = layer(nn.GRUCell)
    texts = {str(jax.make_jaxpr(lowered(lambda p: function(p, x)))(params)) for _ in range(3)}
    assert len(texts) == 1


def test_what_is_no_recurrent_loop_stays():
    def sums(w, x):
        return lax.scan(lambda total, x: (total + x, x @ w), jnp.zeros(4), x)

    w, x = np.ones((4, 4), np.float32), np.ones((3, 4), np.float32)
    assert str(jax.make_jaxpr(lowered(sums))(w, x)) == str(jax.make_jaxpr(sums)(w, x))
    own = models.lstm(5, embedding=4, hidden=4, layers=1)
    words = np.zeros((2, 3), np.int32)
    of_own = jax.jit(own.init)(jax.random.key(0), words)
    gradient = jax.grad(lambda params: own.apply(params, words).sum())
    ours = str(jax.make_jaxpr(gradient)(of_own))
    with tracing_with("lax"):
        assert ours == str(jax.make_jaxpr(gradient)(of_own))
    params = {"w": w, "b": np.ones(4, np.float32)}
    inputs = np.ones((3, 5, 4), np.float32)
    with tracing_for(named("v5e")):
        there = str(jax.make_jaxpr(lowered(weights_first))(params, inputs))
    assert there == str(jax.make_jaxpr(weights_first)(params, inputs))


@pytest.mark.methods
def test_a_round_with_a_gru_of_flax():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(5)(nn.RNN(nn.GRUCell(4))(nn.Embed(5, 3)(x)))

    x = np.random.default_rng(0).integers(0, 5, (24, 6))
    clients = data.partition((x, x), "iid", num_clients=4, seed=0)
    model = models.from_linen(Net())
    params = jax.jit(model.init)(jax.random.key(0), x[:1])
    algorithm = algorithms.fedavg(models.language_model_loss(model.apply), client_lr=0.5)
    how = {"rounds": 2, "cohort_size": 2, "local_steps": 2, "batch_size": 3}
    ours, theirs = (
        simulate(algorithm, params, clients, lowering=lowering, **how).params
        for lowering in ("auto", "lax")
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
