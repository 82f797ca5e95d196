"""Time of each compressor relative to a copy of the vector, and its error against the bound.

Compression, decompression and the copy take turns in one run (A B C A B C ...), every sample
waits for the device, and the medians are compared. Sparsifiers drop ``--comp`` of the
coordinates. The error is ||C(v) - v||^2 / ||v||^2, the mean over ``--keys`` keys (for keyed
compressors an estimate of the expectation that the bound limits), on five kinds of vector:
normal, one coordinate in a hundred, constant, zero, one-hot. Bytes are relative to 4 d.

    python -m experiments.benchmarks.compressors [--sizes 100000 1000000 10000000]
        [--repeats 5] [--keys 2] [--comp 0.99] [--only top_k:0.99 sign]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import compressors

KINDS = ("random", "sparse", "constant", "zero", "one-hot")


def catalogue(comp):
    """{name in the table: compressor}."""
    c = compressors
    return {
        "identity": c.identity(),
        "bfloat16": c.bfloat16(),
        "int8": c.int8(),
        "sign": c.sign(),
        "qsgd:15": c.qsgd(15),
        "qsgd:15 scaled": c.qsgd(15, scaled=True),
        "terngrad": c.terngrad(),
        "terngrad scaled": c.terngrad(scaled=True),
        f"top_k:{comp:g}": c.top_k(comp),
        f"top_k:{comp:g} sort": c.top_k(comp, selection="sort"),
        f"top_k:{comp:g} approximate": c.top_k(comp, selection="approximate"),
        f"random_k:{comp:g}": c.random_k(comp),
        f"random_drop:{comp:g}": c.random_drop(comp),
        "low_rank:2": c.low_rank(2),
        f"top_k:{comp:g}+qsgd:15": c.compose(c.top_k(comp), c.qsgd(15)),
    }


def vector(kind, d):
    """A float32 vector [d]."""
    if kind == "random":
        return jnp.asarray(np.random.default_rng(0).standard_normal(d, np.float32))
    if kind == "sparse":
        return jnp.where(jnp.arange(d) % 100 == 7, 3.0, 0.0)
    if kind == "constant":
        return jnp.full(d, -0.3)
    return jnp.zeros(d).at[d // 3].set(-2.0 if kind == "one-hot" else 0.0)


def seconds(call, *arguments):
    """One sample, the device waited for."""
    began = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    return time.perf_counter() - began


def time_all(chosen, d, repeats):
    """{name: (compress seconds [repeats], decompress seconds [repeats])}; "copy" among them."""
    v, key = vector("random", d), jax.random.key(1)
    calls = {"copy": (jax.jit(jnp.copy), (v,), None, ())}
    for name, compressor in chosen.items():
        compress, decompress = jax.jit(compressor.compress), jax.jit(compressor.decompress)
        calls[name] = (compress, (key, v), decompress, (compress(key, v),))
    samples = {name: ([], []) for name in calls}
    for repeat in range(repeats + 1):
        for name, (compress, given, decompress, message) in calls.items():
            taken = seconds(compress, *given), seconds(decompress, *message) if decompress else 0
            if repeat:  # the first pass warms up
                for times, sample in zip(samples[name], taken, strict=True):
                    times.append(sample)
    return samples


def relative_error(compressor, v, keys):
    """Mean over the keys of ||C(v) - v||^2 / ||v||^2; 0 for a zero vector that stays zero."""

    @jax.jit
    def through(key, v):
        return compressor.decompress(compressor.compress(key, v))

    exact = np.asarray(v, np.float64)
    size = np.square(exact).sum()
    errors = []
    for key in range(keys):
        off = np.asarray(through(jax.random.key(key), v), np.float64) - exact
        errors.append(np.square(off).sum())
    return np.mean(errors) / (size if size else 1)


def main():
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keys", type=int, default=2)
    parser.add_argument("--comp", type=float, default=0.99)
    parser.add_argument("--only", nargs="+", help="names of the table's first column")
    arguments = parser.parse_args()
    chosen = catalogue(arguments.comp)
    if arguments.only:
        chosen = {name: chosen[name] for name in arguments.only}
    head = ("compressor", "d", "compress", "decompress", "ms", "bytes", "bound", *KINDS)
    print(f"| {' | '.join(head)} |")
    print("|" + "---|" * len(head))
    for d in arguments.sizes:
        samples = time_all(chosen, d, arguments.repeats)
        copy = np.median(samples["copy"][0])
        print(f"| copy | {d:.0e} | 1 | | {1e3 * copy:.2f} |" + " |" * (len(head) - 5), flush=True)
        for name, compressor in chosen.items():
            up, down = (np.median(times) for times in samples[name])
            errors = [relative_error(compressor, vector(k, d), arguments.keys) for k in KINDS]
            row = [
                name,
                f"{d:.0e}",
                f"{up / copy:.1f}",
                f"{down / copy:.1f}",
                f"{1e3 * up:.1f} + {1e3 * down:.1f}",
                f"{compressor.bytes(d) / (4 * d):.4f}",
                f"{compressor.snr_bound(d):.4g}",
                *(f"{error:.4g}" for error in errors),
            ]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
