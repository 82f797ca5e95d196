"""The command line: ``fedjax-lab`` or ``python -m fedjax_lab``.

It parses arguments, calls the functions that do the work, and prints.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_lab.command.commands import (
    PROG,
    ExportCommand,
    ListCommand,
    PlanCommand,
    ReportCommand,
    RerunCommand,
    RunCommand,
    SweepCommand,
    TuneCommand,
    parse,
)
from fedjax_lab.command.launch import INTERRUPTED, run_command, start
from fedjax_lab.command.reports import report_command
from fedjax_lab.command.rerun import rerun_command
from fedjax_lab.command.screen import one_line, print_rows, show_warning
from fedjax_lab.command.sweeping import sweep_command
from fedjax_lab.command.tuning import tune_command
from fedjax_lab.machine.target import named
from fedjax_lab.report.reading import read_summary
from fedjax_lab.simulation.processes import ElsewhereError
from fedjax_lab.simulation.stop import forget_signal
from fedjax_lab.storage.run_dir import SUMMARY
from fedjax_lab.storage.saved_run import export_params, load_run
from fedjax_lab.version import __version__

_MISTAKE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0: success. 1: a repeated run differs. 2: a usage error, printed in one line on stderr. 3: a run
      diverged. 4: another process of the run is lost. 130: stopped by Ctrl-C. 143: stopped by
      SIGTERM.

    Args:
      argv: command-line arguments; None: those of the process.
    """
    is_process = argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"{PROG} {__version__}")
        return 0
    debug = "--debug" in argv
    try:
        command = parse(argv)
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            if isinstance(command, ListCommand):
                print(command.text(**vars(command)))
                return 0
            return _ACTIONS[type(command)](command)
    except KeyboardInterrupt as error:
        why = "" if is_process else f" {error}".rstrip()
        print(f"{PROG}: interrupted.{why}", file=sys.stderr)
        if is_process:  # threads of an interrupted compiler can crash the end of the interpreter
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ImportError, ElsewhereError) as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"{PROG}: {one_line(error)}", file=sys.stderr)
        return _MISTAKE
    finally:
        forget_signal()  # the exit status says it


def export_command(command: ExportCommand) -> int:
    """Write the model of a run to a file, and print its arrays; returns the exit status.

    Raises:
      ValueError, FileNotFoundError: as ``load_run``, ``read_client_model`` and ``export_params``;
        or a flag has no effect.
    """
    run = load_run(command.run_dir)
    params = run.params
    if command.client is not None:
        start(quiet=command.quiet)
        from fedjax_lab.command.client_model import read_client_model

        params = read_client_model(command.run_dir, command.client, data_dir=command.data_dir)
    elif command.data_dir is not None:
        raise ValueError(f"data_dir is {command.data_dir!r}; it needs --client.")
    summary = read_summary(Path(command.run_dir) / SUMMARY)
    arrays = export_params(params, command.file)
    if summary.get("stopped") == "diverged":
        print(
            f"{PROG}: the run in {command.run_dir} diverged by round {summary['round']}; the "
            f"model is that of the checkpoint of round {run.round}.",
            file=sys.stderr,
        )
    if not command.quiet:
        numbers = sum(leaf.size for leaf in arrays.values())
        rows = [["name", "dtype", "shape"]]
        rows += [
            [name, str(leaf.dtype), "x".join(map(str, leaf.shape))] for name, leaf in arrays.items()
        ]
        print_rows(rows)
        print(f"\n{command.file}: {numbers:,} numbers, after round {run.round:,}")
    return 0


def plan_command(command: PlanCommand) -> int:
    """Plan a round and print the plan; returns the exit status.

    Raises:
      ValueError, TypeError, OSError, ImportError: as ``setup.build`` and ``plan``.
    """
    if command.target != "here":  # a plan for another machine needs no accelerator of this one
        jax.config.update("jax_platforms", "cpu")
    from fedjax_lab.command.setup import build
    from fedjax_lab.simulation.plan import plan

    config = command.settings.resolve()
    target = named(command.target)
    setup = build(config)
    of_a_run = ("rounds", "eval_every")
    schedule = {name: v for name, v in config.schedule().items() if name not in of_a_run}
    found = plan(
        setup.algorithm,
        setup.params,
        setup.clients,
        **schedule,
        **config.machine.arguments(),
        target=target,
        on_nonfinite=config.rounds.on_nonfinite,
    )
    print_rows(found.rows())
    return 0


_ACTIONS: dict[type, Callable[[Any], int]] = {
    RunCommand: run_command,
    PlanCommand: plan_command,
    SweepCommand: sweep_command,
    TuneCommand: tune_command,
    ReportCommand: report_command,
    ExportCommand: export_command,
    RerunCommand: rerun_command,
}
