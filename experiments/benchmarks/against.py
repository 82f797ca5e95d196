"""Processor time of a round, of this checkout's package and of another one's.

Both run at the same time on one core, so that whatever else the machine does weighs on both alike:
ratios repeat to a few hundredths beside other work. Programs are those of a machine of one core.
Each runs ``experiments`` of this checkout. Wall time on all cores, as ``experiments.benchmarks``
has it, needs an idle machine.

    git worktree add ../before COMMIT
    python -m experiments.benchmarks.against ../before [--workloads W1s W3 ...] [--method M]
        [--repeats 3]
"""

import argparse
import concurrent.futures
import contextlib
import os
import tempfile
from pathlib import Path

import numpy as np

from experiments.benchmarks import zoo
from experiments.benchmarks.__main__ import SCALES, job_of
from experiments.benchmarks.compare import ROOT, run_child, write_data
from experiments.benchmarks.workloads import ON_CPU, WORKLOADS
from fedjax_lab.algorithms import ALGORITHMS

MAX_SECONDS = SCALES["full"][1]
NAMES = [*WORKLOADS, *zoo.ZOO]  # the latter are networks as users write them


def with_package_of(checkout, folder):
    """A folder with a checkout's package beside these benchmarks."""
    folder.mkdir()
    (folder / "fedjax_lab").symlink_to(checkout / "fedjax_lab")
    (folder / "experiments").symlink_to(ROOT / "experiments")
    return folder


@contextlib.contextmanager
def on_one_core():
    """Children are started on the last core, where the system can bind them (Linux)."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def at_once(pool, roots, system, job):
    """The answers of children of each root."""
    return list(pool.map(lambda root: run_child(system, job, root=root), roots))


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="directory of the other checkout")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=ON_CPU)
    parser.add_argument("--method", choices=list(ALGORITHMS), default="fedavg")
    parser.add_argument("--scale", choices=list(SCALES), default="full")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    networks = [name for name in given.workloads if name in zoo.ZOO]
    if networks and given.method != "fedavg":
        parser.error(f"{networks} run fedavg, and --method is {given.method}")
    before = given.before.resolve()
    if not (before / "fedjax_lab" / "__init__.py").is_file():
        parser.error(f"{before} is no checkout: it has no fedjax_lab/__init__.py")
    print("| workload | before, ms | now, ms | now / before | first row, s | peak, MB |")
    print("|---|---:|---:|---:|---:|---:|")
    pool = concurrent.futures.ThreadPoolExecutor(2)
    with tempfile.TemporaryDirectory() as folder, on_one_core(), pool:
        roots = [
            with_package_of(checkout, Path(folder) / name)
            for name, checkout in (("before", before), ("now", ROOT))
        ]
        for name in given.workloads:
            if name in zoo.ZOO:
                system, job = "zoo", zoo.job_of(name, folder, 1 if given.scale == "smoke" else None)
            else:
                path, _ = write_data(name, folder)
                system, job = "fedjax_lab", job_of(name, path, given.scale, MAX_SECONDS)
            job["method"] = given.method
            turns = [at_once(pool, roots, system, job) for _ in range(given.repeats)]
            failed = [a["status"] for turn in turns for a in turn if "status" in a]
            if failed:
                print(f"| {name} | {failed[0]} | | | | |", flush=True)
                continue
            taken = [[np.median(a["processor_milliseconds"]) for a in turn] for turn in turns]
            first = [[a["first_row_processor_seconds"] for a in turn] for turn in turns]
            memory = [[a["peak_bytes"] / 1e6 for a in turn] for turn in turns]
            ratios = [now / earlier for earlier, now in taken]
            rounds, rows, peak = (np.median(of, axis=0) for of in (taken, first, memory))
            print(
                f"| {name} | {rounds[0]:.1f} | {rounds[1]:.1f} | {np.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) | {rows[0]:.1f}, {rows[1]:.1f} | "
                f"{peak[0]:.0f}, {peak[1]:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
