"""The demo: FedAvg, SCAFFOLD and GradMA on digits that are divided very unevenly.

    python -m experiments.demo [FOLDER]

20 clients hold labels in shares of Dirichlet(0.1); 5 of them take part in a round, with 5
local steps each. All methods see the same partition, first model, cohorts and mini-batches for
a seed, and share model and learning rates. Three seeds; less than twenty seconds on two CPU cores,
most of it compilation. On CPU, two processes share the machine, so the seconds that runs took are
longer than alone. Started again, it finds its runs finished and writes the report anew.
"""

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.runner import run
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.markdown import markdown_table
from fedjax_lab.report import default_target, group_runs, load_runs, write_report
from fedjax_lab.report.cells import accuracy_table, target_table
from fedjax_lab.report.sections import best_first

# Two shares of about the same work.
SHARES = (("fedavg", "scaffold"), ("gradma",))
SEEDS = (0, 1, 2)
STOPPED = "Stopped early; the same command goes on from there."


def directory_of(folder: Path, algorithm: str, seed: int) -> Path:
    """Return the run directory of a method and a seed."""
    return folder / f"{algorithm}-seed{seed}"


def run_methods(algorithms: Sequence[str], folder: Path, rounds: int) -> None:
    """Run methods with all seeds; exits with status 1 if a signal ends a run early."""
    # The seeds of a method are the same program: it is compiled once and kept on the disk.
    keep_by_default()
    for algorithm in algorithms:
        for seed in SEEDS:
            print(f"{algorithm}, seed {seed}", flush=True)
            config = RunConfig.of(
                algorithm=algorithm,
                dataset="digits",
                partition="dirichlet:0.1",
                num_clients=20,
                model="mlp",
                rounds=rounds,
                cohort_size=5,
                local_steps=5,
                batch_size=16,
                client_lr=0.1,
                seed=seed,
                eval_every=min(5, rounds),
                checkpoint_every=rounds,
                run_dir=str(directory_of(folder, algorithm, seed)),
            )
            try:
                stopped = run(config, progress=False).interrupted
            except KeyboardInterrupt:  # the signal came in the last chunk of the run before
                stopped = True
            if stopped:
                sys.exit(1)


def run_all(folder: Path, rounds: int) -> None:
    """Run all methods: on CPU in two processes, which compile at the same time."""
    first, second = SHARES
    if jax.default_backend() != "cpu":  # an accelerator belongs to one process
        return run_methods(first + second, folder, rounds)
    other = multiprocessing.get_context("spawn").Process(
        target=run_methods, args=(first, folder, rounds)
    )

    def leave(*_):
        # Not by an exception, which is lost if Python is in JAX's callback of garbage collection.
        other.terminate()
        other.join()
        print(STOPPED, file=sys.stderr, flush=True)
        os._exit(1)

    # Ctrl-C reaches both processes. In a run it saves. Between runs, where nothing is to save, the
    # other one ignores it, and this one ends both.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    other.start()
    signal.signal(signal.SIGINT, leave)
    try:
        run_methods(second, folder, rounds)
    except BaseException:
        other.terminate()  # it saves, too
        raise
    finally:
        other.join()
        signal.signal(signal.SIGINT, before)
    if other.exitcode:
        sys.exit(1)


def main(folder: Path, rounds: int = 100) -> Path:
    """Run all methods with all seeds and write the report; returns the path of report.md."""
    try:
        run_all(folder, rounds)
    except (KeyboardInterrupt, SystemExit):
        sys.exit(STOPPED)
    directories = [
        directory_of(folder, algorithm, seed)
        for share in SHARES
        for algorithm in share
        for seed in SEEDS
    ]
    report = write_report(
        directories, folder / "report", title="FedAvg, SCAFFOLD and GradMA on non-iid digits"
    )
    groups = best_first(group_runs(load_runs(directories)))
    target = default_target(groups)
    print(f"\nTest accuracy (%):\n\n{markdown_table(accuracy_table(groups))}")
    shared = "" if jax.default_backend() != "cpu" else " (seconds: two processes at a time)"
    table = markdown_table(target_table(groups, target))
    print(f"\nUp to {100 * target:.10g} %{shared}:\n\n{table}")
    print(f"\nReport with figures: {report}")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/demo"))
    main(parser.parse_args().folder)
