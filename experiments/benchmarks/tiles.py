"""Winograd's tiles against direct sums, for many shapes of convolutions, on one CPU core.

A sample is five steps of gradient descent on the kernel and the images in one compiled loop, so it
has a convolution and both of its gradients. Both forms take turns (A B A B ...). Time is the
processor's; the table has the median of the ratios of neighbours. "Chosen" is whether "auto" takes
tiles (``fedjax_lab.models.winograd.saves_time``).

    taskset -c 0 python -m experiments.benchmarks.tiles [--repeats 5]
"""

import argparse

import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.gradient_steps import STEPS, compiled_steps, processor_seconds
from fedjax_lab.models import row_products, winograd

# (channels, features), pixels of a side, kernel's side: kinds of ResNets, VGG, LeNets and others.
KINDS = [
    *(((3, 16), pixels, 3) for pixels in (32, 8)),
    *(((3, 64), pixels, 3) for pixels in (32, 16, 8)),
    *(((16, 16), pixels, 3) for pixels in (32, 16, 8, 4)),
    *(((16, 32), pixels, 3) for pixels in (16, 8, 4)),
    *(((32, 32), pixels, 3) for pixels in (32, 16, 4)),
    *(((64, 64), pixels, 3) for pixels in (32, 16, 8, 4)),
    *(((128, 128), pixels, 3) for pixels in (16, 8)),
    *(((256, 256), pixels, 3) for pixels in (8, 4, 2)),
    *(((512, 512), pixels, 3) for pixels in (4, 2)),
    *[((1, 6), 28, 5), ((6, 16), 12, 5), ((1, 32), 28, 5), ((32, 64), 12, 5)],
]
BATCHES = (1, 5, 20, 64)
MOST = 2e9  # multiplications of a convolution
LARGE = 1.1  # a ratio that counts


def program(channels, features, pixels, width, batch, tile):
    """(compiled steps, their arguments); no tile: direct sums."""
    rng = np.random.default_rng(0)
    side = pixels + width - 1
    x = jnp.asarray(rng.normal(size=(side, channels, side, batch)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(width, width, channels, features)), jnp.float32)

    def loss(kernel, x):
        return (row_products.features(x, kernel, (1, 1), tile) ** 2).sum()

    return compiled_steps(loss, kernel, x, 1e-9), (kernel, x)


def main(arguments=None):
    """Print one Markdown table, and how often the choice was the slower one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    print("| channels | pixels | kernel | batch | direct ms | direct / tiles | chosen |")
    print("|---|---|---|---:|---:|---:|---|")
    missed = total = 0
    for (channels, features), pixels, width in KINDS:
        for batch in BATCHES:
            if pixels**2 * width**2 * channels * features * batch > MOST:
                continue
            of = channels, features, pixels, width, batch
            tiles = program(*of, winograd.best_tile(pixels, width))
            direct = program(*of, 0)
            turns = range(given.repeats + 1)
            taken = np.array([[processor_seconds(*p) for p in (direct, tiles)] for _ in turns])
            ratio = np.median(taken[1:, 0] / taken[1:, 1])  # the first one warms up
            chosen = winograd.saves_time((pixels,) * 2, batch, (width, width, channels, features))
            total += 1
            missed += ratio < 1 / LARGE if chosen else ratio > LARGE
            print(
                f"| {channels} to {features} | {pixels} x {pixels} | {width} x {width} | {batch} | "
                f"{1e3 * np.median(taken[1:, 0]) / STEPS:.2f} | {ratio:.2f} | "
                f"{'tiles' if chosen else 'direct'} |",
                flush=True,
            )
    print(f"\nOf {total} shapes, the slower form by a tenth or more was chosen {missed} times.")


if __name__ == "__main__":
    main()
