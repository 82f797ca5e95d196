"""VGG-11, the ResNets and vision transformers: parameter counts, layers against explicit ones."""

import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from fedjax_lab import data, models
from fedjax_lab.models import layers, resnet
from fedjax_lab.models.vit import PatchEmbedding
from tests.tiers import few

COLOR = (32, 32, 3)


def conv(size, inputs, outputs, bias=False):
    return outputs * (size * size * inputs + bias)


def dense(inputs, outputs):
    return outputs * (inputs + 1)


def vgg_count(num_classes, hidden, norm):
    """Configuration A of the paper: 64, 128, 2 x 256, 4 x 512; a 32 x 32 image ends as 1 x 1."""
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    convs = sum(conv(3, *pair, bias=True) for pair in itertools.pairwise(widths))
    scales = 2 * sum(widths[1:]) if norm else 0
    return convs + scales + dense(512, hidden) + dense(hidden, num_classes)


def resnet_count(num_classes, widths, blocks, *, stem=3, projection=True):
    """Convolutions without bias, each followed by a scale and a bias per channel."""
    total = conv(stem, 3, widths[0]) + 2 * widths[0]
    inputs = widths[0]
    for outputs in widths:
        for _ in range(blocks):
            total += conv(3, inputs, outputs) + conv(3, outputs, outputs) + 4 * outputs
            if projection and inputs != outputs:
                total += conv(1, inputs, outputs) + 2 * outputs
            inputs = outputs
    return total + dense(inputs, num_classes)


