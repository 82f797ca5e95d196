"""A paper's claims as comparisons of a table's methods, and what the results say of them.

A claim is decided by ``experiments.studies.verdicts`` from the results alone: by the top and by
the tail of the runs, for the columns that run its methods as the paper writes them and for those
that run them as its code does.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.studies import chance
from experiments.studies.groups import difference, groups_of
from experiments.studies.measures import ACCURACY, Measure, in_tail
from experiments.studies.verdicts import (
    AT_SCALE,
    CONTRADICTED,
    MARGIN,
    SHOWS,
    UNDECIDED,
    Decision,
    ahead,
    alike,
    both_measures,
    both_ways,
)
from fedjax_lab.estimates import NOTHING, Estimate
from fedjax_lab.markdown import markdown_table
from fedjax_lab.report.cells import UNSOLVED, worst_residual
from fedjax_lab.report.paired import best_group
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.tables import UNSOLVED_NOTE

AS_PUBLISHED = ", as published"
_UNKNOWN = "not known"
_POINT = "a point" if MARGIN == 1 else f"{MARGIN:g} points"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says of its table, as a comparison of methods that a study runs.

    Attributes:
      text: the claim.
      study: the study's short name.
      column: of the study; the one as published is named after it.
      ahead: the method that is said to be ahead.
      of: those that it is said to be ahead of; of several, the best counts.
      alike: whether it is said to be as good as ``of``, and not ahead.
      measure: of a run; more is better.
      by: how much it is said to be ahead, at least.
      since: a column whose measure is subtracted, of the same method and seed.
      why: why it is contradicted, in a sentence that says what was measured.
      left_out: rivals of the paper's that were not run, the strongest by its numbers first.
      has_numbers: whether the paper prints numbers, by which the first one is its strongest.
      reversed_by: text of a claim: the same one, in an experiment nearer to the paper's.
    """

    text: str
    study: str
    column: str
    ahead: str
    of: Sequence[str]
    alike: bool = False
    measure: Measure = ACCURACY
    by: float = 0.0
    since: str = ""
    why: str = ""
    left_out: Sequence[str] = ()
    has_numbers: bool = True
    reversed_by: str = ""

    @property
    def headline(self) -> str:
        """The claim with its rivals, as far as its text does not name them, and what is missing."""
        found = self.text
        if len(self.of) > 1 and any(name not in found for name in self.of):
            found += f": of {', '.join(self.of)}"
        if not self.left_out:
            return found
        first, *rest = self.left_out
        strongest = ", the paper's strongest rival" if self.has_numbers else ""
        others = f", and without {', '.join(rest)}" if rest else ""
        return f"{found}; without {first}{strongest}{others}"


class Compared(NamedTuple):
    """What a column says of a claim.

    Attributes:
      top, tail: decisions.
      change: the difference by top less that by tail; None where one is missing.
      rivals: methods of ``Claim.of`` that were run.
      evaluations: those that the tail is the mean of.
    """

    top: Decision = Decision(NOTHING)
    tail: Decision = Decision(NOTHING)
    change: Estimate | None = None
    rivals: int = 0
    evaluations: int = 0

    @property
    def verdict(self) -> str:
        """By both measures."""
        return both_measures(self.top, self.tail, self.change)

    @property
    def texts(self) -> tuple[str, str]:
        """Both decisions; that of a tail of one evaluation says so."""
        alone = self.evaluations == 1 and self.tail.estimate is not None
        return str(self.top), f"{self.tail}, one evaluation" if alone else str(self.tail)


class Judged(NamedTuple):
    """A claim with what the results say of it.

    Attributes:
      claim: the claim.
      written, published: what the columns of both ways say.
      verdict: over both.
      marked: whether quadratic programs of a method that it names were not solved.
    """

    claim: Claim
    written: Compared
    published: Compared
    verdict: str
    marked: bool = False

    @property
    def comparisons(self) -> list[Compared]:
        """The ways in which the claim was tested."""
        return [way for way in (self.written, self.published) if way.top.estimate is not None]

    @property
    def has_short_tail(self) -> bool:
        """Whether a tail that decides it is a single evaluation."""
        return any(way.evaluations == 1 for way in self.comparisons)

    @property
    def is_level(self) -> bool:
        """Whether it is undecided, and accuracy differs by less than ``MARGIN`` in every way."""
        if self.verdict != UNDECIDED or self.claim.measure != ACCURACY:
            return False
        decisions = [each for way in self.comparisons for each in (way.top, way.tail)]
        found = [each.estimate for each in decisions if each.estimate is not None]
        return bool(found) and all(alike(estimate).verdict == SHOWS for estimate in found)


