"""Reports as CSV: scores of groups, of tables of methods and settings, and of single clients."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fedjax_lab.estimates import Estimate, estimate
from fedjax_lab.report.cells import measures
from fedjax_lab.report.distribution import client_scores
from fedjax_lab.report.pivot import METHOD, Pivot
from fedjax_lab.report.runs import Group
from fedjax_lab.report.sections import Section, runs_of, tail_of
from fedjax_lab.report.settings import names_that_differ, show

_ABOUT = ("method", "settings", "dataset", "rounds")  # columns of ``_about``
# Columns of metrics.jsonl whose last values are also lines of the CSV.
_LAST = ("loss", "test_loss", "round", "bytes_up", "bytes_down", "gradients", "seconds")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|-inf")


def runs_csv(sections: Sequence[Section]) -> str:
    """Format runs as CSV, with a line for each group and metric.

    The columns are method, settings that differ between groups or sections (with the metric that
    ranks a section, and the hash of its data, where all else is equal), data set, number of rounds,
    metric, mean, half-width of the 95 % interval, and n. Accuracies are in percent, as in
    the tables. A mean is empty if a seed has no number; the half-width also for a single seed.
    Numbers are not rounded.

    Args:
      sections: result of ``sections_of``.
    """
    lines = []
    for section in sections:
        runs = runs_of(section.groups)
        columns = measures(runs, tail_of(runs)._replace(name="mean of the last tenth"))
        for group in section.groups:
            about = _about(sections, section, group)
            lines += [(about, name, group.over_seeds(f)) for name, f in columns.items()]
            for name in _LAST:
                found = estimate([run.last(name) for run in group.runs])
                lines.append((about, name, found))
    return estimates_csv(_ABOUT, lines)


def clients_csv(sections: Sequence[Section]) -> str:
    """Format the scores of all clients on their own test examples as CSV, with a line for each.

    The columns are method, settings, data set and number of rounds, as of ``runs_csv``; run
    directory, seed, client, number of its test examples, metric, and value. Accuracies are in
    percent. Clients without test examples are left out.

    Args:
      sections: result of ``sections_of``.
    """
    lines = []
    for section in sections:
        score = section.score
        for group in section.groups:
            for run in group.runs:
                about = [*_about(sections, section, group), str(run.path), str(run.seed)]
                lines += [
                    [
                        *about,
                        client.client,
                        _cell(client.examples),
                        f"{score.of_global_model}{score.unit}",
                        _cell(score.scale * client.score),
                    ]
                    for client in client_scores(run)
                ]
    return _csv([*_ABOUT, "run", "seed", "client", "examples", "metric", "value"], lines)


def _about(sections: Sequence[Section], section: Section, group: Group) -> list[str]:
    """Return method, settings that differ, data set and number of rounds of a group."""

    def task(one: Section) -> dict[str, Any]:
        data = one.groups[0].runs[0].settings.get("data_hash")
        return {"metric": one.score.metric, "data": data}

    columns = section.dataset, section.rounds, section.setting
    alike = [task(one) for one in sections if (one.dataset, one.rounds, one.setting) == columns]
    told = section.setting | {name: task(section)[name] for name in names_that_differ(alike)}
    setting = [f"{name}={show(value)}" for name, value in told.items()]
    differs = ", ".join([*setting, *([group.differs] if group.differs else [])])
    return [group.runs[0].algorithm, differs, section.dataset, str(section.rounds)]


def estimates_csv(head: Sequence[str], lines: Iterable[tuple[Sequence[str], str, Estimate]]) -> str:
    """Format estimates as CSV, with the columns ``head``, metric, mean, half_width, n.

    Args:
      lines: (values of ``head``, metric, estimate). Texts that a spreadsheet would read as a
        formula (= + - @) get an apostrophe in front.
    """
    numbers = (
        [*values, metric, _cell(found.mean), _cell(found.half_width), _cell(found.n)]
        for values, metric, found in lines
    )
    return _csv([*head, "metric", "mean", "half_width", "n"], numbers)


def _cell(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else repr(value)


def _csv(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([head, *(list(map(_no_formula, line)) for line in lines)])
    return file.getvalue()


def _no_formula(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would evaluate; numbers are unchanged."""
    is_number = _NUMBER.fullmatch(text) is not None
    return f"'{text}" if text.startswith(tuple("=+-@\t\r\n")) and not is_number else text


def pivots_csv(pivots: Sequence[Pivot]) -> str:
    """Format pivots as CSV, with a line for each cell and metric.

    The columns are table, the two axes, mark ("best", "tie" or empty; with "unsolved" behind it for
    quadratic programs that were not solved), metric, mean, half-width of the 95 % interval, and n.
    The metrics are the score, accuracies in percent, and "rounds to TARGET".

    Args:
      pivots: of ``pivots_of``.
    """
    lines = []
    for pivot in pivots:
        for place, cell in pivot.cells.items():
            row, column = place if pivot.axes[0] == METHOD else reversed(place)
            mark = " ".join(filter(None, [cell.mark, "unsolved" if cell.unsolved else ""]))
            about = [pivot.title, row, column, mark]
            lines.append((about, f"{pivot.score.name}{pivot.score.unit}", cell.score))
            if not math.isnan(target := pivot.targets[place[1]]):
                lines.append((about, f"rounds to {100 * target:.10g} %", cell.rounds))
    return estimates_csv(["table", *pivots[0].axes, "mark"], lines)