def vit_count(num_classes, size, patch, width, depth, mlp_width):
    tokens = 1 + (size // patch) ** 2
    layer = (
        2 * 2 * width  # two norms
        + 4 * dense(width, width)  # queries, keys, values, output
        + dense(width, mlp_width)
        + dense(mlp_width, width)
    )
    embedding = dense(3 * patch**2, width) + width + tokens * width
    return embedding + depth * layer + 2 * width + dense(width, num_classes)


TWENTY = (16, 32, 64)
EIGHTEEN = (64, 128, 256, 512)
VGG_SHAPES = [(16, 1), (8, 2), (8, 4), (4, 4), (4, 8), (2, 8), (2, 8), (1, 8)]
# A plain run takes every network with ten classes, and vgg11 with a hundred, whose default differs.
# name, options, classes, input, count, the count that the papers' networks have (None: not there)
COUNTS = [
    ("vgg11", {}, 10, COLOR, vgg_count(10, 100, False), 9_272_790),
    ("vgg11", {}, 100, COLOR, vgg_count(100, 256, False), 9_377_508),
    (
        "vgg11",
        {"norm": "group", "hidden": (128,), "dropout": 0.5},
        100,
        COLOR,
        vgg_count(100, 128, True),
        9_304_548,
    ),
    *(
        ("resnet18", {"stem": stem}, classes, COLOR, resnet_count(classes, EIGHTEEN, 2, stem=k), n)
        for stem, k, classes, n in [
            ("cifar", 3, 10, 11_173_962),
            ("cifar", 3, 100, 11_220_132),
            ("cifar", 3, 200, 11_271_432),
            ("imagenet", 7, 10, 11_181_642),
            ("imagenet", 7, 100, 11_227_812),
            ("imagenet", 7, 200, 11_279_112),
        ]
    ),
    *(
        (
            "resnet20",
            {"shortcut": shortcut},
            classes,
            COLOR,
            resnet_count(classes, TWENTY, 3, projection=shortcut == "projection"),
            n,
        )
        for shortcut, classes, n in [
            ("identity", 10, 269_722),
            ("identity", 100, 275_572),
            ("identity", 200, 282_072),
            ("projection", 10, 272_474),
            ("projection", 100, 278_324),
            ("projection", 200, 284_824),
        ]
    ),
    ("vit", {}, 10, COLOR, vit_count(10, 32, 4, 192, 6, 768), None),
    ("vit_base", {}, 200, (224, 224, 3), vit_count(200, 224, 16, 768, 12, 3072), 85_952_456),
]


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def drawn(model, x):
    """NumPy's parameters for a model or a module, normal with deviation 1/2."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.tree.map(
        lambda leaf: (rng.standard_normal(leaf.shape) / 2).astype(np.float32),
        shapes.get("params", shapes),
    )


def shapes(name, options, num_classes, shape):
    model = models.build(name, num_classes, **options)
    return jax.eval_shape(
        model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, *shape), jnp.uint8)
    )


@pytest.mark.parametrize(
    ("name", "options", "num_classes", "shape", "count", "papers"),
    [
        pytest.param(*row, marks=pytest.mark.slow if "resnet" in row[0] and row[2] > 10 else ())
        for row in COUNTS
    ],
)
def test_number_of_parameters(name, options, num_classes, shape, count, papers):
    params = shapes(name, options, num_classes, shape)
    assert models.count_params(params) == count
    assert papers in (None, count)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("vgg11", {"width": 2, "hidden": (), "norm": "batch"}, (33, 32, 1)),
        pytest.param(
            "vgg11",
            {"width": 2, "hidden": (6, 5), "dropout": 0.5},
            (32, 64, 3),
            marks=pytest.mark.slow,
        ),
        ("resnet18", {"width": 2, "stem": "imagenet", "norm": None}, (16, 17, 3)),
        pytest.param(
            "resnet20", {"width": 2, "norm": "frozen_batch"}, (8, 8, 3), marks=pytest.mark.slow
        ),
        ("vit", {"dropout": 0.1, "depth": 1}, (32, 32, 3)),
        pytest.param("vit", {"dropout": 0.1}, (32, 32, 3), marks=pytest.mark.slow),
    ],
)
def test_options_give_logits_in_training_and_evaluation(name, options, shape):
    model = models.build(name, 3, **options)
    params, x = shapes(name, options, 3, shape), jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    for args in ((), (jax.random.key(0),)):
        logits = jax.eval_shape(model.apply, params, x, *args)
        assert (logits.shape, logits.dtype) == ((2, 3), jnp.float32)


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        # A pool after the layers 1, 2, 4, 6 and 8, then the two dense layers.
        (models.vgg11(3, width=1), [(s, s, w) for s, w in VGG_SHAPES] + [(100,), (3,)]),
        # Stem, four stages, the last one with the mean over pixels, dense layer.
        pytest.param(
            models.resnet18(3, width=2),
            [(32, 32, 2), (32, 32, 2), (16, 16, 4), (8, 8, 8), (16,), (3,)],
            marks=pytest.mark.slow,
        ),
        (
            models.resnet18(3, width=2, stem="imagenet"),
            [(8, 8, 2), (8, 8, 2), (4, 4, 4), (2, 2, 8), (16,), (3,)],
        ),
        (models.resnet20(3, width=2), [(32, 32, 2), (32, 32, 2), (16, 16, 4), (8,), (3,)]),
    ],
    ids=["vgg11", "resnet18", "resnet18-imagenet", "resnet20"],
)
def test_blocks_have_the_papers_shapes(model, shapes):
    h = jax.ShapeDtypeStruct((2, *COLOR), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), h)
    for block, shape in zip(model.blocks, shapes, strict=True):
        h = jax.eval_shape(block, params, h)
        assert h.shape == (2, *shape)


@pytest.mark.slow
def test_resnet18_runs():
    model = models.resnet18(3, width=2)
    x = normal((2, 8, 8, 3))
    logits = jax.jit(model.apply)(drawn(model, x), x)
    assert logits.shape == (2, 3)
    assert np.isfinite(logits).all()
    assert (logits[0] != logits[1]).any()


RESIDUAL = (
    resnet.Stem(2, "group", "cifar"),
    resnet.Stage(1, 4, "group", 2, "projection", None, last=True),
)
VGG = (layers.ConvBlock(4, "batch", 1, 3, pool=False), layers.DenseBlock(6, dropout=0.1))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(models.from_linen(layers.Classifier(3, VGG)), marks=pytest.mark.slow),
        pytest.param(models.from_linen(layers.Classifier(3, RESIDUAL)), marks=pytest.mark.slow),
        models.vit(3, width=4, depth=1, num_heads=2, dropout=0.1),
    ],
    ids=["vgg", "resnet", "vit"],
)
@pytest.mark.methods
def test_a_small_one_learns_and_is_its_blocks(model):
    examples = data.Examples(normal((4, 8, 8, 3)), np.arange(4, dtype=np.int32) % 3)
    loss_fn = models.classification_loss(model.apply)
    mean = lambda params: loss_fn(params, examples, jax.random.key(1)).mean()  # noqa: E731

    @jax.jit
    def run(params):
        def step(params, _):
            loss, grads = jax.value_and_grad(mean)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        params, losses = jax.lax.scan(step, params, length=10)
        key = jax.random.key(2)
        h = examples.x
        for block in model.blocks:
            h = block(params, h, key)
        return losses, h, model.apply(params, examples.x, key)

    losses, composition, whole = run(drawn(model, examples.x))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(composition, whole, rtol=1e-4, atol=1e-5)


# --- ResNet: the layers against compositions of jax.lax ---


def lax_conv(x, kernel, stride, padding):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def group_norm(x, scale, bias, epsilon=1e-5):
    """Two groups of channels, in float64."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    parts = [x[..., :half], x[..., half:]]
    parts = [
        (part - part.mean(axis=(1, 2, 3), keepdims=True))
        / np.sqrt(part.var(axis=(1, 2, 3), keepdims=True) + epsilon)
        for part in parts
    ]
    return np.concatenate(parts, axis=-1) * np.asarray(scale) + np.asarray(bias)


def conv_norm(params, x, stride, padding):
    return group_norm(
        lax_conv(np.asarray(x, np.float32), params["conv"]["kernel"], stride, padding),
        **params["norm"]["group"],
    )


@pytest.mark.parametrize(
    ("shortcut", "stride", "inputs"),
    [("projection", 2, 4), ("identity", 2, 4), ("projection", 1, 6)],
)
def test_residual_block_is_its_formula(shortcut, stride, inputs):
    # An odd height: "SAME" and PyTorch's padding agree there, and differ at an even width.
    x = normal((2, 5, 6, inputs))
    block = resnet.ResidualBlock(6, "group", stride, shortcut)
    params = drawn(block, x)
    residual = np.maximum(conv_norm(params["conv_norm_0"], x, stride, 1), 0)
    residual = conv_norm(params["conv_norm_1"], residual, 1, 1)
    if inputs == 6:
        assert "projection" not in params  # nothing changes: the input itself
        expected = np.asarray(x) + residual
    elif shortcut == "projection":
        expected = conv_norm(params["projection"], x, stride, 0) + residual
    else:
        expected = residual
        expected[..., :inputs] += np.asarray(x)[:, ::2, ::2]
    out = jax.jit(block.apply)({"params": params}, x)
    np.testing.assert_allclose(out, np.maximum(expected, 0), rtol=1e-3, atol=1e-4)


def test_imagenet_stem_is_conv_norm_relu_pool():
    x = normal((2, 10, 9, 3))
    stem = resnet.Stem(4, "group", "imagenet")
    params = drawn(stem, x)
    features = np.maximum(conv_norm(params["conv_norm"], x, 2, 3), 0)
    expected = jax.lax.reduce_window(
        np.asarray(features, np.float32),
        -jnp.inf,
        jax.lax.max,
        (1, 3, 3, 1),
        (1, 2, 2, 1),
        ((0, 0), (1, 1), (1, 1), (0, 0)),
    )
    out = jax.jit(stem.apply)({"params": params}, x)
    assert out.shape == (2, 3, 3, 4)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_last_stage_is_the_mean_over_pixels():
    x = normal((2, 4, 4, 2))
    stage = resnet.Stage(1, 2, "group", 1, "identity", None, last=True)
    params = drawn(stage, x)
    block = resnet.ResidualBlock(2, "group", 1, "identity")

    @jax.jit
    def run(params, x):
        return block.apply({"params": params["block_0"]}, x), stage.apply({"params": params}, x)

    pixels, out = run(params, x)
    np.testing.assert_allclose(out, np.asarray(pixels).mean(axis=(1, 2)), rtol=1e-5, atol=1e-6)


def test_overlapping_pool_is_flaxs_with_its_gradient():
    x, weights = normal((2, 7, 6, 3)), normal((2, 4, 3, 3))

    def flaxs(x):
        return nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))

    def both(pool):
        return pool(x), jax.grad(lambda x: (pool(x) * weights).sum())(x)

    ours, theirs = jax.jit(lambda: (both(lambda x: models.max_pool(x, 3, 1)), both(flaxs)))()
    for mine, flax_result in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, flax_result, rtol=1e-6)


