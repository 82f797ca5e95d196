"""The numbers of discussions, each from the stored cells that it names.

A discussion, experiments/PAPER/discussion.md, has no numbers of results. It has fields, which are
filled whenever the page is written, so that they cannot differ from the results, and are rounded
once, from the stored values:

    {main mean FedAvg}                     mean over the seeds
    {main interval FedAvg :2}              with its 95 % interval, two decimals
    {main lead FedMoSWA | FedAvg | FedSAM} paired difference from the best of the others
    {main behind FedSWA | FedAvg}          minus that
    {main gap FedSWA | FedAvg}             without sign and interval
    {main paper FedAvg}                    the paper's accuracy
    {main less-uplink Top-k | FedAvg}      the mean of the second row over that of the first
    {main times-rounds Top-k | FedAvg}     the reverse
    {main change FedAvg}                   how far the mean is from that of another column
    {main diverged A | B}                  "1 of 6": runs that diverged, of all of these rows
    {main low-end A}, {main high-end A}    the first and the last round in which a run ended
    {main chosen-client_lr FedAvg}         what tuning chose

``main`` is a column of a study, which the comment at the file's head names: ``main = STUDY /
COLUMN``, with ``/ as published`` for that of the code's way, and with ``/ since COLUMN`` for
changes from another column. All are of top accuracy in percent; ``mean-tail`` and the like are of
another of ``VIEWS``, or of what it takes to reach the target: ``rounds`` or ``uplink``.

Numbers that are none of results, such as those of tables and settings, stand in the comment's
``settings`` with the words around them. So a number that is in neither is found:

    python -m experiments.studies.numbers

prints those of all discussions, and fails if there are any, or if a page ends otherwise.
"""

import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.studies.claims import AS_PUBLISHED, Claim, decide, groups_of_way
from experiments.studies.groups import groups_of
from experiments.studies.measures import (
    ACCURACY,
    ERROR_GROWTH,
    ERROR_MEMORY,
    FLATNESS,
    LOST,
    PERPLEXITY,
    SMOOTHNESS,
    TRAINING_LOSS,
    Measure,
)
from experiments.studies.verdicts import format_difference
from fedjax_lab.estimates import Estimate, estimate, format_estimate
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.statistics import number, reach
from fedjax_lab.report.tables import default_target

ROOT = Path(__file__).parents[1]
PAGES = ("catalogue", "cfedavg", "fafed", "fedspeed", "fedswa", "gradma")
RESULTS, DISCUSSION = "RESULTS.md", "discussion.md"
_HEAD = re.compile(r"\A<!--\n(.*?)\n-->\n+", re.DOTALL)
_FIELD = re.compile(r"\{(\w+) ([\w-]+) ([^{}]+?)(?: :(\d))?\}")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


class View(NamedTuple):
    """What of a run is cited.

    Attributes:
      measure: more is better.
      of: "top" or "tail".
      sign: -1 where the measure is minus the quantity.
    """

    measure: Measure
    of: str = "top"
    sign: int = 1


def _last(run: Run) -> float:
    return 100 * run.values("accuracy")[-1]


def _worst(run: Run) -> float:
    return 100 * number(run.summary.get("worst_10_percent_accuracy"))


VIEWS = {
    "top": View(ACCURACY),
    "tail": View(ACCURACY, "tail"),
    "last": View(Measure(_last)),
    "worst": View(Measure(_worst)),
    "lost": View(LOST, sign=-1),
    "perplexity": View(PERPLEXITY, sign=-1),
    "loss": View(TRAINING_LOSS, sign=-1),
    "eigenvalue": View(FLATNESS, sign=-1),
    "step": View(SMOOTHNESS, sign=-1),
    "memory": View(ERROR_MEMORY, sign=-1),
    "growth": View(ERROR_GROWTH, sign=-1),
}
_COSTS = {"rounds": "round", "uplink": "bytes_up"}  # until the target is reached


