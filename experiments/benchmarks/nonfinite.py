"""What it costs to leave out clients that are not finite: "exclude" next to "keep", in one run.

Both chunks of rounds take turns (A B A B ...) under the planner's client map; every sample waits
for the device. The ratio is the median over the pairs, with the range of the middle half.

    python -m experiments.benchmarks.nonfinite [--workloads W1s W3] [--repeats 15]
"""

import argparse
import time

import jax
import numpy as np

from experiments.benchmarks.systems import Bench
from experiments.benchmarks.workloads import WORKLOADS


def seconds(run):
    """Time of one sample; the state goes on."""
    compiled, state, *rest = run
    began = time.perf_counter()
    run[1] = jax.block_until_ready(compiled(state, *rest))[0]
    return time.perf_counter() - began


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["W1s", "W3"])
    parser.add_argument("--rounds", type=int, help="of a sample")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args(arguments)
    print("| workload | exclude, times keep | middle half |")
    print("|---|---:|---:|")
    for name in given.workloads:
        bench = Bench(name, given.rounds)
        runs = {how: bench.start("fedavg", on_nonfinite=how)[0] for how in ("exclude", "keep")}
        for run in runs.values():
            seconds(run)  # the first one warms up
        pairs = [[seconds(run) for run in runs.values()] for _ in range(given.repeats)]
        ratios = [excluding / keeping for excluding, keeping in pairs]
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        print(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} |", flush=True)


if __name__ == "__main__":
    main()
