"""GroupNorm against flax's and NumPy's, whatever the number of axes; sizes of a convolution."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab.models.layers import Conv, GroupNorm
from tests.tiers import few


@pytest.mark.parametrize("shape", few(1, zip([(4, 6, 5, 8), (3, 8), (2, 5, 8), (2, 3, 2, 2, 8)])))
def test_it_is_the_group_norm_of_flax(shape):
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(3, 2, shape).astype(np.float32) for _ in range(2))
    params = {name: rng.normal(size=8).astype(np.float32) for name in ("scale", "bias")}
    ours = {n: GroupNorm(n) for n in (1, 2, 8)}
    theirs = {n: nn.GroupNorm(n, epsilon=1e-5) for n in ours}
    shapes = [
        {n: jax.eval_shape(norm.init, jax.random.key(0), x)["params"] for n, norm in norms.items()}
        for norms in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]

    @jax.jit
    def values_and_gradients(params, x):
        def of(norm):
            def loss(params, x):
                out = norm.apply({"params": params}, x)
                return (weight * out).sum(), out

            return jax.grad(loss, (0, 1), has_aux=True)(params, x)

        return [{n: of(norm) for n, norm in norms.items()} for norms in (ours, theirs)]

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4),
        *values_and_gradients(params, x),
    )


def test_a_large_mean_does_not_spoil_the_variance():
    x = 1000 + jax.random.normal(jax.random.key(0), (2, 4, 4, 2))
    params = {"scale": np.ones(2, np.float32), "bias": np.zeros(2, np.float32)}
    normed = jax.jit(GroupNorm(1).apply)({"params": params}, x)
    np.testing.assert_allclose(np.std(np.asarray(normed), (1, 2, 3)), 1, rtol=1e-3)


def test_half_precision_comes_back_as_it_went_in():
    x = jnp.ones((2, 4), jnp.bfloat16)
    out, _ = jax.eval_shape(GroupNorm(2).init_with_output, jax.random.key(0), x)
    assert out.dtype == jnp.bfloat16


def test_integers_become_floats():
    x = np.random.default_rng(0).integers(0, 255, (2, 4, 4, 4)).astype(np.uint8)
    grouped = x.astype(np.float64).reshape(2, 4, 4, 2, 2)
    axes = (1, 2, 4)
    deviation = np.sqrt(grouped.var(axes, keepdims=True) + 1e-5)
    expected = ((grouped - grouped.mean(axes, keepdims=True)) / deviation).reshape(x.shape)
    out, _ = GroupNorm(2).init_with_output(jax.random.key(0), x)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_sizes_of_a_convolution_are_named():
    x = jnp.ones((1, 6, 6, 2))
    for module, error, message in (
        (Conv(4, (3, 5)), TypeError, r"kernel_size is \(3, 5\); it must be an integer"),
        (Conv(4, 0), ValueError, "kernel_size is 0; it must be at least 1"),
        (Conv(2.5, 3), TypeError, r"num_features is 2\.5; it must be an integer"),
        (Conv(0, 3), ValueError, "num_features is 0; it must be at least 1"),
    ):
        with pytest.raises(error, match=message):
            module.init(jax.random.key(0), x)
