"""Milliseconds of a FedAvg round with each lowering of the convolutions under each client map.

The programs of a workload take turns (A B C A B C ...). Every sample is a chunk of rounds and waits
for the device; times are medians with their range. "Same" bits: two runs from one state end alike.

    python -m experiments.benchmarks.lowerings [--workloads W1s ...] [--lowerings lax im2col ...]
        [--client-maps vmap scan ...] [--rounds 20] [--repeats 5]
"""

import argparse
import dataclasses

import jax
import numpy as np

from experiments.benchmarks import ours
from experiments.benchmarks.rounds import Rounds
from experiments.benchmarks.workloads import WORKLOADS
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.machine.target import here
from fedjax_lab.models.convolution import LOWERINGS


def same_bits(rounds):
    """Whether two samples from the first state end with the same bits."""
    ends = []
    for _ in range(2):
        rounds.restart()
        rounds.sample()
        ends.append(jax.tree.map(np.asarray, rounds.state.server))
    return jax.tree.all(jax.tree.map(np.array_equal, *ends))


def task_of(name):
    """(method, params, clients, schedule) of a workload."""
    workload = WORKLOADS[name]
    clients, model, params = ours.on_noise(name)
    schedule = Schedule(**ours.schedule_of(workload))
    return ours.build_algorithm(workload, model), params, clients, schedule


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
        task, programs = task_of(name), {}
        for lowering in given.lowerings:
            form = None if lowering == "auto" else lowering
            target = dataclasses.replace(here(), convolution=form)
            for client_map in given.client_maps:
                rounds = Rounds(*task, given.rounds, client_map=client_map, target=target)
                programs[lowering, client_map] = rounds, same_bits(rounds), []
        for _ in range(given.repeats):
            for rounds, _, seconds in programs.values():
                seconds.append(rounds.sample())
        for (lowering, client_map), (rounds, is_same, seconds) in programs.items():
            times = 1e3 * np.array(seconds) / given.rounds
            spread = f"{np.median(times):.2f} ({times.min():.2f} to {times.max():.2f})"
            bits = "same" if is_same else "others"
            megabytes = rounds.memory.temp_size_in_bytes / 1e6
            figures = f"{rounds.compile_seconds:.1f} | {megabytes:.0f} | {bits}"
            print(f"| {name} | {lowering} | {client_map} | {spread} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
