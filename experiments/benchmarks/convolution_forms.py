"""Forms of the convolutions of ten clients, by an accelerator's own compiler, without one.

    python -m experiments.benchmarks.convolution_forms --target v5e|h200 [--only TEXT ...]

Each program is a layer's forward pass and both gradients (of a first layer, whose images need
none, the kernel's alone), ten clients with kernels of their own. Bytes accessed and temporaries
stand next to those of "lax" under ``vmap``, which is what "auto" means on an accelerator:

- one by one: "lax", one client after the other;
- im2col: all patches at once, a batched product;
- batch minor: "gemm", matrices whose minor axis is the batch;
- lanes: images handed over as [H, W, C, B], the batch as the minor axis, and convolved so;
- 8, 128: input channels and features padded with zeros to multiples of these, and cut again;
- bfloat16: images, kernels and gradients are.

On a TPU the compiler also writes down for each kernel how many cycles it expects; their sum, loops
as often as they run, is its own guess of the time.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.benchmarks.accelerators import machine
from experiments.benchmarks.traffic import expected_cycles
from fedjax_lab.machine import program
from fedjax_lab.machine.compiler import abstract, compile_for
from fedjax_lab.models.convolution import convolution

CLIENTS = 10
Convolve = Callable[[jax.Array, jax.Array], jax.Array]


class Layer(NamedTuple):
    """A convolution: B images of ``size`` x ``size`` x ``channels``, a square kernel."""

    name: str
    batch: int
    size: int
    channels: int
    kernel: int
    features: int
    stride: int = 1
    padding: str = "SAME"

    @property
    def needs_images(self) -> bool:
        """Whether the gradient of the images is asked for."""
        return self.channels > 3


LAYERS = (
    Layer("LeNet-5, first", 64, 32, 3, 5, 64, padding="VALID"),
    Layer("LeNet-5, second", 64, 14, 64, 5, 64, padding="VALID"),
    Layer("LeNet-5, second, B = 16", 16, 14, 64, 5, 64, padding="VALID"),
    Layer("LeNet-5, second, B = 256", 256, 14, 64, 5, 64, padding="VALID"),
    Layer("LeNet-5 of LeCun, first", 64, 32, 3, 5, 6, padding="VALID"),
    Layer("LeNet-5 of LeCun, second", 64, 14, 6, 5, 16, padding="VALID"),
    Layer("CNN, first", 50, 28, 1, 5, 32, padding="VALID"),
    Layer("CNN, second", 50, 12, 32, 5, 64, padding="VALID"),
    Layer("FAFED's CNN, second", 50, 13, 5, 3, 10, padding="VALID"),
    Layer("FAFED's for CIFAR-10, second", 50, 16, 16, 3, 32),
    Layer("ResNet-20, first", 50, 32, 3, 3, 16),
    Layer("ResNet-20, 16", 50, 32, 16, 3, 16),
    Layer("ResNet-20, 16 to 32", 50, 32, 16, 3, 32, 2),
    Layer("ResNet-20, 32", 50, 16, 32, 3, 32),
    Layer("ResNet-20, 64", 50, 8, 64, 3, 64),
    Layer("ResNet-18, first", 50, 32, 3, 3, 64),
    Layer("ResNet-18, 64", 50, 32, 64, 3, 64),
    Layer("ResNet-18, 64 to 128", 50, 32, 64, 3, 128, 2),
    Layer("ResNet-18, 64 to 128, 1 x 1", 50, 32, 64, 1, 128, 2),
    Layer("ResNet-18, 128", 50, 16, 128, 3, 128),
    Layer("ResNet-18, 256", 50, 8, 256, 3, 256),
    Layer("ResNet-18, 512", 50, 4, 512, 3, 512),
)


def lowered(layer: Layer, lowering: str) -> Convolve:
    """One of the library's lowerings."""

    def convolve(x, kernel):
        return convolution(x, kernel, layer.padding, stride=layer.stride, lowering=lowering)

    return convolve


def padded(layer: Layer, multiple: int) -> Convolve:
    """ "lax" with input channels and features in multiples."""

    def convolve(x, kernel):
        more = [-size % multiple for size in kernel.shape[2:]]
        x = jnp.pad(x, (*[(0, 0)] * 3, (0, more[0])))
        kernel = jnp.pad(kernel, (*[(0, 0)] * 2, (0, more[0]), (0, more[1])))
        return lowered(layer, "lax")(x, kernel)[..., : layer.features]

    return convolve


def batch_as_lanes(layer: Layer) -> Convolve:
    """ "lax" on [H, W, C, B], given [B, H, W, C]."""

    def convolve(x, kernel):
        strides, numbers = (layer.stride,) * 2, ("HWCN", "HWIO", "HWCN")
        x = x.transpose(1, 2, 3, 0)
        out = lax.conv_general_dilated(x, kernel, strides, layer.padding, dimension_numbers=numbers)
        return out.transpose(3, 0, 1, 2)

    return convolve


