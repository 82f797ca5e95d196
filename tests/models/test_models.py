"""The shipped models against NumPy: parameter counts, forward passes, dropout, errors."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.signal import correlate

from fedjax_lab import models
from fedjax_lab.machine.target import named, tracing_for
from fedjax_lab.models import layers
from tests.tiers import few

# Layer tables, written from the papers: ("conv", kernel, in, out) or ("dense", in, out), and
# whether a norm (a scale and a bias per output) follows every layer but the last.
LENET5 = [("conv", 5, 3, 64), ("conv", 5, 64, 64), ("dense", 1600, 384), ("dense", 384, 192)]
LECUN = [
    *(("conv", 5, 3, 6), ("conv", 5, 6, 16), ("dense", 400, 120), ("dense", 120, 84)),
    ("dense", 84, 10),
]
GRADMA = [("conv", 5, 3, 32), ("conv", 5, 32, 64), ("dense", 1600, 512), ("dense", 512, 128)]
MLP = [("dense", 784, 200), ("dense", 200, 100), ("dense", 100, 10)]
CNN = [("conv", 5, 1, 32), ("conv", 5, 32, 64), ("dense", 1024, 512), ("dense", 512, 10)]
# Rows and columns 28 - 26 - 13 - 11 - 5, so 5 * 5 * 10 inputs of the first dense layer.
FAFED = [("conv", 3, 1, 5), ("conv", 3, 5, 10), ("dense", 250, 100), ("dense", 100, 10)]
# 28 - 24 - 12 - 8 - 4, and with padding 32 - 16 - 8 - 4.
MNIST = [("conv", 5, 1, 20), ("conv", 5, 20, 50), ("dense", 800, 500), ("dense", 500, 10)]
CIFAR = [
    *(("conv", 3, 3, 16), ("conv", 3, 16, 32), ("conv", 3, 32, 64)),
    *(("dense", 1024, 512), ("dense", 512, 64), ("dense", 64, 10)),
]
GRAY, COLOR = (28, 28, 1), (32, 32, 3)
# name, options, classes, input, layers, norm, total
TABLE = [
    ("linear", {}, 10, GRAY, [("dense", 784, 10)], False, 7_850),
    ("mlp", {}, 10, GRAY, MLP, False, 178_110),
    ("mlp", {"norm": "group"}, 10, GRAY, MLP, True, 178_710),
    ("cnn", {}, 10, GRAY, CNN, False, 582_026),
    ("fafed_cnn", {}, 10, GRAY, FAFED, False, 26_620),
    ("fafed_cnn_mnist", {}, 10, GRAY, MNIST, False, 431_080),
    ("fafed_cnn_cifar10", {}, 10, COLOR, CIFAR, False, 581_866),
    ("lenet5", {}, 10, COLOR, [*LENET5, ("dense", 192, 10)], False, 797_962),
    ("lenet5", {}, 100, COLOR, [*LENET5, ("dense", 192, 100)], False, 815_332),
    ("lenet5", {"widths": (6, 16, 120, 84)}, 10, COLOR, LECUN, False, 62_006),
    ("lenet5_gradma", {}, 10, COLOR, [*GRADMA, ("dense", 128, 10)], True, 941_834),
    ("lenet5_gradma", {"norm": None}, 10, COLOR, [*GRADMA, ("dense", 128, 10)], False, 940_362),
]
# The smallest images, and small MLPs, so that loops in NumPy are quick. What a plain run leaves out
# has layers that others have.
SMALL = [
    ("linear", {}, (4, 4, 2)),
    pytest.param("mlp", {"hidden": (12, 6)}, (4, 4, 2), marks=pytest.mark.slow),
    ("mlp", {"hidden": (12, 6), "norm": "group"}, (4, 4, 2)),
    pytest.param("cnn", {}, (16, 16, 1), marks=pytest.mark.slow),
    ("cnn", {"padding": "SAME"}, (8, 8, 1)),
    ("fafed_cnn", {}, (10, 11, 1)),
    ("fafed_cnn", {"bounded": False, "padding": "SAME"}, (5, 4, 2)),
    ("fafed_cnn_mnist", {"padding": "SAME"}, (4, 4, 1)),
    ("fafed_cnn_cifar10", {"bounded": False}, (8, 8, 3)),
    pytest.param("lenet5", {}, (16, 18, 3), marks=pytest.mark.slow),
    ("lenet5", {"norm": "group", "padding": "SAME"}, (8, 8, 3)),
    pytest.param("lenet5_gradma", {}, (16, 16, 3), marks=pytest.mark.slow),
    ("lenet5_gradma", {"norm": None}, (17, 16, 3)),  # an odd row is cut by the pool
]


def layer_counts(table, norm):
    """Scalars of each layer, by the definition of a convolution and an affine map."""
    counts = []
    for position, (kind, *sizes) in enumerate(table):
        outputs = sizes[-1]
        inputs = sizes[0] ** 2 * sizes[1] if kind == "conv" else sizes[0]
        scales = 2 * outputs if norm and position < len(table) - 1 else 0
        counts.append(outputs * (inputs + 1) + scales)
    return counts


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def setup(name, options, shape, *, batch=3):
    """A model, NumPy's parameters for it (scales and biases of norms included), and inputs."""
    model = models.build(name, 10, **options)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((batch, *shape)).astype(np.float32)

    def draw(leaf):
        fan_in = math.prod(leaf.shape[:-1])
        return (rng.standard_normal(leaf.shape) / math.sqrt(fan_in)).astype(np.float32)

    return model, jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0), x)), x


