"""What compressors keep: the stated bound, no bias where none is stated, no NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import compressors as c
from tests.compressors.vectors import ALL, KINDS, UNBIASED, every, every_kernel, vector
from tests.reference import cfedavg_numpy as reference

KEYS, D = 400, 101  # of most programs, so that few are compiled


@functools.cache
def through(name):
    """(keys [KEYS], v [d]) -> C(v) for each key; one program per compressor and size."""
    compressor = ALL[name]

    def once(key, v):
        return compressor.decompress(compressor.compress(key, v))

    return jax.jit(jax.vmap(once, in_axes=(0, None)))


def errors(name, v):
    """||C(v) - v||^2 / ||v||^2 for many keys, in float64."""
    keys = jax.random.split(jax.random.key(0), KEYS)
    off = np.asarray(through(name)(keys, jnp.asarray(v)), np.float64) - v
    return (off**2).sum(1) / max((v.astype(np.float64) ** 2).sum(), 1e-300)


@every
@pytest.mark.parametrize("d", [pytest.param(40, marks=pytest.mark.slow), D])
def test_the_stated_bound_holds(name, d):
    bound = ALL[name].snr_bound(d)
    for kind in KINDS:
        ratios = errors(name, vector(kind, d))
        assert np.isfinite(ratios).all()
        allowance = 5 * ratios.std() / np.sqrt(KEYS) + 1e-6  # of the mean over the keys
        assert ratios.mean() <= bound + allowance, kind


@every_kernel
def test_one_coordinate(name):
    v = np.array([-2.5], np.float32)
    assert errors(name, v).mean() <= ALL[name].snr_bound(1) + 0.1
    assert errors(name, np.zeros(1, np.float32)).max() == 0


def test_bounds_that_are_attained():
    """The bounds are not only true: some vector reaches them."""
    d = D
    one_hot, constant, random = vector("one-hot", d), vector("constant", d), vector("random", d)
    k = round(0.3 * d)
    assert errors("top_k", constant).mean() == pytest.approx(1 - k / d, rel=1e-5)
    assert errors("random_k", one_hot).mean() == pytest.approx(1 - k / d, abs=0.1)
    assert errors("random_drop", random).mean() == pytest.approx(0.7, abs=0.02)
    assert errors("sign", one_hot).mean() == pytest.approx(1 - 1 / d, rel=1e-5)
    worst = np.full(d, 1 / (1 + np.sqrt(d)), np.float32)
    worst[0] = 1
    assert errors("terngrad", worst).mean() == pytest.approx((np.sqrt(d) - 1) / 2, rel=0.05)
    half_steps = np.full(d, 1 / 254.01, np.float32)
    half_steps[0] = 1
    assert errors("int8", half_steps).mean() == pytest.approx((d - 1) / (254**2 + d - 1), rel=1e-3)
    midway = np.full(d, 1 + 2.0**-8, np.float32)
    assert errors("bfloat16", midway).mean() == pytest.approx(257.0**-2, rel=1e-3)
    identity_matrix = np.eye(10, dtype=np.float32).reshape(-1)
    assert errors("low_rank", identity_matrix).mean() == pytest.approx(0.8, rel=1e-4)


def test_what_is_unbiased_says_so():
    assert {name for name, compressor in ALL.items() if compressor.unbiased} == UNBIASED


@pytest.mark.parametrize("name", sorted(UNBIASED))
def test_unbiased(name):
    v = vector("random", D)
    keys = jax.random.split(jax.random.key(1), (50, KEYS))
    mean = np.mean([np.asarray(through(name)(k, v), np.float64).mean(0) for k in keys], axis=0)
    spread = np.sqrt(ALL[name].snr_bound(D) * (v**2).sum() / keys.size)
    assert np.linalg.norm(mean - v) <= 2 * spread + 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("make", [c.random_k, c.random_drop])
def test_rescaled_values_are_rounded_once(make, dtype):
    """The factor itself, 10 / 3, is 0.16 % less in bfloat16: a bias of all numbers."""
    v = jnp.asarray(np.random.default_rng(0).normal(size=1000), dtype)
    compressor = make(0.7, rescale=True)
    sent = np.asarray(compressor.decompress(compressor.compress(jax.random.key(0), v)))
    expected = (np.asarray(v, np.float64) * (10 / 3)).astype(dtype)
    kept = sent != 0
    assert 250 < kept.sum() < 350
    np.testing.assert_array_equal(sent[kept], expected[kept])


@every
@pytest.mark.parametrize("size", [2.0**-66, 2.0**50])  # about 1e-20 and 1e15
def test_tiny_and_huge_values(name, size):
    v = vector("random", D)
    key = jax.random.split(jax.random.key(0), KEYS)
    small, large = (through(name)(key, jnp.asarray(v * s))[0] for s in (1.0, np.float32(size)))
    assert np.isfinite(large).all()
    np.testing.assert_allclose(large, np.asarray(small) * np.float32(size), rtol=2e-5)


COMPS = (0.0, 0.25, 0.9, 0.999)
SIZES = (1, 2, 31, 32, 33, 64, 1000)  # around the words of a mask
PLAIN = {"bisection": (1, 33, 1000), "sort": (33,), "approximate": (33,)}  # XLA's own, they
SELECTIONS = [
    pytest.param(how, d, marks=() if d in PLAIN[how] else pytest.mark.slow)
    for how in PLAIN
    for d in SIZES
]


@pytest.mark.parametrize(("selection", "d"), SELECTIONS)
def test_top_k_is_the_twins(selection, d):
    """Also without a message, where there is a shorter way."""
    rng = np.random.default_rng(d)
    # No ties, many, only zeros, only one value.
    v = np.stack([rng.normal(size=d), rng.integers(-2, 3, size=d), np.zeros(d), np.full(d, -3.0)])
    v = v.astype(np.float32)
    counts = {comp: max(1, round((1 - comp) * d)) for comp in COMPS}
    assert all(c.top_k(comp).positions.kept(d) == k for comp, k in counts.items())
    comps = {k: comp for comp, k in counts.items()}  # one for each count

    @jax.jit
    def run(v):
        def one(compressor, v):
            message = compressor.compress(None, v)
            return message, compressor.decompress(message), compressor.apply(None, v)

        compressors = {k: c.top_k(comp, selection=selection) for k, comp in comps.items()}
        return {k: jax.vmap(functools.partial(one, f))(v) for k, f in compressors.items()}

    for k, (messages, *ways) in run(v).items():
        assert messages.indices.dtype == jnp.int32
        assert messages.indices.shape == (len(v), k)
        expected = np.stack([reference.top_k(comps[k])(row) for row in v])
        if selection == "approximate":  # takes any of equals
            expected, *ways = (np.sort(np.abs(out), axis=1) for out in (expected, *ways))
        for out in ways:
            np.testing.assert_array_equal(out, expected)
        if selection == "bisection":  # which of equals: the twin sends zeros too
            order = np.argsort(-np.abs(v), axis=1, kind="stable")[:, :k]
            np.testing.assert_array_equal(messages.indices, np.sort(order, axis=1))


def test_top_k_in_float64_and_bfloat16(x64):
    v = np.random.default_rng(0).normal(size=100)
    v[1] = v[0] * (1 + 1e-12)  # equal in float32
    half = c.top_k(0.5)
    both = v, jnp.asarray(v, jnp.bfloat16)
    out, low = jax.jit(lambda vs: [half.decompress(half.compress(None, v)) for v in vs])(both)
    np.testing.assert_array_equal(out, reference.top_k(0.5)(v))
    assert low.dtype == jnp.bfloat16
    expected = reference.top_k(0.5)(np.asarray(both[1], np.float64))
    np.testing.assert_array_equal(np.asarray(low, np.float64), expected)


def test_random_k_keeps_k_and_every_coordinate_as_often():
    keys = jax.random.split(jax.random.key(0), 4000)
    compressor = c.random_k(0.7)
    send = jax.vmap(lambda key: compressor.decompress(compressor.compress(key, jnp.ones(40))))
    kept = np.asarray(jax.jit(send)(keys))
    assert (kept.sum(1) == 12).all()
    assert np.abs(kept.mean(0) - 0.3).max() < 0.03


@every
def test_gradual_underflow_is_zero_not_nan(name):
    v = np.full(D, 1e-41, np.float32)
    keys = jax.random.split(jax.random.key(0), KEYS)
    assert np.isfinite(np.asarray(through(name)(keys, jnp.asarray(v)))).all()


@pytest.mark.parametrize("factory", [c.top_k, c.random_k, c.random_drop])
@pytest.mark.parametrize("comp", [1.0, 1.5, -0.1, float("nan")])
def test_comp_out_of_range(factory, comp):
    with pytest.raises(ValueError, match=f"comp is {comp}; .* at least 0 and less than 1"):
        factory(comp)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: c.qsgd(0), "levels is 0; it must be between 1 and 32767"),
        (lambda: c.low_rank(0), "rank is 0; it must be at least 1"),
        (lambda: c.top_k(0.5, selection="sorted"), "Did you mean 'sort'"),
        (lambda: c.compose(c.sign(), c.int8()), r"sparsifier is sign\(\); .* top_k or random_k"),
        (lambda: c.compose(c.random_drop(0.5), c.int8()), "must be top_k or random_k"),
        (lambda: c.as_compressor("compressor", "top_q:0.5"), "Did you mean 'top_k'"),
        (lambda: c.as_compressor("compressor", "top_k"), "must be top_k:COMP"),
        (lambda: c.as_compressor("compressor", "top_k:x"), "'x' must be float"),
        (lambda: c.as_compressor("compressor", "top_k:1"), "comp is 1.0"),
        (lambda: c.as_compressor("compressor", "top_k:keep=0"), r"keep must be in \(0, 1\]"),
        (lambda: c.as_compressor("compressor", "top_k:kept=0.1"), "must be drop or keep"),
        (lambda: c.as_compressor("compressor", "top_k:keep=x"), "'x' must be float"),
        (lambda: c.as_compressor("compressor", "sign:1"), "sign takes no argument"),
        (lambda: c.as_compressor("compressor", "sign+sign+sign"), "at most one"),
        (lambda: c.sign().compress(None, jnp.ones((2, 2))), r"float32\[2, 2\]; .* vector \[d\]"),
        (lambda: c.sign().compress(None, jnp.arange(3)), "floating-point vector"),
        (lambda: c.sign().compress(None, jnp.ones(0)), "v has 0 coordinates"),
    ],
)
def test_wrong_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_text_names_every_compressor():
    texts = {
        "bfloat16": "bfloat16()",
        "identity": "identity()",
        "int8": "int8()",
        "low_rank:2": "low_rank(rank=2)",
        "qsgd": "qsgd(levels=15, scaled=False)",
        "qsgd:3": "qsgd(levels=3, scaled=False)",
        "random_drop:0.9": "random_drop(comp=0.9, rescale=False)",
        "random_k:0.9": "random_k(comp=0.9, rescale=False)",
        "sign": "sign()",
        "terngrad": "terngrad(scaled=False)",
        "top_k:0.99": "top_k(comp=0.99, selection=bisection)",
        "top_k:drop=0.99": "top_k(comp=0.99, selection=bisection)",
        "top_k:keep=0.01": "top_k(comp=0.99, selection=bisection)",
    }
    for text, described in texts.items():
        assert str(c.as_compressor("compressor", text)) == described
    assert {text.split(":")[0] for text in texts} | {"compose"} == set(c.COMPRESSORS)
    assert c.as_compressor("compressor", "top_k:0.9+qsgd:3").name == "compose"
    for name, factory in c.COMPRESSORS.items():
        assert getattr(c, name) is factory
        assert factory.__doc__.splitlines()[0].endswith(".")
    with pytest.raises(TypeError, match="compressor is 3; it must be a Compressor or text"):
        c.as_compressor("compressor", 3)
