"""Which points a search tries: evenly spaced ones, or what a sampler of optuna proposes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_lab.checks import check_choice
from fedjax_lab.machine.extras import imported
from fedjax_lab.simulation.sweep_points import Point
from fedjax_lab.tuning.space import Range, Space, spread

SAMPLERS = ("random", "tpe")
_BATCHES = 4  # of a sampler; each sees the scores of those before it
_ATTEMPTS = 16  # for a point that is not a repetition

# "random", "tpe", or a seed -> a sampler of optuna
Sampler = str | Callable[[int], Any]


class Even:
    """Points that fill the space evenly, first in a single batch, then between these."""

    def __init__(self, space: Space, seed: int):
        self._space, self._seed = space, seed
        self._points: list[Point] = []

    def ask(self, room: int) -> list[Point]:
        """Propose as many new points as there is room for, if the space has them."""
        if room <= 0:
            return []
        batch = spread(self._space, room, self._seed, self._points)
        self._points += batch
        return batch

    def tell(self, scores: Sequence[float]) -> None:
        """Do nothing."""

    def add(self, points: Sequence[Point], scores: Sequence[float]) -> None:
        """Leave out points that have been tried; the next ones lie between them."""
        self._points += points


class Sampled:
    """Points that a sampler of optuna suggests, in four batches.

    Points and scores decide the proposals, so a search that resumes gets the same ones. A diverged
    point is reported as pruned, which a sampler takes for worse than all others.

    Args:
      space: search space of the method.
      seed: seed of the sampler.
      sampler: "random", "tpe" or a function of a seed.
      count: number of points of the search.

    Raises:
      ImportError: optuna is missing.
      TypeError: the function returns no sampler.
    """

    def __init__(self, space: Space, seed: int, sampler: Sampler, count: int):
        self._optuna = import_optuna()
        self._space, self._size = space, -(-count // _BATCHES)
        chosen = self._sampler(sampler, seed, count)
        level = self._optuna.logging.get_verbosity()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)  # no word on the study
        self._study = self._optuna.create_study(sampler=chosen)
        self._optuna.logging.set_verbosity(level)
        self._trials: list[Any] = []
        self._points: list[Point] = []

    def _sampler(self, sampler: Sampler, seed: int, count: int) -> Any:
        samplers = self._optuna.samplers
        if sampler == "random":
            return samplers.RandomSampler(seed=seed)
        if sampler == "tpe":
            return samplers.TPESampler(seed=seed, n_startup_trials=-(-count // 2))
        found = sampler(seed) if callable(sampler) else sampler
        if not isinstance(found, samplers.BaseSampler):
            raise TypeError(
                f"sampler(seed) returned {type(found).__name__}; it must return a sampler of "
                "optuna, such as optuna.samplers.TPESampler(seed=seed)."
            )
        return found

    def ask(self, room: int) -> list[Point]:
        """Propose a batch of new points; repetitions are asked for again."""
        room = min(room, self._size)
        self._trials, start = [], len(self._points)
        for _ in range(_ATTEMPTS * room):
            if len(self._trials) == room:
                break
            trial = self._study.ask()
            point = {name: self._suggest(trial, name) for name in self._space}
            if point in self._points:
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                continue
            self._trials.append(trial)
            self._points.append(point)
        return self._points[start:]

    def _suggest(self, trial: Any, name: str) -> float:
        axis = self._space[name]
        if isinstance(axis, Range):
            return float(trial.suggest_float(name, axis.low, axis.high, log=True))
        return axis.values[trial.suggest_int(name, 0, len(axis.values) - 1)]

    def tell(self, scores: Sequence[float]) -> None:
        """Report the scores of the last batch to the sampler."""
        for trial, score in zip(self._trials, scores, strict=True):
            if np.isfinite(score):
                self._study.tell(trial, float(score))
            else:
                self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    def add(self, points: Sequence[Point], scores: Sequence[float]) -> None:
        """Report points that have been tried; the sampler learns from those within the space."""
        for point, score in zip(points, scores, strict=True):
            self._points.append(point)
            if all(axis.holds(point[name]) for name, axis in self._space.items()):
                self._study.enqueue_trial({n: self._place(n, v) for n, v in point.items()})
                self._trials = [self._study.ask()]
                for name in self._space:
                    self._suggest(self._trials[0], name)
                self.tell([score])

    def _place(self, name: str, value: float) -> float:
        """Return how the sampler names a value: itself, or its place in a list."""
        axis = self._space[name]
        return value if isinstance(axis, Range) else axis.values.index(value)


Proposals = Even | Sampled  # the source of a search's points, in batches


def check_sampler(sampler: Sampler | None) -> None:
    """Check ``tune``'s argument ``sampler``.

    Raises:
      ValueError: an unknown name.
      TypeError: neither None, a name nor a function.
      ImportError: optuna is missing.
    """
    if sampler is None:
        return
    if isinstance(sampler, str):
        check_choice("sampler", sampler, SAMPLERS)
    elif not callable(sampler) or isinstance(sampler, type):
        raise TypeError(
            f"sampler is {sampler!r}; it must be None, one of {', '.join(SAMPLERS)}, or a function "
            "from a seed to a sampler of optuna."
        )
    import_optuna()


def import_optuna() -> Any:
    """Import optuna.

    Raises:
      ImportError: optuna is missing.
    """
    return imported("optuna", "sampler needs the package optuna", "tune")
