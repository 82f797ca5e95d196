"""Milliseconds a round next to the opponents', in one run: systems take turns, each in a process.

The systems are fedjax_lab with its default settings (``simulate``, client_map "auto"), with a
convolutional network of the user's own, and the ``opponents``: frameworks as their users run them,
and PyTorch without one. ``make bench-opponents`` installs them. In each repeat every system gets a
process of its own, one after the other; a ratio is the time of the best opponent of a repeat over
one's own of the same repeat, given as the median over the repeats with their range. An opponent
that took more than 1.25 times the best one's time in the first repeat has no further turn. Imports,
compilation and the first call are apart. The GEMM peak is the rate of a float32 product of
2048 x 2048 matrices, the better of jax and PyTorch.

    python -m experiments.benchmarks [--workloads W1 W1s ...] [--systems ...] [--repeats 5]
        [--json FILE] [--scale full|smoke] [--minutes M]

Systems whose packages are missing are named and left out. The file is written after each answer;
what it holds already, of the same machine, counts as the first repeats.
On a GPU: ``python -m experiments.benchmarks.gpu``.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path

from experiments.benchmarks import speed
from experiments.benchmarks.compare import (
    SYSTEMS,
    commit,
    machine,
    measured,
    run_child,
    take_turns,
    write_data,
)
from experiments.benchmarks.workloads import ON_CPU, WORKLOADS
from fedjax_lab.machine.atomic_files import write_text

# repeats, seconds after which an opponent's process takes no more samples
SCALES = {"full": (5, 25.0), "smoke": (1, 5.0)}


def job_of(name, path, scale, max_seconds):
    """What a child is told about a workload."""
    rounds, samples = WORKLOADS[name].full
    if scale == "smoke":
        rounds, samples = max(rounds // 5, 1), 1
    return {
        "workload": name,
        "data": path,
        "rounds": rounds,
        "samples": samples,
        "max_seconds": max_seconds,
    }


def measure_peak():
    """{"jax": GFLOP/s, "torch": GFLOP/s}, of those that are installed."""
    answers = {kind: run_child(f"peak_{kind}", {}) for kind in ("jax", "torch")}
    return {kind: answer["flops"] / 1e9 for kind, answer in answers.items() if "flops" in answer}


def main(arguments=None):
    """Print the tables; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=list(SCALES), default="full")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=ON_CPU)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", metavar="FILE", help="where all measurements are stored")
    parser.add_argument("--minutes", type=float, help="start no process after so long")
    given = parser.parse_args(arguments)
    repeats, max_seconds = SCALES[given.scale]
    names, seconds = given.workloads, given.minutes and 60 * given.minutes
    about = {
        "command": " ".join(["python -m experiments.benchmarks", *(arguments or sys.argv[1:])]),
        "date": f"{datetime.date.today()}",
        "load": os.getloadavg()[0],
        "commit": commit(),
        "gemm_gflops": [measure_peak()],
    }
    path = given.json and Path(given.json)
    stored = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else None
    if stored and stored["machine"] != machine():
        parser.error(f"{given.json} holds times of another machine ({stored['machine']}).")
    about = _joined(stored, about) if stored else about
    before = dict(stored["workloads"]) if stored else {}
    with tempfile.TemporaryDirectory() as folder:
        data = {name: write_data(name, folder) for name in names}
        sources = {name: source for name, (_, source) in data.items()}
        plan = {name: job_of(name, data[name][0], given.scale, max_seconds) for name in names}
        systems = {name: _asked(given.systems, name) for name in names}

        def store(line, answers):
            print(line, file=sys.stderr, flush=True)
            if path:
                found = measured(names, sources, answers, **about)
                found["workloads"] = {**before, **found["workloads"]}
                write_text(path, json.dumps(found, indent=1) + "\n")

        repeats = given.repeats or repeats
        earlier = {name: of["systems"] for name, of in before.items()}
        answers = take_turns(plan, systems, repeats, run_child, seconds, store, earlier)
    about["gemm_gflops"].append(measure_peak())
    store("", answers)
    found = measured(names, sources, answers, **about)
    if about["load"] > 0.5:
        print(
            f"The machine was busy before the run (load {about['load']:.1f}): threads that wait "
            "for each other, as PyTorch's do, suffer most, and the ratios mean little.\n"
        )
    for name in names:
        print(f"- {name}: {speed.sizes(name)}; data: {sources[name]}")
    print(f"\n{speed.table(found)}\n\n{speed.first_rows(found)}\n\n{speed.about(found)}")


def _joined(stored, about):
    """What two runs into one file say of themselves; the load is that before the first."""
    joined = {**about, "load": stored["load"]}
    for key in ("date", "commit"):
        if stored[key] not in (None, about[key]):
            joined[key] = f"{stored[key]}, {about[key]}"
    joined["gemm_gflops"] = stored["gemm_gflops"] + about["gemm_gflops"]
    return joined


def _asked(systems, name):
    """The systems that have a turn: the user's own CNN is another model for W1s only."""
    return [system for system in systems if system != "fedjax_lab_own_cnn" or name == "W1s"]


if __name__ == "__main__":
    main()
