"""GroupNorm against flax's: parameters, values and gradients, whatever the number of axes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab.models.layers import GroupNorm


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (4, 6, 5, 8), (2, 3, 2, 2, 8)])
@pytest.mark.parametrize("num_groups", [1, 2, 8])
def test_it_is_the_group_norm_of_flax(shape, num_groups):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(3, 2, shape), jnp.float32) for _ in range(2))
    params = {name: jnp.asarray(rng.normal(size=8), jnp.float32) for name in ("scale", "bias")}
    ours, theirs = GroupNorm(num_groups), nn.GroupNorm(num_groups, epsilon=1e-5)
    shapes = [jax.eval_shape(norm.init, jax.random.key(0), x)["params"] for norm in (ours, theirs)]
    assert shapes[0] == shapes[1]

    def value_and_gradients(norm):
        loss = lambda params, x: (weight * norm.apply({"params": params}, x)).sum()  # noqa: E731
        return norm.apply({"params": params}, x), jax.grad(loss, (0, 1))(params, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4),
        value_and_gradients(ours),
        value_and_gradients(theirs),
    )


def test_a_large_mean_does_not_spoil_the_variance():
    x = 1000 + jax.random.normal(jax.random.key(0), (2, 4, 4, 2))
    normed = GroupNorm(1).apply({"params": {"scale": jnp.ones(2), "bias": jnp.zeros(2)}}, x)
    np.testing.assert_allclose(normed.std((1, 2, 3)), 1, rtol=1e-3)


def test_half_precision_comes_back_as_it_went_in():
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert GroupNorm(2).init_with_output(jax.random.key(0), x)[0].dtype == jnp.bfloat16
