"""One number for a run: its last, best or mean value, and when it reaches a target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

ERROR = "mean_squared_error"  # in place of the accuracy, where a run is a regression
LAST = 10  # evaluations whose mean is reported


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


def mean_of_last(values: Sequence[float]) -> float:
    """The mean of the last 10 values, or of all if they are fewer."""
    tail = values[-LAST:]
    return math.fsum(tail) / len(tail)


def reach(rows: Sequence[Mapping[str, Any]], target: float) -> Mapping[str, Any] | None:
    """The first row whose accuracy is at least ``target``; None if there is none."""
    return next((row for row in rows if number(row.get("accuracy")) >= target), None)
