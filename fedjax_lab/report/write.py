"""A report on disk: report.md and its figures."""

import os
from collections.abc import Iterable
from pathlib import Path

from fedjax_lab.checks import check_number
from fedjax_lab.report.figures import write_figures
from fedjax_lab.report.runs import Run, group_runs, load_runs
from fedjax_lab.report.tables import by_accuracy, summary_table

REPORT = "report.md"


def write_report(
    directories: Iterable[str | Path],
    out: str | Path | None = None,
    *,
    target: float | None = None,
    title: str = "Report",
) -> Path:
    """Write report.md with its figures beside it.

    Args:
      directories: run directories, or directories that hold some.
      out: the folder to write to; None: ``default_folder``.
      target: accuracy in (0, 1) to be reached; None: 95 % of the best method's.
      title: the first line.

    Returns:
      The path of report.md.

    Raises:
      FileNotFoundError, ValueError: as ``load_runs``; or ``target`` is out of range.
      ImportError: matplotlib is missing.
    """
    if target is not None:
        check_number("target", target, minimum=0.0, maximum=1.0, exclusive_minimum=True)
    runs = load_runs(directories)
    groups = by_accuracy(group_runs(runs))
    folder = default_folder(runs) if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    figures = write_figures(groups, folder)
    shown = "\n\n".join(f"![{caption}]({name})\n\n{caption}" for name, caption in figures)
    text = f"# {title}\n\n{summary_table(groups, target)}"
    if figures:
        text += f"\n## Figures\n\n{shown}\n"
    path = folder / REPORT
    scratch = folder / f".{REPORT}.tmp"
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
    return path


def default_folder(runs: list[Run]) -> Path:
    """The run's own directory if there is one run; else ``report`` beside the runs."""
    if len(runs) == 1:
        return runs[0].path
    return Path(os.path.commonpath([run.path.resolve() for run in runs])) / "report"
