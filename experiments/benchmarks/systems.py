"""A round of each of the five systems next to FedAvg's, and the gradients that it takes.

Each method takes turns with FedAvg (A B A B ...) in one process under the planner's client map;
every sample waits for the device. The ratio is the median over the repeats and, in brackets, their
range; "gradients" is how many mini-batch gradients a local step takes (FedAvg: 1).

    python -m experiments.benchmarks.systems [--workload W1s] [--methods M ...] [--repeats 5]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import ours
from experiments.benchmarks.methods import take
from experiments.benchmarks.workloads import SEED, WORKLOADS
from fedjax_lab import data
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.round import plan_round
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.simulation.run import Run

METHODS = {
    "gradma": ("gradma", {"memory_size": 100}),
    "gradma_s": ("gradma_s", {"memory_size": 100}),
    "fedswa": ("fedswa", {}),
    "fedmoswa": ("fedmoswa", {}),
    "cfedavg top_k:0.99": ("cfedavg", {"compressor": "top_k:0.99"}),
    "cfedavg sign": ("cfedavg", {"compressor": "sign"}),
    "fafed": ("fafed", {"momentum": 0.1, "second_moment_decay": 0.9}),
    "fedspeed": ("fedspeed", {}),
    "fedspeed_ing": ("fedspeed_ing", {"inertia": 0.1}),
}


class Bench:
    """A workload's data and model, resident for all methods."""

    def __init__(self, name, rounds):
        self._workload, self._rounds = WORKLOADS[name], rounds or WORKLOADS[name].full[0]
        shape = self._workload.input_shape
        noise = data.synthetic.noise_images(self._workload.num_examples, shape, seed=SEED)
        spec, size = self._workload.partition, self._workload.num_clients
        self._clients = data.partition(noise, spec, size, seed=SEED)
        self._model = ours.build_model("fedjax_lab", name)
        self._params = self._model.init(jax.random.key(0), noise.x[:1])

    def start(self, method, on_nonfinite="exclude", **options):
        """([compiled chunk, its arguments], gradients of a local step, client map)."""
        workload = self._workload
        algorithm, _ = ours.build_algorithm(workload, self._model, method, **options)
        steps, batch = workload.local_steps, workload.batch_size
        schedule = Schedule(workload.cohort_size, batch, local_steps=steps, replace=True)
        key, first = jax.random.key(0), jnp.zeros((), jnp.int32)
        shapes = jax.eval_shape(schedule.draw, self._clients, key, first)
        state = jax.jit(Run(algorithm, schedule).start)(self._params, self._clients, key, ())
        client_map = plan_round(algorithm, state, shapes).client_map
        placed = Placement.of(client_map).copies((state, self._clients, key))
        chunk = build_chunk(Run(algorithm, schedule, on_nonfinite), Placement.of(client_map))
        compiled = chunk.lower(*placed, first, length=self._rounds).compile()
        return [compiled, *placed, first], algorithm.gradients_per_step, client_map


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images = [name for name, w in WORKLOADS.items() if not w.is_text and w.algorithm == "fedavg"]
    parser.add_argument("--workload", choices=images, default="W1s")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int, help="of a sample")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    bench = Bench(given.workload, given.rounds)
    base, base_gradients, _ = bench.start("fedavg")
    take(base)
    print(f"{given.workload}: {WORKLOADS[given.workload].title}\n")
    print("| method | gradients | time, times FedAvg's | client map |")
    print("|---|---:|---:|---|")
    for name in given.methods:
        method, options = METHODS[name]
        run, gradients, client_map = bench.start(method, **options)
        take(run)  # warms up
        ratios = [take(run) / take(base) for _ in range(given.repeats)]
        print(
            f"| {name} | {gradients / base_gradients:g} | {np.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {client_map} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