@pytest.mark.parametrize(
    ("name", "options", "num_classes", "shape", "table", "norm", "total"), TABLE
)
def test_number_of_parameters(name, options, num_classes, shape, table, norm, total):
    model = models.build(name, num_classes, **options)
    example = jax.ShapeDtypeStruct((1, *shape), jnp.uint8)
    params = jax.eval_shape(model.init, jax.random.key(0), example)
    order = sorted(params, key=lambda key: (key == "classifier", key))
    expected = layer_counts(table, norm)
    assert [models.count_params(params[key]) for key in order] == expected
    assert models.count_params(params) == sum(expected) == total
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


# --- an independent forward pass: float64, loops, channels-first where PyTorch is ---


def numpy_conv(x, kernel, bias, mode):
    """x [B, H, W, C], kernel [h, w, C, F]; one correlation per example, channel and feature."""
    images = []
    for image in x:
        planes = [
            sum(
                correlate(image[:, :, c], kernel[:, :, c, f], mode=mode, method="direct")
                for c in range(image.shape[-1])
            )
            + bias[f]
            for f in range(kernel.shape[-1])
        ]
        images.append(np.stack(planes, axis=-1))
    return np.stack(images)


def numpy_pool(x):
    height, width = x.shape[1] // 2, x.shape[2] // 2
    out = np.empty((len(x), height, width, x.shape[-1]))
    for i in range(height):
        for j in range(width):
            out[:, i, j] = x[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max(axis=(1, 2))
    return out


def numpy_group_norm(x, scale, bias, groups=2, epsilon=1e-5):
    out = np.empty_like(x)
    size = x.shape[-1] // groups
    for b in range(len(x)):
        for g in range(groups):
            part = x[b, ..., g * size : (g + 1) * size]
            out[b, ..., g * size : (g + 1) * size] = (part - part.mean()) / np.sqrt(
                part.var() + epsilon
            )
    return out * scale + bias


def numpy_forward(params, x, padding, activation=lambda x: np.maximum(x, 0)):
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = np.asarray(x, np.float64)
    for name in sorted(key for key in params if key != "classifier"):
        block = params[name]
        if "conv" in block:
            mode = {"VALID": "valid", "SAME": "same"}[padding]
            x = numpy_conv(x, block["conv"]["kernel"], block["conv"]["bias"], mode)
        else:
            x = x.reshape(len(x), -1) @ block["dense"]["kernel"] + block["dense"]["bias"]
        if "norm" in block:
            x = numpy_group_norm(x, block["norm"]["group"]["scale"], block["norm"]["group"]["bias"])
        x = activation(x)
        if "conv" in block:
            x = numpy_pool(x)
    x = x.reshape(len(x), -1)
    return x @ params["classifier"]["kernel"] + params["classifier"]["bias"]


@pytest.mark.parametrize(("name", "options", "shape"), SMALL)
def test_forward_pass_is_numpys_and_splits_at_the_head(name, options, shape):
    model, params, x = setup(name, options, shape, batch=2)

    @jax.jit
    def run(params, x):
        representation = model.features(params, x)
        return model.apply(params, x), representation, model.head(params, representation)

    logits, representation, logits_of_head = run(params, x)
    tanh = {"activation": np.tanh} if name == "fafed_cnn" else {}
    padding = "SAME" if name == "fafed_cnn_cifar10" else options.get("padding", "VALID")
    expected = numpy_forward(params, x, padding, **tanh)
    if options.get("bounded", name.startswith("fafed")):
        expected = np.tanh(expected) if tanh else np.maximum(expected, 0)
    assert logits.shape == (2, 10)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert representation.shape == (2, params["classifier"]["kernel"].shape[0])
    np.testing.assert_allclose(logits_of_head, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    few(
        1,
        [
            ("lstm", {}),
            ("transformer", {}),
            ("vit", {}),
            *(("resnet20", {"norm": norm}) for norm in ("group", "batch")),
        ],
    ),
)
def test_parameters_are_float32_in_every_mode(name, options, x64):
    del x64
    model = models.build(name, num_classes=10, **options)
    is_text = name in ("lstm", "transformer")
    x = jnp.zeros((1, 5), jnp.int32) if is_text else jnp.zeros((1, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}


def test_examples_do_not_see_each_other():
    model, params, x = setup("mlp", {"hidden": (8,), "norm": "group"}, (6,))
    apply = jax.jit(model.apply)
    others = np.concatenate([x[:1], -3 * x[1:]])
    alone, among_others = (np.asarray(apply(params, each)) for each in (x, others))
    np.testing.assert_array_equal(alone[0], among_others[0])


@pytest.mark.parametrize(
    ("name", "options", "shape", "count"),
    [
        ("linear", {}, (4, 4, 2), 1),
        ("mlp", {"hidden": (12, 6)}, (4, 4, 2), 3),
        pytest.param("cnn", {"padding": "SAME"}, (4, 4, 1), 4, marks=pytest.mark.slow),
        ("lenet5_gradma", {"padding": "SAME"}, (4, 4, 1), 5),
    ],
)
def test_blocks_one_after_the_other_are_the_model(name, options, shape, count):
    model, params, x = setup(name, options, shape)

    @jax.jit
    def both(params, x, key):
        ends = []
        for k in (key, None):  # with dropout and without
            h = x
            for block in model.blocks:
                h = block(params, h, k)
            ends.append((h, model.apply(params, x, k)))
        return ends

    assert len(model.blocks) == count
    for composed, applied in both(params, x, jax.random.key(0)):
        np.testing.assert_allclose(composed, applied, rtol=1e-5, atol=1e-6)


def test_every_classifier_has_blocks():
    for name in set(models.MODELS) - set(models.LANGUAGE_MODELS):
        model = models.build(name, 10)
        assert model.blocks[-1] is model.head, name


def test_group_norm_is_per_example_and_group():
    x = 3 * normal((3, 5, 5, 6)) + 2
    norm = layers.Norm("group")
    out = np.asarray(jax.jit(norm.init_with_output)(jax.random.key(1), x)[0])
    for channels in (slice(0, 3), slice(3, 6)):
        np.testing.assert_allclose(out[..., channels].mean(axis=(1, 2, 3)), 0, atol=1e-5)
        np.testing.assert_allclose(out[..., channels].std(axis=(1, 2, 3)), 1, atol=1e-4)
    assert layers.Norm(None).apply({}, x) is x


@pytest.mark.parametrize(
    ("ours", "flaxs", "shape"),
    [
        (layers.Conv(4), nn.Conv(4, (5, 5), padding="VALID"), (2, 7, 8, 3)),
        (layers.Conv(4, padding="SAME"), nn.Conv(4, (5, 5), padding="SAME"), (2, 7, 8, 3)),
        (layers.Dense(4), nn.Dense(4), (2, 7)),
    ],
)
def test_conv_and_dense_have_flaxs_parameters(ours, flaxs, shape, x64):
    x = normal(shape).astype(float)
    shapes = jax.eval_shape(ours.init, jax.random.key(0), x)
    assert shapes == jax.eval_shape(flaxs.init, jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: normal(leaf.shape).astype(float), shapes)
    both = jax.jit(lambda params, x: (ours.apply(params, x), flaxs.apply(params, x)))
    np.testing.assert_allclose(*both(params, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("machine", ["cpu", "v5e"])
def test_pool_is_flaxs_with_its_derivatives_where_no_pixels_are_equal(machine):
    x, weights, change = normal((2, 7, 6, 3)), normal((2, 3, 3, 3)), normal((2, 7, 6, 3))

    @functools.partial(jax.jit, static_argnums=0)
    def run(pool, x):
        slope = jax.grad(lambda x: (pool(x) * weights).sum())(x)
        return pool(x), slope, jax.jvp(pool, (x,), (change,))[1]

    expected = run(lambda x: nn.max_pool(x, (2, 2), strides=(2, 2)), x)
    with tracing_for(named(machine)):
        found = run(models.max_pool, x)
    for ours, flaxs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, flaxs)


def test_pool_elsewhere_hands_on_nan_and_gives_the_gradient_to_the_first_of_equal_pixels():
    x = np.zeros((1, 4, 4, 1), np.float32)
    x[0, :2, :2, 0] = [[1, np.nan], [2, np.nan]]
    x[0, :2, 2:, 0] = [[-np.inf, 3], [3, 3]]
    with tracing_for(named("h200")):
        value, slope = jax.jit(jax.value_and_grad(lambda x: models.max_pool(x)[0, 0, 1, 0]))(x)
        pooled = jax.jit(models.max_pool)(x)
    assert value == 3
    assert np.flatnonzero(slope) == [3]
    np.testing.assert_array_equal(pooled[0, :, :, 0], [[np.nan, 3], [0, 0]])


def test_initialisation_is_pytorchs():
    # Images may be stored as integers; their values do not matter.
    module = layers.Classifier(100, (layers.ConvBlock(64), layers.DenseBlock(128)))
    model = models.from_linen(module)
    init = jax.jit(model.init)
    params = init(jax.random.key(0), np.ones((1, 8, 8, 3), np.uint8))
    blocks = [*params["blocks_0"].values(), *params["blocks_1"].values(), params["classifier"]]
    for layer, fan_in in zip(blocks, (5 * 5 * 3, 2 * 2 * 64, 128), strict=True):
        for leaf in map(np.asarray, layer.values()):
            assert np.abs(leaf).max() <= 1 / math.sqrt(fan_in)
            np.testing.assert_allclose(leaf.std(), 1 / math.sqrt(3 * fan_in), rtol=0.2)
    other = init(jax.random.key(1), np.zeros((1, 8, 8, 3), np.uint8))
    kernels = (np.asarray(each["classifier"]["kernel"]) for each in (other, params))
    assert np.not_equal(*kernels).all()


def test_dropout_needs_a_key_and_depends_on_it():
    model, params, x = setup("lenet5_gradma", {"norm": None}, (16, 16, 3))
    key, other = jax.random.split(jax.random.key(3))

    @jax.jit
    def run(params, x, key):
        hidden, dropped = model.features(params, x), model.features(params, x, key)
        last = model.head(params, dropped, key)
        return model.apply(params, x), model.apply(params, x, key), hidden, dropped, last

    evaluation, training, hidden, dropped, last = map(np.asarray, run(params, x, key))
    np.testing.assert_array_equal(training, run(params, x, key)[1])
    assert (training != evaluation).any()
    assert (training != np.asarray(run(params, x, other)[1])).any()

    # About half of the last hidden units are dropped; the head itself has no dropout.
    assert 0.35 < (dropped[hidden > 0] == 0).mean() < 0.75
    np.testing.assert_allclose(last, training, rtol=1e-5, atol=1e-5)


def test_dropout_of_rate_zero_changes_nothing():
    options = {"norm": None, "dropout": 0.0, "padding": "SAME"}
    model, params, x = setup("lenet5_gradma", options, (4, 4, 1))
    both = jax.jit(lambda params, x, key: [model.apply(params, x, k) for k in (None, key)])
    np.testing.assert_allclose(*both(params, x, jax.random.key(0)), rtol=1e-6, atol=1e-6)


def test_mean_over_dropout_keys_is_the_evaluation():
    block = layers.DenseBlock(40, dropout=0.25)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 8)).astype(np.float32)
    params = jax.tree.map(
        lambda leaf: (rng.standard_normal(leaf.shape) / 3).astype(np.float32),
        jax.eval_shape(block.init, jax.random.key(1), x),
    )
    keys = jax.random.split(jax.random.key(2), 4000)

    @jax.jit
    def run(keys):
        outs = jax.vmap(lambda key: block.apply(params, x, rngs={"dropout": key}))(keys)
        return outs.mean(axis=0), block.apply(params, x)

    np.testing.assert_allclose(*run(keys), atol=0.1)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(
            pytest.param(name, shape, marks=pytest.mark.slow)
            for name, shape in [
                ("linear", (16, 16, 3)),
                ("mlp", (16, 16, 3)),
                ("cnn", (16, 16, 1)),
                ("lenet5", (16, 16, 3)),
            ]
        ),
        ("fafed_cnn", (10, 10, 1)),  # bounded, with tanh
        ("lenet5_gradma", (16, 16, 3)),  # norm, dropout
    ],
)
def test_gradient_is_finite_and_reaches_every_leaf(name, shape):
    model, params, x = setup(name, {}, shape)

    @jax.jit
    @jax.grad
    def gradient(params, x):
        return (model.apply(params, x, jax.random.key(0)) ** 2).sum()

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient(params, x))]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert all((leaf != 0).any() for leaf in leaves)
    # Blank images: no variance under a norm, all pixels of every pool equal.
    blank = jax.tree.leaves(gradient(params, np.zeros_like(x)))
    assert all(np.isfinite(leaf).all() for leaf in blank)


