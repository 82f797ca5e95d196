"""Paired differences between groups, over their common seeds.

Runs with the same seed share partition, cohorts and mini-batches, so the difference of two methods
varies less than each of them.
"""

import math
from collections.abc import Callable, Sequence

from fedjax_lab.estimates import (
    NOTHING,
    Estimate,
    digits_of,
    estimate,
    format_estimate,
    standard_errors,
)
from fedjax_lab.report.runs import Group, Run, what_is_drawn

NOISE = "≈"  # marks a difference whose interval contains 0


def within_noise(difference: Estimate) -> bool:
    """Return True if the interval of a mean difference contains 0."""
    mean, half_width, _ = difference
    return half_width is not None and abs(mean) <= half_width


def p_value(difference: Estimate) -> float:
    """Return the p-value of the two-sided paired t-test; NaN for a single seed."""
    from scipy.special import stdtr

    mean, half_width, n = difference
    if half_width is None or math.isnan(mean):
        return math.nan
    if half_width == 0:
        return 1.0 if mean == 0 else 0.0
    t = abs(mean) / half_width * standard_errors(n)
    return float(2 * stdtr(n - 1, -t))


def paired_difference(
    better: Group, worse: Group, measure: Callable[[Run], float]
) -> Estimate | None:
    """Estimate ``measure`` of the first group minus that of the second, over common seeds.

    None if there is no common seed; a seed with another partition counts as another seed.
    """
    first = {what_is_drawn(run): measure(run) for run in better.runs}
    second = {what_is_drawn(run): measure(run) for run in worse.runs}
    differences = [first[key] - second[key] for key in first if key in second]
    return estimate(differences) if differences else None


def best_group(groups: Sequence[Group], measure: Callable[[Run], float]) -> Group | None:
    """Return the group with the highest mean; None if no mean is a number."""
    means = [group.over_seeds(measure).mean for group in groups]
    ranked = [-math.inf if math.isnan(mean) else mean for mean in means]
    return groups[ranked.index(max(ranked))] if max(ranked, default=-math.inf) > -math.inf else None


def compare_with_best(
    groups: Sequence[Group], measure: Callable[[Run], float]
) -> tuple[Group | None, list[Estimate | None]]:
    """Return the best group, and its ``paired_difference`` from each other group."""
    leader = best_group(groups, measure)
    return leader, [
        paired_difference(leader, group, measure) if leader and group is not leader else None
        for group in groups
    ]


def behind_best(
    groups: Sequence[Group], measure: Callable[[Run], float], is_error: bool = False
) -> list[list[str]]:
    """Format the cells "behind the best" and "p" of each group.

    Args:
      is_error: whether decimals follow from the size of the differences; otherwise two.
    """
    leader, behind = compare_with_best(groups, measure)
    largest = max((abs(found.mean) for found in behind if found), default=math.nan)
    digits = digits_of([largest], is_error)

    def cells(group: Group, found: Estimate | None) -> list[str]:
        if group is leader:
            return ["best", NOTHING]
        if found is None or math.isnan(found.mean):
            return [NOTHING, NOTHING]
        mark = f" {NOISE}" if within_noise(found) else ""
        return [format_estimate(found, digits) + mark, _format_p(p_value(found))]

    return [cells(group, found) for group, found in zip(groups, behind, strict=True)]


def _format_p(p: float) -> str:
    if math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
