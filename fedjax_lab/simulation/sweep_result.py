"""The result of a sweep."""

import dataclasses
from typing import Any

import numpy as np

from fedjax_lab.checks import check_choice
from fedjax_lab.estimates import estimate, format_estimate
from fedjax_lab.markdown import markdown_table
from fedjax_lab.simulation.sweep_points import Point

_BEST = {"max": np.fmax, "min": np.fmin}  # both prefer a number to NaN


@dataclasses.dataclass(frozen=True, eq=False)
class SweepResult:
    """Result of a sweep of P points and R seeds with E evaluations; all on the host.

    Attributes:
      points: the hyperparameters, P dicts.
      seeds: R integers.
      rounds: int64 [E], finished rounds at each evaluation.
      history: metric -> float64 [P, R, E]; the metrics are those of a row of ``simulate``'s
        history. NaN for evaluations that an interrupted sweep did not reach.
      params: the final global models, NumPy arrays with leading axes [P, R]; NaN for runs that an
        interrupted sweep did not begin.
      seconds: time spent in rounds and evaluation, without compilation.
      compile_seconds: time spent compiling.
      interrupted: whether Ctrl-C ended the sweep early.
      run_map: the run map, with ``auto`` resolved.
      runs_at_once: number of runs in one call of the program.
      diverged: bool [P, R], whether a run diverged, by the rule of ``simulate``. None: unknown, and
        a run whose last value is not finite counts as diverged.
      stopped: bool [P, R], whether ``stop_when`` ended a run before its last round; later
        evaluations repeat the run's last values. None: no run could.
    """

    points: list[Point]
    seeds: list[int]
    rounds: np.ndarray
    history: dict[str, np.ndarray]
    params: Any
    seconds: float
    compile_seconds: float
    interrupted: bool
    run_map: str
    runs_at_once: int
    diverged: np.ndarray | None = None
    stopped: np.ndarray | None = None

    def best(self, metric: str, *, mode: str = "max", at: str = "last") -> Point:
        """Return the point with the best mean over the seeds.

        A point with a seed that diverged, or whose value is not finite, never wins. Of equal points
        the first wins.

        Args:
          metric: a key of ``history``.
          mode: "max" if larger is better, such as of "accuracy"; "min", such as of "test_loss".
          at: "last": the last evaluation; "best": each run's best one.

        Raises:
          ValueError: an argument is unknown, or no point has a finite mean.
        """
        means = self.values(metric, mode=mode, at=at).mean(1)
        if np.isnan(means).all():
            raise ValueError(f"no point has a finite {metric!r} for all seeds.")
        return self.points[int(np.nanargmax(means) if mode == "max" else np.nanargmin(means))]

    def table(self, metric: str, *, mode: str = "max", at: str = "last", digits: int = 4) -> str:
        """Format a Markdown table: a line per point with mean ± 95 % interval over seeds.

        The interval is Student's t. A dash means that a seed diverged, or that its value is not
        finite; one seed has no interval.

        Args:
          metric: a key of ``history``.
          mode: with ``at="best"``: "max" or "min", which value of a run is its best.
          at: "last" evaluation or the "best" one of each run.
          digits: digits after the decimal point.

        Raises:
          ValueError: an argument is unknown.
        """
        values = self.values(metric, mode=mode, at=at)
        rows = [
            [*(f"{v:g}" for v in point.values()), format_estimate(estimate(list(runs)), digits)]
            for point, runs in zip(self.points, values, strict=True)
        ]
        return markdown_table([[*self.points[0], metric], *rows])

    def values(self, metric: str, *, mode: str = "max", at: str = "last") -> np.ndarray:
        """Return one value of each run: float64 [P, R], finite or NaN; NaN for a diverged run.

        Args:
          metric: a key of ``history``.
          mode: with ``at="best"``: "max" or "min", which value of a run is its best.
          at: "last" evaluation or the "best" one of each run.

        Raises:
          ValueError: an argument is unknown.
        """
        check_choice("metric", metric, self.history)
        check_choice("mode", mode, _BEST)
        check_choice("at", at, ("best", "last"))
        values = np.where(np.isfinite(self.history[metric]), self.history[metric], np.nan)
        last = values[..., -1]
        diverged = np.isnan(last) if self.diverged is None else self.diverged
        found = last if at == "last" else _BEST[mode].reduce(values, axis=-1)
        return np.where(diverged, np.nan, found)
