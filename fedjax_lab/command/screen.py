"""Terminal output: tables, and errors and warnings in one line; and files of output."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_lab.command.commands import PROG


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich on a terminal, else as plain text."""
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


def one_line(error: Any) -> str:
    """Format an error or a warning as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 1000 else f"{text[:1000]} ... (--debug shows all)"


def show_warning(message: Any, *about: Any, **more: Any) -> None:
    """Show a warning in one line; replaces ``warnings.showwarning`` while a command runs."""
    print(f"{PROG}: warning: {one_line(message)}", file=sys.stderr, flush=True)


def file_to_write(argument: str, path: str | None) -> Path | None:
    """Return the path of a file that can be written, before the work; None if there is no path.

    Raises:
      FileNotFoundError, IsADirectoryError: its folder does not exist, or it is one.
    """
    if path is None:
        return None
    file = Path(path)
    if file.is_dir():
        raise IsADirectoryError(f"{argument} is {path!r}, a directory; it must be a file.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{argument} is {path!r}; there is no directory {file.parent}.")
    return file
