"""Synthetic problems: the stated optimum is the optimum of what the clients hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from fedjax_lab import data
from fedjax_lab.data import synthetic


@pytest.mark.parametrize(
    "problem",
    [
        synthetic.quadratics(5, 4, heterogeneity=2.0, noise=0.3, examples_per_client=3),
        synthetic.quadratics(1, 1, condition=1),
        synthetic.logistic_regression(6, 3, heterogeneity=2.0),
        synthetic.logistic_regression(2, 5, l2=1e-3, examples_per_client=4, seed=1),
    ],
)
def test_optimum(problem, x64):
    wide = data.Examples(np.asarray(problem.examples.x, np.float64), problem.examples.y)
    start = np.zeros(len(problem.optimum))
    losses = jax.eval_shape(lambda y: problem.loss_fn(y, wide, None), start)
    assert losses.shape == (len(wide.y),)
    objective = jax.jit(jax.value_and_grad(lambda y: problem.loss_fn(y, wide, None).mean()))
    minimum, gradient = objective(problem.optimum)
    assert np.linalg.norm(gradient) < 1e-12
    assert float(minimum) == pytest.approx(problem.minimum, rel=1e-12)
    found = optimize.minimize(objective, start, jac=True, tol=1e-8)
    np.testing.assert_allclose(found.x, problem.optimum, atol=1e-4)


def test_quadratic_formula():
    problem = synthetic.quadratics(4, 3, noise=1.0, examples_per_client=5, seed=2)
    x = problem.examples.x.astype(np.float64)
    y = np.array([0.3, -1.0, 2.0])
    losses = problem.loss_fn(jnp.asarray(y, jnp.float32), problem.examples, None)
    expected = [0.5 * sum(a * (v - b) ** 2 for a, b, v in zip(*row, y, strict=True)) for row in x]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    # All examples of a client share its curvature.
    for client in range(4):
        assert (np.ptp(x[problem.client_ids == client, 0], axis=0) == 0).all()


def test_problems_are_federations():
    problem = synthetic.logistic_regression(6, 3)
    clients = data.partition(problem.examples, problem.client_ids, 6)
    np.testing.assert_array_equal(clients.sizes, np.full(6, 50))
    assert set(np.unique(problem.examples.y)) == {0, 1}
    other = synthetic.logistic_regression(6, 3, seed=1)
    assert (other.examples.x != problem.examples.x).any()


def test_heterogeneity_moves_the_clients_apart():
    same = synthetic.quadratics(5, 4, heterogeneity=0)
    np.testing.assert_allclose(same.optimum, 0, atol=1e-12)
    assert same.minimum == pytest.approx(0)
    assert synthetic.quadratics(5, 4, heterogeneity=1).minimum > 0.1


def test_noise_images():
    images = synthetic.noise_images(50, (8, 6, 3), 7, seed=3)
    assert images.x.shape == (50, 8, 6, 3)
    assert images.x.dtype == np.uint8
    assert images.y.dtype == np.int32
    assert data.num_classes(images) <= 7
    np.testing.assert_array_equal(images.x, synthetic.noise_images(50, (8, 6, 3), 7, seed=3).x)


def test_errors():
    with pytest.raises(ValueError, match="num_clients is 0"):
        synthetic.quadratics(0, 2)
    with pytest.raises(ValueError, match=r"condition is 0\.5"):
        synthetic.quadratics(2, 2, condition=0.5)
    with pytest.raises(ValueError, match="l2 is 0"):
        synthetic.logistic_regression(2, 2, l2=0)
    with pytest.raises(TypeError, match=r"dim is 2\.0"):
        synthetic.logistic_regression(2, 2.0)
    with pytest.raises(ValueError, match="num_classes is 0"):
        synthetic.noise_images(3, num_classes=0)
