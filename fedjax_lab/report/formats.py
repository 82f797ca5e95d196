"""Formats of a report as a single text: Markdown, HTML, tables for LaTeX, CSV."""

import csv
import functools
import io
import math
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedjax_lab.checks import check_choice
from fedjax_lab.estimates import NOTHING, Estimate
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import Rows
from fedjax_lab.report.html import html_page
from fedjax_lab.report.paired import NOISE
from fedjax_lab.report.pivot import (
    Pivot,
    check_axes,
    pivot_text,
    pivots_of,
    score_rows,
    target_rows,
)
from fedjax_lab.report.runs import Run, load_runs, show
from fedjax_lab.report.sections import Section, sections_of, tail_of
from fedjax_lab.report.statistics import ERROR, last
from fedjax_lab.report.tables import accuracy_table, measures, over_seeds
from fedjax_lab.report.write import check_target, report_text, write_report

_BOLD = "\0"  # before the text of a cell in bold type; no text has it
FORMATS = ("markdown", "html", "latex", "csv")
# Columns of metrics.jsonl whose last values are also lines of the CSV.
_LAST = ("loss", "test_loss", "round", "bytes_up", "bytes_down", "gradients", "seconds")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|-inf")
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
    rows: str | None = None,
    columns: str | None = None,
) -> str:
    """Format a report on run directories as a single text.

    Args:
      directories: run directories, or directories that contain some.
      form: "markdown" (tables), "html" (a page with figures), "latex" (accuracies as tables for the
        package booktabs) or "csv" (see ``runs_csv``).
      target: target accuracy in (0, 1); None: 95 % of the best method's.
      title: the first line of Markdown and of HTML.
      rows, columns: only a table of methods and settings, see ``pivot.check_axes``. None: the
        report.

    Raises:
      FileNotFoundError, ValueError: as ``load_runs``; or ``target``, ``form``, ``rows`` or
        ``columns`` is not allowed.
      ImportError: matplotlib or markdown-it-py is missing, which HTML needs.
    """
    check_choice("format", form, FORMATS)
    check_target(target)
    axes = check_axes(rows, columns)
    runs = load_runs(directories := list(directories))
    if axes is not None:
        return _format_pivots(pivots_of(runs, axes, target), form, title)
    sections = sections_of(runs)
    if form == "latex":
        tables = [latex_table(accuracy_table(section.groups)) for section in sections]
        titles = [f"% {section.title}\n" if len(sections) > 1 else "" for section in sections]
        return "\n".join(map(str.__add__, titles, tables))
    if form == "csv":
        return runs_csv(sections)
    if form == "markdown":
        return report_text(sections, [[]] * len(sections), target, title)
    with tempfile.TemporaryDirectory() as folder:
        report = write_report(directories, folder, target=target, title=title)
        return html_page(report.read_text(encoding="utf-8"), Path(folder))


def _format_pivots(pivots: Sequence[Pivot], form: str, title: str) -> str:
    if form == "latex":
        return "\n".join(map(_latex_pivot, pivots))
    if form == "csv":
        return pivots_csv(pivots)
    text = f"# {title}\n\n{pivot_text(pivots)}"
    return text if form == "markdown" else html_page(text, Path())


def _latex_pivot(pivot: Pivot) -> str:
    """Format the scores and the rounds to the target; the best of each setting is bold."""
    comments = [f"% {pivot.title}\n"] if pivot.title else []
    rounds = target_rows(pivot)
    parts = [*comments, latex_table(score_rows(pivot, lambda text: f"{_BOLD}{text}"))]
    if rounds is not None:
        parts += ["\n% Rounds to the target\n", latex_table(rounds)]
    return "".join(parts)


