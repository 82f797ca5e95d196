"""Scores of runs, and statistics of one: best or mean value, and when it reaches a target."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_lab.estimates import digits_of

ACCURACY, PERPLEXITY = "accuracy", "perplexity"
ERROR = "mean_squared_error"  # in place of the accuracy, where a run is a regression
OWN = "own_"  # before a score's name: of the models that clients use, on their own test examples
TAIL = 10  # one part in so many of the rounds, the last one, is a run's tail
ROUNDING = 1e-6  # of an accuracy, as a share of it: in float32, 7 right of 10 are below 0.7


class Score(NamedTuple):
    """The score that compares runs.

    Attributes:
      metric: what runs are scored by: "accuracy", "perplexity" (such runs are compared by their
        accuracy), "mean_squared_error", or a name that the user chose; "" if it is unknown.
      name: the score's name in rows, such as "accuracy", or "own_accuracy" where a run has personal
        models: that of the model that each client uses, on the client's own test examples.
      sign: -1 if less is better, else 1.
    """

    metric: str
    name: str
    sign: float = 1.0

    @property
    def is_own(self) -> bool:
        """True if it is of the models that the clients use."""
        return self.name.startswith(OWN)

    @property
    def of_global_model(self) -> str:
        """Name of the global model's score in rows."""
        return self.name.removeprefix(OWN)

    @property
    def is_accuracy(self) -> bool:
        """True for an accuracy, which is shown in percent."""
        return self.of_global_model == ACCURACY

    @property
    def scale(self) -> float:
        """Factor from a row's number to the number that is shown."""
        return 100.0 if self.is_accuracy else 1.0

    @property
    def unit(self) -> str:
        """Unit behind a column's name."""
        return " (%)" if self.is_accuracy else ""

    @property
    def words(self) -> str:
        """The global model's score in words, such as "mean squared error"."""
        return self.of_global_model.replace("_", " ")

    def digits(self, values: Iterable[float]) -> int:
        """Return the decimals of a column of values: two of accuracies, else by their size."""
        return digits_of(values, not self.is_accuracy)


UNKNOWN = Score("", "")  # of runs that have none


def number(value: Any) -> float:
    """Convert a JSON number to a float; null and a missing value are NaN."""
    return math.nan if value is None else float(value)


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
    """Return the first row whose accuracy is at least ``target``, up to rounding, or None.

    None, too, if a row before it was not scored, which may have been the first one.
    """
    for row in rows:
        if metric not in row:
            return None
        if is_reached(target, number(row[metric])):
            return row
    return None


def is_reached(target: float, accuracy: float) -> bool:
    """Return True if an accuracy is at least ``target``, up to rounding; False for NaN."""
    return accuracy >= target * (1 - ROUNDING)
