"""``fedjax-lab report``: pages, or a table, over finished runs."""

import re
from collections.abc import Iterable
from typing import Any

from fedjax_lab.command.commands import ReportCommand
from fedjax_lab.command.screen import file_to_write, print_rows
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import Cells

_DECIDING = re.compile("method|seeds|behind|((own models|global model), )?mean of round")  # columns


def report_command(command: ReportCommand) -> int:
    """Write the report's pages and print what decides, or print one text; returns the exit status.

    Raises:
      ValueError, OSError, ImportError: as ``write_report``; or a flag has no effect.
    """
    from fedjax_lab.report import write_report
    from fedjax_lab.report.formats import format_report

    axes: Any = {"rows": command.rows, "columns": command.columns}
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
        text = format_report(command.runs, command.format, target=command.target, **axes, **chosen)
        if out is None:
            print(text, end="")
        else:
            write_text(out, text)
        return 0
    path = write_report(
        command.runs,
        command.out,
        target=command.target,
        figures=command.figures,
        **axes,
        **chosen,
    )
    if not command.quiet:
        print_tables(command.runs, command.target, **axes, **chosen)
        print(path)
    return 0


def print_tables(
    runs: Iterable[str],
    target: float | None = None,
    rows: str | None = None,
    columns: str | None = None,
    **chosen: Any,
) -> None:
    """Print what a report decides: of each section, or with axes a table of methods and settings.

    Args:
      runs, target, rows, columns: as of ``write_report``.
      **chosen: what compares the runs, as of ``load_runs``.

    Raises:
      ValueError, FileNotFoundError: as ``write_report``.
    """
    from fedjax_lab.report import load_runs
    from fedjax_lab.report.pivot import check_axes, notes, pivots_of, score_rows
    from fedjax_lab.report.sections import sections_of
    from fedjax_lab.report.statistics import UNKNOWN
    from fedjax_lab.report.tables import accuracy_table

    loaded, axes = load_runs(runs, **chosen), check_axes(rows, columns)
    if axes is not None:
        pivots = pivots_of(loaded, axes, target)
        for pivot in pivots:
            _print_table(pivot.title, score_rows(pivot, lambda text: f"{text} *"))
        print("*: best of its setting; ≈: within noise", *notes(pivots), sep="\n")
        return
    sections = sections_of(loaded)
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
