"""Successive halving: the rungs of a search, and equal budgets in gradients."""

from collections.abc import Sequence
from typing import NamedTuple

_KEPT = 3  # one point in three continues
_RESERVED = 4  # one point in four is chosen after the others have run


class Rungs(NamedTuple):
    """The rungs of a search: when points are compared, and how many there are.

    Attributes:
      rounds: finished rounds at each rung; the last one is a full run.
      points: number of points at each rung; at the first one, including the points added later.
      seeds: number of seeds of each finalist.
    """

    rounds: tuple[int, ...]
    points: tuple[int, ...]
    seeds: int

    @property
    def run_rounds(self) -> int:
        """Total number of rounds of all runs."""
        before = (0, *self.rounds[:-1])
        first_seed = sum(
            count * (end - start)
            for start, end, count in zip(before, self.rounds, self.points, strict=True)
        )
        return first_seed + (self.seeds - 1) * self.points[-1] * self.rounds[-1]

    @property
    def reserved(self) -> int:
        """Number of points of the first rung that are chosen after the others have run."""
        return self.points[0] // _RESERVED


def rungs(rounds: int, count: int, finalists: int, seeds: int) -> Rungs:
    """Compute the rungs of a search: after a ninth, a third and all of the rounds."""
    first = max(1, rounds // _KEPT**2)
    ends = sorted({first, min(_KEPT * first, rounds), rounds})
    last = min(finalists, count)
    points = [count, *(max(last, count // _KEPT**i) for i in range(1, len(ends)))]
    return Rungs(tuple(ends), (*points[:-1], last), seeds)


def equal_budgets(
    gradients: Sequence[int], rounds: int, budget: int, finalists: int, seeds: int
) -> list[Rungs]:
    """Compute rungs for which all methods cost the same number of gradients, up to whole points.

    Args:
      gradients: gradients in a local step, for each method.
      budget: number of points of the method with the most gradients; the others get more.
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
