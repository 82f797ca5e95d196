"""What the twins do not see of MOON and FedMLB: closed forms, dead features, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, models
from fedjax_lab.algorithms.representation import contrastive_loss, divergence
from fedjax_lab.data import Examples
from tests.algorithms import networks, problem
from tests.algorithms.cases import N
from tests.federations import batch_of
from tests.reference import problem as reference
from tests.reference.mlp_numpy import MLP

MODEL = networks.two_blocks()
FACTORIES = [algorithms.moon, algorithms.moonm, algorithms.fedmlb, algorithms.fedmlbm]


def rows(*values):
    return jnp.asarray([values])


def test_the_contrastive_loss_is_its_closed_form(x64):
    """cos(z, positive) = 1 / sqrt(2) and cos(z, negative) = 0, at any length of the vectors."""
    expected = np.log1p(np.exp(-1 / np.sqrt(2) / 0.5))
    for a, b, c in [(1, 1, 1), (3, 0.1, 50)]:
        z, positive, negative = rows(1.0 * a, 0), rows(1.0 * b, b), rows(0, 1.0 * c)
        loss = contrastive_loss(z, positive, negative, 0.5)
        np.testing.assert_allclose(loss, [expected], rtol=1e-12)
    # d cos(z, v) / dz = v / |v| for v orthogonal to z = (1, 0), and 0 along z.
    gradient = jax.grad(lambda z: contrastive_loss(z, rows(1.0, 1), rows(0.0, 1), 0.5)[0])
    slope = (1 - np.exp(-expected)) / 0.5 * (1 - 1 / np.sqrt(2))
    np.testing.assert_allclose(gradient(rows(1.0, 0)), [[0, slope]], atol=1e-12)


def test_equal_models_give_log_2_and_no_gradient(x64):
    z, other = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)))
    loss, gradient = jax.value_and_grad(lambda z: contrastive_loss(z, other, other, 0.1).sum())(z)
    np.testing.assert_allclose(loss, 4 * np.log(2), rtol=1e-12)
    np.testing.assert_allclose(gradient, 0, atol=1e-12)


def test_dead_features_have_a_cosine_and_a_gradient_of_zero():
    loss = jax.value_and_grad(lambda z: contrastive_loss(z, rows(1.0, 1), rows(0.0, 0), 0.5)[0])
    value, gradient = loss(rows(0.0, 0))
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    assert np.isfinite(gradient).all()


def test_the_divergence_is_its_definition(x64):
    p, q = np.array([2.0, 0, 0]), np.array([1.0, 1, 0])
    for temperature in (1.0, 3.0):
        share_p, share_q = (np.exp(v / temperature) for v in (p, q))
        share_p, share_q = share_p / share_p.sum(), share_q / share_q.sum()
        expected = (share_p * np.log(share_p / share_q)).sum()
        actual = divergence(rows(*p), rows(*q), temperature)
        np.testing.assert_allclose(actual, [expected], rtol=1e-12)
    # A share of 0 on either side is no NaN.
    assert np.isfinite(divergence(rows(0.0, 900), rows(0.0, -900), 1.0)).all()


@pytest.mark.methods
def test_the_first_step_of_fedmlb_scales_each_blocks_gradient(x64):
    """Where y = x_t all paths agree: block b of M + 1 is in 1 + M - b + 1 of them."""
    twin = MLP(widths=(reference.FEATURES, 4, 4, 4, reference.CLASSES))
    clients, padded = reference.make_rounds(3, 1, 1, 1, 4, equal_steps=True, weighted=False)[0]
    algorithm = algorithms.fedmlb(
        networks.perceptron(twin),
        client_lr=0.1,
        ce_weight=0.7,
        hybrid_ce_weight=0.5,
        preprocess=networks.preprocess,
    )
    params = networks.perceptron_params(twin)
    state, metrics = jax.jit(algorithm.round_fn)(
        algorithm.init(params, N), problem.to_batch(padded, 0)
    )
    before, after = map(networks.flat_perceptron, (params, algorithm.params(state)))
    g = twin.gradient(before, clients[0].minibatches[0])
    for part, paths in zip(twin.blocks(), (3, 2, 1, 0), strict=True):
        expected = -0.1 * (0.7 + 0.5 * paths / 3) * g[part]
        np.testing.assert_allclose((after - before)[part], expected, rtol=1e-9, atol=1e-12)
    # The metric is the plain cross-entropy, whatever else is descended.
    np.testing.assert_allclose(metrics["loss"], twin.loss(before, clients[0].minibatches[0]))
    assert algorithm.gradients_per_step == 3  # 1 + 3 / 2, rounded up


@pytest.mark.parametrize(
    "factory",
    [
        pytest.param(f, marks=pytest.mark.slow if f.__name__.endswith("m") else pytest.mark.methods)
        for f in FACTORIES
    ],
)
def test_a_shipped_model_on_stored_images(factory):
    """Dropout, and integers that are scaled by ``preprocess``; traced, not compiled."""

    def scaled(examples, key):
        return examples._replace(x=examples.x / 255.0)

    model = models.build("lenet5_gradma", 10, padding="SAME")
    shape = (2, 3, 4, 8, 8, 1)  # S, K, B, H, W, C
    batch = batch_of(stored(shape))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *shape[3:])))

    def trace(algorithm):
        return jax.eval_shape(lambda p: algorithm.round_fn(algorithm.init(p, N), batch), params)

    algorithm = factory(model, client_lr=0.1, preprocess=scaled)
    state, _ = trace(algorithm)
    assert jax.tree.map(lambda leaf: leaf.shape, algorithm.params(state)) == jax.tree.map(
        lambda leaf: leaf.shape, params
    )
    assert "model" not in algorithm.hyperparameters
    assert "preprocess" not in algorithm.hyperparameters
    with pytest.raises(TypeError, match="x has dtype uint8; the model takes floats"):
        trace(factory(model, client_lr=0.1))


def stored(shape):
    return Examples(jnp.zeros(shape, jnp.uint8), jnp.zeros(shape[:3], jnp.int32))


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_model_that_cannot_be_looked_into_is_refused(factory):
    name, is_moon = factory.__name__, "moon" in factory.__name__
    with pytest.raises(TypeError, match=rf"model of {name} is loss_fn; it must be a Model"):
        factory(problem.loss_fn, client_lr=0.1)
    missing = "no features and no head; .* features and head" if is_moon else "no blocks"
    with pytest.raises(ValueError, match=f"model has {missing}"):
        factory(models.Model(MODEL.init, MODEL.apply), client_lr=0.1)
    with pytest.raises(TypeError, match="preprocess is 3"):
        factory(MODEL, client_lr=0.1, preprocess=3)
    with pytest.raises(ValueError, match="temperature is 0; it must be finite and greater than 0"):
        factory(MODEL, client_lr=0.1, temperature=0)
    for weight in ("contrastive_weight",) if is_moon else ("hybrid_ce_weight", "ce_weight"):
        with pytest.raises(ValueError, match=f"{weight} is -1; it must be finite and at least 0"):
            factory(MODEL, client_lr=0.1, **{weight: -1})
    if not is_moon:
        with pytest.raises(ValueError, match=f"model has 1 block; {name} needs at least 2"):
            factory(models.linear(10), client_lr=0.1)
