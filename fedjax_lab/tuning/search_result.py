"""The result of a hyperparameter search."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.estimates import estimate, format_estimate
from fedjax_lab.markdown import markdown_table
from fedjax_lab.simulation.sweep_points import Point
from fedjax_lab.tuning.space import Range, Space


class Diverged(RuntimeError):
    """All points of a method diverged."""


class Trial(NamedTuple):
    """The score of a point at a rung.

    Attributes:
      method: name of the method.
      point: the hyperparameters.
      seed: seed of the run.
      rounds: finished rounds.
      score: score on the validation data; NaN for a diverged run.
      gradients: rounds since the previous rung, times the gradients of a local step.
    """

    method: str
    point: Point
    seed: int
    rounds: int
    score: float
    gradients: int = 0


def said(point: Point) -> str:
    """Format a point, such as "client_lr 0.1, momentum 0.9"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in point.items())


class SearchResult:
    """The result of ``tune``.

    Attributes:
      trials: every point at every rung that it reached, in the order of the runs.
      rounds: number of rounds of a full run.
      mode: "min" if small scores are good, "max" if large ones are.
    """

    def __init__(self, trials: Sequence[Trial], rounds: int, mode: str, spaces: dict[str, Space]):
        self.trials, self.rounds, self.mode = list(trials), rounds, mode
        self._spaces = spaces

    @property
    def best(self) -> dict[str, Point]:
        """Method -> the point with the best mean score over all seeds after a full run."""
        return {method: self._winner(method)[0] for method in self._spaces}

    @property
    def scores(self) -> dict[str, list[float]]:
        """Method -> scores of its best point, one for each seed."""
        return {method: self._winner(method)[1] for method in self._spaces}

    @property
    def edges(self) -> dict[str, list[str]]:
        """Method -> the hyperparameters whose best value is the smallest or largest one tried.

        A better value may lie beyond it. In a range, the search ran out of points; a list is never
        extended.
        """
        found: dict[str, list[str]] = {}
        for method, best in self.best.items():
            for name, axis in self._spaces[method].items():
                tried = {trial.point[name] for trial in self._of(method)}
                numbers = tried if isinstance(axis, Range) else set(axis)
                if len(numbers) > 1 and best[name] in (min(numbers), max(numbers)):
                    found.setdefault(method, []).append(name)
        return found

    @property
    def gradients(self) -> dict[str, int]:
        """Method -> cost of its search, in mini-batch gradients per client and local step."""
        return {
            method: sum(trial.gradients for trial in self._of(method)) for method in self._spaces
        }

    @property
    def diverged(self) -> dict[str, float]:
        """Method -> share of its points that diverged."""
        found = {}
        for method in self._spaces:
            points = {tuple(trial.point.items()) for trial in self._of(method)}
            lost = {tuple(t.point.items()) for t in self._of(method) if math.isnan(t.score)}
            found[method] = len(lost) / len(points)
        return found

    def table(self, digits: int = 4) -> str:
        """Format a Markdown table: each method's best point, its score, and the search's cost.

        Args:
          digits: digits after the decimal point.
        """
        head = ["method", "best point", "validation score", "points", "diverged", "at an end"]
        rows = []
        for method, point in self.best.items():
            tried = {tuple(trial.point.items()) for trial in self._of(method)}
            rows.append(
                [
                    method,
                    said(point),
                    format_estimate(estimate(self.scores[method]), digits),
                    str(len(tried)),
                    f"{self.diverged[method]:.0%}",
                    ", ".join(self.edges.get(method, [])) or "-",
                ]
            )
        return markdown_table([head, *rows])

    def csv(self) -> str:
        """Format all trials as CSV, with a column for each hyperparameter."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self._rows())
        return text.getvalue()

    def markdown(self) -> str:
        """Format all trials as a Markdown table, with a column for each hyperparameter."""
        head, *rows = self._rows()
        shown = [[f"{v:.5g}" if isinstance(v, float) else str(v) for v in row] for row in rows]
        return markdown_table([head, *shown]) + "\n"

    def _rows(self) -> list[list[Any]]:
        names = sorted({name for trial in self.trials for name in trial.point})
        rows: list[list[Any]] = [["method", *names, "seed", "rounds", "score"]]
        for trial in self.trials:
            values: list[Any] = [trial.point.get(name, "") for name in names]
            score = "" if math.isnan(trial.score) else trial.score
            rows.append([trial.method, *values, trial.seed, trial.rounds, score])
        return rows

    def _of(self, method: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.method == method]

    def _winner(self, method: str) -> tuple[Point, list[float]]:
        """Return the best finalist: (point, scores of its seeds)."""
        finals: dict[tuple[Any, ...], list[float]] = {}
        for trial in self._of(method):
            if trial.rounds == self.rounds:
                finals.setdefault(tuple(trial.point.items()), []).append(trial.score)
        sign = 1.0 if self.mode == "min" else -1.0
        alive = {point: scores for point, scores in finals.items() if np.isfinite(scores).all()}
        if not alive:
            raise Diverged(f"no point of {method!r} stayed finite with all seeds.")
        point, scores = min(alive.items(), key=lambda item: sign * float(np.mean(item[1])))
        return dict(point), scores