def test_clients_parameters_are_mapped_and_scanned_alike():
    model, params, x = setup("cnn", {"padding": "SAME"}, (4, 4, 1))
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, 0.5 * leaf]), params)

    @jax.jit
    def both(stacked):
        scanned = jax.lax.map(lambda params: model.apply(params, x), stacked)
        return jax.vmap(model.apply, (0, None))(stacked, x), scanned

    np.testing.assert_allclose(*both(stacked), rtol=1e-4, atol=1e-5)


# --- errors ---


def test_build_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"name is 'lenet'; .* Did you mean 'lenet5'"):
        models.build("lenet", 10)
    with pytest.raises(ValueError, match="num_classes is 1; it must be at least 2"):
        models.build("mlp", 1)
    with pytest.raises(
        TypeError, match="widths is not an option of the model 'mlp'; allowed: hidden"
    ):
        models.build("mlp", 10, widths=(3,))
    with pytest.raises(
        TypeError, match="norm is not an option of the model 'linear'; allowed: none"
    ):
        models.build("linear", 10, norm="group")
    with pytest.raises(ValueError, match="hidden is 0; it must be at least 1"):
        models.build("mlp", 10, hidden=(3, 0))
    for name in ("mlp", "lenet5", "lenet5_gradma"):
        with pytest.raises(ValueError, match="norm is 'layer'; it must be one of group, batch"):
            models.build(name, 10, norm="layer")
    for name in ("cnn", "fafed_cnn", "lenet5", "lenet5_gradma"):
        with pytest.raises(ValueError, match="padding is 'FULL'; it must be one of SAME, VALID"):
            models.build(name, 10, padding="FULL")
    with pytest.raises(ValueError, match=r"dropout is 1\.5"):
        models.build("lenet5_gradma", 10, dropout=1.5)