def forms(layer: Layer) -> dict[str, tuple[Convolve, bool, jnp.dtype]]:
    """{name: (convolution, whether all clients run at once, dtype)}, "lax" under ``vmap`` first."""
    plain, wide = lowered(layer, "lax"), jnp.float32
    return {
        "lax": (plain, True, wide),
        "one by one": (plain, False, wide),
        "im2col": (lowered(layer, "im2col"), True, wide),
        "batch minor": (lowered(layer, "gemm"), True, wide),
        "lanes": (batch_as_lanes(layer), True, wide),
        "8": (padded(layer, 8), True, wide),
        "128": (padded(layer, 128), True, wide),
        "bfloat16": (plain, True, jnp.bfloat16),
    }


class Answer(NamedTuple):
    """Of a compiled program; ``cycles`` is None where its compiler does not say."""

    moved: int
    temporaries: int
    cycles: int | None


def ask(target, layer: Layer, convolve: Convolve, at_once: bool, dtype) -> Answer:
    """Compile the layer's three products for ten clients."""
    size = -(-layer.size // layer.stride)
    if layer.padding == "VALID":
        size = (layer.size - layer.kernel) // layer.stride + 1
    shapes = (
        (layer.batch, layer.size, layer.size, layer.channels),
        (layer.kernel, layer.kernel, layer.channels, layer.features),
        (layer.batch, size, size, layer.features),
    )
    values = [jax.ShapeDtypeStruct((CLIENTS, *shape), dtype) for shape in shapes]

    def one(x, kernel, gradient):
        features, back = jax.vjp(convolve, x, kernel)
        to_images, to_kernel = back(gradient)
        return features, to_kernel, to_images if layer.needs_images else None

    def all_of_them(*values):
        return jax.vmap(one)(*values) if at_once else lax.map(lambda each: one(*each), values)

    found, _ = compile_for(target, jax.jit(all_of_them), *abstract(values, target.devices[:1]))
    text = found.as_text()
    cycles = expected_cycles(text) if target.platform == "tpu" else None
    moved = program.read_traffic(text).bytes_accessed
    return Answer(moved, found.memory_analysis().temp_size_in_bytes, cycles)


def main() -> None:
    """Print a line for each layer, and the geometric means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("v5e", "h200"), required=True)
    parser.add_argument("--only", nargs="+", default=[""], help="texts, one of them in the name")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    target = machine(arguments.target)
    names = list(forms(LAYERS[0]))
    print(f"| {arguments.target} | MB, MiB, cycles | {' | '.join(names[1:])} |")
    print("|---|" + "---|" * len(names), flush=True)
    kept: dict[str, list[Answer]] = {name: [] for name in names}
    for layer in LAYERS:
        if not any(text in layer.name for text in arguments.only):
            continue
        cells = []
        for name, form in forms(layer).items():
            answer = ask(target, layer, *form)
            kept[name].append(answer)
            cells.append(cell(answer, kept["lax"][-1], name == "lax"))
        print(f"| {layer.name} | {' | '.join(cells)} |", flush=True)
    for what in ("bytes", "cycles") if kept["lax"][0].cycles else ("bytes",):
        cells = [
            over_layers([ratio(*pair, what) for pair in zip(kept[name], kept["lax"], strict=True)])
            for name in names[1:]
        ]
        print(f"| {what}: mean (least to most) | | {' | '.join(cells)} |")


def ratio(answer: Answer, plain: Answer, what: str) -> float:
    """Bytes or cycles next to those of "lax"."""
    if what == "bytes":
        return answer.moved / plain.moved
    assert answer.cycles is not None
    assert plain.cycles is not None
    return answer.cycles / plain.cycles


def over_layers(ratios: list[float]) -> str:
    """Geometric mean and range."""
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def cell(answer: Answer, plain: Answer, is_plain: bool) -> str:
    """Bytes, temporaries and cycles: of "lax" as they are, of the others next to it."""
    if is_plain:
        cycles = "" if plain.cycles is None else f", {plain.cycles / 1e3:.0f} k"
        return f"{plain.moved / 1e6:.0f}, {plain.temporaries / 2**20:.1f}{cycles}"
    temporaries = answer.temporaries / max(plain.temporaries, 2**20)
    cycles = "" if answer.cycles is None else f", {ratio(answer, plain, 'cycles'):.2f}"
    return f"{ratio(answer, plain, 'bytes'):.2f}, {temporaries:.1f}{cycles}"


if __name__ == "__main__":
    main()