class Table(NamedTuple):
    """A column of a study.

    Attributes:
      groups: row -> its final runs.
      paper: row -> the paper's accuracy in percent.
      chosen: row -> the point that tuning chose.
      before: row -> runs of the column from which changes are counted; None: there is none.
    """

    groups: Mapping[str, Group]
    paper: Mapping[str, float]
    chosen: Mapping[str, Mapping[str, float]]
    before: Mapping[str, Group] | None = None

    def field(self, kind: str, rows: Sequence[str], digits: int | None) -> str:
        """Return a field's text.

        Args:
          kind: what is cited, such as "mean" or "lead-tail".
          rows: names.
          digits: after the decimal point; None: one, or as a claim's.

        Raises:
          ValueError: there is no such row, kind or value.
        """
        kind, _, about = kind.partition("-")
        lost = [row for row in rows if row not in self.groups and kind != "paper"]
        if lost:
            raise ValueError(f"there is no row {lost[0]!r}; there are {', '.join(self.groups)}.")
        if kind == "paper":
            return _plain(self.paper[rows[0]], digits)
        if kind == "chosen":
            return f"{self.chosen[rows[0]][about]:g}"
        if kind == "diverged":
            runs = [run for row in rows for run in self.groups[row].runs]
            return f"{sum(math.isnan(_last(run)) for run in runs)} of {len(runs)}"
        if kind in ("low", "high"):
            ends = [run.rows[-1]["round"] for row in rows for run in self.groups[row].runs]
            return str(min(ends) if kind == "low" else max(ends))
        view = self._view(about or "top")
        if kind in ("lead", "behind", "gap"):
            found = self._difference(rows, view)
            if kind == "gap":
                return _plain(abs(found.mean), digits)
            found = found._replace(mean=(1 if kind == "lead" else -1) * found.mean)
            return format_difference(found) if digits is None else format_estimate(found, digits)
        first, *others = (self._estimate(self.groups[row], view) for row in rows)
        if kind == "interval":
            return format_estimate(first, 1 if digits is None else digits)
        if kind == "change" and self.before is not None:
            return _plain(abs(first.mean - self._estimate(self.before[rows[0]], view).mean), digits)
        if kind in ("less", "times"):
            ratio = others[0].mean / first.mean
            return _plain(ratio if kind == "less" else 1 / ratio, digits)
        if kind != "mean":
            raise ValueError(f"there is no kind {kind!r}.")
        return _plain(first.mean, digits)

    def _view(self, name: str) -> View:
        if name in VIEWS:
            return VIEWS[name]
        target, key = default_target(self.groups.values()), _COSTS[name]

        def cost(run: Run) -> float:
            row = reach(run.rows, target)
            return math.nan if row is None else number(row.get(key))

        return View(Measure(cost))

    def _estimate(self, group: Group, view: View) -> Estimate:
        measure = view.measure.tail if view.of == "tail" else view.measure.top
        assert measure is not None
        return estimate([view.sign * measure(run) for run in group.runs])

    def _difference(self, rows: Sequence[str], view: View) -> Estimate:
        claim = Claim("", "", "", rows[0], rows[1:], measure=view.measure)
        compared = decide(claim, self.groups, self.before)
        found = (compared.tail if view.of == "tail" else compared.top).estimate
        if found is None:
            raise ValueError(f"{' and '.join(rows)} cannot be compared.")
        return found


def _plain(value: float, digits: int | None) -> str:
    if math.isnan(value):
        raise ValueError("there is no value, or not of each seed.")
    return f"{value:,.{1 if digits is None else digits}f}"


def filled(source: str, studies: Sequence[Any], folder: Path) -> str:
    """Return a discussion with its fields filled.

    Args:
      source: text of discussion.md.
      studies: all of the paper's.
      folder: with their results.

    Raises:
      ValueError: a field names what the results do not have.
    """
    head, text = _parts(source)
    tables: dict[str, Table] = {}

    def fill(found: re.Match) -> str:
        name, kind, rows, digits = found.groups()
        try:
            if name not in tables:
                tables[name] = _table(head[name], studies, folder)
            names = [row.strip() for row in rows.split(" | ")]
            return tables[name].field(kind, names, None if digits is None else int(digits))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{found.group()}: {error}") from error

    text = _FIELD.sub(fill, text).strip()
    if "{" in text:
        raise ValueError(f"no field: {text[text.index('{') :][:60]}")
    return text


def _parts(source: str) -> tuple[dict[str, str], str]:
    """The head as name -> text, and the rest."""
    found = _HEAD.match(source)
    if found is None:
        return {}, source
    lines = re.sub(r"\n +", " ", found.group(1)).splitlines()
    head = dict(line.split(" = ", 1) for line in lines)
    return head, source[found.end() :]


def _table(place: str, studies: Sequence[Any], folder: Path) -> Table:
    name, column, *more = place.split(" / ")
    study = next(study for study in studies if study.short == name)
    result = json.loads(study.result_path(folder).read_text(encoding="utf-8"))
    columns = groups_of(study, result)
    way = AS_PUBLISHED if "as published" in more else ""
    since = [each.removeprefix("since ") for each in more if each.startswith("since ")]
    return Table(
        groups_of_way(columns, result, column, way),
        result["columns"][column + way]["paper"].get("accuracy", {}),
        {name: cell["chosen"] for name, cell in result["columns"][column + way]["methods"].items()},
        groups_of_way(columns, result, since[0], way) if since else None,
    )


def unbound(source: str) -> list[str]:
    """Return the numbers of a discussion that are neither filled in nor among its settings.

    Args:
      source: text of discussion.md.
    """
    head, text = _parts(source)
    plain = " ".join(_FIELD.sub("", text).split())
    bound = [False] * len(plain)
    for phrase in filter(None, head.get("settings", "").split("; ")):
        for found in re.finditer(rf"(?<![\w.]){re.escape(phrase)}(?![\w]|\.\d)", plain):
            bound[found.start() : found.end()] = [True] * (found.end() - found.start())
    return [n.group().rstrip(",") for n in _NUMBER.finditer(plain) if not bound[n.start()]]


def check(paper: str) -> list[str]:
    """Return what is wrong with a paper's discussion.

    Args:
      paper: its folder.
    """
    source = (ROOT / paper / DISCUSSION).read_text(encoding="utf-8")
    studies = importlib.import_module(f"experiments.{paper}.__main__").STUDIES
    page = (ROOT / paper / RESULTS).read_text(encoding="utf-8")
    is_end = page.endswith(f"{filled(source, studies, ROOT / paper)}\n")
    return unbound(source) + ([] if is_end else [f"{RESULTS} does not end with {DISCUSSION}"])


def main() -> None:
    """Print what is wrong with all discussions; exit with 1 if anything is."""
    lost = {paper: check(paper) for paper in PAGES}
    for paper, found in lost.items():
        print(f"{paper}: {', '.join(found) or 'all numbers are of results or settings'}")
    if any(lost.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
