"""Throughput next to the opponents', in one run: systems take turns, each in its own process.

The systems are fedjax_lab with its default settings (``simulate``, client_map "auto"), with a
convolutional network of the user's own, a plain PyTorch loop, ``torch.func.vmap`` over clients,
and Apple's pfl. In each repeat every system gets a process of its own, one after the other; a
ratio is the time of the best opponent of a repeat over one's own of the same repeat, given as the
median over the repeats and, in brackets, their range. Compilation and the first call are apart. The
GEMM peak is the rate of a float32 product of 2048 x 2048 matrices, the better of jax and PyTorch.

    python -m experiments.benchmarks [--workloads W1 W1s ...] [--systems ...] [--repeats 5]
        [--json FILE] [--scale full|smoke|gpu] [--torch-python PATH] [--minutes M]

Systems whose packages are missing are named and left out. On a GPU: ``--scale gpu``.
"""

import argparse
import datetime
import json
import os
import shutil
import sys
import tempfile

from experiments.benchmarks.compare import (
    SYSTEMS,
    measured,
    peak_of,
    run_child,
    table,
    take_turns,
    write_data,
)
from experiments.benchmarks.workloads import ON_CPU, ON_GPU, WORKLOADS

# repeats, workloads, minutes, seconds after which an opponent's process takes no more samples
SCALES = {
    "full": (5, ON_CPU, None, 60.0),
    "smoke": (1, ON_CPU, None, 5.0),
    "gpu": (3, ON_GPU, 7.0, 4.0),
}
LIMIT = 150.0  # seconds that a process may take where minutes are counted


def job_of(name, path, scale, max_seconds):
    """What a child is told about a workload."""
    workload = WORKLOADS[name]
    rounds, samples = workload.gpu if scale == "gpu" else workload.full
    if scale == "smoke":
        rounds, samples = max(rounds // 5, 1), 1
    return {
        "workload": name,
        "data": path,
        "rounds": rounds,
        "samples": samples,
        "evaluate": scale == "gpu" and workload.evaluate_on_gpu,
        "max_seconds": max_seconds,
    }


def measure_peak(torch_python):
    """{"jax": GFLOP/s, "torch": GFLOP/s}, of those that are installed."""
    answers = {kind: run_child(f"peak_{kind}", {}, torch_python) for kind in ("jax", "torch")}
    return {kind: answer["flops"] / 1e9 for kind, answer in answers.items() if "flops" in answer}


def main(arguments=None):
    """Print the table; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=list(SCALES), default="full")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), metavar="W")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", metavar="FILE", help="where all measurements are stored")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter with PyTorch")
    parser.add_argument("--minutes", type=float, help="start no process after so long")
    given = parser.parse_args(arguments)
    torch_python = shutil.which(given.torch_python)
    if not torch_python:
        parser.error(f"--torch-python is {given.torch_python!r}, which cannot be run")
    torch_python = os.path.abspath(torch_python)
    repeats, names, minutes, max_seconds = SCALES[given.scale]
    names, repeats = given.workloads or names, given.repeats or repeats
    minutes = given.minutes or minutes

    def say(line):
        print(line, file=sys.stderr, flush=True)

    def child(system, job, timeout):
        timeout = None if timeout is None else min(timeout, LIMIT)
        return run_child(system, job, torch_python, timeout)

    load = os.getloadavg()[0]
    peaks = [measure_peak(torch_python)]
    with tempfile.TemporaryDirectory() as folder:
        data = {name: write_data(name, folder) for name in names}
        plan = {name: job_of(name, data[name][0], given.scale, max_seconds) for name in names}
        systems = {name: _asked(given.systems, name) for name in names}
        seconds = None if minutes is None else 60 * minutes
        answers = take_turns(plan, systems, repeats, child, seconds, say)
    if seconds is None:
        peaks.append(measure_peak(torch_python))
    found = measured(
        names,
        {name: source for name, (_, source) in data.items()},
        answers,
        command=f"python -m experiments.benchmarks {' '.join(arguments or sys.argv[1:])}".strip(),
        date=f"{datetime.date.today()}",
        load=load,
        gemm_gflops=peaks,
    )
    if peak_of(found):
        print(f"GEMM peak {peak_of(found) / 1e9:,.0f} GFLOP/s, {repeats} repeats.\n")
    if load > 0.5:
        print(
            f"The machine was busy before the run (load {load:.1f}): threads that wait for each "
            "other, as PyTorch's do, suffer most, and the ratios mean little.\n"
        )
    for name in names:
        workload = WORKLOADS[name]
        print(
            f"- {name}: {workload.title}, data: {data[name][1]}; {workload.cohort_size} of "
            f"{workload.num_clients} clients, {workload.local_steps} steps of batch "
            f"{workload.batch_size}: {workload.flop_per_round / 1e9:,.2f} GFLOP a round"
        )
    print(f"\n{table(found)}")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
            file.write("\n")


def _asked(systems, name):
    """The systems that have a turn: the user's own CNN is another model for W1s only."""
    return [system for system in systems if system != "fedjax_lab_own_cnn" or name == "W1s"]


if __name__ == "__main__":
    main()
