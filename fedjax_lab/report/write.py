"""Writes a report: report.md with its figures, the same as report.html, and clients.csv."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedjax_lab.checks import check_choice, check_number
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.report.csv_text import clients_csv
from fedjax_lab.report.distribution import client_scores
from fedjax_lab.report.figures import write_figures
from fedjax_lab.report.html import html_page
from fedjax_lab.report.pivot import check_axes, pivot_text, pivots_of
from fedjax_lab.report.print_size import FORMS
from fedjax_lab.report.runs import REPORT, Run, load_runs
from fedjax_lab.report.sections import score_of, sections_of, warn_of_unknown_scores
from fedjax_lab.report.tables import report_text

CLIENTS = "clients.csv"


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
    return write_pages(
        runs, out, target=target, title=title, figures=figures, rows=rows, columns=columns
    )


def write_pages(
    runs: list[Run],
    out: str | Path | None = None,
    *,
    target: float | None = None,
    title: str = "Report",
    figures: str = "png",
    rows: str | None = None,
    columns: str | None = None,
) -> Path:
    """Write what ``write_report`` writes, of runs that are loaded.

    Raises:
      ValueError, ImportError: as ``write_report``.
    """
    check_choice("figures", figures, FORMS)
    axes = check_axes(rows, columns)
    check_target(target, runs)
    sections = sections_of(runs)
    warn_of_unknown_scores(sections)
    first = "" if axes is None else pivot_section(runs, axes, target)
    folder = default_folder(runs) if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    prefixes = [f"part{i}_" if len(sections) > 1 else "" for i in range(1, len(sections) + 1)]
    shown = [
        write_figures(section.groups, folder, prefix, figures)
        for section, prefix in zip(sections, prefixes, strict=True)
    ]
    if any(map(client_scores, runs)):
        write_text(folder / CLIENTS, clients_csv(sections))
    write_page(report_text(sections, target, shown, title, first), folder / REPORT)
    return folder / REPORT


def check_target(target: float | None, runs: Sequence[Run]) -> None:
    """Check the target accuracy.

    Raises:
      ValueError: it is out of range, or no runs are compared by an accuracy.
    """
    if target is None:
        return
    check_number("target", target, minimum=0.0, maximum=1.0, exclusive_minimum=True)
    if not any(score_of([run]).is_accuracy for run in runs):
        raise ValueError(f"target is {target}, an accuracy; these runs have none: omit it.")


def pivot_section(runs: Iterable[Run], axes: tuple[str, str], target: float | None) -> str:
    """Format the tables of methods and settings, under a heading."""
    text = pivot_text(pivots_of(runs, axes, target), level=3)
    return f"## {axes[0].capitalize()} by {axes[1]}\n\n{text.rstrip()}"


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
