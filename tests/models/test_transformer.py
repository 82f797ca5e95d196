"""Sizes and causality of the small transformer; the decoder's tests are about its layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import models


def test_its_parameters_are_those_of_the_formula():
    model = models.build("transformer", 256)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    width, hidden, depth = 128, 344, 2
    layer = 4 * width**2 + 3 * width * hidden + 2 * width
    assert models.count_params(shapes) == 2 * 256 * width + depth * layer + width
    assert f"{models.count_params(shapes):,} parameters" in models.transformer.__doc__
    tied = models.transformer(256, tie=True, mlp_width=16, depth=1)
    shapes = jax.eval_shape(tied.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    assert models.count_params(shapes) == 257 * width + 4 * width**2 + 3 * width * 16 + 2 * width


def test_a_token_changes_no_logits_before_it():
    model = models.transformer(7, width=8, depth=1, num_heads=2)
    x = jnp.array([[1, 2, 3, 4], [1, 2, 5, 4]])
    params = jax.jit(model.init)(jax.random.key(0), x)
    first, second = np.asarray(jax.jit(model.apply)(params, x))
    np.testing.assert_allclose(first[:2], second[:2], rtol=1e-5)
    assert np.abs(first[2:] - second[2:]).min(axis=1).max() > 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 12}, "width is 12 and num_heads 4; width must be a multiple of twice"),
        ({"depth": 0}, "depth is 0; it must be at least 1"),
        ({"dropout": 0.1}, "dropout is not an option of the model 'transformer'"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        models.build("transformer", 7, **options)
