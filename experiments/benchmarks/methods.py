"""Time of a round of each method, relative to FedAvg in the same process.

Each method takes turns with FedAvg (A B A B ...) under the planner's client map for it; every
sample waits for the device. The ratio is the median over the repeats, with their range. "Gradients"
is the number of mini-batch gradients in a local step.

    python -m experiments.benchmarks.methods [--workload W1s] [--methods M ... | all] [--repeats 5]
"""

import argparse

import jax
import numpy as np

from experiments.benchmarks import ours
from experiments.benchmarks.rounds import Rounds
from experiments.benchmarks.workloads import SEED, WORKLOADS
from fedjax_lab import data
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


class Task:
    """A workload's data and model, resident for all methods."""

    def __init__(self, name, length):
        self._workload = workload = WORKLOADS[name]
        noise = data.synthetic.noise_images(workload.num_examples, workload.input_shape, seed=SEED)
        self._clients = data.partition(noise, workload.partition, workload.num_clients, seed=SEED)
        self._model = ours.build_model("fedjax_lab", name)
        self._params = self._model.init(jax.random.key(0), noise.x[:1])
        sizes = {"batch_size": workload.batch_size, "local_steps": workload.local_steps}
        self._schedule = Schedule(workload.cohort_size, **sizes, replace=True)
        self._length = length or workload.full[0]

    def start(self, name):
        """(rounds of a method, gradients in its local step)."""
        factory, options = METHODS[name]
        method = ours.build_algorithm(self._workload, self._model, factory, **options)
        rounds = Rounds(method, self._params, self._clients, self._schedule, self._length)
        return rounds, method.gradients_per_step


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images = [name for name, w in WORKLOADS.items() if not w.is_text]
    parser.add_argument("--workload", choices=images, default="W1s")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, "all"], default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, help="of a sample")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    task = Task(given.workload, given.rounds)
    base, base_gradients = task.start("fedavg")
    base.sample()
    print(f"{given.workload}: {WORKLOADS[given.workload].title}\n")
    print("| method | gradients | time, times FedAvg's | compile s | client map |")
    print("|---|---:|---:|---:|---|")
    for name in METHODS if "all" in given.methods else given.methods:
        rounds, gradients = task.start(name)
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
