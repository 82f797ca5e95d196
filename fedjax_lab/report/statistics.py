"""Statistics of a run: last, best or mean value, and when it reaches a target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

ACCURACY, PERPLEXITY = "accuracy", "perplexity"
ERROR = "mean_squared_error"  # in place of the accuracy, where a run is a regression
OWN = "own_"  # before a score's name: of the models that clients use, on their own test examples
TAIL = 10  # one part in so many of the rounds, the last one, is a run's tail


def number(value: Any) -> float:
    """Convert a JSON number to a float; null and a missing value are NaN."""
    return math.nan if value is None else float(value)


def last(values: Sequence[float]) -> float:
    """Return the last value."""
    return values[-1]


def best(values: Sequence[float]) -> float:
    """Return the largest value without NaN; NaN if there is no other."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def lowest(values: Sequence[float]) -> float:
    """Return the smallest value without NaN; NaN if there is no other."""
    return -best([-value for value in values])


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values."""
    return math.fsum(values) / len(values) if values else math.nan


def tail_start(rounds: int) -> int:
    """Return the first round of the last tenth, which has at least one round."""
    return rounds - -(-rounds // TAIL) + 1


def reach(
    rows: Sequence[Mapping[str, Any]], target: float, metric: str = ACCURACY
) -> Mapping[str, Any] | None:
    """Return the first row whose accuracy is at least ``target``, or None.

    None, too, if a row before it was not scored, which may have been the first one.
    """
    for row in rows:
        if metric not in row:
            return None
        if number(row[metric]) >= target:
            return row
    return None
