"""Three ways to the Gram matrix of 100 rows of 784 x 200 on a TPU, by its compiler, without one.

    python -m experiments.benchmarks.row_products

In blocks of 56 x 200 as in ``fedjax_lab.qp.gram``, without their compensated sums: sums of
products, products of bfloat16 parts, and a product in full precision. CPU seconds of compiling (the
first line is compiled twice, since a process does some work only once), millions of cycles that the
compiler expects, temporaries.
"""

import jax
import jax.numpy as jnp
from jax import lax

from experiments.benchmarks.accelerators import cpu_seconds, machine
from experiments.benchmarks.traffic import expected_cycles
from fedjax_lab.machine.compiler import abstract, compile_for
from fedjax_lab.qp import gram

ROWS, SHAPE, BLOCK = 100, (784, 200), 56
WAYS = {
    "sums of products": gram.sums_of_products,
    "parts of bfloat16": gram.product_of_parts,
    "full precision": gram.matrix_product,
}


def main() -> None:
    """Print a line for each way."""
    jax.config.update("jax_platforms", "cpu")
    target = machine("v5e")
    rows = jax.ShapeDtypeStruct((ROWS, *SHAPE), jnp.float32)
    print("| v5e | compile CPU s | million cycles | temporaries MiB |")
    print("|---|---|---|---|")
    for name in (next(iter(WAYS)), *WAYS):

        def square(rows, times=WAYS[name]):
            def add(i, total):
                block = lax.dynamic_slice_in_dim(rows, i * BLOCK, BLOCK, axis=1)
                return total + times(block, block)

            return lax.fori_loop(0, SHAPE[0] // BLOCK, add, jnp.zeros((ROWS, ROWS)))

        began = cpu_seconds()
        found, _ = compile_for(target, jax.jit(square), abstract(rows, target.devices[:1]))
        seconds, cycles = cpu_seconds() - began, expected_cycles(found.as_text())
        memory = found.memory_analysis().temp_size_in_bytes
        line = f"{seconds:.1f} | {cycles / 1e6:.2f} | {memory / 2**20:.1f}"
        print(f"| {name} | {line} |", flush=True)


if __name__ == "__main__":
    main()
