"""The runs of one method that compete: they advance from rung to rung."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_lab.clients.mapping import parse_client_map, single_device_map
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.keys import seeded
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.history import History, warn_without_steps
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.sweep_points import Point
from fedjax_lab.simulation.sweep_program import (
    Group,
    Program,
    SweptRun,
    choose_size,
    trace_evaluation,
)
from fedjax_lab.tuning.space import Build
from fedjax_lab.types import FedState, Params


@dataclasses.dataclass(eq=False)
class Candidate:
    """A run of a point with a seed.

    Attributes:
      point: the hyperparameters.
      seed: seed of the run.
      rounds: finished rounds.
      score: score after these rounds; NaN for a diverged run (by the rule of ``simulate``), or if
        the score is not finite.
      recent: the last scores of the global model, of which ``score`` is the mean.
      leaves: arrays of the state, on the host; None before the run starts.
    """

    point: Point
    seed: int
    rounds: int = 0
    score: float = float("nan")
    recent: list[float] = dataclasses.field(default_factory=list)
    leaves: list[np.ndarray] | None = None


class Candidates:
    """Runs of one method, advanced in groups of the size of its compiled program.

    Args:
      build: makes the method of a run from its hyperparameters.
      run: the computation of one of the runs; ``eval_every`` rounds lie between their scores.
      clients: the clients' data.
      evaluate: global model -> {"score": ...}.
      average: number of scores whose mean is a run's score.
    """

    def __init__(
        self,
        build: Build,
        run: Computation,
        clients: FederatedArrays,
        evaluate: Callable[[Params], Mapping[str, Any]],
        average: int,
    ):
        self._build, self._run, self._average = build, run, average
        self.gradients_per_step = run.algorithm.gradients_per_step
        self._shapes = run.shapes(clients)
        score, resident, _ = trace_evaluation(evaluate, run.algorithm, self._shapes)
        kind = single_device_map()
        many = "shard_map" if jax.device_count() > 1 else kind
        of_clients, of_runs = (Placement(parse_client_map(name)) for name in (kind, many))
        self._program = Program(run, build, clients, of_clients, of_runs, score, resident)
        self._size: int | None = None  # of a group, once it is chosen
        self._one_by_one = kind == "scan"

    def accepts(self, point: Point) -> bool:
        """Return whether the method can be built at a point.

        Args:
          point: hyperparameters, which may lie beyond a range of the space.
        """
        try:
            self._build(**point)
        except ValueError:
            return False
        return True

    def advance(self, candidates: Sequence[Candidate], rounds: int) -> None:
        """Run candidates up to a number of rounds."""
        if not candidates:
            return
        begun = candidates[0].rounds
        length_of = dataclasses.replace(self._run, rounds=rounds).chunk_length
        runs = [
            SweptRun(place, self._run.params, seeded(one.seed), one.point, History(self._run))
            for place, one in enumerate(candidates)
        ]
        # On CPU, candidates run one after the other, so a small program is enough for all rungs.
        few = runs[: jax.device_count()] if self._one_by_one else runs
        if self._size is None or len(few) <= self._size // 2:
            self._size = choose_size(self._program, few, length_of(begun), self._shapes)
        for start in range(0, len(candidates), self._size):
            part = slice(start, start + self._size)
            group = Group(self._program, runs[part], self._size, self._states(candidates[part]))
            for _ in group.run_chunks(begun, length_of):
                pass
            after = jax.tree.leaves(group.saved())
            del group  # the next one takes its memory
            for i, (candidate, run) in enumerate(zip(candidates[part], runs[part], strict=True)):
                scores = [*candidate.recent, *(row["score"] for row in run.history.rows)]
                candidate.recent = scores[-self._average :]
                candidate.score = float(np.mean(candidate.recent))
                if not np.isfinite(candidate.score):
                    candidate.score, candidate.recent = float("nan"), []
                candidate.rounds, candidate.leaves = rounds, [leaf[i].copy() for leaf in after]
            warn_without_steps([run.history for run in runs[part]])

    def _states(self, candidates: Sequence[Candidate]) -> FedState | None:
        """Return the states, leaves [candidates, ...], to continue from; None: they begin."""
        if candidates[0].leaves is None:
            return None
        of_all = [candidate.leaves or [] for candidate in candidates]
        leaves = [np.stack(of_leaf) for of_leaf in zip(*of_all, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self._shapes), leaves)
