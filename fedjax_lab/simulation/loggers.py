"""Hooks that receive the rows of a history, three loggers that are such hooks, progress, profile.

A hook of ``simulate(..., on_row=...)`` is any function of one row, a dict of numbers. It is called
with every row of the history in order; a resumed run first passes the rows from before. A hook
therefore sees each row of a run exactly once.
"""

import csv
import math
import numbers
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax

from fedjax_lab.checks import check_choice, check_tilde, warn
from fedjax_lab.machine.atomic_files import new_file
from fedjax_lab.machine.extras import imported

Row = Mapping[str, Any]
Hook = Callable[[dict[str, Any]], Any]

_TENSORBOARD_SUFFIX = ".fedjax_lab"  # of the event files that are ours to replace


class Hooks:
    """Hooks that receive rows; one that fails is not called again, and the run continues.

    Args:
      hooks: a function of a row, or several.

    Raises:
      TypeError: one of them cannot be called.
    """

    def __init__(self, hooks: Hook | Iterable[Hook]):
        if not (callable(hooks) or isinstance(hooks, Iterable)):
            raise TypeError(f"on_row is {hooks!r}; it must be a function of a row, or several.")
        self._hooks: list[Hook] = [hooks] if callable(hooks) else list(hooks)
        for hook in self._hooks:
            if not callable(hook):
                raise TypeError(f"on_row holds {hook!r}; it must be a function of a row.")

    def __call__(self, row: Row) -> None:
        """Pass each hook a copy of ``row``.

        Warns:
          RuntimeWarning: a hook has failed; the warning names the error.
        """
        for hook in tuple(self._hooks):
            try:
                hook(dict(row))
            except Exception as error:
                self._hooks.remove(hook)
                warn(
                    f"on_row: {hook!r} failed after round {row['round']} with "
                    f"{type(error).__name__}: {error}. The run continues without it.",
                    RuntimeWarning,
                )


class CsvLogger:
    """Hook that writes a CSV file with a header; numbers that are not finite are empty cells.

    An array has a column for each number, such as ``loss/0`` and ``loss/1``. Each call of
    ``simulate`` writes a new file, which is complete for a resumed run, too.

    Args:
      path: the file; its folder is created.

    Raises:
      ValueError: it begins with a ~.
    """

    def __init__(self, path: str | Path):
        check_tilde("path", path)
        self._path = Path(path)
        self._columns: list[str] = []

    def __call__(self, row: Row) -> None:
        """Append a row.

        Raises:
          ValueError: the row has a column that the first row does not have.
        """
        is_first, flat = not self._columns, flattened(row)
        if is_first:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._columns = list(flat)
            new_file(self._path).close()
        with self._path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if is_first:
                writer.writeheader()
            writer.writerow({name: value for name, value in flat.items() if _is_finite(value)})

    def close(self) -> None:
        """Do nothing, because the file is closed after each row."""


class TensorBoardLogger:
    """Hook that writes each metric as a scalar over the rounds, for TensorBoard.

    Event files of an earlier logger in the folder are replaced by one file with the same points and
    the new ones. Each run therefore needs its own folder.

    Args:
      folder: folder of the event file; it is created.

    Raises:
      ValueError: it begins with a ~.
      ImportError: tensorboardX is missing.
    """

    def __init__(self, folder: str | Path):
        check_tilde("folder", folder)
        self._writer_type = imported(
            "tensorboardX", "the logger tensorboard needs tensorboardX", "tensorboard"
        ).SummaryWriter
        self._folder = Path(folder)
        self._writer: Any = None

    def __call__(self, row: Row) -> None:
        """Append the row's points and flush them."""
        if self._writer is None:
            for file in self._folder.glob(f"events.out.tfevents.*{_TENSORBOARD_SUFFIX}"):
                file.unlink()
            self._writer = self._writer_type(str(self._folder), filename_suffix=_TENSORBOARD_SUFFIX)
        for name, value in flattened(row).items():
            if name != "round" and _is_finite(value):
                self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbLogger:
    """Hook that sends rows to Weights & Biases, whose step is the round.

    Args:
      folder: folder for wandb's files and the id of its run, so that a resumed run continues there
        without sending rows again. None: each logger is a new run.
      **settings: further arguments of ``wandb.init``, such as project, name and config.

    Raises:
      ValueError: ``folder`` begins with a ~.
      ImportError: wandb is missing.
    """

    def __init__(self, folder: str | Path | None = None, **settings: Any):
        check_tilde("folder", folder)
        self._wandb = imported("wandb", "the logger wandb needs wandb", "wandb")
        self._folder = None if folder is None else Path(folder)
        self._settings = settings
        self._run: Any = None

    def __call__(self, row: Row) -> None:
        """Send a row."""
        if self._run is None:
            self._run = self._wandb.init(**self._settings, **self._place())
        if row["round"] >= self._run.step:  # the next step that it takes
            flat = flattened(row)
            values = {name: v for name, v in flat.items() if name != "round" and _is_finite(v)}
            self._run.log(values, step=row["round"], commit=True)

    def _place(self) -> dict[str, Any]:
        if self._folder is None:
            return {}
        file = self._folder / "wandb_id.txt"
        if not file.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with new_file(file) as new:
                new.write(uuid.uuid4().hex[:8])
        id = file.read_text(encoding="utf-8").strip()
        return {"dir": str(self._folder), "id": id, "resume": "allow"}

    def close(self) -> None:
        """Tell the server that the run has ended."""
        if self._run is not None:
            self._run.finish()


