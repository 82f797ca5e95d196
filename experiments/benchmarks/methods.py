"""Time of a round of each method, relative to FedAvg in the same process.

Each method takes turns with FedAvg (A B A B ...) under the planner's client map for it; every
sample waits for the device. The ratio is the median over the repeats, with their range. "Gradients"
is the number of mini-batch gradients in a local step.

    python -m experiments.benchmarks.methods [--workload W1s] [--methods M ... | all] [--repeats 5]
"""

import argparse

import numpy as np

from experiments.benchmarks import ours
from experiments.benchmarks.rounds import Rounds
from experiments.benchmarks.workloads import WORKLOADS
from fedjax_lab.algorithms import ALGORITHMS
from fedjax_lab.data.cohort import Schedule

# The five systems, by default; name in the table -> (method, options).
SYSTEMS = {
    "gradma": ("gradma", {}),
    "gradma_s": ("gradma_s", {}),
    "fedswa": ("fedswa", {}),
    "fedmoswa": ("fedmoswa", {}),
    "cfedavg top_k:0.99": ("cfedavg", {"compressor": "top_k:0.99"}),
    "cfedavg sign": ("cfedavg", {"compressor": "sign"}),
    "fafed": ("fafed", {}),
    "fedspeed": ("fedspeed", {}),
    "fedspeed_ing": ("fedspeed_ing", {}),
}
METHODS = {name: (name, {}) for name in ALGORITHMS} | SYSTEMS


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images = [name for name, w in WORKLOADS.items() if not w.is_text]
    parser.add_argument("--workload", choices=images, default="W1s")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, "all"], default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, help="of a sample")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    workload = WORKLOADS[given.workload]
    clients, model, params = ours.on_noise(given.workload)  # resident for all methods
    schedule, length = Schedule(**ours.schedule_of(workload)), given.rounds or workload.full[0]

    def start(name):
        """(rounds of a method, gradients in its local step)."""
        factory, options = METHODS[name]
        method = ours.build_algorithm(workload, model, factory, **options)
        return Rounds(method, params, clients, schedule, length), method.gradients_per_step

    base, base_gradients = start("fedavg")
    base.sample()
    print(f"{given.workload}: {workload.title}\n")
    print("| method | gradients | time, times FedAvg's | compile s | client map |")
    print("|---|---:|---:|---:|---|")
    for name in METHODS if "all" in given.methods else given.methods:
        rounds, gradients = start(name)
        rounds.sample()  # warms up
        ratios = [rounds.sample() / base.sample() for _ in range(given.repeats)]
        print(
            f"| {name} | {gradients / base_gradients:g} | {np.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {rounds.compile_seconds:.1f} | "
            f"{rounds.client_map} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