def decide(
    claim: Claim, groups: Mapping[str, Group], before: Mapping[str, Group] | None = None
) -> Compared:
    """Decide a claim in one column, by top and by tail.

    Args:
      claim: the claim.
      groups: method -> its final runs.
      before: those of the column ``claim.since``.
    """
    top, tail = claim.measure.top, claim.measure.tail
    if before is not None:
        top, tail = _change(top, before), None if tail is None else _change(tail, before)
    rivals = [groups[name] for name in claim.of if name in groups]
    if claim.ahead not in groups or not rivals:
        return Compared()
    first = best_group(rivals, top)
    if first is None:  # runs of each of them diverged, so that none has a mean
        return Compared(Decision(UNDECIDED), rivals=len(rivals))
    method = groups[claim.ahead]
    by_top = _decided(claim, method, first, top)
    last = best_group(rivals, tail) if tail is not None else None
    if tail is None or last is None:
        return Compared(by_top, rivals=len(rivals))
    ends = {run.seed: tail(run) for run in last.runs}

    def fall(run: Run) -> float:
        end = tail(run) if run.algorithm == claim.ahead else ends.get(run.seed, math.nan)
        return top(run) - end

    return Compared(
        by_top,
        _decided(claim, method, last, tail),
        difference(method, first, fall),
        len(rivals),
        min(in_tail(run) for run in method.runs),
    )


def _decided(claim: Claim, method: Group, best: Group, measure: Callable[[Run], float]) -> Decision:
    found = difference(method, best, measure)
    if found is None or math.isnan(found.mean):
        return Decision(NOTHING)
    decision = alike(found) if claim.alike else ahead(found, claim.by)
    return decision._replace(paired=method.runs[0].config["drawn"] == best.runs[0].config["drawn"])


def _change(measure: Callable[[Run], float], before: Mapping[str, Group]) -> Callable[[Run], float]:
    start = {(r.algorithm, r.seed): measure(r) for group in before.values() for r in group.runs}
    return lambda run: measure(run) - start.get((run.algorithm, run.seed), math.nan)


def judge(claims: Sequence[Claim], studies: Sequence[Any], folder: Path) -> list[Judged]:
    """Decide all claims of a paper.

    Args:
      claims: of the paper.
      studies: all of the paper's.
      folder: with their results.
    """
    by_name = {study.short: study for study in studies}
    kept: dict[str, Any] = {}
    found: dict[str, Judged] = {}
    # Those that reverse others come first.
    for claim in sorted(claims, key=lambda claim: bool(claim.reversed_by)):
        study = by_name[claim.study]
        if claim.study not in kept:
            path = study.result_path(folder)
            result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
            kept[claim.study] = (result, groups_of(study, result) if result else {})
        result, columns = kept[claim.study]
        ways = []
        marked = False
        for way in ("", AS_PUBLISHED):
            groups = groups_of_way(columns, result, claim.column, way)
            before = groups_of_way(columns, result, claim.since, way) if claim.since else None
            is_whole = not _missing(claim, study, result, way, groups)
            ways.append(decide(claim, groups, before) if is_whole else Compared())
            marked = marked or _is_marked(claim, groups)
        written, published = ways
        said = both_ways(*_at_scale(ways, found.get(claim.reversed_by)))
        found[claim.text] = Judged(claim, written, published, said, marked)
    return [found[claim.text] for claim in claims]


def _missing(
    claim: Claim, study: Any, result: Any, way: str, groups: Mapping[str, Group]
) -> list[str]:
    """Rivals that the study has in this column and that were not run yet."""
    if not groups:
        return []
    scale = study.scales[result["scale"]]
    columns = [scale.columns.get(claim.column + way)]
    if way and columns[0] is not None and not columns[0].override:  # as in ``groups_of_way``
        columns.append(scale.columns.get(claim.column))
    planned = {name for c in columns if c is not None for name in study.shown(scale, c)}
    return [name for name in claim.of if name in planned and name not in groups]


def _at_scale(ways: Sequence[Compared], larger: Judged | None) -> list[str]:
    """The verdicts of both ways, of which a larger experiment reverses those that contradict."""
    if larger is None:
        return [way.verdict for way in ways]
    return [
        AT_SCALE
        if way.verdict == CONTRADICTED and SHOWS in (again.top.verdict, again.tail.verdict)
        else way.verdict
        for way, again in zip(ways, (larger.written, larger.published), strict=True)
    ]


def _is_marked(claim: Claim, groups: Mapping[str, Group]) -> bool:
    """Whether a method that a claim names has runs whose quadratic programs were not solved."""
    named = [groups[name] for name in (claim.ahead, *claim.of) if name in groups]
    return any(worst_residual(run) for group in named for run in group.runs)


