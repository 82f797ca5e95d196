"""Losses and counts of models of all kinds against NumPy; who gets which key."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import data, models
from fedjax_lab.models.losses import cross_entropy, pick

EXAMPLES = data.Examples(
    np.random.default_rng(0).integers(0, 256, (5, 4)).astype(np.uint8),
    np.array([0, 2, 1, 2, 0], np.int32),
)


def scale(examples, key):
    return examples._replace(x=examples.x / 255.0)


def numpy_cross_entropy(logits, labels):
    logits = np.asarray(logits, np.float64)
    return np.array(
        [np.log(np.exp(row).sum()) - row[y] for row, y in zip(logits, labels, strict=True)]
    )


@pytest.fixture
def model():
    return models.build("linear", 3)


@pytest.fixture
def params(model):
    return jax.jit(model.init)(jax.random.key(0), EXAMPLES.x[:1])


def test_losses_and_counts_are_numpys(model, params):
    logits = np.asarray(EXAMPLES.x, np.float64) / 255.0 @ np.asarray(
        params["classifier"]["kernel"], np.float64
    ) + np.asarray(params["classifier"]["bias"])
    expected = numpy_cross_entropy(logits, EXAMPLES.y)

    loss_fn = jax.jit(models.classification_loss(model.apply, scale))
    losses = loss_fn(params, EXAMPLES, jax.random.key(1))
    assert losses.shape == (5,)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, expected, rtol=1e-5)

    correct, losses = jax.jit(models.accuracy_counts(model.apply, scale))(params, EXAMPLES)
    assert correct.dtype == losses.dtype == jnp.float32
    np.testing.assert_array_equal(correct, logits.argmax(axis=1) == np.asarray(EXAMPLES.y))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_gradient_is_softmax_minus_onehot(model, params):
    examples = EXAMPLES._replace(x=EXAMPLES.x.astype(np.float32) / 255)
    loss_fn = models.classification_loss(model.apply)

    @jax.jit
    def run(params):
        gradient = jax.grad(lambda p: loss_fn(p, examples, jax.random.key(0)).sum())(params)
        return gradient, model.apply(params, examples.x)

    gradient, logits = run(params)
    logits = np.asarray(logits, np.float64)
    residual = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    residual[np.arange(5), np.asarray(EXAMPLES.y)] -= 1
    classifier = gradient["classifier"]
    np.testing.assert_allclose(
        classifier["kernel"], np.asarray(examples.x).T @ residual, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(classifier["bias"], residual.sum(axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "classes"), [("uint8", 300), ("int8", 7), ("uint16", 7), ("int64", 7), ("uint64", 7)]
)
def test_cross_entropy_and_its_derivatives_are_those_of_optax(x64, dtype, classes):
    rng = np.random.default_rng(1)
    logits, direction = (jnp.asarray(rng.normal(size=(6, classes))) for _ in range(2))
    labels = jnp.asarray(rng.integers(0, min(classes, 256), 6).astype(dtype))

    def derivatives(loss):
        gradient = jax.grad(lambda x: jnp.sin(loss(x, labels)).sum())
        both = jax.jvp(gradient, (logits,), (direction,))
        back = jax.grad(lambda x: (gradient(x) * direction).sum())(logits)
        return loss(logits, labels), *both, back

    both = cross_entropy, optax.softmax_cross_entropy_with_integer_labels
    for found, wanted in zip(*jax.jit(lambda: [derivatives(loss) for loss in both])(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint32", "uint64"])
def test_an_index_without_a_value_picks_nan_and_has_no_gradient(x64, dtype):
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    indices = np.array([0, 4, 5, least, most, most - 2**32 if most > 2**32 else 6], dtype)
    values = jnp.arange(30.0).reshape(6, 5)
    outside = (indices < 0) | (indices > 4)
    picked, back = jax.vjp(lambda x: pick(x, jnp.asarray(indices)), values)
    np.testing.assert_array_equal(np.isnan(picked), outside)
    expected = np.zeros((6, 5))
    for row in np.flatnonzero(~outside):
        assert picked[row] == values[row, indices[row]]
        expected[row, indices[row]] = 1
    np.testing.assert_array_equal(back(jnp.ones(6))[0], expected)


def test_the_gradient_of_a_loss_adds_nothing_place_by_place(model, params):
    losses = models.classification_loss(model.apply, scale)
    loss = lambda params: losses(params, EXAMPLES, jax.random.key(0)).sum()  # noqa: E731
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(params))


def test_keys_are_split_in_training_and_absent_in_evaluation():
    seen = {}

    def preprocess(examples, key):
        seen["augmentation"] = key
        return examples

    def apply(params, x, key=None):
        seen["dropout"] = key
        return jnp.zeros((5, 3)) * params

    loss_fn = models.classification_loss(apply, preprocess)
    key = jax.random.key(7)
    loss_fn(1.0, EXAMPLES, key)
    data = [jax.random.key_data(k).tolist() for k in (seen["augmentation"], seen["dropout"], key)]
    assert len({tuple(row) for row in data}) == 3

    models.accuracy_counts(apply, preprocess)(1.0, EXAMPLES)
    assert seen == {"augmentation": None, "dropout": None}


def test_equal_logits_count_for_the_first_class():
    counts = models.accuracy_counts(lambda params, x, key: jnp.zeros((5, 3)))
    correct, loss = counts(None, EXAMPLES)
    np.testing.assert_array_equal(correct, [1, 0, 0, 0, 1])
    np.testing.assert_allclose(loss, np.log(3), rtol=1e-6)


def test_half_precision_logits_are_scored_in_float32():
    counts = models.accuracy_counts(lambda params, x, key: jnp.ones((5, 3), jnp.bfloat16))
    assert counts(None, EXAMPLES)[1].dtype == jnp.float32


def test_large_logits_stay_finite():
    loss_fn = models.classification_loss(lambda params, x, key: params * jnp.eye(5, 3))
    summed = jax.value_and_grad(lambda p: loss_fn(p, EXAMPLES, jax.random.key(0)).sum())
    value, gradient = jax.jit(summed)(1e30)
    assert np.isfinite(value)
    assert np.isfinite(gradient)


@pytest.mark.parametrize("shape", [(5,), (5, 2, 3), (4, 3)])
def test_logits_of_the_wrong_shape_are_refused(shape):
    def apply(params, x, key=None):
        return jnp.zeros(shape)

    message = r"apply returned logits of shape .* for 5 examples; they must be \[B, C\] = \[5, "
    with pytest.raises(ValueError, match=message):
        models.classification_loss(apply)(None, EXAMPLES, jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        models.accuracy_counts(apply)(None, EXAMPLES)


@pytest.mark.parametrize("y", [jnp.zeros((5, 3), jnp.int32), jnp.zeros(5)])
def test_labels_of_the_wrong_kind_are_refused(model, params, y):
    loss_fn = models.classification_loss(model.apply, scale)
    with pytest.raises(ValueError, match="it must be integer class labels"):
        loss_fn(params, EXAMPLES._replace(y=y), jax.random.key(0))


def test_arguments_that_are_no_functions_are_refused(model):
    with pytest.raises(TypeError, match=r"such as model\.apply"):
        models.classification_loss(model)
    with pytest.raises(TypeError, match="preprocess is 255"):
        models.accuracy_counts(model.apply, 255)


def test_language_model_losses_and_counts_are_means_over_the_words():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 4, 6)).astype(np.float32)
    examples = data.Examples(
        np.zeros((3, 4), np.int32), rng.integers(0, 6, (3, 4)).astype(np.int32)
    )
    seen = []

    def apply(params, x, key=None):
        seen.append(key)
        return params

    key = jax.random.key(0)
    expected = [numpy_cross_entropy(*pair).mean() for pair in zip(logits, examples.y, strict=True)]
    losses = models.language_model_loss(apply)(logits, examples, key)
    assert losses.shape == (3,)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    correct, losses = models.token_counts(apply)(logits, examples)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(
        correct, (np.asarray(logits).argmax(-1) == np.asarray(examples.y)).mean(1), rtol=1e-6
    )
    assert seen == [key, None]


def test_language_model_losses_name_what_is_wrong():
    words = data.Examples(jnp.zeros((3, 4), jnp.int32), jnp.zeros((3, 4), jnp.int32))
    loss_fn = models.language_model_loss(lambda params, x, key: jnp.zeros((3, 6)))
    with pytest.raises(ValueError, match=r"must be \[B, L, V\] = \[3, 4, number of words\]"):
        loss_fn(None, words, jax.random.key(0))
    counts = models.token_counts(lambda params, x, key: jnp.zeros((3, 4, 6)))
    with pytest.raises(ValueError, match=r"must be the next words of sequences, integers \[B, L\]"):
        counts(None, words._replace(y=jnp.zeros(3, jnp.int32)))
    with pytest.raises(TypeError, match="apply is 3"):
        models.language_model_loss(3)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (5, 2, 3)])
@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_squared_errors_are_numpys(shape, kind):
    rng = np.random.default_rng(2)
    predictions = rng.normal(size=shape).astype(np.float32)
    targets = (5 * rng.normal(size=shape)).astype(kind)
    expected = [np.mean((predictions[i] - targets[i].astype(float)) ** 2) for i in range(5)]
    examples = EXAMPLES._replace(y=targets)
    key = jax.random.key(0)
    losses = models.regression_loss(lambda params, x, key: params)(predictions, examples, key)
    assert losses.shape == (5,)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    counts = models.squared_error_counts(lambda params, x, key: params)
    for found in counts(predictions, examples):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    if shape == (5,):  # as a layer with one output has it
        np.testing.assert_allclose(counts(predictions[:, None], examples)[0], expected, rtol=1e-5)


def test_the_gradient_of_a_regression_is_that_of_least_squares():
    rng = np.random.default_rng(3)
    x, y, w = rng.normal(size=(5, 4)), rng.normal(size=(5, 2)), rng.normal(size=(4, 2))
    loss_fn = models.regression_loss(lambda params, x, key: x @ params)
    examples = data.Examples(jnp.float32(x), jnp.float32(y))
    summed = jax.grad(lambda w: loss_fn(w, examples, jax.random.key(0)).sum())
    gradient = jax.jit(summed)(jnp.float32(w))
    np.testing.assert_allclose(gradient, x.T @ (x @ w - y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 2), (1, 5), (), (4,)])
def test_predictions_of_the_wrong_shape_are_refused(shape):
    examples = EXAMPLES._replace(y=jnp.zeros(5))
    counts = models.squared_error_counts(lambda params, x, key: jnp.zeros(shape))
    with pytest.raises(ValueError, match=r"predictions of shape .* for targets .* \(5,\)"):
        counts(None, examples)
    with pytest.raises(TypeError, match="apply is 3"):
        models.regression_loss(3)


def test_a_regression_is_preprocessed_with_its_keys():
    seen = []

    def preprocess(examples, key):
        seen.append(key is None)
        return scale(examples, key)

    examples = data.Examples(np.full((2, 1), 51, np.uint8), np.float32([0, 1]))
    identity = lambda params, x, key: x  # noqa: E731
    losses = models.regression_loss(identity, preprocess)(None, examples, jax.random.key(0))
    np.testing.assert_allclose(losses, [0.2**2, 0.8**2], rtol=1e-5)
    found, _ = models.squared_error_counts(identity, preprocess)(None, examples)
    np.testing.assert_allclose(found, [0.2**2, 0.8**2], rtol=1e-5)
    assert seen == [False, True]
