"""``fedjax-lab tune``: hyperparameters of several methods by successive halving."""

import dataclasses
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedjax_lab.checks import check_choice
from fedjax_lab.command.commands import TuneCommand
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.grid import at_point, may_vary
from fedjax_lab.command.launch import start
from fedjax_lab.command.own_code import check_known
from fedjax_lab.command.screen import show_warning
from fedjax_lab.tuning.found import Found

_LOG = "log:"


def tune_command(command: TuneCommand) -> int:
    """Tune, print the table and write the trials to a file; returns the exit status.

    Args:
      command: as parsed.

    Raises:
      ValueError, TypeError, OSError, ImportError: as ``runner.build`` and ``tune``.
    """
    methods = command.methods or (command.settings.algorithm,)
    for name in methods:
        check_known("algorithm", name, "methods")
    spaces = {name: space_of(command.space, name, methods) for name in methods}
    out = None if command.out is None else Path(command.out)
    if out is not None and not out.parent.is_dir():
        raise FileNotFoundError(f"out is {command.out!r}; there is no directory {out.parent}.")
    if command.figure is not None and not Path(command.figure).parent.is_dir():
        raise FileNotFoundError(
            f"figure is {command.figure!r}; there is no directory {Path(command.figure).parent}."
        )
    start(command.cpu_devices, command.quiet)
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        found = _tune(command, spaces)
    print(found.table(), end="")
    if out is not None:
        from fedjax_lab.report.formats import write_format

        write_format(found.markdown() if out.suffix == ".md" else found.csv(), out)
        print(f"\n{out}")
    if command.figure is not None:
        from fedjax_lab.report.search import search_figure
        from fedjax_lab.report.style import save

        save(search_figure(found), Path(command.figure))
        print(f"\n{command.figure}")
    return 0


def space_of(texts: Iterable[str], method: str, methods: Iterable[str]) -> dict[str, Any]:
    """Build the search space of one method for ``tune``.

    Args:
      texts: such as "client_lr=log:0.001:1", "momentum=0.5,0.9" or "scaffold.server_lr=0.5,1".
      method: its name.
      methods: all names.

    Raises:
      ValueError: a text has another form, or the method takes no such hyperparameter.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, _, values = text.partition("=")
        of, dot, own = name.strip().partition(".")
        if dot and of not in methods:
            raise ValueError(f"space is {text!r}; {of!r} is none of {', '.join(methods)}.")
        if dot and of != method:
            continue
        name = own if dot else of
        allowed = may_vary(dataclasses.replace(RunConfig(), algorithm=method))
        if not dot and name not in allowed and len(list(methods)) > 1:
            continue  # what only some methods take
        check_choice("the name in space", name, allowed)
        found[name] = _read(text, values)
    if not found:
        raise ValueError(
            f"space says nothing for {method}; give such as --space client_lr=log:0.001:1."
        )
    return found


def _read(text: str, values: str) -> Any:
    try:
        if values.startswith(_LOG):
            low, high = map(float, values.removeprefix(_LOG).split(":"))
            return low, high
        return [float(value) for value in values.split(",")]
    except ValueError:
        raise ValueError(
            f"space is {text!r}; it must be of the form name=log:low:high or name=value,value."
        ) from None


def _tune(command: TuneCommand, spaces: dict[str, dict[str, Any]]) -> Found:
    from fedjax_lab.command.runner import build
    from fedjax_lab.tuning.tune import tune

    setups = {}
    for name, space in spaces.items():
        first = {key: value[0] for key, value in space.items()}
        config = at_point(dataclasses.replace(command.settings, algorithm=name), first).resolve()
        setups[name] = build(config)
    some = next(iter(setups.values()))
    schedule = config.schedule()
    left_out = ("eval_every", "times")
    return tune(
        {name: setup.vary for name, setup in setups.items()},
        spaces,
        some.params,
        some.clients,
        **{name: value for name, value in schedule.items() if name not in left_out},
        validation=command.validation,
        hold_out=command.hold_out,
        budget=command.budget,
        finalists=command.finalists,
        seeds=command.seeds,
        run_dir=command.keep_in,
        progress=not command.quiet,
    )
