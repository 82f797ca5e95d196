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

from fedjax_lab import algorithms
from fedjax_lab import compressors as c
from tests.compressors.vectors import ALL
from tests.federations import batch_of, distance_loss

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


@pytest.mark.parametrize(
    ("halves", "told"),
    [
        ({"decompress": lambda message: message.values[:2]}, r"decompress .* float32\[2\]"),
        ({"decompress": lambda message: None}, "decompress .* returned None"),
        ({"direct": lambda key, v: jnp.zeros(())}, r"direct .* returned float32\[\]"),
    ],
)
def test_a_compressor_that_returns_something_else_is_named(halves, told):
    own = dataclasses.replace(c.identity(), **{"direct": None} | halves)
    with pytest.raises(ValueError, match=rf"{told}; it must return C\(v\), float32\[3\]"):
        jax.eval_shape(own.apply, jax.random.key(0), jnp.zeros(3))


PLAIN = (("top_k", "float32"), ("random_k-rescale", "float32"), ("top_k", "bfloat16"))
MORE = (
    *((name, "float32") for name in EDGES),
    ("top_k", "float64"),  # magnitudes as bits
    ("random_k-rescale", "bfloat16"),
)
MARKS = dict.fromkeys(PLAIN, ()) | dict.fromkeys(MORE, pytest.mark.methods)
CASES = [
    pytest.param(name, dtype, marks=MARKS.get((name, dtype), pytest.mark.slow))
    for name in (*EXACT, *EDGES)
    for dtype in ("float32", "bfloat16", "float16", "float64")
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_same_bits(name, dtype):
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(arrays.arrays(np.float64, (3, 33), elements=NUMBERS), st.integers(0, 2**31 - 1))
    def check(v, seed):
        direct, message = both(name)(jax.random.key(seed), jnp.asarray(v, dtype))
        np.testing.assert_array_equal(direct, message)

    with jax.enable_x64(dtype == "float64"):
        check()


def test_a_round_makes_no_message():
    def refuse(key, v):
        raise AssertionError("a message was made")

    algorithm = algorithms.cfedavg(
        distance_loss, client_lr=0.1, compressor=dataclasses.replace(c.top_k(0.5), compress=refuse)
    )
    batch = batch_of(jnp.ones((2, 1, 1, 5)))
    state = algorithm.init({"w": jnp.zeros(5)}, num_clients=3)
    after, _ = jax.eval_shape(algorithm.round_fn, state, batch)  # traced only
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_top_k_of_a_vector_in_parts_of_any_shape(dtype):
    shapes = [(3, 4, 5), (), (0, 2), (7,), (2, 6)]
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
    v = np.random.default_rng(0).integers(-3, 4, (5, ends[-1])).astype(np.float32)  # many equals
    split = [np.split(row, ends[:-1]) for row in v]
    parts = [
        jnp.asarray(np.stack([row[i].reshape(shape) for row in split]), dtype)
        for i, shape in enumerate(shapes)
    ]
    compressor = c.top_k(0.7)
    kept = jax.jit(jax.vmap(compressor.direct_parts, (None, 0)))(jax.random.key(0), parts)
    k = compressor.positions.kept(ends[-1])
    for row, *answer in zip(v, *kept, strict=True):
        expected = np.zeros_like(row)
        chosen = np.argsort(-abs(row), kind="stable")[:k]  # of equals those of lowest index
        expected[chosen] = row[chosen]
        np.testing.assert_array_equal(np.concatenate([np.ravel(part) for part in answer]), expected)
        assert [np.shape(part) for part in answer] == shapes
