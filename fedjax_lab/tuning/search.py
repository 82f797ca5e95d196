"""The search of one method: what runs at each rung."""

import sys
from collections.abc import Sequence

import numpy as np

from fedjax_lab.simulation.sweep_points import Point
from fedjax_lab.tuning.candidates import Candidate, Candidates
from fedjax_lab.tuning.halving import Rungs
from fedjax_lab.tuning.proposals import Proposals
from fedjax_lab.tuning.search_log import SearchLog
from fedjax_lab.tuning.search_result import Diverged, Trial, said
from fedjax_lab.tuning.space import Range, Space


class Search:
    """The search of one method."""

    def __init__(
        self,
        name: str,
        space: Space,
        rungs: Rungs,
        candidates: Candidates,
        proposals: Proposals,
        search_log: SearchLog,
        start_points: Sequence[Point] = (),
        *,
        seeds: Sequence[int],
        mode: str,
        progress: bool = False,
    ):
        self._name, self._space, self._rungs, self._candidates = name, space, rungs, candidates
        self._start_points, self._seeds = list(start_points), seeds
        self._proposals, self._search_log, self._progress = proposals, search_log, progress
        self._sign = 1.0 if mode == "min" else -1.0  # times a score: small is good
        self._trials: list[Trial] = []

    def run(self) -> list[Trial]:
        """Run the search; returns all trials of the method, in order."""
        done, candidates, self._trials = self._search_log.load(self._name)
        for rung, rounds in enumerate(self._rungs.rounds):
            if rung < done:
                continue
            candidates = (
                self._first_rung(rounds, candidates) if rung == 0 else self._next(candidates, rung)
            )
            if not any(np.isfinite(candidate.score) for candidate in candidates):
                raise Diverged(
                    f"all points of {self._name!r} diverged within {rounds} "
                    f"round{'s' * (rounds > 1)}; lower its ranges."
                )
            candidates = self._going_on(candidates, rung + 1)
            self._search_log.save(self._name, rung + 1, candidates, self._trials)
        return self._trials

    def _first_rung(self, rounds: int, stored: list[Candidate]) -> list[Candidate]:
        """Run batches of points; ``stored`` are the candidates of those that have been run."""
        count, candidates = self._rungs.points[0], list[Candidate]()
        ranges = any(isinstance(axis, Range) for axis in self._space.values())
        proposed = max(count - self._rungs.reserved * ranges, 1)

        def scores_of(points: list[Point]) -> list[float]:
            batch = self._batch(points, rounds, candidates, stored)
            candidates.extend(batch)
            return [self._sign * candidate.score for candidate in batch]

        if self._start_points:
            self._proposals.add(self._start_points, scores_of(self._start_points))
        while points := self._proposals.ask(proposed - len(candidates)):
            self._proposals.tell(scores_of(points))
        while room := max(count - len(candidates), 0):
            if further := self._further(candidates, room):
                scores_of(further)
            elif points := self._proposals.ask(room):
                self._proposals.tell(scores_of(points))
            else:  # a space of lists has been tried whole
                break
        return candidates

    def _batch(
        self, points: list[Point], rounds: int, before: list[Candidate], stored: list[Candidate]
    ) -> list[Candidate]:
        """Run a batch of points, or return it from ``stored``, in which batches follow in order."""
        candidates = stored[len(before) : len(before) + len(points)]
        if candidates:
            return candidates
        candidates = [Candidate(point, self._seeds[0]) for point in points]
        self._advance(candidates, rounds)
        if len(self._rungs.rounds) > 1:
            best = self._going_on([*before, *candidates], 1)
            for candidate in (*before, *candidates):
                if candidate not in best:  # it cannot continue
                    candidate.leaves = None
            self._search_log.save(self._name, 0, [*before, *candidates], self._trials)
        return candidates

    def _further(self, candidates: list[Candidate], room: int) -> list[Point]:
        """Choose points beyond the ends at which the best point lies, or else around it."""
        tried = [candidate.point for candidate in candidates]
        best_first = self._best_first(candidates)
        if not best_first:
            return []
        best = best_first[0].point
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
        chosen = [point for point in beyond if self._candidates.accepts(point)] or around
        return [point for point in chosen if point not in tried][:room]

    def _next(self, candidates: list[Candidate], rung: int) -> list[Candidate]:
        """Run the candidates that continue; finalists also run with the other seeds.

        If all finalists diverge, the next best points take their place.
        """
        rounds, count = self._rungs.rounds[rung], self._rungs.points[rung]
        if rounds < self._rungs.rounds[-1]:
            self._advance(candidates, rounds)
            return candidates
        finished: list[Candidate] = []
        for start in range(0, len(candidates), count):
            self._advance(first := candidates[start : start + count], rounds)
            alive = [candidate for candidate in first if np.isfinite(candidate.score)]
            again = [Candidate(x.point, seed) for seed in self._seeds[1:] for x in alive]
            self._advance(again, rounds)
            finished += [*first, *again]
            lost = [candidate.point for candidate in again if not np.isfinite(candidate.score)]
            if any(candidate.point not in lost for candidate in alive):
                break
        return finished

    def _going_on(self, candidates: list[Candidate], rung: int) -> list[Candidate]:
        """Return those that continue: start points, then the best; all before the last rung."""
        if rung == len(self._rungs.rounds):
            return []
        is_last = rung == len(self._rungs.rounds) - 1
        best_first = self._best_first(candidates)
        best_first.sort(key=lambda candidate: candidate.point not in self._start_points)
        return best_first[: None if is_last else self._rungs.points[rung]]

    def _best_first(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates with a finite score, the best first."""
        finite = [candidate for candidate in candidates if np.isfinite(candidate.score)]
        return sorted(finite, key=lambda candidate: self._sign * candidate.score)

    def _advance(self, candidates: list[Candidate], rounds: int) -> None:
        before = [candidate.rounds for candidate in candidates]
        self._candidates.advance(candidates, rounds)
        for candidate, start in zip(candidates, before, strict=True):
            cost = (rounds - start) * self._candidates.gradients_per_step
            about = dict(candidate.point), candidate.seed, rounds, candidate.score, cost
            self._trials.append(Trial(self._name, *about))
        if self._progress and candidates:
            best = self._best_first(candidates)
            summary = f"best {best[0].score:.4g} at {said(best[0].point)}" if best else "diverged"
            points = (
                f"{len(candidates)} point{'s' * (len(candidates) > 1)}, seed {candidates[0].seed}"
            )
            line = f"{self._name}: {points}, {rounds} rounds: {summary}"
            print(line, file=sys.stderr, flush=True)
