"""Tables of methods by settings: a row for each method, a column for each partition, and so on."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fedjax_lab.checks import check_choice
from fedjax_lab.estimates import NOTHING, Estimate, estimate, format_estimate
from fedjax_lab.markdown import Cells, inert, markdown_table, printable
from fedjax_lab.report.cells import UNSOLVED, worst_residual
from fedjax_lab.report.paired import NOISE, compare_with_best, within_noise
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.sections import Section, runs_of, score_of, setting_of, tail_of
from fedjax_lab.report.settings import (
    MODEL_OPTION,
    SETTINGS,
    label_of,
    names_that_differ,
    parts_of,
    parts_that_differ,
    show,
    shown_parts,
)
from fedjax_lab.report.statistics import UNKNOWN, Score, number, reach
from fedjax_lab.report.tables import OWN_MODELS, UNSOLVED_NOTE, default_target

METHOD, DATASET, ROUNDS = "method", "dataset", "rounds"
# Settings of which each value has data of its own.
_OF_DATA = (DATASET, "sequence_length", "vocabulary_size", "tokens")


class Cell(NamedTuple):
    """A method's score in a setting.

    Attributes:
      score: mean and interval over the seeds; of accuracies in percent.
      mark: "best" of its setting, "tie" (the paired difference from the best is within noise), "".
      rounds: rounds to the setting's target; NaN if a seed does not reach it.
      reached: seeds that reach it.
      unsolved: whether quadratic programs of the method were not solved in one of its runs.
    """

    score: Estimate
    mark: str
    rounds: Estimate
    reached: int
    unsolved: bool


class Pivot(NamedTuple):
    """A table of scores.

    Attributes:
      title: the settings of all its runs that differ from those of other tables; "" for one table.
      axes: names of the rows and of the columns.
      methods, settings: labels of the two axes.
      cells: by (method, setting); empty ones are missing.
      targets: setting -> its target, a fraction; NaN for errors.
      score: the score of its cells.
      merged: methods of which each column has other hyperparameters, with their names.
    """

    title: str
    axes: tuple[str, str]
    methods: list[str]
    settings: list[str]
    cells: dict[tuple[str, str], Cell]
    targets: dict[str, float]
    score: Score
    merged: dict[str, list[str]]


def check_axes(rows: str | None, columns: str | None) -> tuple[str, str] | None:
    """Check the names of a pivot's axes; returns None if there are none.

    Args:
      rows, columns: "method" for one of them, and for the other "dataset", "rounds", or a setting.

    Raises:
      ValueError: one is missing or unknown, or none of them or both are "method".
    """
    if rows is None and columns is None:
        return None
    if rows is None or columns is None:
        raise ValueError(f"rows is {rows!r} and columns {columns!r}; give both, or none.")
    for argument, name in (("rows", rows), ("columns", columns)):
        if not name.startswith(MODEL_OPTION):
            check_choice(argument, name, (METHOD, DATASET, ROUNDS, *SETTINGS))
    if (rows == METHOD) == (columns == METHOD):
        raise ValueError(f"rows is {rows!r} and columns {columns!r}; one of them must be method.")
    return rows, columns


def pivots_of(
    sections: Iterable[Section], axes: tuple[str, str], target: float | None = None
) -> list[Pivot]:
    """Arrange sections in tables, one for each value of what is neither in rows nor in columns.

    Methods are compared within a setting: each setting has a best one, ties with it, and a target.

    Args:
      sections: result of ``sections_of``.
      axes: names of the rows and of the columns, as ``check_axes`` returns them.
      target: accuracy in (0, 1); None: 95 % of the best method's in each setting.

    Raises:
      ValueError: no run has a setting of such a name, or a score; or runs that differ are of one
        row or column.
    """
    sections = [section for section in sections if section.score != UNKNOWN]
    if not sections:
        raise ValueError(
            f"rows is {axes[0]!r} and columns {axes[1]!r}, a table of scores; no run has one that "
            "is known: give metric (--metric), the name of one."
        )
    for name in axes:
        if name != METHOD and all(_values(one).get(name) is None for one in sections):
            raise ValueError(f"{name} is to be an axis of the table; no run has such a setting.")
    tables: dict[str, list[Section]] = {}
    for one in sections:
        key = json.dumps(_rest(one, axes), sort_keys=True)
        tables.setdefault(key, []).append(one)
    rests = [_rest(some[0], axes) for some in tables.values()]
    differ = [name for name in names_that_differ(rests) if name != "data_hash"]
    titles = [
        ", ".join(f"{printable(n)} {show(rest[n])}" for n in differ if n in rest) for rest in rests
    ]
    return [_pivot(t, some, axes, target) for t, some in zip(titles, tables.values(), strict=True)]


def _values(section: Section) -> dict[str, Any]:
    """Return a section's values of the axes that a table may have."""
    run = section.groups[0].runs[0]
    data = {"data_hash": run.settings.get("data_hash")}
    about = {"metric": section.score.metric, DATASET: section.dataset}
    return {**about, **data, ROUNDS: section.rounds, **setting_of(run)}


