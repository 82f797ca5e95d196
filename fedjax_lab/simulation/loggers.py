"""Where else the rows of a history go: hooks of ``simulate(..., on_row=...)``, and three of them.

A hook is any function of one row, a dict of numbers. It is called with every row of the history
in order; a run that goes on first hands it the rows that it has already. So a hook sees each row
of a whole run once, and a logger that writes all it sees leaves none out and none twice.
"""

import csv
import importlib
import math
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedjax_lab.checks import check_choice

Row = Mapping[str, Any]
Hook = Callable[[dict[str, Any]], Any]

_TENSORBOARD_SUFFIX = ".fedjax_lab"  # of the event files that are ours to replace


class Hooks:
    """Calls hooks with rows; one that fails is left out from then on, and the run goes on.

    Args:
      hooks: a function of a row, or several.

    Raises:
      TypeError: one of them cannot be called.
    """

    def __init__(self, hooks: Hook | Iterable[Hook]):
        self._hooks: list[Hook] = [hooks] if callable(hooks) else list(hooks)
        for hook in self._hooks:
            if not callable(hook):
                raise TypeError(f"on_row holds {hook!r}; it must be a function of a row.")

    def __call__(self, row: Row) -> float:
        """Hand each hook a copy of ``row``; returns the seconds that they took.

        Warns:
          RuntimeWarning: a hook has failed; it names the error.
        """
        began = time.perf_counter()
        for hook in tuple(self._hooks):
            try:
                hook(dict(row))
            except Exception as error:
                self._hooks.remove(hook)
                warnings.warn(
                    f"on_row: {hook!r} failed after round {row['round']} with "
                    f"{type(error).__name__}: {error}. The run goes on without it.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return time.perf_counter() - began


class CsvLogger:
    """Writes rows to a CSV file with a head; a number that is not finite is an empty cell.

    The file is new with each run, and whole also where a run went on: see the module.

    Args:
      path: the file; its folder is made.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._columns: list[str] = []

    def __call__(self, row: Row) -> None:
        """Append a row.

        Raises:
          ValueError: the row has a column that the first one has not.
        """
        is_first = not self._columns
        if is_first:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._columns = list(row)
        mode = "w" if is_first else "a"
        with self._path.open(mode, encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if is_first:
                writer.writeheader()
            writer.writerow({name: value for name, value in row.items() if _is_finite(value)})

    def close(self) -> None:
        """The file is closed after each row; here because loggers have a ``close``."""


class TensorBoardLogger:
    """Writes each metric as a scalar over the rounds, for TensorBoard.

    Event files that an earlier logger left in the folder are replaced by one with the same
    points and the new ones; so each run needs a folder of its own.

    Args:
      folder: where the event file goes; it is made.

    Raises:
      ImportError: tensorboardX is missing.
    """

    def __init__(self, folder: str | Path):
        self._writer_type = _imported("tensorboardX", "tensorboard").SummaryWriter
        self._folder = Path(folder)
        self._writer: Any = None

    def __call__(self, row: Row) -> None:
        """Append the row's points and flush them."""
        if self._writer is None:
            for file in self._folder.glob(f"events.out.tfevents.*{_TENSORBOARD_SUFFIX}"):
                file.unlink()
            self._writer = self._writer_type(str(self._folder), filename_suffix=_TENSORBOARD_SUFFIX)
        for name, value in row.items():
            if name != "round" and _is_finite(value):
                self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbLogger:
    """Sends rows to Weights & Biases, whose step is the round.

    Args:
      folder: where wandb keeps its files, and where the id of its run stands, so that a run that
        goes on is continued there: rows that it has already are not sent again. None: each
        logger is a new run.
      **settings: what else ``wandb.init`` takes, such as project, name and config.

    Raises:
      ImportError: wandb is missing.
    """

    def __init__(self, folder: str | Path | None = None, **settings: Any):
        self._wandb = _imported("wandb", "wandb")
        self._folder = None if folder is None else Path(folder)
        self._settings = settings
        self._run: Any = None

    def __call__(self, row: Row) -> None:
        """Send a row."""
        if self._run is None:
            self._run = self._wandb.init(**self._settings, **self._place())
        if row["round"] >= self._run.step:  # the next step that it takes
            values = {name: v for name, v in row.items() if name != "round" and _is_finite(v)}
            self._run.log(values, step=row["round"], commit=True)

    def _place(self) -> dict[str, Any]:
        if self._folder is None:
            return {}
        file = self._folder / "wandb_id.txt"
        if not file.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
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
    """The loggers of a run directory: metrics.csv, tensorboard/, or the project on wandb.

    Args:
      names: keys of ``LOGGERS``.
      path: the run directory; nothing is written before the first row.
      record: settings for wandb to show.

    Raises:
      ValueError: a name is unknown.
      ImportError: a logger's package is missing.
    """
    return [
        LOGGERS[check_choice("log", name, LOGGERS)](path, record) for name in dict.fromkeys(names)
    ]


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _imported(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"the logger {extra} needs {package}: `pip install 'fedjax-lab[{extra}]'`."
        ) from error
