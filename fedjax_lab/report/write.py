"""Divides runs for a report, and writes it: report.md, its figures, report.html, clients.csv."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_lab.checks import check_choice, check_number, check_tilde
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.report.csv_text import clients_csv
from fedjax_lab.report.distribution import client_scores
from fedjax_lab.report.figures import write_figures
from fedjax_lab.report.html import html_page, shows
from fedjax_lab.report.pivot import Pivot, check_axes, pivot_text, pivots_of
from fedjax_lab.report.runs import REPORT, Run, load_runs
from fedjax_lab.report.sections import Section, sections_of, warn_of_unknown_scores
from fedjax_lab.report.style import FORMS
from fedjax_lab.report.tables import report_text

CLIENTS = "clients.csv"


class Report(NamedTuple):
    """What a report is about, in any format.

    Attributes:
      title: the first line.
      target: target accuracy; None: 95 % of the best method's.
      runs: all runs.
      sections: the runs, divided into comparable ones.
      pivots: tables of methods and settings; none unless ``rows`` and ``columns`` were given.
    """

    title: str
    target: float | None
    runs: list[Run]
    sections: list[Section]
    pivots: list[Pivot]


def report_of(
    runs: list[Run],
    *,
    target: float | None = None,
    title: str = "Report",
    rows: str | None = None,
    columns: str | None = None,
) -> Report:
    """Divide runs for a report; warn of those that cannot be ranked.

    Args:
      runs: from ``load_runs``.
      target, title, rows, columns: as of ``write_report``.

    Raises:
      ValueError: as ``write_report``.
    """
    axes, sections = check_axes(rows, columns), sections_of(runs)
    if target is not None:
        check_number("target", target, minimum=0.0, maximum=1.0, exclusive_minimum=True)
        if not any(section.score.is_accuracy for section in sections):
            raise ValueError(f"target is {target}, an accuracy; these runs have none: omit it.")
    warn_of_unknown_scores(sections)
    return Report(title, target, runs, sections, pivots_of(sections, axes, target) if axes else [])


def write_report(
    directories: Iterable[str | Path],
    out: str | Path | None = None,
    *,
    target: float | None = None,
    title: str = "Report",
    figures: str = "png",
    rows: str | None = None,
    columns: str | None = None,
    metric: str | None = None,
    mode: str = "max",
    compare: Sequence[str] = (),
) -> Path:
    """Write report.md with its figures, report.html, which contains them, and clients.csv.

    Runs with different data sets, metrics, numbers of rounds or settings get separate sections.
    clients.csv has the score of each client, if the runs have it; see ``csv_text.clients_csv``.
    Figures and clients.csv of an earlier report in the folder are deleted if the new one does not
    have them. Its figures as vectors stay.

    Args:
      directories: run directories, or directories that contain some.
      out: output folder; None: ``default_folder``.
      target: target accuracy in (0, 1); None: 95 % of the best method's.
      title: the first line.
      figures: "png"; "pdf" or "svg" writes the figures once more as vectors for a paper, with
        their fonts, as wide as a column (3.4 inches; several panels: 7).
      rows, columns: the report begins with a table of methods and settings; see
        ``pivot.check_axes``. None: it does not.
      metric, mode, compare: what compares the runs, see ``load_runs``.

    Returns:
      The path of report.md.

    Raises:
      FileNotFoundError, ValueError: as ``load_runs``; or ``target``, ``figures``, ``rows`` or
        ``columns`` is not allowed.
      ImportError: matplotlib is missing.
    """
    runs = load_runs(directories, metric=metric, mode=mode, compare=compare)
    report = report_of(runs, target=target, title=title, rows=rows, columns=columns)
    return write_pages(report, out, figures)


def write_pages(report: Report, out: str | Path | None = None, figures: str = "png") -> Path:
    """Write the pages of ``write_report``; returns the path of report.md.

    Raises:
      ValueError: ``figures`` is not allowed, or ``out`` begins with a ~.
      ImportError: matplotlib is missing.
    """
    check_choice("figures", figures, FORMS)
    check_tilde("out", out)
    runs, sections, pivots = report.runs, report.sections, report.pivots
    folder = default_folder(runs) if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    earlier = _files_of(folder)
    shown = [
        write_figures(section.groups, folder, f"part{i}_" if len(sections) > 1 else "", figures)
        for i, section in enumerate(sections, start=1)
    ]
    written = {name for part in shown for name, _ in part}
    if any(map(client_scores, runs)):
        write_text(folder / CLIENTS, clients_csv(sections))
        written.add(CLIENTS)
    for name in earlier - written:
        (folder / name).unlink(missing_ok=True)
    first = ""
    if pivots:
        rows, columns = pivots[0].axes
        tables = pivot_text(pivots, level=3).rstrip()
        first = f"## {rows.capitalize()} by {columns}\n\n{tables}"
    write_page(report_text(sections, report.target, shown, report.title, first), folder / REPORT)
    return folder / REPORT


def _files_of(folder: Path) -> set[str]:
    """Return an earlier report's files: the figures that its HTML page embeds, and clients.csv."""
    page = (folder / REPORT).with_suffix(".html")
    if not page.is_file():
        return set()
    text = page.read_text(encoding="utf-8", errors="replace")
    figures = {file.name for file in folder.glob("*.png") if shows(text, file)}
    has_scores = any(name.endswith("clients.png") for name in figures)
    return figures | ({CLIENTS} if has_scores else set())


def write_page(markdown: str, path: Path) -> None:
    """Write Markdown to ``path``, and the same as an HTML page next to it."""
    write_text(path, markdown)
    write_text(path.with_suffix(".html"), html_page(markdown, path.parent))


def default_folder(runs: list[Run]) -> Path:
    """Return the run's directory for a single run, else ``report`` next to the runs.

    Args:
      runs: from ``load_runs``.
    """
    if len(runs) == 1:
        return runs[0].path
    return Path(os.path.commonpath([run.path.resolve() for run in runs])) / "report"
