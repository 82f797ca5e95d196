"""Networks as their users write them, with each library's own layers, beside PyTorch.

No network here has a layer of ``fedjax_lab``: each is written as in the documentation of flax
linen, flax NNX, equinox or haiku, and brought as a plain loss. Three systems take turns, each in a
process of its own: ``fedjax_lab`` with its default settings, which gives slow convolutions and
poolings other forms; the same with ``lowering="lax"``, which leaves them as ``jax.lax`` has them;
and ``torch``, a plain PyTorch loop with the same network. The sides have the same sizes and the
same number of parameters; a twin with another number is refused. The method is FedAvg, in float32,
on noise.

    python -m experiments.benchmarks.zoo [--networks N ...] [--repeats R] [--rounds R]
        [--with-lax] [--json FILE]

``lowering="lax"`` is left out for networks of which it takes minutes, unless ``--with-lax`` is
given. Networks of libraries that are not installed are named and left out.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import fedjax_lab
from experiments.benchmarks.compare import (
    commit,
    machine,
    ratios,
    run_child,
    spread,
    take_turns,
    times_of,
)
from experiments.benchmarks.ours import about_device
from experiments.benchmarks.workloads import SEED
from fedjax_lab import algorithms, data
from fedjax_lab.data.partition import split_indices
from fedjax_lab.storage.run_dir import versions

NUM_CLIENTS, EXAMPLES_OF_CLIENT = 100, 50
CLIENT_LR = 0.01
MAX_SECONDS = 60.0  # after which a process of PyTorch takes no more samples
NUM_GROUPS = 8  # of GroupNorm
# Fields of a network that the twin is built and trained from.
TOLD = (
    *("shape", "num_classes", "width", "blocks", "vocabulary"),
    *("local_steps", "batch_size", "cohort_size"),
)
CHILDREN = {"fedjax_lab": "zoo", "lax": "zoo_lax", "torch": "zoo_torch"}  # names in ``child``


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and what a round of it is.

    Attributes:
      title: one line for the reader.
      build: ``Network`` -> (params, apply); ``apply(params, x)`` returns logits, classes last.
      shape: of an example: pixels and channels, or [L] words.
      num_classes: logits.
      width: features of the first layer; the others are multiples of it.
      local_steps, batch_size, cohort_size: of a round.
      blocks: (features / width, stride) of each, in networks that are made of blocks.
      rounds: measured rounds of a process, after the first one.
      vocabulary: number of words; 0 for images.
      label_shape: of an example's labels.
      package: the module that must be installed.
      lax_takes_minutes: whether a process with ``lowering="lax"`` does.
    """

    title: str
    build: Callable[["Network"], tuple[Any, Callable[[Any, jax.Array], jax.Array]]]
    shape: tuple[int, ...]
    num_classes: int
    width: int
    local_steps: int
    batch_size: int
    rounds: int
    cohort_size: int = 10
    blocks: tuple[tuple[int, int], ...] = ()
    vocabulary: int = 0
    label_shape: tuple[int, ...] = ()
    package: str = "flax"
    lax_takes_minutes: bool = False


# --- flax linen


class LinenCNN(nn.Module):
    """LeNet with max-pooling."""

    width: int
    num_classes: int

    @nn.compact
    def __call__(self, x):
        """Logits [B, C] of images."""
        for features in (self.width, 2 * self.width):
            x = nn.Conv(features, kernel_size=(5, 5))(x)
            x = nn.relu(x)
            x = nn.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(120)(x))
        x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(self.num_classes)(x)


class TextCNN(nn.Module):
    """Convolutions of 3, 4 and 5 words, each with its maximum over time."""

    width: int
    num_classes: int
    vocabulary: int

    @nn.compact
    def __call__(self, words):
        """Logits [B, C] of words [B, L]."""
        x = nn.Embed(self.vocabulary, 128)(words)
        found = [
            nn.relu(nn.Conv(self.width, kernel_size=(size,), padding="VALID")(x)).max(axis=1)
            for size in (3, 4, 5)
        ]
        return nn.Dense(self.num_classes)(jnp.concatenate(found, axis=-1))