@pytest.mark.parametrize("num_classes", [0, "10", 10.0, True])
@pytest.mark.parametrize("name", ["linear", "cnn", "vgg11", "vit", "lstm"])
def test_a_wrong_number_of_classes_is_named(name, num_classes):
    with pytest.raises((TypeError, ValueError), match=f"num_classes is {num_classes!r}; it must"):
        models.MODELS[name](num_classes)


def test_widths_and_truth_values_are_checked():
    with pytest.raises(TypeError, match="hidden is 64; it must be a sequence of integers"):
        models.vgg11(10, hidden=64)
    with pytest.raises(TypeError, match="hidden is '64'; it must be a sequence of integers"):
        models.mlp(10, hidden="64")
    with pytest.raises(ValueError, match=r"widths is \(6, 16, 120\); it must be four integers"):
        models.lenet5(10, widths=(6, 16, 120))
    x = jnp.zeros((1, 28, 28, 1))
    for one, other in (
        (models.mlp(10, hidden=np.int64(3)), models.mlp(10, hidden=(3,))),
        (models.lenet5(10, widths=[3, 4, 5, 6]), models.lenet5(10, widths=(3, 4, 5, 6))),
    ):
        assert jax.eval_shape(one.init, jax.random.key(0), x) == jax.eval_shape(
            other.init, jax.random.key(0), x
        )
    for factory in (models.fafed_cnn, models.fafed_cnn_mnist, models.fafed_cnn_cifar10):
        with pytest.raises(TypeError, match="bounded is 'no'; it must be True or False"):
            factory(10, bounded="no")
    with pytest.raises(TypeError, match="tie is 'no'; it must be True or False"):
        models.lstm(10, tie="no")


