"""Compact keys draw JAX's own bits, by programs with fewer kernels."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import models
from fedjax_lab.machine.keys import (
    below,
    bits_at,
    compact,
    fold_in,
    plain,
    seeded,
    stored,
    threefry,
)
from fedjax_lab.models import from_linen
from fedjax_lab.models.layers import Classifier, DenseBlock

KEY = jax.random.key(2**32 - 3)

DRAWS = {
    "bits8": lambda key: jax.random.bits(key, (3, 5), jnp.uint8),
    "bits16": lambda key: jax.random.bits(key, (7,), jnp.uint16),
    "bits32": lambda key: jax.random.bits(key, (2, 3, 4)),
    "scalar": lambda key: jax.random.bits(key),
    "nothing": lambda key: jax.random.bits(key, (0, 3)),
    "uniform": lambda key: jax.random.uniform(key, (64, 33), jnp.float32, -0.1, 0.1),
    "normal": lambda key: jax.random.normal(key, (1000,)),
    "integers": lambda key: jax.random.randint(key, (100,), -7, 1000, jnp.int32),
    "permutation": lambda key: jax.random.permutation(key, 5000),
    "split": lambda key: jax.random.key_data(jax.random.split(key, (2, 3))),
    "fold": lambda key: jax.random.key_data(jax.random.fold_in(key, np.uint32(2**32 - 1))),
    "chain": lambda key: jax.random.uniform(jax.random.split(jax.random.fold_in(key, 3))[1], (9,)),
    "batched": lambda key: jax.vmap(lambda k, i: jax.random.bits(jax.random.fold_in(k, i), (6,)))(
        jax.random.split(key, 4), jnp.arange(4)
    ),
}
AT_ONCE = {"uniform", "split", "fold", "batched"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.methods) for name in DRAWS],
)
def test_draws_have_the_bits_of_jax(name):
    draw = DRAWS[name]
    expected = np.asarray(draw(KEY))
    for kind in (compact, stored):
        np.testing.assert_array_equal(jax.jit(lambda key, k=kind: draw(k(key)))(KEY), expected)
        np.testing.assert_array_equal(draw(kind(KEY)), expected)


def test_draws_of_64_bits_have_the_bits_of_jax(x64):
    del x64
    for draw in (
        lambda key: jax.random.bits(key, (5,), jnp.uint64),
        lambda key: jax.random.normal(key, (5,), jnp.float64),
        lambda key: jax.random.randint(key, (5,), 0, 2**40),
        lambda key: jax.random.key_data(jax.random.fold_in(key, jnp.int64(7))),
    ):
        np.testing.assert_array_equal(draw(compact(KEY)), draw(KEY))


def test_a_key_goes_there_and_back():
    there = compact(KEY)
    assert KEY.dtype != there.dtype != stored(KEY).dtype
    assert compact(there).dtype == there.dtype
    assert stored(there).dtype == stored(KEY).dtype == stored(stored(KEY)).dtype
    assert plain(stored(KEY)).dtype == KEY.dtype
    assert plain(there).dtype == KEY.dtype == plain(KEY).dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (plain(there), KEY)))
    seeded = jax.random.key(7, impl=jax.random.key_impl(there))
    np.testing.assert_array_equal(*map(jax.random.key_data, (seeded, jax.random.key(7))))


def test_other_keys_stay_as_they_are():
    for key in (jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)):
        assert compact(key) is key is stored(key)
    with jax.threefry_partitionable(False):
        assert compact(KEY) is KEY


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_seed_gives_threefrys_key_whatever_the_default(impl):
    expected = jax.random.key_data(jax.random.key(5, impl="threefry2x32"))
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", impl)
    try:
        for key in (seeded(5), threefry(jax.random.key(5)), threefry(jax.random.PRNGKey(5))):
            data = jax.random.key_data(key) if key.dtype != jnp.uint32 else key
            np.testing.assert_array_equal(data, expected)
    finally:
        jax.config.update("jax_default_prng_impl", before)


def test_different_keys_of_other_generators_stay_different():
    words = np.uint32([[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [1, 0, 1, 0]])
    keys = jax.random.wrap_key_data(words, impl="rbg")
    found = np.asarray(jax.random.key_data(threefry(keys)))
    assert found.shape == (5, 2)
    assert len(np.unique(found, axis=0)) == 5
    for one, row in zip(keys, found, strict=True):  # whatever it is batched with
        np.testing.assert_array_equal(jax.random.key_data(threefry(one)), row)
    for kind in (compact, stored, plain):
        assert threefry(kind(KEY)).dtype == kind(KEY).dtype


def test_the_package_makes_keys_by_seeded_alone():
    """Keys of JAX's default generator would make draws depend on the client map."""
    root = Path(models.__file__).parents[1]
    found = [
        (path.relative_to(root).as_posix(), line.strip())
        for path in root.rglob("*.py")
        if "recipes" not in path.parts
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"random\.(key|PRNGKey)\(", line) and "``" not in line and "raise" not in line
    ]
    assert {where for where, _ in found} == {"machine/keys.py", "simulation/sweep.py"}
    assert sum(where == "simulation/sweep.py" for where, _ in found) == 1  # its ``params``


