"""Convolutions whose kernel spans several strides: the library's form against ``jax.lax``, on CPU.

A sample is five steps of gradient descent on the kernel in one compiled loop, with the gradient by
the input as well. Both forms take turns (A B A B ...). Time is the processor's; the table has the
median of the ratios of neighbours, with their range. "Whole" is the form without blocks of strides
and without joined phases, which kernels of up to seven weights and strides of up to four keep.

    python -m experiments.benchmarks.long_kernels [--repeats 5]
"""

import argparse
import importlib
import time

import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.benchmarks.gradient_steps import compiled_steps, processor_seconds
from fedjax_lab.machine.target import tracing_with
from fedjax_lab.models.lowering import lowered

# The module, whose limits "whole" lifts; as an attribute of the package it is the function.
convolution = importlib.import_module("fedjax_lab.models.convolution")
# name -> shapes of images and kernels, stride, distance of the image's pixels
CASES = {
    "1,024 weights, stride 512": ((8, 16_000, 1), (1024, 1, 64), 512, 1),
    "400 weights, stride 160": ((8, 16_000, 1), (400, 1, 64), 160, 1),
    "80 weights, stride 4": ((8, 4_000, 1), (80, 1, 64), 4, 1),
    "16 x 16 weights, stride 16": ((4, 224, 224, 3), (16, 16, 3, 192), 16, 1),
    "8 x 8 weights, stride 8": ((16, 64, 64, 3), (8, 8, 3, 64), 8, 1),
    "transposed, 32 weights, stride 16": ((8, 200, 64), (32, 64, 1), 1, 16),
    "transposed, 16 weights, stride 8": ((8, 200, 64), (16, 64, 32), 1, 8),
}


def program(case, form):
    """(compiled steps, their arguments, seconds of compilation) of "lax", "blocks" or "whole"."""
    images, kernels, stride, spread = CASES[case]
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in (images, kernels))
    axes = len(images) - 2
    numbers = (("NWC", "WIO", "NWC"), ("NHWC", "HWIO", "NHWC"))[axes - 1]
    padding = "SAME" if spread == 1 else [(size - 1, size - 1) for size in kernels[:axes]]

    def loss(kernel, x):
        y = lax.conv_general_dilated(
            *(x, kernel, (stride,) * axes, padding, (spread,) * axes), dimension_numbers=numbers
        )
        return (y**2).sum()

    limits = convolution.LONG_KERNEL, convolution.FEW_PHASES
    if form == "whole":
        convolution.LONG_KERNEL = convolution.FEW_PHASES = 10**9
    began = time.process_time()
    with tracing_with("lax" if form == "lax" else "auto"):
        run = compiled_steps(lowered(loss), kernel, x, 1e-6)
    seconds = time.process_time() - began
    convolution.LONG_KERNEL, convolution.FEW_PHASES = limits
    return run, (kernel, x), seconds


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    print("| convolution | lax / blocks | whole / blocks | compile s: lax, whole, blocks |")
    print("|---|---:|---:|---:|")
    for case in CASES:
        made = {form: program(case, form) for form in ("lax", "whole", "blocks")}
        taken = {form: [] for form in made}
        for turn in range(given.repeats + 1):
            for form, (run, arguments, _) in made.items():
                seconds = processor_seconds(run, arguments)
                if turn:  # the first one warms up
                    taken[form].append(seconds)
        shown = []
        for form in ("lax", "whole"):
            ratios = np.array(taken[form]) / np.array(taken["blocks"])
            shown.append(f"{np.median(ratios):.1f} ({ratios.min():.1f} to {ratios.max():.1f})")
        compiled = ", ".join(f"{seconds:.1f}" for _, _, seconds in made.values())
        print(f"| {case} | {' | '.join(shown)} | {compiled} |", flush=True)


if __name__ == "__main__":
    main()
