"""Which points a search tries: evenly spaced ones, or what a sampler of optuna proposes."""

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_lab.checks import check_choice
from fedjax_lab.machine.extras import imported
from fedjax_lab.simulation.sweep_points import Point
from fedjax_lab.storage.fingerprint import hash_function
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
        self._tried: list[Point] = []

    def ask(self, room: int) -> list[Point]:
        """Propose as many new points as there is room for, if the space has them."""
        return spread(self._space, room, self._seed, self._tried) if room > 0 else []

    def tell(self, points: Sequence[Point], scores: Sequence[float]) -> None:
        """Leave out points that have been tried; the next ones lie between them."""
        self._tried += points


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
        self._optuna = _optuna()
        self._space, self._size = space, -(-count // _BATCHES)
        chosen = self._sampler(sampler, seed, count)
        level = self._optuna.logging.get_verbosity()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)  # no word on the study
        self._study = self._optuna.create_study(sampler=chosen)
        self._optuna.logging.set_verbosity(level)
        self._trials: dict[tuple[float, ...], Any] = {}  # values of a point -> its trial

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
        points: list[Point] = []
        room = min(room, self._size)
        for _ in range(_ATTEMPTS * room):
            if len(points) == room:
                break
            trial, point = self._next()
            if tuple(point.values()) in self._trials:
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                continue
            self._trials[tuple(point.values())] = trial
            points.append(point)
        return points

    def tell(self, points: Sequence[Point], scores: Sequence[float]) -> None:
        """Report the scores of points, proposed or others; those outside the space say nothing."""
        for point, score in zip(points, scores, strict=True):
            values = tuple(point.values())
            if values not in self._trials:
                if not all(axis.holds(point[name]) for name, axis in self._space.items()):
                    continue
                self._study.enqueue_trial({n: self._place(n, v) for n, v in point.items()})
                self._trials[values], _ = self._next()
            if np.isfinite(score):
                self._study.tell(self._trials[values], float(score))
            else:
                self._study.tell(self._trials[values], state=self._optuna.trial.TrialState.PRUNED)

    def _next(self) -> tuple[Any, Point]:
        """Return the next trial of the study, with its point."""
        trial = self._study.ask()
        return trial, {name: self._suggest(trial, name) for name in self._space}

    def _suggest(self, trial: Any, name: str) -> float:
        axis = self._space[name]
        if isinstance(axis, Range):
            return float(trial.suggest_float(name, axis.low, axis.high, log=True))
        return axis[trial.suggest_int(name, 0, len(axis) - 1)]

    def _place(self, name: str, value: float) -> float:
        """Return how the sampler names a value: itself, or its place in a list."""
        axis = self._space[name]
        return value if isinstance(axis, Range) else axis.index(value)


Proposals = Even | Sampled  # the source of a search's points, in batches


def proposals_of(space: Space, seed: int, sampler: Sampler | None, count: int) -> Proposals:
    """Return the source of ``count`` points for ``tune``'s argument ``sampler``."""
    return Even(space, seed) if sampler is None else Sampled(space, seed, sampler, count)


def record_sampler(sampler: Sampler | None) -> list[str | None]:
    """Return what tells ``tune``'s argument ``sampler`` from others, for a search's directory."""
    if sampler is None:
        return ["halton", importlib.metadata.version("scipy")]
    chosen = sampler if isinstance(sampler, str) else hash_function(sampler)
    return [chosen, _optuna().__version__]


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
    _optuna()


def _optuna() -> Any:
    return imported("optuna", "sampler needs the package optuna", "tune")