def _rest(section: Section, axes: tuple[str, str]) -> dict[str, Any]:
    """Return the values that all sections of a table share."""
    out = {*axes, *(("data_hash",) if set(axes) & set(_OF_DATA) else ())}
    return {n: v for n, v in _values(section).items() if n not in out}


def _pivot(
    title: str, sections: Sequence[Section], axes: tuple[str, str], target: float | None
) -> Pivot:
    """Fill a table, whose sections each need a row or column of their own, and groups a cell.

    Raises:
      ValueError: two sections or two groups differ in what the table does not show.
    """
    score = score_of(runs_of(group for one in sections for group in one.groups))
    told, merged = _told_apart(sections)
    side = axes[1 - axes.index(METHOD)]
    of_name: dict[str, Section] = {}
    of_cell: dict[tuple[str, str], Group] = {}
    cells: dict[tuple[str, str], Cell] = {}
    targets: dict[str, float] = {}
    for one in sections:
        name = show(_values(one).get(side))
        before = of_name.setdefault(name, one)
        if before is not one:
            names = names_that_differ([_values(before), _values(one)])
            first = before.groups[0], one.groups[0]
            raise _not_shown(*first, f"{side} {name}", names)
        if target is None or not score.is_accuracy:
            targets[name] = default_target(one.groups, score)
        else:
            targets[name] = target
        for group, cell in zip(one.groups, _cells(one, score, targets[name]), strict=True):
            run = group.runs[0]
            shown = shown_parts(parts_of(run.settings), told[run.algorithm])
            place = label_of(run.algorithm, shown), name
            beside = of_cell.setdefault(place, group)
            if beside is not group:
                names = names_that_differ([of.runs[0].settings for of in (beside, group)])
                raise _not_shown(beside, group, " and ".join(place), names)
            cells[place] = cell
    best_first = sorted(
        dict.fromkeys(method for method, _ in cells),
        key=lambda name: _loss(cells, score.sign, name),
    )
    settings = sorted(of_name, key=_natural)
    return Pivot(title, axes, best_first, settings, cells, targets, score, merged)


def _not_shown(one: Group, other: Group, what: str, names: Sequence[str]) -> ValueError:
    paths = " and ".join(str(group.runs[0].path) for group in (one, other))
    return ValueError(
        f"{paths} are both of {what}, and the table does not show that they differ in "
        f"{', '.join(map(printable, names))}. Report them apart."
    )


def _loss(cells: dict[tuple[str, str], Cell], sign: float, name: str) -> float:
    """Return minus the mean of a method's scores, by which methods are ordered."""
    means = [cell.score.mean for (method, _), cell in cells.items() if method == name]
    means = [value for value in means if not math.isnan(value)]
    return -sign * math.fsum(means) / len(means) if means else math.inf


