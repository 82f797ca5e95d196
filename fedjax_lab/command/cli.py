"""The command line: ``fedjax-lab`` or ``python -m fedjax_lab``.

It parses, calls ``runner.run`` or ``report.write_report``, and prints; it computes nothing.
"""

import argparse
import dataclasses
import functools
import math
import operator
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fedjax_lab.checks import check_int
from fedjax_lab.command import catalogue, listings
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.config_file import format_settings, is_yaml
from fedjax_lab.data import DATASETS, PARTITIONS
from fedjax_lab.version import __version__

_PROG = "fedjax-lab"
_MISTAKE, _DIVERGED, _INTERRUPTED = 2, 3, 130


@dataclasses.dataclass(frozen=True)
class RunCommand:
    """Run a simulation, or go on with one: the same command resumes it."""

    settings: RunConfig

    config: str | None = None
    """YAML or JSON file with settings, or the config.json of a run; flags override it."""

    print_config: Literal["yaml", "json"] | None = None
    """Print all settings as such a file, without running."""

    cpu_devices: int | None = None
    """CPU devices, over which client_map auto spreads the cohort. None: one per core."""

    quiet: bool = False
    """Print errors only."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclasses.dataclass(frozen=True)
class ReportCommand:
    """Write report.md with tables and figures over runs."""

    runs: tuple[str, ...]
    """Run directories, or directories that hold some."""

    out: str | None = None
    """Folder for the report. None: the run's own, or `report` beside several."""

    target: float | None = None
    """Accuracy to be reached, such as 0.9. None: 95 % of the best method's."""

    quiet: bool = False
    """Print errors only."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclasses.dataclass(frozen=True)
class AlgorithmsCommand:
    """List the methods: paper, traffic, client state, gradients, options and defaults."""

    markdown: bool = False
    """Print them as a page of Markdown."""

    def text(self) -> str:
        """What is printed."""
        return catalogue.page() if self.markdown else listings.algorithms()


@dataclasses.dataclass(frozen=True)
class PublishedCommand:
    """List the methods that --as-published knows, and how their codes run them."""

    def text(self) -> str:
        """What is printed."""
        return listings.published()


@dataclasses.dataclass(frozen=True)
class CompressorsCommand:
    """List the compressors: how to write them, arguments, and the bytes of a message."""

    def text(self) -> str:
        """What is printed."""
        return listings.compressors()


@dataclasses.dataclass(frozen=True)
class DatasetsCommand:
    """List the data sets."""

    def text(self) -> str:
        """What is printed."""
        return listings.pairs(DATASETS)


@dataclasses.dataclass(frozen=True)
class PartitionsCommand:
    """List the ways to divide data among clients."""

    def text(self) -> str:
        """What is printed."""
        return listings.pairs(PARTITIONS)


@dataclasses.dataclass(frozen=True)
class ModelsCommand:
    """List the models, with their options and defaults."""

    def text(self) -> str:
        """What is printed."""
        return listings.models()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0: done. 2: a mistake, told in one line on stderr. 3: the run diverged. 130: stopped by Ctrl-C;
    143: by SIGTERM.

    Args:
      argv: the words after the program's name; None: those of the process.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"{_PROG} {__version__}")
        return 0
    debug = "--debug" in argv
    try:
        command = _parse(argv)
        if isinstance(command, RunCommand):
            return _run(command)
        if isinstance(command, ReportCommand):
            return _report(command)
        print(command.text())
        return 0
    except KeyboardInterrupt:
        print(f"{_PROG}: interrupted.", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"{_PROG}: {_one_line(error)}", file=sys.stderr)
        return _MISTAKE


def _parse(argv: list[str]) -> Any:
    """The command that the arguments stand for; the file of --config gives the defaults."""
    import tyro

    # It looks at stdout alone, and its errors go to stderr.
    plain = os.environ.get("NO_COLOR") or not (sys.stdout.isatty() and sys.stderr.isatty())
    tyro._experimental_options["ansi_codes"] = not plain
    first = argparse.ArgumentParser(prog=_PROG, add_help=False, allow_abbrev=False)
    first.add_argument("--config", nargs="?")
    file = first.parse_known_args(argv)[0].config if argv[:1] == ["run"] else None
    default = RunCommand(RunConfig() if file is None else RunConfig.from_file(file))
    commands: list[Any] = [Annotated[RunCommand, tyro.conf.subcommand("run", default=default)]]
    commands += [
        Annotated[kind, tyro.conf.subcommand(name)]
        for name, kind in {"report": ReportCommand, **_LISTS}.items()
    ]
    union: Any = functools.reduce(operator.or_, commands)
    return tyro.cli(
        union,
        prog=_PROG,
        description="Federated learning in JAX: run simulations, and report on them. --version "
        "prints the version, --tyro-print-completion bash (zsh, fish) a completion script.",
        args=argv,
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.UseAppendAction,
            tyro.conf.PositionalRequiredArgs,
        ),
    )


def _run(command: RunCommand) -> int:
    if command.print_config is not None:
        config = dataclasses.replace(command.settings.resolve(), run_dir=command.settings.run_dir)
        print(format_settings(config.to_dict(), command.print_config), end="")
        return 0
    import jax

    from fedjax_lab.command.runner import run
    from fedjax_lab.report import load_runs
    from fedjax_lab.simulation.programs import keep_programs

    keep_programs()
    if command.cpu_devices is not None:
        count = check_int("cpu_devices", command.cpu_devices, minimum=1)
        jax.config.update("jax_num_cpu_devices", count)
    config = command.settings.resolve()
    assert config.run_dir is not None  # resolved
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        result = run(config, progress=not command.quiet)
    if command.config is not None and is_yaml(command.config):
        settings = format_settings(config.record(), "yaml")
        (Path(config.run_dir) / "config.yaml").write_text(settings, encoding="utf-8")
    if not command.quiet and result.history:
        print()
        _print_rows(_facts(load_runs([config.run_dir])[0]))
    if result.interrupted:
        done = result.history[-1]["round"] if result.history else 0
        print(
            f"{_PROG}: stopped after round {done} of {config.rounds}; the same command goes on "
            "from there.",
            file=sys.stderr,
        )
        return _INTERRUPTED if result.signal is None else 128 + result.signal
    return _DIVERGED if result.stopped == "diverged" else 0


def _show_warning(message: Any, *about: Any, **more: Any) -> None:
    print(f"{_PROG}: warning: {_one_line(message)}", file=sys.stderr, flush=True)


def _facts(run: Any) -> list[list[str]]:
    """What the end of a run shows: rows of (name, value) under a head."""
    from fedjax_lab.report.statistics import best, last, mean_of_last, number

    row, summary = run.rows[-1], run.summary

    def percent(value: float) -> str:
        return "-" if math.isnan(value) else f"{100 * value:.2f} %"

    accuracy = run.values("accuracy")
    return [
        [run.algorithm, f"seed {run.seed}"],
        ["rounds", f"{row['round']:,} of {run.config['rounds']:,}"],
        ["accuracy, last", percent(last(accuracy))],
        ["accuracy, best", percent(best(accuracy))],
        ["accuracy, mean of last 10", percent(mean_of_last(accuracy))],
        ["worst 10 % of clients", percent(number(summary.get("worst_10_percent_accuracy")))],
        ["test loss", f"{number(row.get('test_loss')):.4g}"],
        *_perplexity(row),
        ["uplink, downlink", f"{row['bytes_up'] / 1e6:,.1f} MB, {row['bytes_down'] / 1e6:,.1f} MB"],
        ["gradients", f"{row['gradients']:,}"],
        ["compile, run", f"{run.compile_seconds:.1f} s, {run.seconds:.1f} s"],
        ["partition", run.config["partition"]["hash"]],
        ["run directory", str(run.path)],
    ]


def _perplexity(row: Mapping[str, Any]) -> list[list[str]]:
    return [["perplexity", f"{row['perplexity']:.4g}"]] if "perplexity" in row else []


def _report(command: ReportCommand) -> int:
    from fedjax_lab.report import group_runs, load_runs, write_report
    from fedjax_lab.report.tables import accuracy_table, by_accuracy

    path = write_report(command.runs, command.out, target=command.target)
    if not command.quiet:
        _print_rows(accuracy_table(by_accuracy(group_runs(load_runs(command.runs)))))
        print(f"\n{path}")
    return 0


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    """A table, the first row being its head: with rich on a terminal, else plain text."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for i, name in enumerate(rows[0]):
            table.add_column(Text(name), justify="left" if i == 0 else "right")
        for row in rows[1:]:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 1000 else f"{text[:1000]} ... (--debug shows all)"


# The commands without arguments, and what each prints.
_LISTS: dict[str, type] = {
    "algorithms": AlgorithmsCommand,
    "published": PublishedCommand,
    "compressors": CompressorsCommand,
    "datasets": DatasetsCommand,
    "partitions": PartitionsCommand,
    "models": ModelsCommand,
}
