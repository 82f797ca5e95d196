"""Means with intervals over seeds, and when a run reaches a target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LAST = 10  # evaluations whose mean is reported


class Estimate(NamedTuple):
    """A mean over seeds.

    Attributes:
      mean: NaN if a seed has no value.
      half_width: of the 95 % interval (Student's t); None for a single seed.
      n: number of seeds.
    """

    mean: float
    half_width: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of independent values: mean ± t(0.975, n - 1) s / sqrt(n).

    Raises:
      ValueError: there are no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("values is empty; there must be at least one.")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    from scipy import stats  # jax brings it; only a report needs it

    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return Estimate(mean, float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n), n)


def number(value: Any) -> float:
    """A number of a JSON file as a float; null, which stands for NaN, and nothing are NaN."""
    return math.nan if value is None else float(value)


def last(values: Sequence[float]) -> float:
    """The last value."""
    return values[-1]


def best(values: Sequence[float]) -> float:
    """The largest value, NaN left out; NaN if there is nothing else."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def mean_of_last(values: Sequence[float]) -> float:
    """The mean of the last 10 values, or of all if they are fewer."""
    tail = values[-LAST:]
    return math.fsum(tail) / len(tail)


def reach(rows: Sequence[Mapping[str, Any]], target: float) -> Mapping[str, Any] | None:
    """The first row whose accuracy is at least ``target``; None if there is none."""
    return next((row for row in rows if number(row.get("accuracy")) >= target), None)
