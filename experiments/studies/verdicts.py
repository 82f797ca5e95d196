"""The rules by which a difference over seeds decides a claim (experiments/PROTOCOL.md)."""

import math
from typing import NamedTuple

from fedjax_lab.estimates import NOTHING, Estimate, format_estimate

SHOWS, CONTRADICTED, UNDECIDED = "shows", "contradicted", "undecided"
DEPENDS = "depends on the measure"
AT_SCALE = "contradicted at this scale"
WAYS = ("written", "published")
MARGIN = 1.0  # of claims that two methods are alike, in points
_CONFIDENCE = 0.95  # of each one-sided test of "alike"
_MOST_SEEDS = 1000


class Decision(NamedTuple):
    """What a difference says.

    Attributes:
      verdict: ``SHOWS``, ``CONTRADICTED`` or ``UNDECIDED``; a dash if there is no difference.
      estimate: the difference and its 95 % interval.
      seeds: how many would decide if mean and spread stayed as they are; None: it is decided, or
        ``_MOST_SEEDS`` would not do.
      paired: whether it is of pairs of runs; if not, it is one of means.
    """

    verdict: str
    estimate: Estimate | None = None
    seeds: int | None = None
    paired: bool = True

    def __str__(self) -> str:
        """Such as "undecided: 0.6 ± 0.7 (5 seeds)"."""
        if self.estimate is None:
            return NOTHING
        text = f"{self.verdict}: {format_difference(self.estimate)}"
        text += "" if self.paired else ", not paired"
        if self.verdict != UNDECIDED or self.estimate.half_width is None:
            return text
        return f"{text} ({self.seeds or f'> {_MOST_SEEDS:,}'} seeds)"


def format_difference(found: Estimate) -> str:
    """Format with one digit, or two where one would hide on which side of 0 the interval ends."""
    half = found.half_width
    close = half is not None and abs(abs(found.mean) - half) < 0.1
    return format_estimate(found, 2 if close or abs(found.mean) < 0.1 else 1)


def ahead(found: Estimate, by: float = 0.0) -> Decision:
    """Decide "ahead by at least so much" from the 95 % interval.

    Args:
      found: the paired difference.
      by: how much.
    """
    if _says_nothing(found):
        return Decision(NOTHING)
    distance, half = found.mean - by, _half(found)
    if abs(distance) > half:
        return Decision(SHOWS if distance > 0 else CONTRADICTED, found)
    return Decision(UNDECIDED, found, seeds_needed(found, abs(distance), 0.5 + _CONFIDENCE / 2))


def alike(found: Estimate, margin: float = MARGIN) -> Decision:
    """Decide "as good as": two one-sided tests against the margin, at 5 % each.

    Args:
      found: the paired difference.
      margin: in the measure's unit.
    """
    if math.isnan(found.mean):
        return Decision(NOTHING)
    distance = abs(found.mean) - margin
    half = _half(found) * _quantile(_CONFIDENCE, found.n) / _quantile(0.975, found.n)
    if abs(distance) > half:
        return Decision(SHOWS if distance < 0 else CONTRADICTED, found)
    return Decision(UNDECIDED, found, seeds_needed(found, abs(distance), _CONFIDENCE))


def seeds_needed(found: Estimate, distance: float, quantile: float) -> int | None:
    """Return the number of seeds with which an interval would be narrower than a distance.

    Args:
      found: the difference over today's seeds.
      distance: of its mean from the value that is to be excluded.
      quantile: of Student's t that makes the interval.
    """
    if found.half_width is None:
        return None
    deviation = found.half_width * math.sqrt(found.n) / _quantile(0.975, found.n)
    counts = range(found.n + 1, _MOST_SEEDS + 1)
    return next(
        (n for n in counts if _quantile(quantile, n) * deviation / math.sqrt(n) < distance), None
    )


def _says_nothing(found: Estimate) -> bool:
    """Whether runs have no value, or are equal to the last bit, as where none reaches a target."""
    return math.isnan(found.mean) or found.mean == found.half_width == 0


def _half(found: Estimate) -> float:
    return math.inf if found.half_width is None else found.half_width


def _quantile(share: float, n: int) -> float:
    from scipy import stats

    return float(stats.t.ppf(share, n - 1)) if n > 1 else math.inf


def both_measures(top: Decision, tail: Decision, change: Estimate | None) -> str:
    """Join the verdicts on top and tail.

    Two verdicts that differ are a difference between the measures only if the measures differ: one
    interval may contain 0 and another, hardly shifted, may not.

    Args:
      top, tail: decisions; a dash where there is no such measure.
      change: the difference by top less that by tail, paired over the seeds.
    """
    if NOTHING in (top.verdict, tail.verdict):
        return top.verdict if tail.verdict == NOTHING else tail.verdict
    if top.verdict == tail.verdict:
        return top.verdict
    return UNDECIDED if change is not None and ahead(change).verdict == UNDECIDED else DEPENDS


def both_ways(written: str, published: str) -> str:
    """Join the verdicts on a method as written and as published.

    Args:
      written, published: verdicts; a dash where there is no such column.
    """
    if published == NOTHING or written == published:
        return written
    if written == NOTHING:
        return published
    said = dict(zip(WAYS, (written, published), strict=True))
    for clear in (SHOWS, CONTRADICTED):
        for way in WAYS:
            if said[way] == clear:
                return one_way(clear, way)
    return AT_SCALE if AT_SCALE in said.values() else DEPENDS


def one_way(verdict: str, way: str) -> str:
    """Name a verdict that holds in one way only.

    Args:
      verdict: ``SHOWS`` or ``CONTRADICTED``.
      way: one of ``WAYS``.
    """
    return f"{verdict} only as {way}"