def groups_of_way(
    columns: Mapping[str, Sequence[Group]], result: Any, name: str, way: str
) -> dict[str, Group]:
    """Return a column's methods; those that its code runs as they are written are not run again.

    Args:
      columns: name -> groups, of ``result``.
      result: a study's stored results.
      name: the column's name, as written.
      way: "" or ``AS_PUBLISHED``.
    """
    if name + way not in columns:
        return {}
    found = columns[name + way]
    if way and not result["columns"][name + way]["override"]:
        found = [*columns.get(name, ()), *found]
    return {group.label: group for group in found}


def claims_section(judged: Sequence[Judged]) -> list[str]:
    """Return Markdown of what ``judge`` found; nothing for a paper without claims."""
    if not judged:
        return []
    heads = ["top, as written", "tail, as written", "top, as published", "tail, as published"]
    texts = [[*one.written.texts, *one.published.texts] for one in judged]
    used = [i for i in range(len(heads)) if any(cells[i] != NOTHING for cells in texts)]
    rows = [["claim", *(heads[i] for i in used), "verdict"]]
    for one, cells in zip(judged, texts, strict=True):
        name = f" [{one.claim.measure.name}]" if one.claim.measure.name else ""
        mark = f" {UNSOLVED}" if one.marked else ""
        level = f", within {_POINT}" if one.is_level else ""
        shown = [cells[i] for i in used]
        rows.append([f"{one.claim.headline}{name}{mark}", *shown, f"{one.verdict}{level}"])
    contradicted = [one.claim for one in judged if CONTRADICTED in one.verdict]
    return [
        "## Claims",
        "Each claim as a comparison of a table's methods: the paired difference with its 95 % "
        "interval, in points of accuracy where brackets name nothing else. Of several rivals, the "
        "one with the best mean counts. Top is a run's best evaluation, tail the mean of those in "
        "the last tenth of its rounds. Methods run as the paper writes them and as its code runs "
        "them. Behind an undecided difference stands the number of seeds that would decide it if "
        "mean and spread stayed as they are. [The protocol](../PROTOCOL.md) has the rules.",
        f"{chance_note(judged)} {tail_note(judged)}".rstrip(),
        markdown_table(rows),
        *([UNSOLVED_NOTE] if any(one.marked for one in judged) else []),
        *(["Why a claim is contradicted here:"] if contradicted else []),
        *(
            ["\n".join(f"- {claim.text}: {claim.why or _UNKNOWN}." for claim in contradicted)]
            if contradicted
            else []
        ),
    ]


def level_note(judged: Sequence[Judged]) -> str:
    """Say how many undecided claims are about methods that hardly differ; "" if none is undecided.

    Args:
      judged: from ``judge``.
    """
    undecided = sum(one.verdict == UNDECIDED for one in judged)
    level = sum(one.is_level for one in judged)
    if not undecided:
        return ""
    return (
        f"Of {undecided} undecided claims, {level} compare methods whose accuracy differs by less "
        f"than {_POINT}: two one-sided tests say so, by both measures and in both ways."
    )


def tail_note(judged: Sequence[Judged]) -> str:
    """Say how many tails are single evaluations; "" if none is.

    Args:
      judged: from ``judge``.
    """
    with_tail = [one for one in judged if any(way.evaluations for way in one.comparisons)]
    alone = sum(one.has_short_tail for one in with_tail)
    if not alone:
        return ""
    return (
        f"In {alone} of the {len(with_tail)} claims that have a tail, it is a single evaluation, "
        "the last one: too few rounds were evaluated."
    )


def chance_note(judged: Sequence[Judged]) -> str:
    """Say how many claims there are, and how many would be decided by chance.

    Args:
      judged: from ``judge``.
    """
    tests = [(one.claim, way) for one in judged for way in one.comparisons]
    plain = [way for claim, way in tests if not claim.alike and not claim.by]
    chances = [chance.of(way.rivals, way.top.estimate.n) for way in plain if way.top.estimate]
    if not chances:  # their methods did not run
        return f"{len(judged)} claims, none of which could be tested."
    shows, contradicted = (sum(values) / 100 for values in zip(*chances, strict=True))
    most = max(way.rivals for way in plain)
    against = (
        f" (against one rival both have 2.5 %; against the best of {most}, the most here, "
        f"{chance.of(most, 3).shows:.2g} and {chance.of(most, 3).contradicted:.1f} % with three "
        f"seeds, {chance.of(most, 10).shows:.1g} and {chance.of(most, 10).contradicted:.1f} % with "
        "ten)"
    )
    return (
        f"{len(judged)} claims in {len(tests)} comparisons, of which {len(plain)} say that a "
        f"method is ahead. If no method differed from another, about {shows:.1f} of these would "
        f"show by chance by one measure, and {contradicted:.1f} would be contradicted"
        f"{against if most > 1 else ''}."
    )
