"""What a sweep leaves, and what one asks of it."""

import dataclasses
from typing import Any

import numpy as np

from fedjax_lab.checks import check_choice
from fedjax_lab.estimates import estimate, format_estimate, markdown_table
from fedjax_lab.simulation.points import Point

_BEST = {"max": np.fmax, "min": np.fmin}  # both prefer a number to NaN


@dataclasses.dataclass(frozen=True, eq=False)
class SweepResult:
    """What a sweep of P points and R seeds leaves after E evaluations; all of it on the host.

    Attributes:
      points: the hyper-parameters, P dicts.
      seeds: R integers.
      rounds: int64 [E], finished rounds at each evaluation.
      history: metric -> float64 [P, R, E]; the metrics and what they mean are those of a row of
        ``simulate``'s history. NaN where an interrupted sweep did not come.
      params: the last server models, NumPy arrays with leading axes [P, R]; NaN for runs that an
        interrupted sweep did not begin.
      seconds: time spent in rounds and evaluation, compilation left out.
      compile_seconds: time spent compiling.
      interrupted: whether Ctrl-C ended the sweep early.
      run_map: how runs were mapped, with ``auto`` resolved.
      runs_at_once: how many runs one call of the program takes.
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

    def best(self, metric: str, *, mode: str = "max", at: str = "last") -> Point:
        """The point with the best mean over the seeds.

        A point of which a seed has no finite number never wins. Of equal points the first wins.

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
        """A Markdown table: a line per point, with mean ± 95 % interval (Student's t) over seeds.

        A dash stands where a seed has no finite number; one seed has no interval.

        Args:
          metric: a key of ``history``.
          mode: with ``at="best"``: "max" or "min", which value of a run is its best.
          at: "last" evaluation or the "best" one of each run.
          digits: behind the decimal point.

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
        """One value of each run: float64 [P, R], finite or NaN.

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
        return values[..., -1] if at == "last" else _BEST[mode].reduce(values, axis=-1)