def test_a_draw_is_one_kernel():
    def kernels(draw):
        return jax.jit(draw).lower(KEY).compile().as_text().count(" fusion(")

    uniform = DRAWS["uniform"]
    assert kernels(lambda key: uniform(compact(key))) == 1 < kernels(uniform)


def test_stored_numbers_are_hashed_once():
    """Dropout between images with the batch as their minor axis and a dense layer: the gradient
    needs the mask again, and transposed.
    """

    def gradient(key, x, w):
        def loss(x):
            images = x.transpose(3, 0, 2, 1)
            dropped = jnp.where(jax.random.bernoulli(key, 0.5, images.shape), images, 0)
            return jnp.square(dropped.reshape(len(images), -1) @ w).sum()

        return jax.grad(loss)(x)

    x, w = jnp.ones((4, 8, 4, 16)), jnp.ones((128, 3))
    text = jax.jit(lambda key: gradient(stored(key), x, w)).lower(KEY).compile().as_text()
    assert text.count("shift-left(") == 20  # the rounds of one hash; 40 with ``compact``


def test_draws_that_32_bits_cannot_count_are_left_to_jax():
    many = jax.eval_shape(lambda: jax.random.bits(compact(KEY), (2**17, 2**16), jnp.uint8))
    assert many.shape == (2**17, 2**16)


def test_a_model_starts_with_the_values_of_jax(monkeypatch):
    def start():
        return models.build("mlp", num_classes=3, hidden=(4,)).init(KEY, jnp.zeros((1, 5)))

    params = start()
    monkeypatch.setattr("fedjax_lab.models.base.compact", lambda key: key)
    jax.tree.map(np.testing.assert_array_equal, params, start())


def test_folds_stay_jax_keys():
    for key in (KEY, jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)):
        folded, expected = fold_in(key, 5), jax.random.fold_in(key, 5)
        assert folded.dtype == expected.dtype
        np.testing.assert_array_equal(*map(jax.random.key_data, (folded, expected)))


def test_dropout_has_the_bits_of_jax(monkeypatch):
    x = jnp.ones((4, 5))

    def run():
        model = from_linen(Classifier(3, (DenseBlock(8, dropout=0.5),)))
        params = model.init(KEY, x)
        return model.apply(params, x, KEY), model.apply(params, x)

    compacted, without = run()
    monkeypatch.setattr("fedjax_lab.models.base.compact", lambda key: key)
    monkeypatch.setattr("fedjax_lab.models.base.stored", lambda key: key)
    np.testing.assert_array_equal(compacted, run()[0])
    assert (compacted != without).any()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_bits_at_a_place_depend_on_the_key_and_the_place_alone(impl):
    own = compact(jax.random.key(3, impl=impl))
    high, low = jnp.arange(5)[:, None], jnp.arange(400)[None]
    found = np.asarray(jax.jit(bits_at)(own, high, low))
    assert found.shape == (5, 400)
    assert len(np.unique(found)) > 1990  # 2,000 of 2^32
    np.testing.assert_array_equal(bits_at(own, 3, jnp.arange(7)), found[3, :7])
    assert abs(np.unpackbits(found.view(np.uint8)).mean() - 0.5) < 0.01


def test_bits_at_are_threefrys():
    """JAX's own hash of the same counters, of which a draw is the exclusive or of both halves."""
    from jax.extend.random import threefry_2x32

    high, low = np.uint32([7, 2**31]), np.uint32([1, 2**32 - 1])
    halves = threefry_2x32(jax.random.key_data(KEY), jnp.concatenate([high, low]))
    np.testing.assert_array_equal(bits_at(compact(KEY), high, low), halves[:2] ^ halves[2:])


def test_integers_below_a_bound_are_exact():
    bits = np.uint32([0, 1, 2**16, 2**31, 2**32 - 1, 0x89ABCDEF])
    for bound in (1, 2, 5, 2**16 - 1, 2**16, 2**16 + 1, 10**9, 2**31 - 1):
        exact = [int(b) * bound >> 32 for b in bits]
        np.testing.assert_array_equal(below(jnp.asarray(bits), np.int32(bound)), exact)