def pivots_csv(pivots: Sequence[Pivot]) -> str:
    """Format pivots as CSV, with a line for each cell and metric.

    The columns are table, the two axes, mark ("best", "tie" or empty), metric, mean, half-width of
    the 95 % interval, and n. The metrics are the score, accuracies in percent, and "rounds to
    TARGET".

    Args:
      pivots: of ``pivots_of``.
    """
    lines = []
    for pivot in pivots:
        for (row, column), cell in pivot.cells.items():
            about = [pivot.title, row, column, cell.mark]
            unit = "" if pivot.metric.endswith(ERROR) else " (%)"
            lines.append((about, f"{pivot.metric}{unit}", cell.score))
            if not math.isnan(cell.target):
                lines.append((about, f"rounds to {100 * cell.target:.10g} %", cell.rounds))
    return estimates_csv(["table", *pivots[0].axes, "mark"], lines)


def write_format(text: str, out: str | Path) -> None:
    """Write a report's text to a file atomically.

    Args:
      text: result of ``format_report``.
      out: the file, in an existing folder; an existing file is replaced.

    Raises:
      FileNotFoundError, IsADirectoryError: the folder of ``out`` does not exist, or ``out`` is one.
    """
    path = Path(out)
    if path.is_dir():
        raise IsADirectoryError(f"out is {str(out)!r}, a directory; it must be a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"out is {str(out)!r}; there is no directory {path.parent}.")
    write_text(path, text)


def latex_table(rows: Rows) -> str:
    """Format rows as a tabular of the package booktabs; the first row is the header.

    Args:
      rows: texts; ± and special characters of LaTeX are escaped.
    """

    def escaped(cell: str) -> str:
        if cell.startswith(_BOLD):
            return rf"\textbf{{{latex_escape(cell.removeprefix(_BOLD))}}}"
        return "--" if cell == NOTHING else latex_escape(cell)

    def line(row: Sequence[str]) -> str:
        cells = map(escaped, row)
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
    """Escape special characters of LaTeX.

    Args:
      text: plain text.
    """
    return "".join(_ESCAPED.get(character, character) for character in text)


def runs_csv(sections: Sequence[Section]) -> str:
    """Format runs as CSV, with a line for each group and metric.

    The columns are method, settings that differ between groups or sections, data set, number of
    rounds, metric, mean, half-width of the 95 % interval, and n. Accuracies are in percent, as in
    the tables. A mean is empty if a seed has no number; the half-width also for a single seed.
    Numbers are not rounded.

    Args:
      sections: result of ``sections_of``.
    """
    lines = []
    for section in sections:
        runs = [run for group in section.groups for run in group.runs]
        columns = measures(runs, tail_of(runs)._replace(name="mean of the last tenth"))
        columns |= {name: functools.partial(_last, name) for name in _LAST}
        for group in section.groups:
            setting = [f"{name}={show(value)}" for name, value in section.setting.items()]
            differs = ", ".join([*setting, *([group.differs] if group.differs else [])])
            about = [group.runs[0].algorithm, differs, section.dataset, str(section.rounds)]
            lines += [(about, name, over_seeds(group, f)) for name, f in columns.items()]
    return estimates_csv(["method", "settings", "dataset", "rounds"], lines)


def _last(name: str, run: Run) -> float:
    return last(run.values(name))


def estimates_csv(head: Sequence[str], lines: Iterable[tuple[Sequence[str], str, Estimate]]) -> str:
    """Format estimates as CSV, with the columns ``head``, metric, mean, half_width, n.

    Args:
      head: names of the columns that identify a line, besides the metric.
      lines: (values of ``head``, metric, estimate). Texts that a spreadsheet would read as a
        formula (= + - @) get an apostrophe in front.
    """

    def cell(value: float | None) -> str:
        return "" if value is None or math.isnan(value) else repr(float(value))

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*head, "metric", "mean", "half_width", "n"])
    for values, metric, found in lines:
        about = [_no_formula(text) for text in (*values, metric)]
        writer.writerow([*about, cell(found.mean), cell(found.half_width), found.n])
    return file.getvalue()


def _no_formula(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would evaluate; numbers are unchanged."""
    is_number = _NUMBER.fullmatch(text) is not None
    return f"'{text}" if text.startswith(tuple("=+-@\t\r\n")) and not is_number else text
