"""Milliseconds of a FedAvg round with each lowering of the convolutions under each client map.

The programs of a workload take turns (A B C A B C ...). Every sample is a chunk of rounds and waits
for the device; times are medians with their range. "Same" bits: two runs from one state end alike.

    python -m experiments.benchmarks.lowerings [--workloads W1s ...] [--lowerings lax im2col ...]
        [--client-maps vmap scan ...] [--rounds 20] [--repeats 5]
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import ours
from experiments.benchmarks.methods import take
from experiments.benchmarks.workloads import SEED, WORKLOADS
from fedjax_lab import data
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.machine.target import here
from fedjax_lab.models.convolution import LOWERINGS
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.simulation.run import Run


class Cell:
    """A compiled chunk of rounds with one lowering and one client map."""

    def __init__(self, task, lowering, client_map, rounds):
        run, clients, params = task
        target = dataclasses.replace(here(), convolution=None if lowering == "auto" else lowering)
        place = Placement.of(client_map, target=target)
        key, first = jax.random.key(SEED), jnp.zeros((), jnp.int32)
        self._start = jax.jit(run.start)(params, clients, key, ())
        placed = place.copies((self._start, clients, key))
        began = time.perf_counter()
        compiled = build_chunk(run, place).lower(*placed, first, length=rounds).compile()
        self.compile_seconds = time.perf_counter() - began
        self.temporaries = compiled.memory_analysis().temp_size_in_bytes
        self._place, self._run = place, [compiled, *placed, first]
        self.same_bits = self._twice()
        self.seconds = []

    def _twice(self):
        ends = []
        for _ in range(2):
            [self._run[1]] = self._place.copies((jax.tree.map(jnp.copy, self._start),))
            take(self._run)
            ends.append(jax.tree.map(np.asarray, self._run[1].server))
        return jax.tree.all(jax.tree.map(np.array_equal, *ends))

    def sample(self):
        """Time one chunk."""
        self.seconds.append(take(self._run))


def task_of(name):
    """(run, clients, params) of a workload."""
    workload = WORKLOADS[name]
    noise = data.synthetic.noise_images(workload.num_examples, workload.input_shape, seed=SEED)
    clients = data.partition(noise, workload.partition, workload.num_clients, seed=SEED)
    model = ours.build_model("fedjax_lab", name)
    params = model.init(jax.random.key(0), noise.x[:1])
    algorithm, _ = ours.build_algorithm(workload, model, "fedavg")
    sizes = {"batch_size": workload.batch_size, "local_steps": workload.local_steps}
    schedule = Schedule(workload.cohort_size, **sizes, replace=True)
    return Run(algorithm, schedule), clients, params


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images = [name for name, workload in WORKLOADS.items() if not workload.is_text]
    parser.add_argument("--workloads", nargs="+", choices=images, default=["W1s"])
    parser.add_argument("--lowerings", nargs="+", choices=LOWERINGS, default=["lax", "im2col"])
    parser.add_argument("--client-maps", nargs="+", default=["vmap", "scan"])
    parser.add_argument("--rounds", type=int, default=20, help="of a sample")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    print(f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}\n")
    print("| workload | lowering | client map | ms a round | compile s | temporary MB | bits |")
    print("|---|---|---|---:|---:|---:|---|")
    for name in given.workloads:
        task, cells = task_of(name), {}
        for lowering in given.lowerings:
            for client_map in given.client_maps:
                cells[lowering, client_map] = Cell(task, lowering, client_map, given.rounds)
        for _ in range(given.repeats):
            for cell in cells.values():
                cell.sample()
        for (lowering, client_map), cell in cells.items():
            times = 1e3 * np.array(cell.seconds) / given.rounds
            spread = f"{np.median(times):.2f} ({times.min():.2f} to {times.max():.2f})"
            bits = "same" if cell.same_bits else "others"
            figures = f"{cell.compile_seconds:.1f} | {cell.temporaries / 1e6:.0f} | {bits}"
            print(f"| {name} | {lowering} | {client_map} | {spread} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
