"""Where the bytes of a round of ten clients and five steps go, by an accelerator's compiler.

    python -m experiments.benchmarks.traffic --target v5e|h200 [--models M ...] [--algorithm A]
        [--client-map vmap] [--cohort 10] [--steps 5] [--compute-dtype float32|bfloat16]

Each instruction of the compiled round counts with all that it reads and writes, under what its
kernel does: a product or convolution (with what is computed along with it), a normalisation, a
pooling, a copy or transposition alone, or the rest (activations where they stand alone, the
update, the draw). The floor is what no compiler saves as long as products are kernels of their own:
their operands read once and their results written once, without padding. A TPU's compiler keeps
part of all that in the chip's own memory: "off chip" is what goes to the large one, and it writes
down how many cycles it expects each kernel to take: their sum stands in millions.
"""

import argparse
import collections
import re

import jax

from experiments.benchmarks.accelerators import IMAGES, one_round
from fedjax_lab.machine import program
from fedjax_lab.machine.arithmetic import count_products
from fedjax_lab.machine.compiler import compile_for

PARTS = ("products", "normalisation", "pooling", "copies", "rest")
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^{}]*S\(1\)[^{}]*\}")
_PRODUCT = re.compile(r"= [^=]*? (?:convolution|dot)\(|__cublas|__cudnn|__triton_(?:nested_)?gemm")


class Reader(program.Reader):
    """Counts each instruction's bytes under a part as well."""

    def __init__(self, text):
        self.parts = collections.Counter()
        self._products = _with_products(text)
        super().__init__(text)

    def step(self, body, instruction, times):
        """As of ``program.Reader``; its bytes count under its part, too."""
        moved = super().step(body, instruction, times)
        if instruction.opcode not in ("while", "conditional", "call", "async-start"):
            self.parts[self._part(instruction)] += moved
        return moved

    def largest(self, names, times):
        """As of ``program.Reader``; of the parts, the branch that moves most counts alone."""
        before, best, kept = self.parts, 0.0, self.parts
        for name in names:
            self.parts = before.copy()
            moved = self.run(name, times)
            if moved >= best:
                best, kept = moved, self.parts
        self.parts = kept
        return best

    def _part(self, instruction):
        name = re.search(r'op_name="([^"]*)"', instruction.rest)
        name = name[1] if name else ""
        if (
            instruction.opcode in ("convolution", "dot")
            or program.called(instruction, "calls") in self._products
            or _PRODUCT.search(f"= x {instruction.opcode}({instruction.rest}")
        ):
            return "products"
        if instruction.opcode in ("copy", "copy-start", "copy-done", "transpose"):
            return "copies"
        if "/norm/" in name or "/norm_" in name or "GroupNorm" in name:
            return "normalisation"
        if "pool" in name or "reduce_window" in name:
            return "pooling"
        return "rest"


def _with_products(text):
    """The computations that hold a product or a convolution, also in one that they call."""
    current, calls, found = "", collections.defaultdict(set), set()
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*->.*\{$", line):
            current = head[1]
        elif _PRODUCT.search(line):
            found.add(current)
        for called in re.findall(r"calls=%?([\w.\-]+)", line):
            calls[current].add(called)
    while more := {name for name, inner in calls.items() if inner & found} - found:
        found |= more
    return found


class _Cycles(program.Reader):
    """Adds up cycles in place of bytes."""

    def step(self, body, instruction, times):
        if instruction.opcode in ("while", "conditional", "call", "async-start"):
            return super().step(body, instruction, times)
        found = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
        return times * int(found[1]) if found else 0


def expected_cycles(text: str) -> int:
    """Cycles that a TPU's compiler expects of a program, loops as often as they run."""
    return _Cycles(text).traffic().bytes_accessed


def product_bytes(jaxpr) -> int:
    """Bytes of the operands and results of a program's matrix products and convolutions, without
    padding; loops and branches as in ``fedjax_lab.machine.arithmetic``.

    Args:
      jaxpr: what ``jax.make_jaxpr(function)(...)`` returned.
    """

    def of(eqn):
        values = [variable.aval for variable in (*eqn.invars[:2], *eqn.outvars)]
        return sum(value.size * value.dtype.itemsize for value in values)

    return round(count_products(jaxpr, of))


def main() -> None:
    """Compile and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("v5e", "h200"), required=True)
    parser.add_argument("--models", nargs="+", default=["mlp", *IMAGES])
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--client-map", default="vmap")
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"| {arguments.target} | GB | MiB | cycles | off chip | floor | {' | '.join(PARTS)} |")
    print("|---|---|---|---|---|---|" + "---|" * len(PARTS))
    for model in arguments.models:
        batch_size, size, channels = IMAGES.get(model, (64, 28, 1))
        shape = {"model": model, "batch_size": batch_size, "size": size, "channels": channels}
        where, function, shapes, static, _ = one_round(
            arguments.target,
            name=arguments.algorithm,
            client_map=arguments.client_map,
            cohort=arguments.cohort,
            steps=arguments.steps,
            compute_dtype=arguments.compute_dtype,
            **shape,
        )
        compiled, _ = compile_for(where, function, *shapes, **static)
        text = compiled.as_text()
        reader, outside = Reader(text), program.read_traffic(_ON_CHIP.sub("()", text))
        moved = reader.traffic().bytes_accessed
        least = product_bytes(function.trace(*shapes, **static).jaxpr)
        shares = [f"{reader.parts[part] / moved:.0%}" for part in PARTS]
        memory = compiled.memory_analysis().temp_size_in_bytes
        cycles = f"{expected_cycles(text) / 1e6:.2f}" if arguments.target == "v5e" else ""
        cells = [f"{memory / 2**20:.0f}", cycles]
        cells += [f"{outside.bytes_accessed / moved:.0%}", f"{least / moved:.0%}", *shares]
        print(f"| {model} | {moved / 1e9:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
