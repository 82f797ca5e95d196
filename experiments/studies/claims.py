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

from experiments.studies.groups import groups_of
from experiments.studies.measures import ACCURACY, Measure
from experiments.studies.verdicts import (
    CHANCE,
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
from fedjax_lab.estimates import NOTHING, markdown_table
from fedjax_lab.report.paired import best_group, paired_difference
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.tables import UNSOLVED, UNSOLVED_NOTE, worst_residual

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


class Judged(NamedTuple):
    """A claim with what the results say of it.

    Attributes:
      claim: the claim.
      decisions: by top and by tail as written, then by top and by tail as published.
      verdict: over all four.
      marked: whether quadratic programs of a method that it names were not solved.
    """

    claim: Claim
    decisions: tuple[Decision, ...]
    verdict: str
    marked: bool

    @property
    def comparisons(self) -> int:
        """In how many ways the claim was tested: as written, as published."""
        return sum(self.decisions[i].estimate is not None for i in (0, 2))

    @property
    def is_level(self) -> bool:
        """Whether it is undecided, and accuracy differs by less than ``MARGIN`` in every way."""
        if self.verdict != UNDECIDED or self.claim.measure != ACCURACY:
            return False
        found = [each.estimate for each in self.decisions if each.estimate is not None]
        return all(alike(estimate).verdict == SHOWS for estimate in found)


def decide(
    claim: Claim, groups: Mapping[str, Group], before: Mapping[str, Group] | None = None
) -> tuple[Decision, Decision]:
    """Decide a claim in one column, by top and by tail.

    Args:
      claim: the claim.
      groups: method -> its final runs.
      before: those of the column ``claim.since``.
    """
    top, tail = claim.measure.top, claim.measure.tail
    first = _decide_by(top, claim, groups, before)
    return first, Decision(NOTHING) if tail is None else _decide_by(tail, claim, groups, before)


def _decide_by(
    measure: Callable[[Run], float],
    claim: Claim,
    groups: Mapping[str, Group],
    before: Mapping[str, Group] | None,
) -> Decision:
    measure = measure if before is None else _change(measure, before)
    rivals = [groups[name] for name in claim.of if name in groups]
    best = best_group(rivals, measure)
    if claim.ahead not in groups or best is None:
        return Decision(NOTHING)
    found = paired_difference(groups[claim.ahead], best, measure)
    if found is None or math.isnan(found.estimate.mean):
        return Decision(NOTHING)
    return alike(found.estimate) if claim.alike else ahead(found.estimate, claim.by)


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
    found = []
    for claim in claims:
        study = by_name[claim.study]
        if claim.study not in kept:
            path = study.result_path(folder)
            result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
            kept[claim.study] = (result, groups_of(study, result) if result else {})
        result, columns = kept[claim.study]
        decisions: list[Decision] = []
        marked = False
        for way in ("", AS_PUBLISHED):
            groups = _groups(columns, result, claim.column, way)
            before = _groups(columns, result, claim.since, way) if claim.since else None
            decisions += decide(claim, groups, before)
            marked = marked or _is_marked(claim, groups)
        top, tail, published_top, published_tail = (each.verdict for each in decisions)
        said = both_ways(both_measures(top, tail), both_measures(published_top, published_tail))
        found.append(Judged(claim, tuple(decisions), said, marked))
    return found


def _is_marked(claim: Claim, groups: Mapping[str, Group]) -> bool:
    """Whether a method that a claim names has runs whose quadratic programs were not solved."""
    named = [groups[name] for name in (claim.ahead, *claim.of) if name in groups]
    return any(worst_residual(run) for group in named for run in group.runs)


def _groups(columns: Mapping[str, Any], result: Any, name: str, way: str) -> dict[str, Group]:
    """A column's methods; those that its code runs as they are written are not run again."""
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
    used = [i for i in range(len(heads)) if any(one.decisions[i].estimate for one in judged)]
    rows = [["claim", *(heads[i] for i in used), "verdict"]]
    for one in judged:
        name = f" [{one.claim.measure.name}]" if one.claim.measure.name else ""
        mark = f" {UNSOLVED}" if one.marked else ""
        cells = [str(one.decisions[i]) for i in used]
        level = f", within {_POINT}" if one.is_level else ""
        rows.append([f"{one.claim.text}{name}{mark}", *cells, f"{one.verdict}{level}"])
    contradicted = [one.claim for one in judged if CONTRADICTED in one.verdict]
    return [
        "## Claims",
        "Each claim as a comparison of a table's methods: the paired difference with its 95 % "
        "interval, in points of accuracy where brackets name nothing else. Top is a run's best "
        "evaluation, tail the mean over the last tenth of its rounds. Methods run as the paper "
        "writes them and as its code runs them. Behind an undecided difference stands the number "
        "of seeds that would decide it if mean and spread stayed as they are. "
        "[The protocol](../PROTOCOL.md) has the rules.",
        chance_note(judged),
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


def chance_note(judged: Sequence[Judged]) -> str:
    """Say how many claims there are and how many would show by chance.

    Args:
      judged: from ``judge``.
    """
    tests = sum(one.comparisons for one in judged)
    return (
        f"{len(judged)} claims in {tests} comparisons. If no method differed from another, "
        f"{CHANCE:.1%} of the comparisons, about {CHANCE * tests:.1f}, would show by chance, and "
        "as many would be contradicted."
    )
