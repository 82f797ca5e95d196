"""What one client does with its mini-batches."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.clients.local import Gradient, Step


def test_an_infinite_loss_of_a_masked_example_is_left_out():
    """0 times infinity is no number: what is masked must be left out, not multiplied by 0."""

    def loss_fn(params, examples, key):
        return params * examples["x"] + examples["penalty"]

    examples = {"x": jnp.array([1.0, 2.0, 3.0]), "penalty": jnp.array([0.0, jnp.inf, 4.0])}
    step = Step(examples, jnp.array([True, False, True]), jax.random.key(0), (), ())
    gradient, report = jax.jit(Gradient(loss_fn).raw)(jnp.float32(5.0), step)
    np.testing.assert_allclose(gradient, (1 + 3) / 2)
    np.testing.assert_allclose(report.loss, (5 + 15 + 4) / 2)
    assert report.num_examples == 2
