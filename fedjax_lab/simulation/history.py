"""The history of a run: rows, totals, seconds, divergence and the reason why it stopped."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import warn
from fedjax_lab.clients.metrics import OF_EVERY_ROUND, OF_SERVER_STEP, PER_CLIENT
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.divergence import finite_and_other_clients, lost_rounds
from fedjax_lab.storage.rows import Row
from fedjax_lab.types import FedState, Params

_TIME = "simulated_seconds"  # a total, where rounds say how long they take


class SimulationResult(NamedTuple):
    """Result of a run.

    Attributes:
      params: the final global model.
      state: the final state of the method.
      history: one row per evaluation. ``round`` is the number of finished rounds. ``bytes_up``,
        ``bytes_down`` and ``gradients`` (mini-batch gradients taken) are exact totals since round
        0. Other metrics of rounds are means over those rounds since the last row that have a value:
        a round without participants has no loss, for example. NaN (null in a file) means that no
        round had one. The rest is what ``evaluate`` and ``diagnose`` returned.
      seconds: time spent in rounds and evaluation without compilation, including the time before an
        interruption.
      compile_seconds: time spent compiling rounds, including the time before an interruption.
      stopped: why the run ended early: "interrupt" (Ctrl-C or SIGTERM), "stop_when" or "diverged";
        None: it ran to its end.
      signal: number of the signal that interrupted the run; None: there was none, or it came to
        another process of the run.
    """

    params: Params
    state: FedState
    history: list[Row]
    seconds: float
    compile_seconds: float
    stopped: str | None
    signal: int | None = None

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C or SIGTERM ended the run early."""
        return self.stopped == "interrupt"


class History:
    """The rows of one run, with exact totals since round 0.

    Args:
      run: the computation, whose method says what a client sends, receives and computes.
      guarantees: number of rounds -> privacy guarantees for the rows.
      rows: those of earlier calls.

    Attributes:
      rows: the rows so far.
      guarantees: as given.
    """

    def __init__(
        self,
        run: Computation,
        guarantees: Callable[[int], Row] = lambda rounds: {},
        rows: Sequence[Row] = (),
    ):
        self.rows: list[Row] = []
        self.guarantees = guarantees
        self._traffic = run.algorithm.traffic(run.params)
        self._gradients_per_step = run.algorithm.gradients_per_step
        self._totals: dict[str, float] = dict.fromkeys(("bytes_up", "bytes_down", "gradients"), 0)
        if run.in_round == "exclude":
            self._totals["nonfinite_clients"] = 0
        self.go_on_from(rows)

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self.rows[-1]["round"] if self.rows else 0

    def go_on_from(self, rows: Sequence[Row]) -> None:
        """Append rows of earlier calls, from whose totals the new rows count on."""
        self.rows += rows
        if rows:
            last = rows[-1]
            known = [*self._totals, *([_TIME] if _TIME in last else [])]
            self._totals = {name: last[name] for name in known}

    def names(self, metrics: Mapping[str, Any]) -> set[str]:
        """Return the names of a row's entries, without those of an evaluation."""
        timed = (_TIME,) if "round_seconds" in metrics else ()
        always = ("round", "seconds", "compile_seconds", "run", "diverged")
        return {*always, *metrics, *self._totals, *timed, *self.guarantees(0)}

    def enter(self, round: int, metrics: Mapping[str, Any], scores: Mapping[str, Any]) -> Row:
        """Append the row of a chunk of rounds and return it.

        Args:
          metrics: of the chunk's rounds, [length] each.
        """
        row = {"round": round, **self.account(metrics), **self.guarantees(round), **scores}
        self.rows.append(row)
        return row

    def shown(self, scores: Collection[str]) -> Row:
        """Return the numbers of the last row for a progress bar.

        Args:
          scores: names of what an evaluation returned.
        """
        row, names = self.rows[-1], ("loss", *self.guarantees(0), *scores)
        return {name: row[name] for name in names if name in row}

    def account(self, metrics: Mapping[str, Any]) -> Row:
        """Compute the means over a chunk's rounds, and the new totals.

        A metric's mean is over the rounds that have it: those with a participant or, for metrics
        of the server's step, those in which the server takes one. NaN: no round has it.

        Args:
          metrics: of the rounds, stacked [rounds].

        Raises:
          ValueError: there are numbers of each client.
        """
        if any(name.startswith(PER_CLIENT) for name in metrics):
            raise ValueError(
                "with_update_metrics(per_client=True) writes a file for simulate(run_dir=...); "
                "leave per_client out of a sweep or a search."
            )
        metrics = {name: np.asarray(values, np.float64) for name, values in metrics.items()}
        for name in ("client_lr", "server_lr"):
            if np.any(metrics.get(name, 0.0) < 0):
                warn(
                    f"{name} is {metrics[name].min():.3g} in some round: with a schedule below 0, "
                    "steps go uphill."
                )
        finite, others = finite_and_other_clients(metrics)
        lost = lost_rounds(metrics)
        bytes_up, bytes_down = self._traffic.of_rounds(metrics)
        self._totals["bytes_up"] += bytes_up
        self._totals["bytes_down"] += bytes_down
        participants, steps = metrics.pop("participants"), metrics.pop("local_steps")
        # Means have the precision of float32; each round's total is a whole number.
        taken = np.rint(participants * steps).sum()
        self._totals["gradients"] += round(taken) * self._gradients_per_step
        counted = "bytes_up", "bytes_down", "message_parts", "nonfinite_clients", "finite_clients"
        for name in (*counted, "overflow"):  # which ``Watch`` has checked
            metrics.pop(name, None)
        if "nonfinite_clients" in self._totals:
            self._totals["nonfinite_clients"] += round(others.sum())
        if "round_seconds" in metrics:
            spent = float(metrics["round_seconds"].sum())
            self._totals[_TIME] = self._totals.get(_TIME, 0.0) + spent
        came = finite > 0
        stepped = metrics.get("server_updates", came) * metrics.get("communicated", 1) > 0
        row = {}
        for name, values in [*sorted(metrics.items()), ("local_steps", steps)]:
            has = stepped if name in OF_SERVER_STEP else came
            if name in OF_EVERY_ROUND:
                has = np.ones_like(has)
            elif name in ("loss", "delta_norm"):
                has, values = has | lost, np.where(lost, np.nan, values)
            row[name] = _mean(values[has])
        return {**row, **self._totals}


