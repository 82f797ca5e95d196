"""``fedjax-lab run``: one run, or a grid of runs one after the other."""

import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_lab.checks import check_int
from fedjax_lab.command.combinations import list_runs
from fedjax_lab.command.commands import PROG, RunCommand
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.config_file import format_settings, is_yaml
from fedjax_lab.command.distributed import join, leave
from fedjax_lab.command.own_code import own_sources
from fedjax_lab.command.reports import print_tables
from fedjax_lab.command.screen import print_rows
from fedjax_lab.estimates import digits_of_amount, estimate, format_estimate
from fedjax_lab.machine.atomic_files import new_file
from fedjax_lab.machine.json_file import read_json
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.report import Run, load_runs
from fedjax_lab.report.cells import seed_table
from fedjax_lab.report.runs import with_own
from fedjax_lab.report.sections import known_score
from fedjax_lab.report.settings import SETTINGS
from fedjax_lab.report.statistics import number
from fedjax_lab.report.write import report_of
from fedjax_lab.simulation.history import SimulationResult
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.stop import compiles_still
from fedjax_lab.storage.rows import read_metrics
from fedjax_lab.storage.run_dir import METRICS, PARTITION, SUMMARY, read_config

DIVERGED, INTERRUPTED = 3, 130
_SCORES = "worst_10_percent_"  # of every run's summary, when the clients have been scored


def start(cpu_devices: int | None = None, quiet: bool = False) -> None:
    """Turn on the cache of programs, and divide the CPU into devices; None: one per core.

    Raises:
      ValueError, TypeError: ``cpu_devices`` is not a positive integer.
    """
    keep_by_default(quiet)
    if cpu_devices is not None:
        count = check_int("cpu_devices", cpu_devices, minimum=1)
        jax.config.update("jax_num_cpu_devices", count)


def run_command(command: RunCommand) -> int:
    """Execute a run command; returns the exit status, the worst one of several runs.

    An interruption or an error also cancels the following runs; a diverged run does not.

    Raises:
      ValueError, TypeError, OSError, ImportError: as ``runner.run``.
    """
    lists = dict(command.lists)
    configs = list_runs(command.settings, lists, command.seeds)
    if command.print_config is not None:
        print(format_settings(_printed(command, configs), command.print_config), end="")
        return 0
    start(command.cpu_devices, command.quiet)
    join(command)
    processes = Processes.here()
    processes.meet()
    processes.agree({"seeds": list(command.seeds), **lists})
    if not processes.is_first:
        command = dataclasses.replace(command, quiet=True)
    worst = 0
    for place, config in enumerate(configs, 1):
        try:
            with processes.reporting_losses():
                if len(configs) == 1:
                    status = _run_one(command, config)
                else:
                    status = _run_of_several(command, config, f"[{place}/{len(configs)}]")
        except ConnectionError:  # told
            if not processes.is_multiprocess:
                raise
            leave()
        worst = max(worst, status)
        if status >= INTERRUPTED:
            return status
    if not command.quiet:
        _show_all(command, configs, lists)
    return worst


def _printed(command: RunCommand, configs: Sequence[RunConfig]) -> dict[str, Any]:
    """Return the settings of --print-config: those of the run, or of a grid with its lists."""
    run_dir = command.settings.output.run_dir
    if len(configs) == 1 and not command.seeds:
        return configs[0].replace(run_dir=run_dir).to_dict()
    lists = {name: list(values) for name, values in command.lists}
    seeds = {"seeds": list(command.seeds)} if command.seeds else {}
    option = {"option": list(command.settings.method.option)}  # also METHOD.NAME=VALUE
    return command.settings.replace(option=()).to_dict() | option | lists | seeds


def _run_one(command: RunCommand, config: RunConfig) -> int:
    result = _run(command, config, progress=not command.quiet)
    if not command.quiet and result.history:
        print()
        print_rows(facts_of(load_runs([str(config.output.run_dir)])[0]))
    return _status(result, config)


def _run_of_several(command: RunCommand, config: RunConfig, place: str) -> int:
    """Run one of several, unless it has finished, and print a line about it."""

    def say(text: str, end: str = "\n") -> None:
        if not command.quiet:
            print(text, end=end, file=sys.stderr, flush=True)

    path = Path(str(config.output.run_dir))
    say(f"{place} {path.name}: ", end="")
    # Several processes may see different files.
    summary = None if Processes.here().is_multiprocess else finished_before(config)
    if summary is not None:
        diverged = summary["stopped"] == "diverged"
        score = "diverged" if diverged else last_score(read_metrics(path / METRICS))
        say(f"{score}, finished before")
        return DIVERGED if diverged else 0
    result = _run(command, config, progress=False)
    score = "diverged" if result.stopped == "diverged" else last_score(result.history)
    say(f"{score}, {result.seconds:.1f} s")
    return _status(result, config)