@pytest.mark.parametrize("name", sorted({*models.MODELS} - {"vit_base"}))
def test_no_example_has_no_logits(name):
    """As an evaluation of an empty part of the data asks for."""
    model, is_text = models.build(name, 10), name in models.LANGUAGE_MODELS
    x = jnp.zeros((1, 5), jnp.int32) if is_text else jnp.zeros((1, 32, 32, 3))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    logits = jax.eval_shape(model.apply, params, x[:0])
    assert logits.shape == ((0, 5, 10) if is_text else (0, 10))


def test_arguments_of_a_pool_are_named():
    x = jnp.ones((1, 6, 6, 2))
    for given, error, message in (
        ({"size": 0}, ValueError, "size is 0; it must be at least 1"),
        ({"size": (2, 2)}, TypeError, r"size is \(2, 2\); it must be an integer"),
        ({"padding": "SAME"}, TypeError, "padding is 'SAME'; it must be an integer"),
        ({"padding": -1}, ValueError, "padding is -1; it must be between 0 and 1"),
        ({"size": 3, "padding": 3}, ValueError, "padding is 3; it must be between 0 and 2"),
    ):
        with pytest.raises(error, match=message):
            models.max_pool(x, **given)
    with pytest.raises(ValueError, match=r"x has shape \(6, 6, 2\); a max-pool takes images"):
        models.max_pool(x[0])
    assert np.isfinite(models.max_pool(x, 3, padding=2)).all()


