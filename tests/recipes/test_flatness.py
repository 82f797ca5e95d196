"""Eigenvalues against dense Hessians, surfaces against NumPy."""

import functools

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data
from fedjax_lab.models import classification_loss, from_linen, mlp, running_statistics
from fedjax_lab.models.layers import Classifier, ConvBlock
from fedjax_lab.recipes.flatness import (
    hessian_eigenvalues,
    loss_surface,
    random_directions,
)
from tests.algorithms import problem
from tests.reference import problem as reference


def labelled(shape, seed=0):
    rng = np.random.default_rng(seed)
    return data.Examples(rng.standard_normal(shape), rng.integers(3, size=shape[0]))


def dense_eigenvalues(loss_fn, params, examples):
    """The largest first, with all second derivatives computed in reverse mode."""
    flat, unflatten = jax.flatten_util.ravel_pytree(params)
    mean = lambda flat: loss_fn(unflatten(flat), examples, jax.random.key(1)).mean()  # noqa: E731
    hessian = jax.jit(jax.jacrev(jax.grad(mean)))(flat)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-12)
    return np.linalg.eigvalsh(np.asarray(hessian))[::-1]


def quadratic_loss(params, examples, key):
    point = jnp.concatenate([params["a"], params["b"].reshape(-1)])
    return 0.5 * jnp.einsum("i,bij,j->b", point, examples["matrix"], point)


def quadratic(seed=0):
    """Seven quadratic losses; the mean's Hessian has its largest magnitude below 0."""
    matrices = np.random.default_rng(seed).standard_normal((7, 5, 5))
    matrices = (matrices + matrices.transpose(0, 2, 1)).astype(np.float32)
    matrices -= 2 * np.eye(5, dtype=np.float32)
    return {"a": np.ones(1, np.float32), "b": np.ones((2, 2), np.float32)}, {"matrix": matrices}


def test_eigenvalues_of_a_quadratic():
    params, examples = quadratic()
    expected = np.linalg.eigvalsh(examples["matrix"].astype(np.float64).mean(0))[::-1]
    assert abs(expected[-1]) > abs(expected[0])
    found = hessian_eigenvalues(quadratic_loss, params, examples, count=3, batch_size=3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected[:3], atol=1e-5)


@pytest.mark.methods
def test_eigenvalues_of_an_mlp(x64):
    examples = labelled((23, 4))
    model = mlp(3, hidden=(6,))
    params = model.init(jax.random.key(0), examples.x[:1])
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    loss_fn = classification_loss(model.apply)
    expected = dense_eigenvalues(loss_fn, params, examples)
    find = functools.partial(hessian_eigenvalues, loss_fn, params, examples)
    found = find(count=4, batch_size=5, tolerance=1e-9)
    np.testing.assert_allclose(found, expected[:4], rtol=1e-8)
    first = find(batch_size=5, seed=3)
    np.testing.assert_allclose(first, expected[:1], rtol=1e-4)
    np.testing.assert_array_equal(first, find(batch_size=5, seed=3))


@pytest.mark.parametrize("norm", [pytest.param("group", marks=pytest.mark.slow), "batch"])
@pytest.mark.slow
def test_eigenvalues_of_a_convolution(norm, x64):
    """Ours have gradients of their own on CPU; the dense Hessian is that of XLA's."""
    examples = labelled((6, 4, 4, 1))

    def build(lowering):
        block = ConvBlock(2, norm, "SAME", 3, nn.tanh, lowering)
        return from_linen(Classifier(3, (block,)))

    ours, xla = build("auto"), build("lax")
    params = ours.init(jax.random.key(0), examples.x[:1])
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    fixed = running_statistics(params)
    weights = jax.tree.map(lambda f, p: None if f else p, fixed, params)

    def loss_of_weights(weights, examples, key):
        whole = jax.tree.map(lambda f, p, w: p if f else w, fixed, params, weights)
        return classification_loss(xla.apply)(whole, examples, key)

    expected = dense_eigenvalues(loss_of_weights, weights, examples)
    # Statistics are those of a batch, so that BatchNorm needs all examples in one.
    size = 4 if norm == "group" else 6
    found = hessian_eigenvalues(
        classification_loss(ours.apply), params, examples, count=2, batch_size=size, tolerance=1e-9
    )
    np.testing.assert_allclose(found, expected[:2], rtol=1e-8)


def regression(n=13):
    x, y = (np.concatenate(parts)[:n] for parts in zip(*reference.client_data(), strict=True))
    return {"x": x.astype(np.float32), "y": y}


def numpy_loss(weights, bias, examples):
    logits = examples["x"] @ weights + bias
    return (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), examples["y"]]).mean()


def test_surface():
    params, examples = problem.initial_params(), regression()
    offsets, losses = loss_surface(
        problem.loss_fn, params, examples, radius=0.6, points=5, seed=4, batch_size=5
    )
    np.testing.assert_allclose(offsets, [-0.6, -0.3, 0, 0.3, 0.6])
    weights, bias = np.asarray(params["W"], np.float64), np.asarray(params["b"], np.float64)
    draws = np.random.default_rng(4).standard_normal((2, *weights.shape))
    u, v = np.zeros_like(weights), np.zeros_like(weights)
    for direction, draw in zip((u, v), draws, strict=True):
        for out in range(weights.shape[1]):
            length = np.linalg.norm(weights[:, out]) / np.linalg.norm(draw[:, out])
            direction[:, out] = length * draw[:, out]
    for i, j in ((2, 2), (0, 3), (4, 1)):
        expected = numpy_loss(weights + offsets[i] * u + offsets[j] * v, bias, examples)
        assert losses[i, j] == pytest.approx(expected, rel=1e-5)
    # Given directions are taken as they are, biases included.
    given = ({"W": u, "b": np.ones(3)}, {"W": v, "b": np.arange(3.0)})
    _, losses = loss_surface(
        problem.loss_fn, params, examples, points=5, batch_size=5, directions=given
    )
    moved = (weights + 0.5 * u - v, bias + 0.5 - np.arange(3.0))
    assert losses[3, 0] == pytest.approx(numpy_loss(*moved, examples), rel=1e-5)


def test_directions_of_two_models_are_one_draw():
    rng = np.random.default_rng(0)
    shapes = {"bias": (4,), "conv": (3, 3, 2, 4), "dense": (5, 3)}
    models = [
        {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(2)
    ]
    models[1]["dense"][:, 1] = 0
    pairs = [random_directions(model, seed=1) for model in models]
    for model, pair in zip(models, pairs, strict=True):
        for direction in pair:
            assert not direction["bias"].any()
            for name in ("conv", "dense"):
                norms = [
                    np.linalg.norm(tree[name].reshape(-1, tree[name].shape[-1]), axis=0)
                    for tree in (direction, model)
                ]
                np.testing.assert_allclose(*norms, rtol=1e-5)
    for one, other in zip(*pairs, strict=True):
        for out in range(4):  # the same filter of both points the same way
            a, b = (tree["conv"][..., out].reshape(-1) for tree in (one, other))
            assert a @ b == pytest.approx(np.linalg.norm(a) * np.linalg.norm(b), rel=1e-5)
    u, v = (direction["conv"].reshape(-1) for direction in pairs[0])
    assert abs(u @ v) < 0.5 * np.linalg.norm(u) * np.linalg.norm(v)


def test_a_model_that_has_diverged_has_no_eigenvalues():
    params, examples = quadratic()
    with pytest.raises(FloatingPointError, match="the Hessian is not finite at params"):
        hessian_eigenvalues(quadratic_loss, params, {"matrix": examples["matrix"] * np.inf})
