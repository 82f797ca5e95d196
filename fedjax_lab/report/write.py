"""A report on disk: report.md with its figures, and both as one page, report.html."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedjax_lab.checks import check_choice, check_number
from fedjax_lab.estimates import inert
from fedjax_lab.machine.files import write_text
from fedjax_lab.report.figures import write_figures
from fedjax_lab.report.html import html_page
from fedjax_lab.report.print_size import FORMS
from fedjax_lab.report.runs import REPORT, Run, load_runs
from fedjax_lab.report.sections import Section, sections_of
from fedjax_lab.report.tables import SEVERAL, section_text


def write_report(
    directories: Iterable[str | Path],
    out: str | Path | None = None,
    *,
    target: float | None = None,
    title: str = "Report",
    figures: str = "png",
) -> Path:
    """Write report.md with its figures beside it, and report.html, which holds them.

    Runs of several data sets, metrics or numbers of rounds have a part each.

    Args:
      directories: run directories, or directories that hold some.
      out: the folder to write to; None: ``default_folder``.
      target: accuracy in (0, 1) to be reached; None: 95 % of the best method's.
      title: the first line.
      figures: "png"; "pdf" or "svg" writes the figures once more as vectors for a paper, with
        their fonts, as wide as a column (3.4 inches; several panels: 7).

    Returns:
      The path of report.md.

    Raises:
      FileNotFoundError, ValueError: as ``load_runs``; or ``target`` or ``figures`` is not
        allowed.
      ImportError: matplotlib is missing.
    """
    check_target(target)
    check_choice("figures", figures, FORMS)
    runs = load_runs(directories)
    sections = sections_of(runs)
    folder = default_folder(runs) if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    prefixes = [f"part{i}_" if len(sections) > 1 else "" for i in range(1, len(sections) + 1)]
    shown = [
        write_figures(section.groups, folder, prefix, figures)
        for section, prefix in zip(sections, prefixes, strict=True)
    ]
    write_page(report_text(sections, shown, target, title), folder / REPORT)
    return folder / REPORT


def check_target(target: float | None) -> None:
    """Check the accuracy to be reached.

    Args:
      target: in (0, 1), or None.

    Raises:
      ValueError: it is out of range.
    """
    if target is not None:
        check_number("target", target, minimum=0.0, maximum=1.0, exclusive_minimum=True)


def report_text(
    sections: Sequence[Section],
    figures: Sequence[Sequence[tuple[str, str]]],
    target: float | None,
    title: str,
) -> str:
    """report.md: title; for each section its first figure, tables, settings, other figures.

    Args:
      sections: from ``sections_of``.
      figures: of each section, (file name, caption).
      target: accuracy in (0, 1); None: 95 % of the best method's.
      title: the first line.
    """
    several = len(sections) > 1
    level = 3 if several else 2
    parts = [f"# {title}", *([SEVERAL] if several else [])]
    for section, shown in zip(sections, figures, strict=True):
        parts += [f"## {inert(section.title)}"] if several else []
        parts += [show_figures(shown[:1])] if shown else []
        parts += [section_text(section, target, level).rstrip()]
        parts += [f"{'#' * level} More figures\n\n{show_figures(shown[1:])}"] if shown[1:] else []
    return "\n\n".join(parts) + "\n"


def show_figures(figures: Iterable[tuple[str, str]]) -> str:
    """Markdown of figures, each with its caption below: (file name, caption)."""
    return "\n\n".join(f"![{caption}]({name})\n\n{caption}" for name, caption in figures)


def write_page(markdown: str, path: Path) -> None:
    """Write ``path``, Markdown, and the same as a page beside it that ends in .html."""
    write_text(path, markdown)
    write_text(path.with_suffix(".html"), html_page(markdown, path.parent))


def default_folder(runs: list[Run]) -> Path:
    """The run's own directory if there is one run; else ``report`` beside the runs.

    Args:
      runs: from ``load_runs``.
    """
    if len(runs) == 1:
        return runs[0].path
    return Path(os.path.commonpath([run.path.resolve() for run in runs])) / "report"