def _natural(text: str) -> list[Any]:
    """Return a key that orders numbers in texts by their values."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]\d+)?)", text)
    return [(float(part), "") if place % 2 else (0.0, part) for place, part in enumerate(parts)]


def _cells(section: Section, score: Score, target: float) -> list[Cell]:
    """Return the cell of each group; groups are compared with the best one of the section."""
    tail = tail_of(runs_of(section.groups))

    def value(run: Run) -> float:
        return score.scale * tail.mean(run, score.name)

    leader, differences = compare_with_best(section.groups, lambda run: score.sign * value(run))
    found = []
    for group, difference in zip(section.groups, differences, strict=True):
        tied = difference is not None and within_noise(difference)
        mark = "best" if group is leader else "tie" if tied else ""
        reached = [reach(run.rows, target, score.name) for run in group.runs]
        rounds = estimate([math.nan if row is None else number(row["round"]) for row in reached])
        count = sum(row is not None for row in reached)
        unsolved = any(map(worst_residual, group.runs))
        found.append(Cell(group.over_seeds(value), mark, rounds, count, unsolved))
    return found


def _told_apart(
    sections: Sequence[Section],
) -> tuple[dict[str, dict[str, None]], dict[str, list[str]]]:
    """Return method -> the settings that differ within a section, and method -> those between them.

    Labels name the first ones. What differs between sections alone makes no other row, because the
    method may have been tuned there.
    """
    runs = [[group.runs[0] for group in one.groups] for one in sections]
    within: dict[str, dict[str, None]] = {}
    between: dict[str, list[str]] = {}
    for method in dict.fromkeys(run.algorithm for some in runs for run in some):
        own = [[run for run in some if run.algorithm == method] for some in runs]
        parts = [[parts_of(run.settings) for run in some] for some in own]
        within[method] = dict.fromkeys(n for some in parts for n in parts_that_differ(some))
        of_all = [parts_of(_hyperparameters(run)) for some in own for run in some]
        if names := [n for n in parts_that_differ(of_all) if n not in within[method]]:
            between[method] = names
    return within, between


def _hyperparameters(run: Run) -> dict[str, Any]:
    task = {*setting_of(run), *SETTINGS, DATASET, "data_hash", ROUNDS, "eval_every"}
    return {name: value for name, value in run.settings.items() if name not in task}


def score_rows(pivot: Pivot, best: Callable[[str], str]) -> Cells:
    """Return header and rows of scores: mean and interval over the seeds."""
    digits = pivot.score.digits(cell.score.mean for cell in pivot.cells.values())

    def text(cell: Cell) -> str:
        shown = format_estimate(cell.score, digits) + (f" {UNSOLVED}" if cell.unsolved else "")
        if cell.mark == "best":
            return best(shown)
        return f"{shown} {NOISE}" if cell.mark == "tie" else shown

    return _rows(pivot, text)


def target_rows(pivot: Pivot) -> Cells | None:
    """Return header and rows of rounds to the target; None if there is no target.

    A mean is given only if all seeds reach it. Targets stand beside the settings' names; a setting
    in which no method has a score has none.
    """

    def text(cell: Cell) -> str:
        if cell.reached == cell.score.n:
            return format_estimate(cell.rounds, 0)
        return f"{cell.reached} of {cell.score.n} seeds" if cell.reached else NOTHING

    if all(map(math.isnan, pivot.targets.values())):
        return None

    def named(setting: str) -> str:
        target = pivot.targets[setting]
        return setting if math.isnan(target) else f"{setting} ({100 * target:.10g} %)"

    return _rows(pivot, text, named)


def _rows(pivot: Pivot, text: Callable[[Cell], str], named: Callable[[str], str] = str) -> Cells:
    """Return header and rows; ``named`` formats the settings' labels."""
    table = [["", *map(named, pivot.settings)]]
    for method in pivot.methods:
        cells = [pivot.cells.get((method, setting)) for setting in pivot.settings]
        table.append([method, *(NOTHING if cell is None else text(cell) for cell in cells)])
    rows = table if pivot.axes[0] == METHOD else [list(row) for row in zip(*table, strict=True)]
    rows[0][0] = pivot.axes[0]
    return rows


def pivot_text(pivots: Sequence[Pivot], level: int = 2) -> str:
    """Format pivots as Markdown, with an explanation."""
    parts = [explanation(pivots)]
    mark = "#" * level
    for pivot in pivots:
        parts += [f"{mark} {inert(pivot.title)}"] if pivot.title else []
        parts += [_shown(score_rows(pivot, lambda text: f"**{text}**"))]
        if pivot.merged:
            differ = (f"{inert(m)}: {', '.join(map(inert, n))}" for m, n in pivot.merged.items())
            parts += [f"Hyperparameters that differ between the settings: {'; '.join(differ)}."]
        rounds = target_rows(pivot)
        if rounds is not None:
            parts += ["Rounds until the setting's target, which stands beside its name:"]
            parts += [_shown(rounds)]
    return "\n\n".join(parts) + "\n"


def explanation(pivots: Sequence[Pivot]) -> str:
    """Say what the numbers and the marks of pivots mean, as for a table's caption."""
    units = {
        "test accuracy in percent" if pivot.score.is_accuracy else pivot.score.words
        for pivot in pivots
    }
    unit = " or ".join(sorted(units, reverse=True))
    own = f" {OWN_MODELS}" if any(pivot.score.is_own for pivot in pivots) else ""
    return (
        f"{unit[0].upper()}{unit[1:]}, mean over the last tenth of the rounds ± 95 % interval over "
        f"the seeds (Student's t).{own} Bold: the best of its setting. {NOISE}: the paired "
        "difference from the best one is within noise."
        f"{' '.join(['', *notes(pivots)])}"
    )


def notes(pivots: Sequence[Pivot]) -> list[str]:
    """Return what marks of single cells mean."""
    unsolved = any(cell.unsolved for pivot in pivots for cell in pivot.cells.values())
    return [UNSOLVED_NOTE] if unsolved else []


def _shown(rows: Cells) -> str:
    head, *body = rows
    return markdown_table([list(map(inert, head)), *([inert(row[0]), *row[1:]] for row in body)])
