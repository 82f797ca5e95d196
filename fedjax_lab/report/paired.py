"""Paired differences between groups, over their common seeds.

Runs with the same seed share partition, cohorts and mini-batches, so the difference of two methods
varies less than each of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fedjax_lab.estimates import NOTHING, Estimate, estimate, format_estimate, standard_errors
from fedjax_lab.report.runs import Group, Run

NOISE = "≈"  # marks a difference whose interval contains 0


class Difference(NamedTuple):
    """A mean of paired differences.

    Attributes:
      estimate: mean and 95 % interval (Student's t) over the common seeds.
      p: p-value of the two-sided paired t-test; NaN for a single seed.
    """

    estimate: Estimate
    p: float

    @property
    def within_noise(self) -> bool:
        """True if the interval contains 0."""
        half_width = self.estimate.half_width
        return half_width is not None and abs(self.estimate.mean) <= half_width


def paired_difference(
    better: Group, worse: Group, measure: Callable[[Run], float]
) -> Difference | None:
    """Compute ``measure`` of the first group minus that of the second, over common seeds.

    None if there is no common seed; a seed with another partition counts as another seed.
    """
    first = {_key(run): measure(run) for run in better.runs}
    second = {_key(run): measure(run) for run in worse.runs}
    differences = [first[key] - second[key] for key in first if key in second]
    if not differences:
        return None
    found = estimate(differences)
    return Difference(found, _p_value(found))


def _key(run: Run) -> Any:
    partition = run.config.get("partition", {}).get("hash")
    return run.seed, partition, run.config.get("run_config", {}).get("init_seed")


def _p_value(found: Estimate) -> float:
    from scipy.special import stdtr

    if found.half_width is None or math.isnan(found.mean):
        return math.nan
    if found.half_width == 0:
        return 1.0 if found.mean == 0 else 0.0
    t = abs(found.mean) / found.half_width * standard_errors(found.n)
    return float(2 * stdtr(found.n - 1, -t))


def best_group(groups: Sequence[Group], measure: Callable[[Run], float]) -> Group | None:
    """Return the group with the highest mean; None if no mean is a number."""
    means = [estimate([measure(run) for run in group.runs]).mean for group in groups]
    ranked = [-math.inf if math.isnan(mean) else mean for mean in means]
    return groups[ranked.index(max(ranked))] if max(ranked, default=-math.inf) > -math.inf else None


def behind_best(groups: Sequence[Group], measure: Callable[[Run], float]) -> list[list[str]]:
    """Format the cells "behind the best" and "p" of each group."""
    leader = best_group(groups, measure)

    def cells(group: Group) -> list[str]:
        if group is leader:
            return ["best", NOTHING]
        found = paired_difference(leader, group, measure) if leader else None
        if found is None or math.isnan(found.estimate.mean):
            return [NOTHING, NOTHING]
        mark = f" {NOISE}" if found.within_noise else ""
        return [format_estimate(found.estimate, 2) + mark, _format_p(found.p)]

    return [cells(group) for group in groups]


def _format_p(p: float) -> str:
    if math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
