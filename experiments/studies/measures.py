"""What a claim compares of a run: numbers of which more is better."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from fedjax_lab.report.runs import Run
from fedjax_lab.report.sections import tail_of
from fedjax_lab.report.statistics import best, lowest, mean, number, reach


class Measure(NamedTuple):
    """Two views of one quantity; a verdict needs both.

    Attributes:
      top: of a run, read off its best evaluation, or the only view.
      tail: of a run, over the last tenth of its rounds; None: there is no such view.
      name: in a report; "" is accuracy.
      unit: one of a claim's margin, such as points.
    """

    top: Callable[[Run], float]
    tail: Callable[[Run], float] | None = None
    name: str = ""
    unit: str = "points"


def _is_whole(run: Run) -> bool:
    return run.rows[-1]["round"] == run.config["rounds"]


def top(run: Run) -> float:
    """Return a run's top accuracy in percent; NaN if the run did not reach its last round."""
    return 100 * best(run.values("accuracy")) if _is_whole(run) else math.nan


def tail(run: Run) -> float:
    """Return the mean accuracy in percent over the last tenth of the rounds."""
    return 100 * tail_of([run]).mean(run)


def in_tail(run: Run) -> int:
    """Return the number of evaluations in the last tenth of a run's rounds."""
    return len(tail_of([run]).rounds)


def _lost(run: Run) -> float:
    return 100 * run.values("accuracy")[-1] - top(run)


def _lowest_perplexity(run: Run) -> float:
    return -lowest(run.values("perplexity")) if _is_whole(run) else math.nan


def flatness(run: Run) -> float:
    """Return minus the Hessian's largest eigenvalue at the last model."""
    values = run.landscape.get("eigenvalues") or [math.nan]
    return -number(values[0])


def _smoothness(run: Run) -> float:
    values = [100 * value for value in run.values("accuracy")]
    later = values[len(values) // 2 :]
    return -mean([abs(b - a) for a, b in itertools.pairwise(later)])


def _memory(run: Run) -> float:
    """Mean squared residual of the clients in the tail, over that of their changes."""
    group = tail_of([run])
    return group.mean(run, "error_sq") / group.mean(run, "change_sq")


def _memory_growth(run: Run) -> float:
    """By how many percent the residual's tail is above its mean in the middle tenth of the run."""
    values = run.values("error_sq")
    last = tail_of([run]).mean(run, "error_sq")
    if not last:  # without error feedback
        return 0.0
    middle, width = len(values) // 2, max(1, len(values) // 20)
    return 100 * (last / mean(values[middle - width : middle + width]) - 1)


def rounds_to(percent: float) -> Measure:
    """Return the measure "rounds until an accuracy is reached", all rounds if it never is.

    Args:
      percent: the accuracy.
    """

    def rounds(run: Run) -> float:
        row = reach(run.rows, percent / 100)
        return -float(run.config["rounds"] if row is None else row["round"])

    return Measure(rounds, name=f"minus rounds to {percent:g} %", unit="rounds")


ACCURACY = Measure(top, tail)
LOST = Measure(_lost, name="last less top accuracy")
PERPLEXITY = Measure(
    _lowest_perplexity,
    lambda run: -tail_of([run]).mean(run, "perplexity"),
    name="minus perplexity",
    unit="",
)
FLATNESS = Measure(flatness, name="minus the largest eigenvalue", unit="")
SMOOTHNESS = Measure(_smoothness, name="minus the mean step between evaluations, second half")
# A round's training loss is that of its cohort, so that its lowest value would say little.
TRAINING_LOSS = Measure(
    lambda run: -tail_of([run]).mean(run, "loss"), name="minus the training loss, tail", unit=""
)
# Of methods with error feedback; 0 for those without. More is worse, so both are negated.
ERROR_MEMORY = Measure(
    lambda run: -_memory(run),
    name="minus the squared residual over that of the change, tail",
    unit="times",
)
ERROR_GROWTH = Measure(
    lambda run: -_memory_growth(run),
    name="minus the growth of the squared residual in the second half",
    unit="%",
)
