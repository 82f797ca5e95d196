"""``fedjax-lab report``: pages, or a table, over finished runs."""

from typing import Any

from fedjax_lab.command.commands import ReportCommand
from fedjax_lab.command.screen import file_to_write, print_rows
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import Cells
from fedjax_lab.report import load_runs
from fedjax_lab.report.cells import accuracy_table
from fedjax_lab.report.formats import format_report
from fedjax_lab.report.pivot import notes, score_rows
from fedjax_lab.report.statistics import UNKNOWN
from fedjax_lab.report.write import Report, report_of, write_pages


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
    report = report_of(load_runs(command.runs, **chosen), **shown)
    path = write_pages(report, command.out, command.figures)
    if not command.quiet:
        print_tables(report)
        print(path)
    return 0


def print_tables(report: Report) -> None:
    """Print what a report decides: its tables of methods and settings, or else each section."""
    for pivot in report.pivots:
        _print_table(pivot.title, score_rows(pivot, lambda text: f"{text} *"))
    if report.pivots:
        print("*: best of its setting; ≈: within noise", *notes(report.pivots), sep="\n")
        return
    for section in report.sections:
        if section.score != UNKNOWN:
            title = section.title if len(report.sections) > 1 else ""
            _print_table(title, accuracy_table(section.groups, brief=True))


def _print_table(title: str, table: Cells) -> None:
    if title:
        print(f"{title}:\n")
    print_rows(table)
    print()