class VolumeCNN(nn.Module):
    """Two convolutions and max-poolings in three dimensions."""

    width: int
    num_classes: int

    @nn.compact
    def __call__(self, x):
        """Logits [B, C] of volumes [B, D, H, W, 1]."""
        for features in (self.width, 2 * self.width):
            x = nn.relu(nn.Conv(features, kernel_size=(3, 3, 3))(x))
            x = nn.max_pool(x, window_shape=(2, 2, 2), strides=(2, 2, 2))
        x = x.reshape((x.shape[0], -1))
        return nn.Dense(self.num_classes)(nn.relu(nn.Dense(128)(x)))


class ResNetBlock(nn.Module):
    """The block of flax's ImageNet example."""

    filters: int
    conv: Any
    norm: Any
    act: Callable
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        """Run the block."""
        residual = x
        y = self.conv(self.filters, (3, 3), self.strides)(x)
        y = self.norm()(y)
        y = self.act(y)
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return self.act(residual + y)


class ResNet(nn.Module):
    """ResNet-18 of flax's ImageNet example, with GroupNorm and a stem for small images."""

    width: int
    num_classes: int
    blocks: tuple[tuple[int, int], ...]

    @nn.compact
    def __call__(self, x):
        """Logits [B, C] of images."""
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.GroupNorm, num_groups=NUM_GROUPS)
        x = nn.relu(norm(name="norm_init")(conv(self.width, (3, 3), name="conv_init")(x)))
        for factor, stride in self.blocks:
            filters, strides = factor * self.width, (stride, stride)
            x = ResNetBlock(filters, strides=strides, conv=conv, norm=norm, act=nn.relu)(x)
        return nn.Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


