"""Low-rank adapters: against the paper's equation in NumPy, and what they are refused for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import models

PARAMS = {
    "dense": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)},
    "query": jnp.ones((8, 2, 4)),  # to heads: 8 x 8
    "out": jnp.ones((2, 4, 8)),  # from heads: 8 x 8
    "conv": jnp.ones((3, 3, 16, 16)),  # 144 x 16
}
SHAPES = {"dense/kernel": (6, 4), "query": (8, 8), "out": (8, 8), "conv": (144, 16)}


def adapters_of(rank=2, is_adapted=lambda path: path != "dense/bias", params=PARAMS):
    return models.init_adapters(jax.random.key(0), params, is_adapted, rank)


def test_the_matrices_and_the_start():
    adapters = adapters_of()
    assert {path: (a.down.shape[0], a.up.shape[1]) for path, a in adapters.items()} == SHAPES
    assert all(a.down.shape[1] == a.up.shape[0] == 2 for a in adapters.values())
    merged = models.merge_adapters(PARAMS, adapters, scale=8.0)
    jax.tree.map(np.testing.assert_array_equal, merged, PARAMS)
    assert len({float(a.down[0, 0]) for a in adapters.values()}) == len(adapters)
    wide = adapters_of(params={"w": jnp.ones((400, 300))})["w"].down
    assert float(wide.std()) == pytest.approx(1 / 20, rel=0.1)


def test_a_merged_kernel_does_what_the_paper_writes():
    """h = W_0 x + (α / r) B A x, with our matrices transposed."""
    rng = np.random.default_rng(0)
    w, down, up = (rng.normal(size=shape) for shape in ((6, 4), (6, 2), (2, 4)))
    x, alpha, rank = rng.normal(size=6), 3.0, 2
    adapter = adapters_of(params={"w": jnp.asarray(w)})["w"]._replace(down=down, up=up)
    merged = models.merge_adapters({"w": jnp.asarray(w)}, {"w": adapter}, alpha / rank)["w"]
    a, b = down.T, up.T
    np.testing.assert_allclose(
        x @ np.asarray(merged), w.T @ x + alpha / rank * (b @ (a @ x)), rtol=1e-5, atol=1e-5
    )
    assert np.linalg.matrix_rank(np.asarray(merged) - w, tol=1e-4) == rank


def test_in_the_kernels_order_and_dtype():
    """A kernel of three axes is used as the matrix that a reshape makes of it."""
    rng = np.random.default_rng(1)
    down, up = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 3), (3, 8)))
    adapters = {"query": adapters_of(3)["query"]._replace(down=down, up=up)}
    merged = models.merge_adapters(PARAMS, adapters)["query"]
    expected = 1 + np.einsum("ir,rhd->ihd", down, up.reshape(3, 2, 4))
    np.testing.assert_allclose(merged, expected, rtol=1e-5)
    half = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    adapter = adapters_of(params=half)
    assert adapter["w"].down.dtype == jnp.float32
    assert models.merge_adapters(half, adapter)["w"].dtype == jnp.bfloat16


def test_mistakes_are_named():
    with pytest.raises(
        ValueError, match=r"no leaf of the params\. The leaves are: conv, dense/bias"
    ):
        adapters_of(is_adapted=lambda path: False)
    with pytest.raises(ValueError, match=r"dense/bias is adapted, but has the shape \(4,\)"):
        adapters_of(is_adapted=lambda path: True)
    with pytest.raises(ValueError, match="rank for dense/kernel, 6 x 4, is 6"):
        adapters_of(rank=6)
    with pytest.raises(TypeError, match="w is adapted, but holds int32"):
        adapters_of(params={"w": jnp.ones((3, 3), jnp.int32)})
    with pytest.raises(ValueError, match="adapters has conv; params have no such leaf"):
        models.merge_adapters({"w": jnp.ones((3, 3))}, {"conv": adapters_of()["conv"]})
    with pytest.raises(ValueError, match=r"adapters\['w'\] is for 144 x 16 numbers; the leaf has"):
        models.merge_adapters({"w": jnp.ones((3, 3))}, {"w": adapters_of()["conv"]})
    with pytest.raises(ValueError, match=r"stacked is 'layer/\*', which matches no adapted leaf"):
        models.init_adapters(jax.random.key(0), PARAMS, "conv", 2, stacked="layer/*")
    with pytest.raises(ValueError, match=r"match some of dense/kernel\.$"):
        models.init_adapters(
            jax.random.key(0), PARAMS, "dense/kernel", 2, stacked=lambda path: path == "conv"
        )


@pytest.mark.parametrize("use", [models.attach_adapters, models.merge_adapters])
def test_what_is_no_adapter_or_no_scale_is_named(use):
    adapters = {"dense/kernel": adapters_of()["dense/kernel"]}
    read = {path: adapter._asdict() for path, adapter in adapters.items()}
    with pytest.raises(TypeError, match=r"'dense/kernel'\] is a dict, not an Adapter; .*like=ad"):
        use(PARAMS, read)
    with pytest.raises(TypeError, match=r"adapters is a list; it must be \{path: Adapter\}"):
        use(PARAMS, list(adapters.values()))
    for wrong in ("2", None):
        with pytest.raises(TypeError, match=f"scale is {wrong!r}; it must be a number"):
            use(PARAMS, adapters, scale=wrong)
    traced = jax.jit(lambda scale: use(PARAMS, adapters, scale))(2.0)
    jax.tree.map(np.testing.assert_array_equal, traced, use(PARAMS, adapters, 2.0))


def test_adapters_are_attached_once_and_to_one_matrix():
    params = {"layers": {"up": {"kernel": jnp.ones((2, 4, 5))}}, "kernel": jnp.ones((4, 5))}
    first = adapters_of(1, "kernel", params)
    attached = models.attach_adapters(params, first)
    with pytest.raises(ValueError, match="'kernel', where params have an adapter already; merge"):
        models.attach_adapters(attached, first)
    flat = adapters_of(1, "layers/*", params)
    with pytest.raises(ValueError, match=r"one matrix; the leaf .* \(2, 4, 5\).*pass stacked= to"):
        models.attach_adapters(params, flat)
    stacked = models.init_adapters(jax.random.key(0), params, "layers/*", 1, stacked="layers/*")
    up = models.attach_adapters(attached, stacked)["layers"]["up"]
    assert (up["adapter_down"].shape, up["adapter_up"].shape) == ((2, 4, 1), (2, 1, 5))


@pytest.mark.methods
def test_adapters_are_float32_in_every_mode():
    expected = adapters_of()
    with jax.enable_x64(True):
        found = adapters_of()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, found, expected)
