"""``fedjax-lab report``: pages, or a table, over finished runs."""

import re
from collections.abc import Sequence
from typing import Any

from fedjax_lab.command.commands import ReportCommand
from fedjax_lab.command.screen import file_to_write, print_rows
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import Cells
from fedjax_lab.report import Run, load_runs
from fedjax_lab.report.formats import format_report
from fedjax_lab.report.pivot import check_axes, notes, pivots_of, score_rows
from fedjax_lab.report.sections import sections_of
from fedjax_lab.report.statistics import UNKNOWN
from fedjax_lab.report.tables import accuracy_table
from fedjax_lab.report.write import write_pages

_DECIDING = re.compile("method|seeds|behind|((own models|global model), )?mean of round")  # columns


def report_command(command: ReportCommand) -> int:
    """Write the report's pages and print what decides, or print one text; returns the exit status.

    Raises:
      ValueError, OSError, ImportError: as ``write_report``; or a flag has no effect.
    """
    shown: Any = {"target": command.target, "rows": command.rows, "columns": command.columns}
    chosen: Any = {"metric": command.metric, "mode": command.mode, "compare": command.compare}
    if command.format is not None:
        if command.figures != "png":
            raise ValueError(f"figures is {command.figures!r}; with --format none are written.")
        if command.quiet and command.out is None:
            raise ValueError(
                "quiet is True; with --format and without --out `fedjax-lab report` prints the "
                "text, and nothing else: omit --quiet, or give --out."
            )
        out = file_to_write("out", command.out)
        text = format_report(command.runs, command.format, **shown, **chosen)
        if out is None:
            print(text, end="")
        else:
            write_text(out, text)
        return 0
    runs = load_runs(command.runs, **chosen)
    path = write_pages(runs, command.out, figures=command.figures, **shown)
    if not command.quiet:
        print_tables(runs, **shown)
        print(path)
    return 0


def print_tables(
    runs: Sequence[Run],
    target: float | None = None,
    rows: str | None = None,
    columns: str | None = None,
) -> None:
    """Print what a report decides: of each section, or with axes a table of methods and settings.

    Raises:
      ValueError: as ``write_report``.
    """
    axes = check_axes(rows, columns)
    if axes is not None:
        pivots = pivots_of(runs, axes, target)
        for pivot in pivots:
            _print_table(pivot.title, score_rows(pivot, lambda text: f"{text} *"))
        print("*: best of its setting; ≈: within noise", *notes(pivots), sep="\n")
        return
    sections = sections_of(runs)
    for section in sections:
        if section.score == UNKNOWN:
            continue
        table = accuracy_table(section.groups)
        # The report has the other columns, which a terminal is too narrow for.
        shown = [i for i, name in enumerate(table[0]) if _DECIDING.match(name)]
        title = section.title if len(sections) > 1 else ""
        _print_table(title, [[row[i] for i in shown] for row in table])


def _print_table(title: str, table: Cells) -> None:
    if title:
        print(f"{title}:\n")
    print_rows(table)
    print()