def warn_without_steps(histories: Sequence[History]) -> None:
    """Warn of runs in which no client has taken a step, though none was left out as not finite.

    Args:
      histories: of runs that have ended; those without rows do not count.
    """
    ends = [history.rows[-1] for history in histories if history.rows]
    still = [row["gradients"] == 0 and not row.get("nonfinite_clients") for row in ends]
    if any(still):
        where = "in this run" if len(still) == 1 else f"in {sum(still)} of {len(still)} runs"
        warn(f"no client took a local step {where}; the model is the initial one.")


def reason_to_stop(rounds_left: int, diverged: bool, enough: bool) -> str | None:
    """Return the reason why a run ended early, as in ``SimulationResult``.

    Args:
      enough: whether ``stop_when`` ended the run.
    """
    if diverged:
        return "diverged"
    if not rounds_left:
        return None
    return "stop_when" if enough else "interrupt"


def _mean(values: np.ndarray) -> float | list:
    """Average values [rounds, ...] over the rounds; NaN if there are none."""
    return as_value(values.mean(0) if len(values) else np.full(values.shape[1:], np.nan))


def as_value(value: Any) -> float | list:
    """Convert a metric for a row: a number, or a list of an array's numbers.

    NaN becomes ``math.nan``, so that equal rows are equal.
    """
    array = np.asarray(value, np.float64)
    if array.ndim:
        return array.tolist()
    return math.nan if np.isnan(array) else float(array)


def check_scores(argument: str, scores: Any, taken: Collection[str] = ()) -> None:
    """Check what an evaluation returned.

    Raises:
      TypeError: it is no dict, or a name is no string.
      ValueError: a name is taken.
    """
    if not isinstance(scores, Mapping):
        kind = "an array" if hasattr(scores, "dtype") else type(scores).__name__
        raise TypeError(f"{argument} returned {kind}; it must be a dict.")
    for name in scores:
        if not isinstance(name, str):
            raise TypeError(f"{argument} returned the name {name!r}; names must be strings.")
        if name in taken:
            raise ValueError(
                f"{argument} returned {name!r}, a name that rows already have; choose another one."
            )


def is_enough(stop_when: Callable[[Row], Any] | None, row: Row) -> bool:
    """Return whether the run ends after a row.

    Raises:
      KeyError: it asked for a number that the row lacks.
      TypeError: it returned several values.
    """
    if stop_when is None:
        return False
    try:
        said = stop_when(dict(row))
    except KeyError as error:
        error.add_note(f"stop_when is given a row with {', '.join(row)}.")
        raise
    if np.ndim(said):
        raise TypeError(
            f"stop_when returned {said!r}, of shape {np.shape(said)}; it must return one truth "
            "value, such as bool(array.all())."
        )
    return bool(said)