@pytest.mark.parametrize("stem", few(1, ["cifar", "imagenet"]))
def test_initialisation_is_that_of_the_stems_lineage(stem):
    # The squared norm of the last stage, 16 to 32 channels. A norm adds one per channel, and a
    # convolution: uniform in +-1/sqrt(fan_in), a third per channel; normal with variance
    # 2 / fan_out, two per input channel.
    model = models.resnet18(10, stem=stem, width=4)
    x = np.zeros((1, 16, 16, 3), np.float32)
    stage = jax.jit(lambda key: model.init(key, x)["blocks_4"])(jax.random.key(0))
    channels, inputs = 5 * 32, 16 + 16 + 3 * 32
    expected = channels + (channels / 3 if stem == "cifar" else 2 * inputs)
    total = sum((np.asarray(leaf) ** 2).sum() for leaf in jax.tree.leaves(stage))
    np.testing.assert_allclose(total, expected, rtol=0.02)


# --- ViT: against NumPy ---


def layer_norm(x, scale, bias):
    x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
    return x * scale + bias


def numpy_vit(params, x, patch):
    affine = lambda x, p: x @ p["kernel"] + p["bias"]  # noqa: E731
    blocks = [params[f"blocks_{i}"] for i in range(len(params) - 1)]
    first, *encoder, last = blocks
    tokens = []
    for image in x:
        rows = [first["class_token"][0, 0]]
        for i in range(0, image.shape[0], patch):
            for j in range(0, image.shape[1], patch):
                rows.append(affine(image[i : i + patch, j : j + patch].ravel(), first["patches"]))
        h = np.stack(rows) + first["positions"][0]
        for layer in encoder:
            normalised = layer_norm(h, **layer["norm_0"])
            p = layer["attention"]
            mixed = 0.0
            for head in range(p["query"]["bias"].shape[0]):
                q, k, v = (
                    normalised @ p[name]["kernel"][:, head] + p[name]["bias"][head]
                    for name in ("query", "key", "value")
                )
                scores = np.exp(q @ k.T / math.sqrt(q.shape[-1]))
                scores /= scores.sum(axis=-1, keepdims=True)
                mixed = mixed + scores @ v @ p["out"]["kernel"][head]
            h = h + mixed + p["out"]["bias"]
            inner = affine(layer_norm(h, **layer["norm_1"]), layer["dense_0"])
            inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
            h = h + affine(inner, layer["dense_1"])
        tokens.append(layer_norm(h[0], **last["norm"]))
    return affine(np.stack(tokens), params["classifier"])


