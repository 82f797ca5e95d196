"""The short way through a compressor gives the bits of the message's, and makes no message."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedjax_lab import CohortBatch, algorithms
from fedjax_lab import compressors as c
from tests.compressors.vectors import ALL

EXACT = {name: compressor for name, compressor in ALL.items() if compressor.direct is not None}
EDGES = {  # of d = 33 coordinates: all of them, and one
    "top_k-all": c.top_k(0.0),
    "top_k-one": c.top_k(0.99),
    "random_k-all": c.random_k(0.0, rescale=True),
    "random_k-one": c.random_k(0.99, rescale=True),
}
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1.5, 1e-41, float("inf"), -float("inf"), float("nan"))
NUMBERS = st.sampled_from(SPECIAL) | st.floats(width=16)


@functools.cache
def both(name):
    """(key, v [n, d]) -> C(v) [n, d] by the short way and by the message, as bits."""
    compressor = {**EXACT, **EDGES}[name]

    def message(key, v):
        return compressor.decompress(compressor.compress(key, v))

    def bits(out):
        return out.view(jnp.dtype(f"uint{8 * out.dtype.itemsize}"))

    def run(key, v):
        return tuple(bits(jax.vmap(f, (None, 0))(key, v)) for f in (compressor.apply, message))

    return jax.jit(run)


def test_which_compressors_have_one():
    assert {compressor.name for compressor in EXACT.values()} == {"top_k", "random_k"}
    assert c.top_k(0.5, selection="sort").direct is None


@pytest.mark.parametrize("name", [*EXACT, *EDGES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_same_bits(name, dtype):
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(arrays.arrays(np.float64, (3, 33), elements=NUMBERS), st.integers(0, 2**31 - 1))
    def check(v, seed):
        direct, message = both(name)(jax.random.key(seed), jnp.asarray(v, dtype))
        np.testing.assert_array_equal(direct, message)

    with jax.enable_x64(dtype == "float64"):
        check()


@pytest.mark.parametrize("d", [1, 2, 31, 64, 1000])
@pytest.mark.parametrize("comp", [0.0, 0.25, 0.9, 0.999])
def test_top_k_keeps_what_a_stable_sort_puts_first(comp, d):
    rng = np.random.default_rng(d)
    v = np.stack([rng.normal(size=d), rng.integers(-2, 3, size=d), np.zeros(d), np.full(d, -3.0)])
    v = v.astype(np.float32)  # no ties, many, only zeros, only one value
    first = np.argsort(-np.abs(v), axis=1, kind="stable")[:, : max(1, round((1 - comp) * d))]
    expected = np.zeros_like(v)
    np.put_along_axis(expected, first, np.take_along_axis(v, first, 1), 1)
    compressor = c.top_k(comp)
    np.testing.assert_array_equal(
        jax.vmap(lambda row: compressor.apply(None, row))(jnp.asarray(v)), expected
    )


def test_a_round_makes_no_message():
    def refuse(key, v):
        raise AssertionError("a message was made")

    def loss_fn(params, examples, key):
        return jnp.square(params["w"][None] - examples).sum(-1)

    algorithm = algorithms.cfedavg(
        loss_fn, client_lr=0.1, compressor=dataclasses.replace(c.top_k(0.5), compress=refuse)
    )
    batch = CohortBatch(
        client_ids=jnp.arange(2),
        examples=jnp.ones((2, 1, 1, 5)),
        key=jax.random.key(0),
        round=jnp.int32(0),
    )
    state = algorithm.init({"w": jnp.zeros(5)}, num_clients=3)
    after, _ = jax.eval_shape(algorithm.round_fn, state, batch)  # traced only
    assert jax.tree.structure(after) == jax.tree.structure(state)
