"""The search of one method: what runs at each rung."""

import sys

import numpy as np

from fedjax_lab.simulation.sweep_result import Point
from fedjax_lab.tuning.found import Diverged, Trial, said
from fedjax_lab.tuning.halving import Rungs, best_first
from fedjax_lab.tuning.kept import Kept
from fedjax_lab.tuning.lanes import Lane, Lanes
from fedjax_lab.tuning.proposals import Proposals
from fedjax_lab.tuning.space import Range, Space


class Search:
    """The search of one method.

    Args:
      name: the caller's name of the method.
      space: search space of the method.
      plan: rungs of the method.
      lanes: advances the method's runs.
      proposals: proposes the points, except those beyond an end of a range.
      kept: the search's directory.
      progress: show progress on stderr.
    """

    def __init__(
        self,
        name: str,
        space: Space,
        plan: Rungs,
        lanes: Lanes,
        proposals: Proposals,
        kept: Kept,
        progress: bool,
    ):
        self._name, self._space, self._plan, self._lanes = name, space, plan, lanes
        self._proposals, self._kept, self._progress = proposals, kept, progress
        self._sign = 1.0 if lanes.mode == "min" else -1.0
        self._trials: list[Trial] = []

    def run(self) -> list[Trial]:
        """Run the search; returns all trials of the method, in order."""
        done, lanes, self._trials = self._kept.load(self._name)
        for rung, rounds in enumerate(self._plan.rounds):
            if rung < done:
                continue
            lanes = self._first_rung(rounds, lanes) if rung == 0 else self._next(lanes, rung)
            if not any(np.isfinite(lane.score) for lane in lanes):
                raise Diverged(
                    f"all points of {self._name!r} diverged within {rounds} "
                    f"round{'s' * (rounds > 1)}; lower its ranges."
                )
            lanes = self._going_on(lanes, rung + 1)
            self._kept.save(self._name, rung + 1, lanes, self._trials)
        return self._trials

    def _first_rung(self, rounds: int, stored: list[Lane]) -> list[Lane]:
        """Run batches of points; ``stored`` are the lanes of the batches that have been run."""
        count, lanes = self._plan.points[0], list[Lane]()
        ranges = any(isinstance(axis, Range) for axis in self._space.values())
        proposed = max(count - self._plan.reserved * ranges, 1)
        while points := self._proposals.ask(proposed - len(lanes)):
            lanes += (batch := self._batch(points, rounds, lanes, stored))
            self._proposals.tell([self._sign * lane.score for lane in batch])
        while room := max(count - len(lanes), 0):
            further = self._further(lanes, room)
            points = further or self._proposals.ask(room)
            if not points:  # a space of lists has been tried whole
                break
            lanes += (batch := self._batch(points, rounds, lanes, stored))
            if not further:
                self._proposals.tell([self._sign * lane.score for lane in batch])
        return lanes

    def _batch(
        self, points: list[Point], rounds: int, before: list[Lane], stored: list[Lane]
    ) -> list[Lane]:
        """Run a batch of points, or return it from ``stored``, in which batches follow in order."""
        lanes = stored[len(before) : len(before) + len(points)]
        if lanes:
            return lanes
        lanes = [Lane(point, self._lanes.seeds[0]) for point in points]
        self._advance(lanes, rounds)
        if len(self._plan.rounds) > 1:
            best = self._going_on([*before, *lanes], 1)
            for lane in (*before, *lanes):  # the others cannot continue
                lane.leaves = lane.leaves if any(lane is each for each in best) else None
            self._kept.save(self._name, 0, [*before, *lanes], self._trials)
        return lanes

    def _further(self, lanes: list[Lane], room: int) -> list[Point]:
        """Choose points beyond the ends at which the best point lies, or else around it."""
        order = best_first([self._sign * lane.score for lane in lanes])
        tried = [lane.point for lane in lanes]
        if not order or room <= 0:
            return []
        best = lanes[order[0]].point
        beyond, around = [], []
        for name, axis in self._space.items():
            if not isinstance(axis, Range):
                continue
            there = sorted({point[name] for point in tried})
            place = there.index(best[name])
            wide = (axis.high / axis.low) ** (1 / max(len(there) - 1, 1))
            if place == 0 and best[name] <= axis.at(1 / max(len(there), 1)):
                beyond.append({**best, name: best[name] / max(wide, 1.5)})
            if place == len(there) - 1 and best[name] >= axis.at(1 - 1 / max(len(there), 1)):
                beyond.append({**best, name: best[name] * max(wide, 1.5)})
            for other in (place - 1, place + 1):
                if 0 <= other < len(there):
                    middle = float(np.sqrt(best[name] * there[other]))
                    if not np.isclose(middle, best[name], rtol=0.05):
                        around.append({**best, name: middle})
        chosen = beyond or around
        return [point for point in chosen if point not in tried][:room]

    def _next(self, lanes: list[Lane], rung: int) -> list[Lane]:
        """Run the lanes that continue; finalists also run with the other seeds.

        If all finalists diverge, the next best points take their place.
        """
        rounds, count = self._plan.rounds[rung], self._plan.points[rung]
        if rounds < self._plan.rounds[-1]:
            self._advance(lanes, rounds)
            return lanes
        finished: list[Lane] = []
        for start in range(0, len(lanes), count):
            self._advance(first := lanes[start : start + count], rounds)
            alive = [lane for lane in first if np.isfinite(lane.score)]
            again = [Lane(x.point, seed) for seed in self._lanes.seeds[1:] for x in alive]
            self._advance(again, rounds)
            finished += [*first, *again]
            lost = [lane.point for lane in again if not np.isfinite(lane.score)]
            if any(lane.point not in lost for lane in alive):
                break
        return finished

    def _going_on(self, lanes: list[Lane], rung: int) -> list[Lane]:
        """Return the lanes that continue, the best first; before the last rung, all in order."""
        if rung == len(self._plan.rounds):
            return []
        order = best_first([self._sign * lane.score for lane in lanes])
        is_last = rung == len(self._plan.rounds) - 1
        return [lanes[place] for place in (order if is_last else order[: self._plan.points[rung]])]

    def _advance(self, lanes: list[Lane], rounds: int) -> None:
        before = [lane.rounds for lane in lanes]
        self._lanes.advance(lanes, rounds)
        for lane, start in zip(lanes, before, strict=True):
            trial = Trial(self._name, dict(lane.point), lane.seed, rounds, lane.score)
            cost = (rounds - start) * self._lanes.gradients_per_step
            self._trials.append(trial._replace(gradients=cost))
        if self._progress and lanes:
            at = best_first([self._sign * lane.score for lane in lanes])[:1]
            summary = f"best {lanes[at[0]].score:.4g} at {said(lanes[at[0]].point)}" if at else ""
            points = f"{len(lanes)} point{'s' * (len(lanes) > 1)}, seed {lanes[0].seed}"
            line = f"{self._name}: {points}, {rounds} rounds: {summary or 'diverged'}"
            print(line, file=sys.stderr, flush=True)
