"""Successive halving: who goes on, for how long, and what it costs in gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_KEPT = 3  # of so many points, one goes on
_RESERVED = 4  # of so many points, one waits for where the first ones point to


class Rungs(NamedTuple):
    """The rounds after which points are compared, and how many of them there are.

    Attributes:
      rounds: finished rounds at each rung, the last one a whole run's.
      points: points of each rung, the first one with those that are added there.
      seeds: of each finalist.
    """

    rounds: tuple[int, ...]
    points: tuple[int, ...]
    seeds: int

    @property
    def run_rounds(self) -> int:
        """The rounds of all runs together."""
        before = (0, *self.rounds[:-1])
        first_seed = sum(
            count * (end - start)
            for start, end, count in zip(before, self.rounds, self.points, strict=True)
        )
        return first_seed + (self.seeds - 1) * self.points[-1] * self.rounds[-1]

    @property
    def reserved(self) -> int:
        """Points of the first rung that are chosen when the others have run."""
        return self.points[0] // _RESERVED


def rungs(rounds: int, count: int, finalists: int, seeds: int) -> Rungs:
    """The rungs of so many points: a ninth, a third and all of the rounds.

    Args:
      rounds: of a whole run.
      count: points of the first rung.
      finalists: points of the last one, at most.
      seeds: of each finalist.
    """
    first = max(1, rounds // _KEPT**2)
    ends = sorted({first, min(_KEPT * first, rounds), rounds})
    last = min(finalists, count)
    points = [count, *(max(last, count // _KEPT**i) for i in range(1, len(ends)))]
    return Rungs(tuple(ends), (*points[:-1], last), seeds)


def equal_budgets(
    gradients: Sequence[int], rounds: int, budget: int, finalists: int, seeds: int
) -> list[Rungs]:
    """Rungs of several methods that cost as many gradients each, as nearly as whole points can.

    Args:
      gradients: of each method, in a local step.
      rounds, finalists, seeds: as in ``rungs``.
      budget: points of the method with the most gradients; the others get more.
    """
    most = max(gradients)
    limit = most * rungs(rounds, budget, finalists, seeds).run_rounds
    found = []
    for each in gradients:
        count = budget
        while each * rungs(rounds, count + 1, finalists, seeds).run_rounds <= limit:
            count += 1
        found.append(rungs(rounds, count, finalists, seeds))
    return found


def best_first(scores: Sequence[float]) -> list[int]:
    """The places of the scores that are finite, the smallest first.

    Args:
      scores: less is better; NaN for a run that diverged.
    """
    order = np.argsort(np.asarray(scores, np.float64), kind="stable").tolist()
    return [place for place in order if np.isfinite(scores[place])]
