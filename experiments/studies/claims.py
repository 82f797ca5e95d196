"""A paper's claims as comparisons of a table's methods, and which of them show.

A claim is decided by the rules of experiments/PROTOCOL.md from the results alone, once for the
columns that run its methods as the paper writes them and once as its code does.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.studies.groups import groups_of
from fedjax_lab.estimates import NOTHING, format_estimate, markdown_table
from fedjax_lab.report.paired import Difference, best_group, paired_difference
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.statistics import number
from fedjax_lab.report.tables import UNSOLVED, UNSOLVED_NOTE, worst_residual

SHOWS, OPEN, FAILS = "shows", "open", "does not show"
ALIKE = 1.0  # points
AS_PUBLISHED = ", as published"


def top(run: Run) -> float:
    """A run's top accuracy in percent."""
    return 100 * max((v for v in run.values("accuracy") if not math.isnan(v)), default=math.nan)


def lost(run: Run) -> float:
    """What of it is gone at the end, negative: points."""
    return 100 * run.values("accuracy")[-1] - top(run)


def low_perplexity(run: Run) -> float:
    """Minus the lowest perplexity."""
    return -min((v for v in run.values("perplexity") if not math.isnan(v)), default=math.nan)


def flatness(run: Run) -> float:
    """Minus the Hessian's largest eigenvalue at the last model."""
    values = run.landscape.get("eigenvalues") or [math.nan]
    return -number(values[0])


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
    """

    text: str
    study: str
    column: str
    ahead: str
    of: Sequence[str]
    alike: bool = False
    measure: Callable[[Run], float] = top
    by: float = 0.0
    since: str = ""


def decide(
    claim: Claim, groups: Mapping[str, Group], before: Mapping[str, Group] | None = None
) -> tuple[str, Difference | None]:
    """What a column says of a claim: a verdict, and the difference behind it.

    Args:
      claim: the claim.
      groups: method -> its final runs.
      before: those of the column ``claim.since``.
    """
    measure = claim.measure if before is None else _change(claim.measure, before)
    rivals = [groups[name] for name in claim.of if name in groups]
    best = best_group(rivals, measure)
    if claim.ahead not in groups or best is None:
        return NOTHING, None
    found = paired_difference(groups[claim.ahead], best, measure)
    if found is None or math.isnan(found.estimate.mean):
        return NOTHING, found
    mean, half = found.estimate.mean - claim.by, found.estimate.half_width
    half = math.inf if half is None else half
    if claim.alike:
        outside = abs(mean) - half > ALIKE
        return SHOWS if abs(mean) <= ALIKE else FAILS if outside else OPEN, found
    return SHOWS if mean - half > 0 else FAILS if mean <= 0 else OPEN, found


def _change(measure: Callable[[Run], float], before: Mapping[str, Group]) -> Callable[[Run], float]:
    start = {(r.algorithm, r.seed): measure(r) for group in before.values() for r in group.runs}
    return lambda run: measure(run) - start.get((run.algorithm, run.seed), math.nan)


def verdict(written: str, published: str) -> str:
    """Both ways in one word.

    Args:
      written, published: what ``decide`` says of each; a dash where there is no such column.
    """
    if published == NOTHING or written == published:
        return written
    if SHOWS in (written, published):
        return f"{SHOWS} only as {'written' if written == SHOWS else 'published'}"
    return OPEN


def judge(claims: Sequence[Claim], studies: Sequence[Any], folder: Path) -> list[list[str]]:
    """Rows (claim, as written, as published, verdict) of a paper.

    Args:
      claims: of the paper.
      studies: all of the paper's.
      folder: with their results.
    """
    by_name = {study.short: study for study in studies}
    rows = []
    for claim in claims:
        study = by_name[claim.study]
        path = study.result_path(folder)
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        columns = groups_of(study, result) if result else {}
        cells, verdicts = [], []
        for way in ("", AS_PUBLISHED):
            groups, before = (
                _groups(columns, result, name, way) for name in (claim.column, claim.since)
            )
            said, found = decide(claim, groups, before if claim.since else None)
            verdicts.append(said)
            shown = NOTHING if found is None else format_estimate(found.estimate, 1)
            mark = f" {UNSOLVED}" if _is_marked(claim, groups) else ""
            cells.append(shown if shown == NOTHING else f"{said}: {shown}{mark}")
        rows.append([claim.text, *cells, verdict(*verdicts)])
    return rows


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


def claims_section(judged: Sequence[Sequence[str]]) -> list[str]:
    """Markdown of what ``judge`` found; nothing for a paper without claims."""
    if not judged:
        return []
    return [
        "## Claims",
        "Each claim as a comparison of a table's methods: the paired difference in points of top "
        "accuracy where nothing else is said, with its 95 % interval, as the paper writes its "
        "methods and as its code runs them. [The protocol](../PROTOCOL.md) says what shows, what "
        "does not, and what is open.",
        markdown_table([["claim", "as written", "as published", "verdict"], *judged]),
        *([UNSOLVED_NOTE] if any(UNSOLVED in cell for row in judged for cell in row) else []),
    ]