# What --log takes, and how each logger is made of a run directory and its record.
LOGGERS: dict[str, Callable[[Path, Mapping[str, Any]], Any]] = {
    "csv": lambda path, record: CsvLogger(path / "metrics.csv"),
    "tensorboard": lambda path, record: TensorBoardLogger(path / "tensorboard"),
    "wandb": lambda path, record: WandbLogger(
        path, project="fedjax_lab", name=path.name, config=dict(record)
    ),
}


def build_loggers(names: Iterable[str], path: Path, record: Mapping[str, Any]) -> list[Any]:
    """Create the loggers of a run directory: metrics.csv, tensorboard/, or a wandb project.

    Args:
      path: run directory; nothing is written before the first row.

    Raises:
      ValueError: a name is unknown.
      ImportError: a logger's package is missing.
    """
    return [
        LOGGERS[check_choice("log", name, LOGGERS)](path, record) for name in dict.fromkeys(names)
    ]


def flattened(row: Row) -> dict[str, Any]:
    """Return a row in which an array has an entry for each number, as in ``loss/0``.

    Args:
      row: of a history; an array is a list, or a list of lists.
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, list):
            flat |= flattened({f"{name}/{place}": each for place, each in enumerate(value)})
        else:
            flat[name] = value
    return flat


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


class Progress:
    """Progress bar of a run; silent if ``enabled`` is False.

    On a terminal it is a bar. Elsewhere it prints the first line, the last line, and at most one
    line in ten seconds.
    """

    def __init__(self, name: str, rounds: int, enabled: bool):
        self._name, self._start, self._rounds = name, 0, rounds
        self._began = self._last_line = time.monotonic()
        self._compile_seconds = -1.0  # none is known yet
        self._bar: Any = None  # rich is imported on a terminal only
        self._enabled = enabled
        if enabled and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            console = Console(stderr=True)
            # The line must not be wider than the terminal: rich would cut every column then.
            width = max(10, min(40, console.width // 8))
            taken = len(name) + width + 2 * len(str(rounds)) + len("/ 1000.0 rounds/s 00:00:00    ")
            self._room = console.width - taken
            self._bar = progress.Progress(
                progress.TextColumn("[bold]{task.description}"),
                progress.BarColumn(bar_width=width),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[rate]:6.1f} rounds/s"),
                progress.TimeRemainingColumn(compact=True),
                progress.TextColumn("{task.fields[note]}"),
                console=console,
            )
            self._task = self._bar.add_task(name, total=rounds, rate=0.0, note="compiling")

    def note(self, text: str) -> None:
        """Print a line about the run, before its bar; "" prints nothing."""
        if text and self._enabled:
            print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def go_on_from(self, round: int, finished: bool = False) -> None:
        """Show the number of rounds that were finished before.

        Args:
          finished: whether the run is finished.
        """
        self._start = round
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=round)
        if finished or round >= self._rounds:
            self.note("already finished, nothing to run")

    def update(self, round: int, values: dict[str, Any]) -> None:
        """Report progress.

        Args:
          values: a few metrics to show; those that are NaN have no value.
        """
        now = time.monotonic()
        rate = (round - self._start) / max(now - self._began, 1e-9)
        notes = [
            f"{name} {'-' if math.isnan(value) else format(value, '#.4g')}"
            for name, value in values.items()
            if isinstance(value, float)
        ]
        if self._bar is not None:
            while notes and len("  ".join(notes)) > self._room:
                notes.pop()
            self._bar.update(self._task, completed=round, rate=rate, note="  ".join(notes))
        elif self._enabled and (
            round == self._rounds or now - self._last_line >= 10 or self._last_line == self._began
        ):
            self._last_line = now
            left = (self._rounds - round) / max(rate, 1e-9)
            print(
                f"{self._name}: round {round}/{self._rounds}  {rate:.1f} rounds/s  "
                f"{left:.0f} s left  {'  '.join(notes)}",
                file=sys.stderr,
                flush=True,
            )

    def start_clock(self, compile_seconds: float = 0.0) -> None:
        """Exclude the time so far from the rate, if a part of it was compilation."""
        if compile_seconds != self._compile_seconds:
            self._compile_seconds = compile_seconds
            self._began = self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.start()

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()


class Profile:
    """Profile of the first chunk, written by ``jax.profiler``.

    The profile is in ``folder/plugins/profile/DATE``: a .trace.json.gz, which https://ui.perfetto.dev
    opens in a browser, and a .xplane.pb for ``xprof`` or TensorBoard's plugin of that name.

    Args:
      folder: folder of the profile; None: no profile.
    """

    def __init__(self, folder: str | Path | None):
        self._folder = folder

    def once(self) -> AbstractContextManager[Any]:
        """Profile the code inside the context, in the first call only."""
        folder, self._folder = self._folder, None
        return nullcontext() if folder is None else jax.profiler.trace(str(folder))
