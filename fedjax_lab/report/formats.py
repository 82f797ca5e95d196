"""Formats of a report as a single text: Markdown, HTML, tables for LaTeX, CSV."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedjax_lab.checks import check_choice
from fedjax_lab.estimates import NOTHING
from fedjax_lab.markdown import Cells
from fedjax_lab.report.cells import UNSOLVED, accuracy_table
from fedjax_lab.report.csv_text import pivots_csv, runs_csv
from fedjax_lab.report.html import html_page
from fedjax_lab.report.paired import NOISE
from fedjax_lab.report.pivot import Pivot, explanation, pivot_text, score_rows, target_rows
from fedjax_lab.report.runs import load_runs
from fedjax_lab.report.statistics import UNKNOWN
from fedjax_lab.report.tables import report_text
from fedjax_lab.report.write import report_of, write_pages

_BOLD = "\0"  # before the text of a cell in bold type; no text has it
FORMATS = ("markdown", "html", "latex", "csv")
_ESCAPED = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    NOISE: r"$\approx$",
    "±": r"$\pm$",
    UNSOLVED: r"$\dagger$",
    "²": "$^2$",
}


def format_report(
    directories: Iterable[str | Path],
    form: str,
    *,
    target: float | None = None,
    title: str = "Report",
    rows: str | None = None,
    columns: str | None = None,
    metric: str | None = None,
    mode: str = "max",
    compare: Sequence[str] = (),
) -> str:
    """Format a report on run directories as a single text.

    Args:
      directories: run directories, or directories that contain some.
      form: "markdown" (tables), "html" (a page with figures), "latex" (accuracies as tables for the
        package booktabs) or "csv" (see
        ``csv_text.runs_csv``).
      target: target accuracy in (0, 1); None: 95 % of the best method's.
      title: the first line of Markdown and of HTML.
      rows, columns: only a table of methods and settings, see ``pivot.check_axes``. None: the
        report.
      metric, mode, compare: what compares the runs, see ``load_runs``.

    Raises:
      FileNotFoundError, ValueError: as ``load_runs``; or ``target``, ``form``, ``rows`` or
        ``columns`` is not allowed.
      ImportError: matplotlib or markdown-it-py is missing, which HTML needs.
    """
    check_choice("format", form, FORMATS)
    runs = load_runs(directories, metric=metric, mode=mode, compare=compare)
    report = report_of(runs, target=target, title=title, rows=rows, columns=columns)
    sections = report.sections
    if report.pivots:
        return _format_pivots(report.pivots, form, title)
    if form == "html":
        with tempfile.TemporaryDirectory() as folder:
            page = write_pages(report, folder).with_suffix(".html")
            return page.read_text(encoding="utf-8")
    if form == "latex":
        scored = [one for one in sections if one.score != UNKNOWN]
        tables = [latex_table(accuracy_table(section.groups)) for section in scored]
        titles = [f"% {section.title}\n" if len(sections) > 1 else "" for section in scored]
        return "\n".join(map(str.__add__, titles, tables))
    return runs_csv(sections) if form == "csv" else report_text(sections, target, title=title)


def _format_pivots(pivots: Sequence[Pivot], form: str, title: str) -> str:
    if form == "latex":
        return f"% {explanation(pivots)}\n" + "\n".join(map(_latex_pivot, pivots))
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


def latex_table(rows: Cells) -> str:
    """Format rows as a tabular of the package booktabs; the first row is the header.

    Args:
      rows: texts; ± and special characters of LaTeX are escaped.
    """

    def escaped(cell: str) -> str:
        if cell.startswith(_BOLD):
            return rf"\textbf{{{latex_escape(cell.removeprefix(_BOLD))}}}"
        return "--" if cell == NOTHING else latex_escape(cell)

    def line(row: Sequence[str]) -> str:
        text = " & ".join(map(escaped, row))
        # Before a bracket or a star, which TeX would read as an argument of the line above.
        guard = "{}" if text.startswith(("[", "*")) else ""
        return rf"  {guard}{text} \\"

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
    """Escape special characters of LaTeX."""
    return "".join(_ESCAPED.get(character, character) for character in text)
