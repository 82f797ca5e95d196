"""``fedjax-lab run``: one run, or one for each of several seeds."""

import dataclasses
import math
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_lab.checks import check_int
from fedjax_lab.command.commands import PROG, RunCommand
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.config_file import format_settings, is_yaml
from fedjax_lab.command.distributed import join, leave
from fedjax_lab.command.screen import print_rows
from fedjax_lab.machine.atomic_files import new_file
from fedjax_lab.simulation.book import SimulationResult
from fedjax_lab.simulation.stop import compiles_still
from fedjax_lab.simulation.sweep_result import check_seeds
from fedjax_lab.simulation.team import Team

DIVERGED, INTERRUPTED = 3, 130


def start(cpu_devices: int | None = None, quiet: bool = False) -> None:
    """Turn on the cache of compiled programs, and divide the CPU into devices.

    Args:
      cpu_devices: number of devices; None: one per core.
      quiet: do not print the folder of the cache.

    Raises:
      ValueError, TypeError: ``cpu_devices`` is not a positive integer.
    """
    import jax

    from fedjax_lab.machine.program_cache import keep_by_default

    keep_by_default(quiet)
    if cpu_devices is not None:
        count = check_int("cpu_devices", cpu_devices, minimum=1)
        jax.config.update("jax_num_cpu_devices", count)


def run_command(command: RunCommand) -> int:
    """Execute a run command; returns the exit status, the worst one of several runs.

    An interruption or an error also cancels the following runs; a diverged run does not.

    Args:
      command: as parsed.

    Raises:
      ValueError, TypeError, OSError, ImportError: as ``runner.run``.
    """
    if command.print_config is not None:
        config = command.settings.resolve().replace(run_dir=command.settings.output.run_dir)
        print(format_settings(config.to_dict(), command.print_config), end="")
        return 0
    start(command.cpu_devices, command.quiet)
    configs = _configs(command)
    join(command)
    team = Team.here()
    team.meet()
    team.agree({"seeds": list(command.seeds)})
    if not team.is_first:
        command = dataclasses.replace(command, quiet=True)
    worst = 0
    for config in configs:
        try:
            with team.reporting_losses():
                status = _run_one(command, config)
        except ConnectionError:  # told
            if not team.is_multiprocess:
                raise
            leave()
        worst = max(worst, status)
        if status >= INTERRUPTED:
            return status
    if command.seeds and not command.quiet:
        _show_seeds(configs)
    return worst


def _configs(command: RunCommand) -> list[RunConfig]:
    """Resolve a config for each seed; all are checked before the first one runs."""
    settings = command.settings
    if not command.seeds:
        return [settings.resolve()]
    configs = []
    for seed in check_seeds(command.seeds):
        parent = settings.output.run_dir
        run_dir = None if parent is None else str(Path(parent) / f"seed{seed}")
        configs.append(settings.replace(seed=seed, run_dir=run_dir).resolve())
    return configs


def _run_one(command: RunCommand, config: RunConfig) -> int:
    from fedjax_lab.command.runner import run
    from fedjax_lab.report import load_runs

    assert config.output.run_dir is not None  # resolved
    is_first = Team.here().is_first
    with warnings.catch_warnings():
        if not is_first:  # process 0 prints them
            warnings.simplefilter("ignore")
        result = run(config, progress=not command.quiet)
    if command.config is not None and is_yaml(command.config) and is_first:
        settings = format_settings(config.record(), "yaml")
        with new_file(Path(config.output.run_dir) / "config.yaml") as file:
            file.write(settings)
    if not command.quiet and result.history and not command.seeds:
        print()
        print_rows(_facts(load_runs([config.output.run_dir])[0]))
    if result.interrupted and is_first:
        done = result.history[-1]["round"] if result.history else 0
        print(
            f"{PROG}: stopped after round {done} of {config.rounds.rounds}; the same "
            "command resumes it.",
            file=sys.stderr,
        )
        if compiles_still():  # Python would wait for the compiler
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status_of(result))
    return status_of(result)


def status_of(result: SimulationResult) -> int:
    """Return the exit status of a run.

    Args:
      result: result of the run.
    """
    if result.interrupted:
        return INTERRUPTED if result.signal is None else 128 + result.signal
    return DIVERGED if result.stopped == "diverged" else 0


def _show_seeds(configs: list[RunConfig]) -> None:
    from fedjax_lab.report import load_runs
    from fedjax_lab.report.tables import seed_table
    from fedjax_lab.storage.run_dir import METRICS

    paths = [Path(str(config.output.run_dir)) for config in configs]
    evaluated = [path for path in paths if (path / METRICS).stat().st_size]
    print()
    if evaluated:  # what diverges at once has no row
        print_rows(seed_table(load_runs(evaluated)))
    print("\n" + "\n".join(str(path) for path in paths))


def _facts(run: Any) -> list[list[str]]:
    """Return the summary of a run: rows of (name, value) under a header."""
    from fedjax_lab.report.sections import tail_of
    from fedjax_lab.report.statistics import ERROR, best, last, lowest, number

    row, summary, tail = run.rows[-1], run.summary, tail_of([run])

    def percent(value: float) -> str:
        return "-" if math.isnan(value) else f"{100 * value:.2f} %"

    accuracy, worst = run.values("accuracy"), "worst 10 % of clients"
    of = "global model" if "personal_accuracy" in row else "accuracy"
    scores = [
        [f"{of}, last", percent(last(accuracy))],
        [f"{of}, best", percent(best(accuracy))],
        [f"{of}, {tail.name}", percent(tail.mean(run))],
        [worst, percent(number(summary.get("worst_10_percent_accuracy")))],
    ]
    errors = [
        ["mean squared error, last", _plain(number(row.get(ERROR)))],
        ["mean squared error, lowest", _plain(lowest(run.values(ERROR)))],
        [worst, _plain(number(summary.get(f"worst_10_percent_{ERROR}")))],
    ]
    return [
        [run.algorithm, f"seed {run.seed}"],
        ["rounds", f"{row['round']:,} of {run.config['rounds']:,}"],
        *_own_models(row),
        *(scores if ERROR not in row else errors),
        ["test loss", _plain(number(row.get("test_loss")))],
        *([["perplexity", _plain(number(row["perplexity"]))]] if "perplexity" in row else []),
        ["uplink, downlink", f"{row['bytes_up'] / 1e6:,.1f} MB, {row['bytes_down'] / 1e6:,.1f} MB"],
        ["gradients", f"{row['gradients']:,}"],
        ["compile, run", f"{run.compile_seconds:.1f} s, {run.seconds:.1f} s"],
        ["partition", run.config["partition"]["hash"]],
        ["run directory", str(run.path)],
    ]


def _own_models(row: Mapping[str, Any]) -> list[list[str]]:
    """Return the summary of personal models on the clients' own test examples."""
    of = {"": "mean over clients", "_weighted": "over examples", "_worst": "worst 10 % of clients"}
    return [
        [f"own models, {text}", f"{100 * row[f'personal_accuracy{name}']:.2f} %"]
        for name, text in of.items()
        if row.get(f"personal_accuracy{name}") is not None
    ]


def _plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