def test_inputs_of_the_wrong_kind_are_refused():
    key = jax.random.key(0)
    model, params, x = setup("mlp", {"hidden": (4,)}, (8,))
    with pytest.raises(TypeError, match="x has dtype uint8; the model takes floats"):
        model.apply(params, x.astype(np.uint8))
    with pytest.raises(ValueError, match=r"x has shape \(8,\); it must be a batch"):
        model.apply(params, x[0])
    with pytest.raises(ValueError, match=r"a convolution takes images \[B, H, W, C\]"):
        models.build("cnn", 10).init(key, jnp.zeros((3, 28, 28)))
    with pytest.raises(ValueError, match="at least 5 x 5 pixels"):
        models.build("cnn", 10).init(key, jnp.zeros((1, 8, 8, 1)))
    with pytest.raises(ValueError, match=r"x has shape \(3, 3\) .* 2 groups"):
        models.build("mlp", 10, hidden=(3,), norm="group").init(key, x)


# --- from_linen ---


class WithTrain(nn.Module):
    features: int = 5  # a width: no method

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.Dense(self.features)(x)))


class WithDeterministic(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic=True):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(5)(x)))


class WithBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x))


class WithTraining(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not training)(nn.Dense(5)(x)))


@pytest.mark.parametrize("module", [WithTrain(), WithTraining(), WithDeterministic()])
def test_from_linen_sets_the_modules_flag(module):
    model = models.from_linen(module)
    x = normal((4, 6))
    params = jax.jit(model.init)(jax.random.key(1), x)
    assert model.features is None
    assert model.head is None
    assert model.blocks is None
    key = jax.random.key(2)

    @jax.jit
    def run(params, x):
        return model.apply(params, x), model.apply(params, x, key), model.apply(params, x, None)

    evaluation, training, without_key = map(np.asarray, run(params, x))
    assert (evaluation != training).any()
    np.testing.assert_array_equal(evaluation, without_key)


def test_from_linen_takes_modules_without_a_flag():
    model = models.from_linen(nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)]))
    x = np.ones((3, 5), np.float32)
    params = jax.jit(model.init)(jax.random.key(0), x)
    both = jax.jit(lambda params, x, key: (model.apply(params, x), model.apply(params, x, key)))
    without, with_key = both(params, x, jax.random.key(1))
    assert without.shape == (3, 2)
    np.testing.assert_array_equal(without, with_key)


def test_from_linen_refuses_what_is_not_only_parameters():
    model = models.from_linen(WithBatchNorm())
    with pytest.raises(ValueError, match="WithBatchNorm has variables in batch_stats"):
        model.init(jax.random.key(0), jnp.ones((2, 4)))
    with pytest.raises(TypeError, match=r"must be an instance of flax\.linen\.Module"):
        models.from_linen(WithTrain)