def finished_before(config: RunConfig) -> dict[str, Any] | None:
    """Return summary.json of a run directory that has all of this run already; None if not.

    Raises:
      FileExistsError: it was made by other versions of the user's own code.
    """
    from fedjax_lab.command.setup import are_the_data_of

    path = Path(str(config.output.run_dir))
    try:
        before = read_config(path)
        summary = read_json(path / SUMMARY)
        diverged = summary["stopped"] == "diverged"
        is_whole = not summary["interrupted"] and (diverged or summary["round"] == before["rounds"])
        is_same = before["run_config"] == json.loads(json.dumps(config.record()))
        # What a run writes last; the partition's file may be that of a shorter run.
        is_scored = (path / PARTITION).exists() and any(
            name.startswith(_SCORES) for name in summary
        )
        if not (is_whole and is_same and is_scored and are_the_data_of(before, config)):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    own_sources(config, path)
    return summary


def last_score(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the score of a run's last row in words.

    Args:
      rows: of metrics.jsonl.
    """
    row = with_own(rows[-1]) if rows else {}
    score = known_score(row.keys())
    value = row.get(score.name)
    if value is None:
        return "no score"
    shown = f"{100 * value:.2f} %" if score.is_accuracy else f"{value:.4g}"
    return f"{'own models, ' * score.is_own}{score.words} {shown}"


def _run(command: RunCommand, config: RunConfig, progress: bool) -> SimulationResult:
    from fedjax_lab.command.runner import run

    is_first = Processes.here().is_first
    with warnings.catch_warnings():
        if not is_first:  # process 0 prints them
            warnings.simplefilter("ignore")
        result = run(config, progress=progress)
    if command.config is not None and is_yaml(command.config) and is_first:
        settings = format_settings(config.record(), "yaml")
        with new_file(Path(str(config.output.run_dir)) / "config.yaml") as file:
            file.write(settings)
    return result


def _status(result: SimulationResult, config: RunConfig) -> int:
    """Return the exit status, after a line about an interruption."""
    if result.interrupted and Processes.here().is_first:
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
    """Return the exit status of a run."""
    if result.interrupted:
        return INTERRUPTED if result.signal is None else 128 + result.signal
    return DIVERGED if result.stopped == "diverged" else 0


def _show_all(command: RunCommand, configs: Sequence[RunConfig], lists: Mapping[str, Any]) -> None:
    """Print what several runs come to: a table of methods and settings, or one of seeds."""
    if len(configs) == 1:
        return
    paths = [Path(str(config.output.run_dir)) for config in configs]
    print()
    if not lists:
        print_rows(seed_table(load_runs(paths)))
        print("\n" + "\n".join(map(str, paths)))
        return
    axes = [name for name in lists if name in ("dataset", "rounds", *SETTINGS)]
    columns = "partition" if "partition" in lists or not axes else axes[0]
    parent = command.settings.output.run_dir
    shown = [parent] if parent is not None else map(str, paths)
    print_tables(report_of(load_runs(shown), rows="method", columns=columns))
    print(f"{PROG} report {parent or 'runs'} --rows method --columns {columns}: the whole report")


def facts_of(run: Run) -> list[list[str]]:
    """Return the summary of a run: rows of (name, value) under a header."""
    row, (head, values, _) = run.rows[-1], seed_table([run])
    test_loss = estimate([number(row.get("test_loss"))])
    megabytes = [row[name] / 1e6 for name in ("bytes_up", "bytes_down")]
    return [
        [run.algorithm, f"seed {run.seed}"],
        ["rounds", f"{row['round']:,} of {run.config['rounds']:,}"],
        *map(list, zip(head[1:], values[1:], strict=True)),
        ["test loss", format_estimate(test_loss, 4)],
        [
            "uplink, downlink (MB)",
            ", ".join(f"{size:,.{digits_of_amount(size)}f}" for size in megabytes),
        ],
        ["gradients", f"{row['gradients']:,}"],
        ["compile, run (s)", f"{run.compile_seconds:.1f}, {run.seconds:.1f}"],
        ["partition", run.config["partition"]["hash"]],
        ["run directory", str(run.path)],
    ]
