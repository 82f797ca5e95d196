"""Rows of numbers: metrics.jsonl and its kin, a line for each row, and the rows of a checkpoint."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedjax_lab.checks import MOST_ROUNDS
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.machine.json_file import no_numbers, parse_json, shown

Row = dict[str, Any]  # name -> number, or list of numbers


def read_metrics(path: Path) -> list[Row]:
    """Read the rows of metrics.jsonl.

    Raises:
      ValueError: a line is not a row (a truncated last line is ignored).
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is not text ({error}).") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                break  # the run was killed while it wrote this line
            raise _damaged(path, number, f"not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise _damaged(path, number, "no JSON object")
        round = row.get("round")
        if type(round) is not int or not 0 < round <= MOST_ROUNDS:
            raise _damaged(path, number, f"no row of a round: round is {round!r}")
        for name, value in row.items():
            if wrong := no_numbers(value):
                raise _damaged(path, number, f"no row: {name} is {shown(wrong[0])}, no number")
        rows.append(row)
    return rows


def _damaged(path: Path, line: int, what: str) -> ValueError:
    return ValueError(
        f"{path}, line {line}, is {what}. Running the same again repairs it from the last "
        "checkpoint."
    )


class MetricsFile:
    """Appends rows to metrics.jsonl; begins with the rows that a resumed run keeps."""

    def __init__(self, path: Path, kept: list[Row]):
        write_text(path, "".join(map(_line, kept)))
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        """Write one row and flush it.

        Args:
          row: {name: number}; NaN and infinities become null.
        """
        self._file.write(_line(row))
        self._file.flush()

    def sync(self) -> None:
        """Wait until the rows are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(row: Row) -> str:
    return json.dumps(plain_row(row), allow_nan=False) + "\n"


def plain_row(row: Mapping[str, Any]) -> Row:
    """Convert a row for JSON: NaN and infinities become null."""
    return _converted(row, lambda value: None if _is_not_finite(value) else value)


def stored_row(row: Mapping[str, Any]) -> Row:
    """Convert a row for a checkpoint: NaN becomes null, and infinities become text."""

    def stored(value):
        if not _is_not_finite(value):
            return value
        return None if math.isnan(value) else str(value)

    return _converted(row, stored)


def restored_row(row: Mapping[str, Any]) -> Row:
    """Convert a row of a checkpoint for the history, the inverse of ``stored_row``.

    Args:
      row: {name: number, None, "inf", "-inf", or list of these}.
    """
    meanings = {None: math.nan, "inf": math.inf, "-inf": -math.inf}
    return _converted(row, lambda value: meanings.get(value, value))


def _converted(row: Mapping[str, Any], one: Callable[[Any], Any]) -> Row:
    """Convert each number of a row, also in lists."""

    def convert(value):
        return [convert(part) for part in value] if isinstance(value, list) else one(value)

    return {name: convert(value) for name, value in row.items()}


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
