"""What a stored cell says: score, rank, gap, and what it costs to reach the target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.leaderboard.tasks import Task
from fedjax_lab.estimates import Estimate, estimate
from fedjax_lab.report.statistics import is_reached, mean, number


class Row(NamedTuple):
    """A line of a task's table; NaN or None where there is no value.

    Attributes:
      score: mean over the last tenth of the rounds.
      top: best evaluation.
      rank: rank by score, with the ranks that the paired differences allow, such as "3 (2-5)".
      gap: paired difference from the best method.
      is_best: whether no method has a better score.
      train: accuracy on training images after the last round.
      rounds, megabytes, gradients: cost until the target is reached.
      diverged: share of the tuning points that diverged.
    """

    score: Estimate | None
    top: Estimate | None
    rank: str
    gap: Estimate | None
    is_best: bool
    train: Estimate | None
    rounds: float
    megabytes: float
    gradients: float
    diverged: float


def rows_of(task: Task, cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Row]:
    """Return method -> row, the best first; methods without a score come last.

    Args:
      task: the task.
      cells: method -> stored cell.
    """
    tails = tails_of(cells)
    order = sorted(tails, key=lambda name: -estimate(tails[name]).mean)
    rows = {}
    for place, name in enumerate(order, start=1):
        gap = difference(tails[order[0]], tails[name])
        rank = f"{place} ({ranks(tails, name)})"
        rows[name] = _row(task, cells[name], rank, gap, tails[name], place == 1)
    for name in cells:
        if name not in rows:
            rows[name] = _row(task, cells[name], "-", None, None, False)
    return rows


def tails_of(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return method -> the score of each seed; methods without one are left out.

    Args:
      cells: method -> stored cell.
    """
    tails = {name: _tails(cell) for name, cell in cells.items() if cell["chosen"] is not None}
    return {name: values for name, values in tails.items() if all(map(math.isfinite, values))}


def ranks(tails: Mapping[str, Sequence[float]], name: str) -> str:
    """Return the best and the worst rank that the paired differences allow a method, as "2-5".

    Args:
      tails: method -> a score for each seed.
      name: the method.
    """
    others = [difference(tails[other], tails[name]) for other in tails if other != name]
    ahead = sum(each.mean - (each.half_width or 0.0) > 0 for each in others)
    behind = sum(each.mean + (each.half_width or 0.0) < 0 for each in others)
    low, high = 1 + ahead, len(tails) - behind
    return f"{low}" if low == high else f"{low}-{high}"


def difference(one: Sequence[float], other: Sequence[float]) -> Estimate:
    """Return the mean of the paired differences over the seeds, with its interval.

    Args:
      one, other: a score for each seed.
    """
    return estimate([a - b for a, b in zip(one, other, strict=True)])


def _tails(cell: Mapping[str, Any]) -> list[float]:
    """The mean score over the last tenth of the rounds, of each seed."""
    begin = 0.9 * cell["rounds"][-1]
    kept = [i for i, passed in enumerate(cell["rounds"]) if passed > begin]
    return [mean([number(run["scores"][i]) for i in kept]) for run in cell["runs"]]


def _row(task, cell, rank, gap, tails, is_best) -> Row:
    if tails is None:
        costs = [math.nan] * 3
        return Row(None, None, rank, None, False, None, *costs, cell.get("diverged", 1.0))
    runs, rounds = cell["runs"], cell["rounds"]
    reached = [_reach(run["scores"], rounds, task.target) for run in runs]
    shares = [passed / rounds[-1] for passed in reached]
    has_train = all("train" in run for run in runs)
    return Row(
        score=estimate(tails),
        top=estimate([max(run["scores"]) for run in runs]),
        rank=rank,
        gap=gap,
        is_best=is_best,
        train=estimate([run["train"] for run in runs]) if has_train else None,
        rounds=mean(reached),
        megabytes=mean([s * r["bytes_up"] / 1e6 for s, r in zip(shares, runs, strict=True)]),
        gradients=mean([s * r["gradients"] for s, r in zip(shares, runs, strict=True)]),
        diverged=cell["diverged"],
    )


def _reach(scores: Sequence[float], rounds: Sequence[int], target: float) -> float:
    """The rounds at the first evaluation that reaches the target; NaN if none does."""
    pairs = zip(scores, rounds, strict=True)
    return float(next((passed for value, passed in pairs if is_reached(target, value)), math.nan))