def test_vit_is_numpys():
    x = normal((2, 4, 6, 3))
    model = models.vit(3, patch_size=2, width=8, depth=2, num_heads=2, mlp_width=5)
    params = drawn(model, x)
    doubles = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = numpy_vit(doubles, np.asarray(x, np.float64), 2)
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), expected, rtol=1e-3, atol=1e-4)
    with jax.enable_x64(True):
        found = jax.jit(model.apply)(doubles, np.asarray(x, np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_patch_embedding_is_a_convolution_of_stride_its_size():
    x = normal((2, 6, 9, 2))
    embedding = PatchEmbedding(4, 3, 0.0)
    params = drawn(embedding, x)
    kernel = params["patches"]["kernel"].reshape(3, 3, 2, 4)

    @jax.jit
    def run(params, x):
        return embedding.apply({"params": params}, x), lax_conv(x, kernel, 3, 0)

    out, patches = map(np.asarray, run(params, x))
    patches = patches + params["patches"]["bias"].reshape(1, 1, 1, -1)
    out = out - params["positions"]
    np.testing.assert_allclose(out[:, 1:], patches.reshape(2, 6, 4), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        out[:, 0], np.broadcast_to(params["class_token"][0], (2, 4)), atol=1e-6
    )


# --- errors ---


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vgg11", {"norm": "layer"}, "norm is 'layer'; it must be one of group, batch"),
        ("vgg11", {"hidden": (0,)}, "hidden is 0; it must be at least 1"),
        ("vgg11", {"dropout": 2.0}, r"dropout is 2\.0"),
        ("resnet18", {"stem": "mnist"}, "stem is 'mnist'; it must be one of cifar, imagenet"),
        ("resnet18", {"width": 0}, "width is 0; it must be at least 1"),
        ("resnet20", {"shortcut": "A"}, "shortcut is 'A'; it must be one of identity, projection"),
        ("vit", {"num_heads": 5}, "width is 192; it must be a multiple of num_heads=5"),
        ("vit", {"depth": 0}, "depth is 0; it must be at least 1"),
        ("vit_base", {"dropout": -0.1}, r"dropout is -0\.1"),
    ],
)
def test_options_out_of_range_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, 10, **options)


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"x has shape \(1, 1, 1, 512\) where a max-pool takes"):
        shapes("vgg11", {}, 10, (31, 31, 3))
    with pytest.raises(ValueError, match="H and W multiples of patch_size=4"):
        shapes("vit", {}, 10, (30, 32, 3))
    with pytest.raises(ValueError, match="a convolution takes images"):
        shapes("resnet18", {}, 10, (64,))


IMAGE_MODELS = sorted({*models.MODELS} - {*models.LANGUAGE_MODELS, "linear", "mlp"})


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (4, 64, 48), (3, 218, 178)])
def test_channels_first_are_refused(name, shape):
    message = rf"looks like images with {shape[0]} channels? first.*x.transpose\(0, 2, 3, 1\)"
    with pytest.raises(ValueError, match=message):
        models.build(name, 10).init(jax.random.key(0), np.zeros((2, *shape), np.float32))


@pytest.mark.parametrize(
    "shape",
    few(
        2, zip([(3, 3, 3), (1, 128, 9), (3, 8, 4), (4, 4, 8), (32, 32, 1), (8, 3, 32), (3, 40, 16)])
    ),
)
def test_other_shapes_are_no_channels_first(shape):
    model = models.resnet20(10, width=2)
    x = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    assert jax.eval_shape(model.apply, params, x).shape == (2, 10)
