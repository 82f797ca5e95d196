"""One number for a run: its last, best or mean value, and when it reaches a target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

ERROR = "mean_squared_error"  # in place of the accuracy, where a run is a regression
TAIL = 10  # one part in so many of the rounds, the last one, is a run's tail


def number(value: Any) -> float:
    """A number of a JSON file as a float; null, which stands for NaN, and nothing are NaN."""
    return math.nan if value is None else float(value)


def last(values: Sequence[float]) -> float:
    """The last value."""
    return values[-1]


def best(values: Sequence[float]) -> float:
    """The largest value, NaN left out; NaN if there is nothing else."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def lowest(values: Sequence[float]) -> float:
    """The smallest value, NaN left out; NaN if there is nothing else."""
    return -best([-value for value in values])


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def tail_start(rounds: int) -> int:
    """The first round of the last tenth, which has one round at least.

    Args:
      rounds: of the whole run.
    """
    return rounds - -(-rounds // TAIL) + 1


def reach(rows: Sequence[Mapping[str, Any]], target: float) -> Mapping[str, Any] | None:
    """The first row whose accuracy is at least ``target``; None if there is none."""
    return next((row for row in rows if number(row.get("accuracy")) >= target), None)
