"""The search of one method: what runs at each rung."""

import dataclasses
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


@dataclasses.dataclass
class Search:
    """The search of one method."""

    name: str
    space: Space
    rungs: Rungs
    candidates: Candidates
    proposals: Proposals
    search_log: SearchLog
    start_points: Sequence[Point] = ()
    _: dataclasses.KW_ONLY
    seeds: Sequence[int]
    mode: str
    progress: bool = False
    trials: list[Trial] = dataclasses.field(default_factory=list, init=False)

    def run(self) -> list[Trial]:
        """Run the search; returns all trials of the method, in order."""
        done, candidates, self.trials = self.search_log.load(self.name)
        for rung, rounds in enumerate(self.rungs.rounds):
            if rung < done:
                continue
            candidates = (
                self._first_rung(rounds, candidates) if rung == 0 else self._next(candidates, rung)
            )
            if not any(np.isfinite(candidate.score) for candidate in candidates):
                raise Diverged(
                    f"all points of {self.name!r} diverged within {rounds} "
                    f"round{'s' * (rounds > 1)}; lower its ranges."
                )
            candidates = self._going_on(candidates, rung + 1)
            self.search_log.save(self.name, rung + 1, candidates, self.trials)
        return self.trials

    def _first_rung(self, rounds: int, stored: list[Candidate]) -> list[Candidate]:
        """Run batches of points; ``stored`` are the candidates of those that have been run."""
        count, candidates = self.rungs.points[0], list[Candidate]()
        ranges = any(isinstance(axis, Range) for axis in self.space.values())
        proposed = max(count - self.rungs.reserved * ranges, 1)

        def losses_of(points: Sequence[Point]) -> list[float]:
            batch = self._batch(points, rounds, candidates, stored)
            candidates.extend(batch)
            return list(map(self._loss, batch))

        if self.start_points:
            self.proposals.tell(self.start_points, losses_of(self.start_points))
        while points := self.proposals.ask(proposed - len(candidates)):
            self.proposals.tell(points, losses_of(points))
        while room := max(count - len(candidates), 0):
            if further := self._further(candidates, room):
                losses_of(further)
            elif points := self.proposals.ask(room):
                self.proposals.tell(points, losses_of(points))
            else:  # a space of lists has been tried whole
                break
        return candidates

    def _batch(
        self, points: Sequence[Point], rounds: int, before: list[Candidate], stored: list[Candidate]
    ) -> list[Candidate]:
        """Run a batch of points, or return it from ``stored``, in which batches follow in order."""
        candidates = stored[len(before) : len(before) + len(points)]
        if candidates:
            return candidates
        candidates = [Candidate(point, self.seeds[0]) for point in points]
        self._advance(candidates, rounds)
        if len(self.rungs.rounds) > 1:
            best = self._going_on([*before, *candidates], 1)
            for candidate in (*before, *candidates):
                if candidate not in best:  # it cannot continue
                    candidate.leaves = None
            self.search_log.save(self.name, 0, [*before, *candidates], self.trials)
        return candidates

    def _further(self, candidates: list[Candidate], room: int) -> list[Point]:
        """Choose points beyond the ends at which the best point lies, or else around it."""
        tried = [candidate.point for candidate in candidates]
        best_first = self._best_first(candidates)
        if not best_first:
            return []
        best = best_first[0].point
        beyond, around = [], []
        for name, axis in self.space.items():
            if not isinstance(axis, Range):
                continue
            there = sorted({point[name] for point in tried})
            place = there.index(best[name])
            wide = (axis.high / axis.low) ** (1 / max(len(there) - 1, 1))
            if place == 0 and best[name] <= axis.at(1 / len(there)):
                beyond.append({**best, name: best[name] / max(wide, 1.5)})
            if place == len(there) - 1 and best[name] >= axis.at(1 - 1 / len(there)):
                beyond.append({**best, name: best[name] * max(wide, 1.5)})
            for other in (place - 1, place + 1):
                if 0 <= other < len(there):
                    middle = float(np.sqrt(best[name] * there[other]))
                    if not np.isclose(middle, best[name], rtol=0.05):
                        around.append({**best, name: middle})
        chosen = [point for point in beyond if self.candidates.accepts(point)] or around
        return [point for point in chosen if point not in tried][:room]

    def _next(self, candidates: list[Candidate], rung: int) -> list[Candidate]:
        """Run the candidates that continue; finalists also run with the other seeds.

        If all finalists diverge, the next best points take their place.
        """
        rounds, count = self.rungs.rounds[rung], self.rungs.points[rung]
        if rounds < self.rungs.rounds[-1]:
            self._advance(candidates, rounds)
            return candidates
        finished: list[Candidate] = []
        for start in range(0, len(candidates), count):
            self._advance(first := candidates[start : start + count], rounds)
            alive = [candidate for candidate in first if np.isfinite(candidate.score)]
            again = [Candidate(x.point, seed) for seed in self.seeds[1:] for x in alive]
            self._advance(again, rounds)
            finished += [*first, *again]
            lost = [candidate.point for candidate in again if not np.isfinite(candidate.score)]
            if any(candidate.point not in lost for candidate in alive):
                break
        return finished

    def _going_on(self, candidates: list[Candidate], rung: int) -> list[Candidate]:
        """Return those that continue: start points, then the best; all before the last rung."""
        if rung == len(self.rungs.rounds):
            return []
        is_last = rung == len(self.rungs.rounds) - 1
        best_first = self._best_first(candidates)
        best_first.sort(key=lambda candidate: candidate.point not in self.start_points)
        return best_first[: None if is_last else self.rungs.points[rung]]

    def _best_first(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates with a finite score, the best first."""
        finite = [candidate for candidate in candidates if np.isfinite(candidate.score)]
        return sorted(finite, key=self._loss)

    def _loss(self, candidate: Candidate) -> float:
        """Return the score, or minus the score where large ones are good."""
        return candidate.score if self.mode == "min" else -candidate.score

    def _advance(self, candidates: list[Candidate], rounds: int) -> None:
        before = [candidate.rounds for candidate in candidates]
        self.candidates.advance(candidates, rounds)
        for candidate, start in zip(candidates, before, strict=True):
            cost = (rounds - start) * self.candidates.gradients_per_step
            about = dict(candidate.point), candidate.seed, rounds, candidate.score, cost
            self.trials.append(Trial(self.name, *about))
        if self.progress and candidates:
            best = self._best_first(candidates)
            summary = f"best {best[0].score:.4g} at {said(best[0].point)}" if best else "diverged"
            points = (
                f"{len(candidates)} point{'s' * (len(candidates) > 1)}, seed {candidates[0].seed}"
            )
            line = f"{self.name}: {points}, {rounds} rounds: {summary}"
            print(line, file=sys.stderr, flush=True)