class VGG(nn.Module):
    """Convolutions of 3 x 3 pixels; a stride of 2 in ``blocks`` is a max-pooling after one."""

    width: int
    num_classes: int
    blocks: tuple[tuple[int, int], ...]

    @nn.compact
    def __call__(self, x):
        """Logits [B, C] of images."""
        for factor, stride in self.blocks:
            x = nn.relu(nn.Conv(factor * self.width, kernel_size=(3, 3))(x))
            if stride > 1:
                x = nn.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        return nn.Dense(self.num_classes)(x.reshape((x.shape[0], -1)))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: wider, a depthwise convolution, narrower."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        """Run the block."""
        hidden = 4 * x.shape[-1]
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.GroupNorm, num_groups=NUM_GROUPS)
        y = nn.relu6(norm()(conv(hidden, (1, 1))(x)))
        strides = (self.stride, self.stride)
        y = nn.relu6(norm()(conv(hidden, (3, 3), strides, feature_group_count=hidden)(y)))
        y = norm()(conv(self.features, (1, 1))(y))
        return x + y if x.shape == y.shape else y


class MobileNet(nn.Module):
    """A small MobileNetV2 with GroupNorm."""

    width: int
    num_classes: int
    blocks: tuple[tuple[int, int], ...]

    @nn.compact
    def __call__(self, x):
        """Logits [B, C] of images."""
        norm = functools.partial(nn.GroupNorm, num_groups=NUM_GROUPS)
        x = nn.relu6(norm()(nn.Conv(self.width, (3, 3), use_bias=False)(x)))
        for factor, stride in self.blocks:
            x = InvertedResidual(factor * self.width, stride)(x)
        x = nn.relu6(norm()(nn.Conv(8 * self.width, (1, 1), use_bias=False)(x)))
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))


class UNet(nn.Module):
    """Two steps down by strides, two up by transposed convolutions, with skip connections."""

    width: int
    num_classes: int

    @nn.compact
    def __call__(self, x):
        """Logits [B, H, W, C] of images."""
        x = nn.relu(nn.Conv(self.width, (3, 3))(x))
        skipped = []
        for features in (2 * self.width, 4 * self.width):
            skipped.append(x)
            x = nn.relu(nn.Conv(features, (3, 3), strides=(2, 2))(x))
            x = nn.relu(nn.Conv(features, (3, 3))(x))
        for features in (2 * self.width, self.width):
            x = nn.ConvTranspose(features, (2, 2), strides=(2, 2))(x)
            x = jnp.concatenate([x, skipped.pop()], axis=-1)
            x = nn.relu(nn.Conv(features, (3, 3))(x))
        return nn.Conv(self.num_classes, (1, 1))(x)


class RecurrentLanguageModel(nn.Module):
    """Word vectors, a recurrent layer, decoder."""

    width: int
    num_classes: int
    cell: Callable[[int], nn.RNNCellBase]

    @nn.compact
    def __call__(self, words):
        """Logits [B, L, V] of words [B, L]."""
        x = nn.Embed(self.num_classes, self.width)(words)
        return nn.Dense(self.num_classes)(nn.RNN(self.cell(self.width))(x))


class EncoderBlock(nn.Module):
    """Self-attention and two dense layers, each after LayerNorm."""

    @nn.compact
    def __call__(self, x):
        """Run the block."""
        width = x.shape[-1]
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
        y = nn.gelu(nn.Dense(2 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width)(y)


class ViT(nn.Module):
    """Patches of 4 x 4 pixels, blocks, the mean of the tokens."""

    width: int
    num_classes: int
    blocks: tuple[tuple[int, int], ...]

    @nn.compact
    def __call__(self, x):
        """Logits [B, C] of images."""
        x = nn.Conv(self.width, (4, 4), strides=(4, 4), padding="VALID")(x)
        x = x.reshape((x.shape[0], -1, x.shape[-1]))
        positions = nn.initializers.normal(stddev=0.02)
        x = x + self.param("positions", positions, (1, *x.shape[1:]))
        for _ in self.blocks:
            x = EncoderBlock()(x)
        return nn.Dense(self.num_classes)(nn.LayerNorm()(x).mean(axis=1))


def linen(module: Callable[..., nn.Module], *options: str, **more: Any):
    """Return ``build`` of a module, which takes the options from fields of the network."""

    def build(network):
        chosen = {name: getattr(network, name) for name in options}
        net = module(width=network.width, num_classes=network.num_classes, **chosen, **more)
        example = jnp.zeros((1, *network.shape), jnp.int32 if network.vocabulary else jnp.float32)
        params = jax.jit(net.init)(jax.random.key(SEED), example)["params"]
        return params, lambda params, x: net.apply({"params": params}, x)

    return build


# --- flax NNX


class NNXCNN(nnx.Module):
    """The CNN of flax NNX's MNIST tutorial, without dropout."""

    def __init__(self, pixels, channels, width, num_classes, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(channels, width, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(width, 2 * width, kernel_size=(3, 3), rngs=rngs)
        self.avg_pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(pixels // 16 * 2 * width, 256, rngs=rngs)
        self.linear2 = nnx.Linear(256, num_classes, rngs=rngs)

    def __call__(self, x):
        """Logits [B, C] of images."""
        x = self.avg_pool(nnx.relu(self.conv1(x)))
        x = self.avg_pool(nnx.relu(self.conv2(x)))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.linear1(x))
        return self.linear2(x)


def build_nnx(network):
    """Split a module into its graph and its parameters."""
    *pixels, channels = network.shape
    sizes = math.prod(pixels), channels, network.width, network.num_classes
    graphdef, params = nnx.split(NNXCNN(*sizes, rngs=nnx.Rngs(SEED)))
    return params, lambda params, x: nnx.merge(graphdef, params)(x)


# --- equinox and haiku


def build_equinox(network):
    """The CNN of equinox's MNIST example, a little smaller; it takes one image, channels first."""
    import equinox as eqx

    height, columns, channels = network.shape
    width, keys = network.width, jax.random.split(jax.random.key(SEED), 4)
    pixels = math.prod(((size - 3) // 2 - 3) // 2 for size in (height, columns))

    class CNN(eqx.Module):
        layers: list

        def __init__(self):
            self.layers = [
                eqx.nn.Conv2d(channels, width, kernel_size=4, key=keys[0]),
                jax.nn.relu,
                eqx.nn.MaxPool2d(kernel_size=2, stride=2),
                eqx.nn.Conv2d(width, 2 * width, kernel_size=4, key=keys[1]),
                jax.nn.relu,
                eqx.nn.MaxPool2d(kernel_size=2, stride=2),
                jnp.ravel,
                eqx.nn.Linear(pixels * 2 * width, 128, key=keys[2]),
                jax.nn.relu,
                eqx.nn.Linear(128, network.num_classes, key=keys[3]),
            ]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    params, static = eqx.partition(CNN(), eqx.is_inexact_array)

    def apply(params, x):
        return jax.vmap(eqx.combine(params, static))(jnp.moveaxis(x, -1, 1))

    return params, apply


def build_haiku(network):
    """Two convolutions with max-pooling, transformed to functions."""
    import haiku as hk

    def forward(x):
        net = hk.Sequential(
            [
                hk.Conv2D(network.width, kernel_shape=3),
                jax.nn.relu,
                hk.MaxPool(window_shape=(2, 2, 1), strides=(2, 2, 1), padding="VALID"),
                hk.Conv2D(2 * network.width, kernel_shape=3),
                jax.nn.relu,
                hk.MaxPool(window_shape=(2, 2, 1), strides=(2, 2, 1), padding="VALID"),
                hk.Flatten(),
                hk.Linear(128),
                jax.nn.relu,
                hk.Linear(network.num_classes),
            ]
        )
        return net(x)

    transformed = hk.without_apply_rng(hk.transform(forward))
    params = transformed.init(jax.random.key(SEED), jnp.zeros((1, *network.shape)))
    return params, transformed.apply


IMAGES = {"shape": (32, 32, 3), "num_classes": 10}
WORDS = {"shape": (32,), "num_classes": 1000, "vocabulary": 1000, "label_shape": (32,)}
CHARACTERS = {"shape": (80,), "num_classes": 90, "vocabulary": 90, "label_shape": (80,)}
SOME, FEW = {"local_steps": 5, "batch_size": 20}, {"local_steps": 5, "batch_size": 10}

ZOO = {
    "linen_cnn": Network(
        "flax linen: LeNet, max_pool", linen(LinenCNN), **IMAGES, **SOME, width=16, rounds=5
    ),
    "nnx_cnn": Network("flax NNX: CNN, avg_pool", build_nnx, **IMAGES, **SOME, width=32, rounds=5),
    "equinox_cnn": Network(
        "equinox: CNN, channels first, vmap over examples",
        *(build_equinox, *IMAGES.values(), 16, *SOME.values(), 5),
        package="equinox",
    ),
    "haiku_cnn": Network(
        "haiku: CNN", build_haiku, **IMAGES, **SOME, width=32, rounds=5, package="haiku"
    ),
    "text_cnn": Network(
        "flax linen: text CNN, widths 3, 4, 5",
        linen(TextCNN, "vocabulary"),
        **SOME,
        shape=(64,),
        num_classes=4,
        vocabulary=2000,
        width=100,
        rounds=5,
    ),
    "volume_cnn": Network(
        "flax linen: 3-D CNN",
        linen(VolumeCNN),
        **FEW,
        shape=(16, 16, 16, 1),
        num_classes=10,
        width=16,
        rounds=5,
        lax_takes_minutes=True,
    ),
    "resnet18": Network(
        "flax linen: ResNet-18 of flax's examples, GroupNorm",
        linen(ResNet, "blocks"),
        **IMAGES,
        blocks=((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1)),
        width=64,
        local_steps=2,
        batch_size=20,
        cohort_size=2,
        rounds=3,
        lax_takes_minutes=True,
    ),
    "resnet20": Network(
        "flax linen: ResNet-20, GroupNorm",
        linen(ResNet, "blocks"),
        **IMAGES,
        blocks=(*((1, 1),) * 3, (2, 2), *((2, 1),) * 2, (4, 2), *((4, 1),) * 2),
        **FEW,
        width=16,
        rounds=2,
        lax_takes_minutes=True,
    ),
    "vgg11": Network(
        "flax linen: VGG-11",
        linen(VGG, "blocks"),
        **IMAGES,
        blocks=((1, 2), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 1), (8, 2)),
        width=64,
        local_steps=2,
        batch_size=20,
        cohort_size=2,
        rounds=3,
        lax_takes_minutes=True,
    ),
    "mobilenet": Network(
        "flax linen: inverted residuals, depthwise convolutions",
        linen(MobileNet, "blocks"),
        **IMAGES,
        blocks=((1, 1), (2, 2), (2, 1), (4, 2), (4, 1)),
        **FEW,
        width=16,
        rounds=2,
        lax_takes_minutes=True,
    ),
    "unet": Network(
        "flax linen: U-Net, ConvTranspose, a class for each pixel",
        linen(UNet),
        **FEW,
        shape=(32, 32, 3),
        num_classes=4,
        label_shape=(32, 32),
        width=16,
        rounds=3,
        lax_takes_minutes=True,
    ),
    "lstm": Network(
        "flax linen: LSTM language model",
        linen(RecurrentLanguageModel, cell=nn.OptimizedLSTMCell),
        **WORDS,
        **FEW,
        width=128,
        rounds=5,
    ),
    "gru": Network(
        "flax linen: GRU language model",
        linen(RecurrentLanguageModel, cell=nn.GRUCell),
        **WORDS,
        **FEW,
        width=128,
        rounds=5,
    ),
    "lstm_characters": Network(
        "flax linen: LSTM of characters, 80 a row",
        linen(RecurrentLanguageModel, cell=nn.OptimizedLSTMCell),
        **CHARACTERS,
        **FEW,
        width=256,
        rounds=3,
    ),
    "gru_characters": Network(
        "flax linen: GRU of characters, 80 a row",
        linen(RecurrentLanguageModel, cell=nn.GRUCell),
        **CHARACTERS,
        **FEW,
        width=256,
        rounds=3,
    ),
    "vit": Network(
        "flax linen: ViT",
        linen(ViT, "blocks"),
        **IMAGES,
        **FEW,
        blocks=((1, 1),) * 3,
        width=128,
        rounds=3,
    ),
}


def build_loss(network, apply):
    """Loss of each example, as a user writes it: a mean over its words or pixels."""
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels

    def loss_fn(params, examples, key):
        x = examples.x if network.vocabulary else examples.x / 255.0
        losses = cross_entropy(apply(params, x), examples.y)
        return losses.mean(axis=range(1, losses.ndim))

    return loss_fn


def count_params(network):
    """Number of parameters, without computing any."""
    shapes = jax.eval_shape(lambda: network.build(network)[0])
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def noise(network, num_examples):
    """Examples of bytes or words, with labels that mean nothing."""
    rng = np.random.default_rng(SEED)
    values, dtype = (network.vocabulary, np.int32) if network.vocabulary else (256, np.uint8)
    x = rng.integers(0, values, (num_examples, *network.shape), dtype)
    labels = num_examples, *network.label_shape
    return data.Examples(x, rng.integers(0, network.num_classes, labels, np.int32))


# --- One process


def run(system, job):
    """One run of ``simulate``; the clocks are read after each round, with the device idle."""
    network = ZOO[job["network"]]
    with np.load(job["data"]) as file:
        clients = data.partition(data.Examples(file["x"], file["y"]), "iid", NUM_CLIENTS, seed=SEED)
    params, apply = network.build(network)
    jax.block_until_ready(params)
    clock, processor = [time.perf_counter()], []

    def evaluate(params):
        jax.block_until_ready(params)
        clock.append(time.perf_counter())
        processor.append(time.process_time())
        return {}

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = fedjax_lab.simulate(
            algorithms.fedavg(build_loss(network, apply), client_lr=CLIENT_LR),
            params,
            clients,
            rounds=1 + job["samples"],
            cohort_size=network.cohort_size,
            local_steps=network.local_steps,
            batch_size=network.batch_size,
            replace=True,
            evaluate=evaluate,
            eval_every=1,
            lowering="lax" if system == "zoo_lax" else "auto",
        )
    first, *others = np.diff(clock).tolist()
    return {
        "milliseconds": [1e3 * seconds for seconds in others],
        "first_row_seconds": first,
        "processor_milliseconds": (1e3 * np.diff(processor)).tolist(),
        "first_row_processor_seconds": processor[0],
        "compile_seconds": result.compile_seconds,
        "warnings": sorted({str(warning.message) for warning in warned}),
        **about_device(),
        "versions": versions(),
    }


# --- The command


def job_of(name, folder, rounds=None):
    """Write a network's examples; return what both sides are told."""
    network = ZOO[name]
    examples = noise(network, NUM_CLIENTS * EXAMPLES_OF_CLIENT)
    parts = split_indices(examples.y, "iid", NUM_CLIENTS, SEED)
    path = Path(folder) / f"{name}.npz"
    arrays = {"x": examples.x, "y": examples.y, "x_test": examples.x[:1], "y_test": examples.y[:1]}
    np.savez(path, **arrays, indices=parts.indices, sizes=parts.sizes)
    return {
        "network": name,
        "data": str(path),
        "rounds": 1,
        "samples": rounds or network.rounds,
        "max_seconds": MAX_SECONDS,
        "num_params": count_params(network),
        "client_lr": CLIENT_LR,
        "num_groups": NUM_GROUPS,
        **{name: getattr(network, name) for name in TOLD},
    }


COLUMNS = (
    "network",
    "torch / fedjax_lab",
    "lax / fedjax_lab",
    "ms a round: fedjax_lab",
    "torch",
    "first row s",
    "peak MB: fedjax_lab",
    "torch",
)


def table(found):
    """What was measured as Markdown: ratios of times within a repeat, more is faster."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for of in found["networks"].values():
        answers = of["systems"]
        times = times_of(answers)
        good = {name: [a for a in answers[name] if "status" not in a] for name in times}

        def ratio(other, times=times):
            both = {name: times[name] for name in ("fedjax_lab", other) if name in times}
            return spread(ratios(both, (other,)).get("fedjax_lab"))

        def milliseconds(system, times=times, answers=answers):
            if system in times:
                return f"{1e3 * np.median([*times[system].values()]):.1f}"
            return answers[system][-1]["status"].replace("|", "/") if answers.get(system) else "-"

        def peak(system, good=good):
            memory = max((answer["peak_bytes"] or 0 for answer in good.get(system, [])), default=0)
            return f"{memory / 1e6:,.0f}" if memory else "-"

        first = [answer["first_row_seconds"] for answer in good.get("fedjax_lab", [])]
        cells = [
            of["title"],
            ratio("torch"),
            ratio("lax"),
            milliseconds("fedjax_lab"),
            milliseconds("torch"),
            f"{np.median(first):.1f}" if first else "-",
            peak("fedjax_lab"),
            peak("torch"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments=None):
    """Print the table; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="N")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="measured rounds of a process")
    parser.add_argument("--with-lax", action="store_true", help="also where it takes minutes")
    parser.add_argument("--json", metavar="FILE", help="where all measurements are stored")
    given = parser.parse_args(arguments)

    def say(line, _):
        print(line, file=sys.stderr, flush=True)

    def child(system, job, timeout):
        few = {"samples": 1} if system == "lax" else {}  # its rounds are long
        return run_child(CHILDREN[system], {**job, **few}, timeout)

    missing = [n for n in given.networks if importlib.util.find_spec(ZOO[n].package) is None]
    names = [name for name in given.networks if name not in missing]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        plan = {name: job_of(name, folder, given.rounds) for name in names}
        systems = {
            name: [s for s in CHILDREN if s != "lax" or _takes_lax(name, given.with_lax)]
            for name in names
        }
        answers = take_turns(plan, systems, given.repeats, child, say=say)
    found = {
        "command": f"python -m experiments.benchmarks.zoo {' '.join(arguments or sys.argv[1:])}",
        "date": f"{datetime.date.today()}",
        "load": load,
        "machine": machine(),
        "commit": commit(),
        "networks": {
            name: {
                "title": ZOO[name].title,
                "job": {key: value for key, value in plan[name].items() if key != "data"},
                "systems": answers[name],
            }
            for name in names
        },
    }
    if load > 0.5:
        print(
            f"The machine was busy before the run (load {load:.1f}): PyTorch's threads, which wait "
            "for each other, suffer most, and the ratios mean little.\n"
        )
    print(table(found))
    for name in missing:
        print(f"\n{name} is left out: {ZOO[name].package} is not installed.")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
            file.write("\n")


def _takes_lax(name, asked):
    return asked or not ZOO[name].lax_takes_minutes


if __name__ == "__main__":
    main()
