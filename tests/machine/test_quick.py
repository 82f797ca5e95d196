"""Short compilations: the same values, inside other programs too; never of rounds."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import models
from fedjax_lab.machine.quick import quick_jit, without_collection


def test_inside_other_programs():
    square = quick_jit(lambda x: (x * x).sum())
    x = jnp.arange(3.0)
    assert square(x) == 5
    assert jax.jit(square)(x) == 5
    assert jax.jit(lambda: square(x))() == 5  # nothing in the call is traced
    np.testing.assert_array_equal(jax.grad(square)(x), [0, 2, 4])
    np.testing.assert_array_equal(jax.vmap(square)(x[:, None]), [0, 1, 4])
    assert jax.eval_shape(square, x).shape == ()


def test_a_model_is_drawn_with_the_same_bits_inside_a_program():
    model = models.build("linear", num_classes=3)
    key, x = jax.random.key(0), jnp.zeros((1, 4))
    alone, inside = model.init(key, x), jax.jit(lambda: model.init(key, x))()
    jax.tree.map(np.testing.assert_array_equal, alone, inside)


@pytest.mark.parametrize("was_on", [True, False])
def test_collection_pauses_for_a_call_and_is_then_as_before(was_on):
    @without_collection()
    def fails():
        assert not gc.isenabled()
        raise ArithmeticError

    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ArithmeticError):
            fails()
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
