"""The workloads as plain data, and their floating-point operations counted from shapes.

Imports neither jax nor torch: the children of both sides read it. A workload is local SGD in
float32 on mini-batches drawn with replacement, the uniform mean of the cohort, and a model:

    ("conv", features, kernel)   no padding, stride 1     ("pool",)  2 x 2, stride 2
    ("dense", units)             flattens first           ("relu",)  ("dropout", rate)
    ("resnet18", width)          conv3x3 stem, GroupNorm with two groups, and the last dense layer
    ("lstm", units, layers)      word vectors of as many units, and the decoder

Axes: N clients, S of them in a cohort, K local steps, B examples of a mini-batch.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

SEED = 0  # of data and partitions


@dataclasses.dataclass(frozen=True)
class Workload:
    """What all systems run.

    Attributes:
      title: one line for the reader.
      input_shape: of an example: [H, W, C], or [L] words.
      num_classes: logits; of a language model the size of the vocabulary.
      layers: the model, see above.
      model: (name, options) in ``fedjax_lab.models``; None: the user writes it.
      num_clients, cohort_size, local_steps, batch_size: N, S, K, B.
      num_examples: of all clients together.
      partition: a scheme of ``fedjax_lab.data``.
      dataset: whose examples, if they are on this machine; "noise" otherwise.
      client_lr: learning rate.
      full, gpu: (rounds of a sample, samples of a process) on a CPU and on a GPU.
    """

    title: str
    input_shape: tuple[int, ...]
    num_classes: int
    layers: tuple[tuple, ...]
    model: tuple[str, dict] | None
    num_clients: int
    cohort_size: int
    local_steps: int
    batch_size: int
    num_examples: int
    full: tuple[int, int]
    gpu: tuple[int, int]
    partition: str = "iid"
    dataset: str = "noise"
    client_lr: float = 0.01

    @property
    def is_text(self) -> bool:
        """Whether examples are sequences of words."""
        return self.layers[0][0] == "lstm"

    @property
    def samples_per_round(self) -> int:
        """Examples that a round takes gradients of."""
        return self.cohort_size * self.local_steps * self.batch_size

    @property
    def flop_per_round(self) -> int:
        """Operations of a round: 6 per multiplication, less the input gradient of layer 1."""
        return self.samples_per_round * flop_per_example(self)


class Layer(NamedTuple):
    """What one example costs in a layer.

    Attributes:
      multiplications: of the forward pass.
      weights: numbers that are trained, biases and the scales of norms among them.
      outputs: numbers that the backward pass needs: products' results, norms' and activations'
        where they are not computed again from these.
    """

    multiplications: int
    weights: int
    outputs: int


def flop_per_example(workload: Workload) -> int:
    """Operations of one example's loss and gradient; biases, norms and activations left out.

    Every multiplication of the forward pass counts 2 (multiply and add), and as often for the
    gradient of the weights and for that of the layer's input, which layer 1 does not need.
    """
    products = [layer.multiplications for layer in layers(workload) if layer.multiplications]
    first = 0 if workload.is_text else products[0]  # word vectors are trained: all inputs count
    return 6 * sum(products) - 2 * first


def layers(workload: Workload) -> Iterator[Layer]:
    """Each layer with weights, and each pooling."""
    shape = workload.input_shape
    for kind, *sizes in workload.layers:
        if kind == "conv":
            features, kernel = sizes
            height, width = (size - kernel + 1 for size in shape[:2])
            weights = features * kernel**2 * shape[2]
            shape = (height, width, features)
            yield Layer(height * width * weights, weights + features, math.prod(shape))
        elif kind == "pool":
            shape = (shape[0] // 2, shape[1] // 2, shape[2])
            yield Layer(0, 0, math.prod(shape))
        elif kind == "dense":
            weights = math.prod(shape) * sizes[0]
            shape = (sizes[0],)
            yield Layer(weights, weights + sizes[0], sizes[0])
        elif kind == "resnet18":
            yield from _resnet18(shape, sizes[0], workload.num_classes)
        elif kind == "lstm":
            (length,), (units, number) = shape, sizes
            words = workload.num_classes
            yield Layer(0, words * units, length * units)
            weights = 4 * units * (units + units)
            yield from [Layer(length * weights, weights + 8 * units, length * 6 * units)] * number
            yield Layer(length * units * words, (units + 1) * words, length * words)


def _resnet18(shape: tuple[int, ...], width: int, num_classes: int) -> Iterator[Layer]:
    height, columns, channels = shape
    pixels = height * columns

    def convolution(kernel: int, channels: int, features: int) -> Layer:
        """With its norm: a scale and a bias for each channel, and a result of its own."""
        weights = kernel**2 * channels * features
        return Layer(pixels * weights, weights + 2 * features, 2 * pixels * features)

    yield convolution(3, channels, width)
    channels = width
    for features in (width, 2 * width, 4 * width, 8 * width):
        if features != channels:
            pixels //= 4
            yield convolution(1, channels, features)  # projection
        yield convolution(3, channels, features)
        yield from [convolution(3, features, features)] * 3
        channels = features
    yield Layer(channels * num_classes, (channels + 1) * num_classes, num_classes)


def _lenet(widths: tuple[int, int, int, int]) -> tuple[tuple, ...]:
    conv = [part for width in widths[:2] for part in (("conv", width, 5), ("pool",), ("relu",))]
    dense = [part for width in widths[2:] for part in (("dense", width), ("relu",))]
    return (*conv, *dense, ("dense", 10))


_CIFAR = {"input_shape": (32, 32, 3), "num_classes": 10, "num_examples": 50_000}
_FASHION = {
    "input_shape": (28, 28, 1),
    "num_classes": 10,
    "num_examples": 60_000,
    "dataset": "fashion_mnist",
}
_TENTH = {"num_clients": 100, "cohort_size": 10}
_LECUN = (6, 16, 120, 84)


def _text(units: int, words: int, full: tuple[int, int]) -> Workload:
    options = {"embedding": units, "hidden": units, "layers": 2, "dropout": 0.0}
    return Workload(
        f"LSTM 2 x {units}, {words:,} words, sequences of 32",
        (32,),
        words,
        (("lstm", units, 2),),
        ("lstm", options),
        **_TENTH,
        local_steps=5,
        batch_size=20,
        num_examples=20_000,
        full=full,
        gpu=(20, 3),
    )


_W4 = Workload(
    "ResNet-18 with GroupNorm",
    layers=(("resnet18", 64),),
    model=("resnet18", {}),
    **_CIFAR,
    **_TENTH,
    local_steps=50,
    batch_size=50,
    full=(1, 1),
    gpu=(1, 1),
)

WORKLOADS = {
    # As small as can be, to see that everything runs.
    "W0": Workload(
        "MLP 784-8-10",
        layers=(("dense", 8), ("relu",), ("dense", 10)),
        model=("mlp", {"hidden": (8,)}),
        input_shape=(28, 28, 1),
        num_classes=10,
        num_examples=400,
        num_clients=20,
        cohort_size=4,
        local_steps=2,
        batch_size=8,
        full=(2, 1),
        gpu=(2, 1),
    ),
    "W1": Workload(
        "LeNet of GradMA, no norm",
        layers=_lenet((32, 64, 512, 128)),
        model=("lenet5_gradma", {"norm": None, "dropout": 0.0}),
        **_CIFAR,
        **_TENTH,
        local_steps=5,
        batch_size=64,
        full=(2, 3),
        gpu=(20, 4),
    ),
    "W1s": Workload(
        "LeNet-5 of LeCun's widths",
        layers=_lenet(_LECUN),
        model=("lenet5", {"widths": _LECUN}),
        **_CIFAR,
        **_TENTH,
        local_steps=5,
        batch_size=64,
        full=(10, 3),
        gpu=(50, 4),
    ),
    "W2": Workload(
        "CNN of CFedAvg, Dirichlet 0.1",
        layers=(*_lenet((32, 64, 512, 0))[:-3], ("dense", 10)),
        model=("cnn", {}),
        **_FASHION,
        **_TENTH,
        local_steps=50,
        batch_size=50,
        partition="dirichlet:0.1",
        full=(1, 2),
        gpu=(5, 3),
    ),
    "W3": Workload(
        "MLP 784-200-100-10",
        layers=(("dense", 200), ("relu",), ("dense", 100), ("relu",), ("dense", 10)),
        model=("mlp", {}),
        **_FASHION,
        num_clients=1000,
        cohort_size=100,
        local_steps=5,
        batch_size=20,
        full=(20, 3),
        gpu=(20, 4),
    ),
    "W4": _W4,
    # As many clients as a machine of two cores has streams, so that a round takes seconds.
    "W4s": dataclasses.replace(
        _W4,
        cohort_size=2,
        local_steps=2,
        batch_size=20,
        num_examples=10_000,
    ),
    "W5": Workload(
        "two-convolution CNN of pfl-research's CIFAR-10 benchmark, dropout",
        layers=(
            *(("conv", 32, 3), ("relu",), ("conv", 64, 3), ("pool",), ("relu",), ("dropout", 0.25)),
            *(("dense", 128), ("relu",), ("dropout", 0.5), ("dense", 10)),
        ),
        model=None,
        **_CIFAR,
        num_clients=1000,
        cohort_size=50,
        local_steps=5,
        batch_size=10,
        full=(1, 2),
        gpu=(10, 4),
    ),
    "W6": _text(256, 10_000, full=(1, 1)),
    "W6s": _text(128, 2_000, full=(2, 2)),
}
ON_CPU = ("W1", "W1s", "W2", "W3", "W4s", "W5", "W6s")
