"""A report as one text: Markdown, a page of HTML, a table for LaTeX, or CSV."""

import csv
import functools
import io
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedjax_lab.checks import check_choice
from fedjax_lab.estimates import NOTHING, Estimate, Rows
from fedjax_lab.report.html import html_page
from fedjax_lab.report.paired import NOISE
from fedjax_lab.report.runs import Group, Run, group_runs, load_runs
from fedjax_lab.report.statistics import last
from fedjax_lab.report.tables import accuracy_table, by_accuracy, measures, over_seeds
from fedjax_lab.report.write import check_target, report_text, write_report, write_text

FORMATS = ("markdown", "html", "latex", "csv")
# Columns of metrics.jsonl whose last values are lines of the CSV, too.
_LAST = ("loss", "test_loss", "round", "bytes_up", "bytes_down", "gradients", "seconds")
_ESCAPED = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    NOISE: r"$\approx$",
    "±": r"$\pm$",
}


def format_report(
    directories: Iterable[str | Path],
    form: str,
    *,
    target: float | None = None,
    title: str = "Report",
) -> str:
    """A report on run directories as one text.

    Args:
      directories: run directories, or directories that hold some.
      form: "markdown" (the tables), "html" (the page with its figures inside), "latex" (the
        accuracies as a table for the package booktabs) or "csv" (see ``runs_csv``).
      target: accuracy in (0, 1) to be reached; None: 95 % of the best method's.
      title: the first line of Markdown and of HTML.

    Raises:
      FileNotFoundError, ValueError: as ``load_runs``; or ``target`` or ``form`` is not allowed.
      ImportError: matplotlib or markdown-it-py is missing, which HTML needs.
    """
    check_choice("format", form, FORMATS)
    check_target(target)
    groups = by_accuracy(group_runs(load_runs(directories := list(directories))))
    if form == "latex":
        return latex_table(accuracy_table(groups))
    if form == "csv":
        return runs_csv(groups)
    if form == "markdown":
        return report_text(groups, [], target, title)
    with tempfile.TemporaryDirectory() as folder:
        report = write_report(directories, folder, target=target, title=title)
        return html_page(report.read_text(encoding="utf-8"), Path(folder))


def write_format(text: str, out: str | Path) -> None:
    """Write a report's text to a file; whoever reads it finds it whole.

    Args:
      text: from ``format_report``.
      out: the file, in a folder that exists; one that is there is replaced.

    Raises:
      FileNotFoundError, IsADirectoryError: ``out`` is in no folder, or is one.
    """
    path = Path(out)
    if path.is_dir():
        raise IsADirectoryError(f"out is {str(out)!r}, a directory; it must be a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"out is {str(out)!r}; there is no directory {path.parent}.")
    write_text(path, text)


def latex_table(rows: Rows) -> str:
    """Rows, the first of which is the head, as a tabular of the package booktabs.

    Args:
      rows: texts; ± and what LaTeX reads as its own are escaped.
    """

    def line(row: Sequence[str]) -> str:
        cells = ["--" if cell == NOTHING else latex_escape(cell) for cell in row]
        return "  " + " & ".join(cells) + r" \\"

    head, *body = rows
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"  \toprule",
            line(head),
            r"  \midrule",
            *map(line, body),
            r"  \bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def latex_escape(text: str) -> str:
    """A text as LaTeX shows it.

    Args:
      text: plain.
    """
    return "".join(_ESCAPED.get(character, character) for character in text)


def runs_csv(groups: Sequence[Group]) -> str:
    """A line for each group and metric: method, settings that differ, metric, mean, ± and n.

    Accuracies are in percent, as in the tables; a mean is empty where a seed has no number, the
    half-width of the 95 % interval also where there is one seed. Numbers are not rounded.

    Args:
      groups: from ``group_runs``.
    """
    columns = measures(run for group in groups for run in group.runs)
    columns |= {name: functools.partial(_last, name) for name in _LAST}
    return estimates_csv(
        ["method", "settings"],
        [
            ([group.runs[0].algorithm, group.differs], name, over_seeds(group, value))
            for group in groups
            for name, value in columns.items()
        ],
    )


def _last(name: str, run: Run) -> float:
    return last(run.values(name))


def estimates_csv(head: Sequence[str], lines: Iterable[tuple[Sequence[str], str, Estimate]]) -> str:
    """CSV of estimates, with the columns ``head``, metric, mean, half_width, n.

    Args:
      head: what identifies a line beside its metric.
      lines: (values of ``head``, metric, estimate).
    """

    def cell(value: float | None) -> str:
        return "" if value is None or math.isnan(value) else repr(float(value))

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*head, "metric", "mean", "half_width", "n"])
    for values, metric, found in lines:
        writer.writerow([*values, metric, cell(found.mean), cell(found.half_width), found.n])
    return file.getvalue()
