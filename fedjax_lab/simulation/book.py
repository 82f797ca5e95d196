"""The history of a run: rows, totals, seconds, divergence and the reason why it stopped."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab import tree
from fedjax_lab.clients.metrics import OF_EVERY_ROUND, OF_SERVER_STEP
from fedjax_lab.qp.residuals import LARGEST_RESIDUAL, QP_RESIDUALS, unsolved
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.divergence import (
    ODD_LOSS,
    finite_and_other_clients,
    lost_rounds,
    odd_losses,
)
from fedjax_lab.simulation.loggers import Hooks
from fedjax_lab.simulation.recorder import Row
from fedjax_lab.simulation.run import Run
from fedjax_lab.simulation.scores import Scores, as_value, is_enough
from fedjax_lab.storage.run_dir import with_nan
from fedjax_lab.types import FedState, Metrics, Params

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
        round had one. The rest is what ``evaluate`` returned.
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


class Book:
    """History of a run.

    Args:
      run: the computation.
      chunks: the run's state.
      scores: the caller's evaluation functions.
      guarantees: number of rounds -> privacy guarantees for the rows.
      hooks: functions that receive each row.
      stop_when: as in ``simulate``.

    Attributes:
      history: the rows.
      round: finished rounds.
      seconds: time spent in rounds and evaluation, without compilation.
      diverged: whether the run has to end.
      enough: whether ``stop_when`` ended the run.
    """

    def __init__(
        self,
        run: Run,
        chunks: Chunks,
        scores: Scores,
        guarantees: Callable[[int], Row],
        hooks: Hooks,
        stop_when: Callable[[Row], Any] | None,
    ):
        self._run, self._chunks, self._scores, self._spent = run, chunks, scores, guarantees
        self._hooks, self._stop_when = hooks, stop_when
        self._watch = Watch(run.algorithm, run.on_nonfinite)
        self.history: list[Row] = []
        self.round, self.seconds, self.enough = 0, 0.0, False

    def go_on_from(self, history: list[Row], round: int, spent: tuple[float, float]) -> None:
        """Continue the history of an earlier call, and pass its rows to the hooks.

        Args:
          history: rows of the earlier call, from a file.
          round: finished rounds.
          spent: (seconds, compile_seconds) of earlier calls.
        """
        chunks, counts = self._chunks, self._run.in_round == "exclude"
        self.history, self.round = list(map(with_nan, history)), round
        self._tally = Tally(self._run.algorithm, chunks.params, self.history, counts)
        self.seconds, before = spent
        is_finished = round >= self._run.rounds
        chunks.compile_seconds = before + (0 if is_finished else chunks.compile_seconds)
        for row in self.history:
            self._hooks(row)
            self.enough = is_enough(self._stop_when, row)
        self._began = time.perf_counter() - self.seconds - chunks.compile_seconds

    @property
    def next_length(self) -> int:
        """Number of rounds of the next chunk."""
        return self._run.chunk_length(self.round)

    @property
    def is_last(self) -> bool:
        """True if no whole chunk is left, so that a longer run would resume here."""
        return self.round + self._run.eval_every > self._run.rounds

    @property
    def diverged(self) -> bool:
        """True if the global model, or all participants of a round, were not finite."""
        return self._watch.diverged

    def goes_on(self, interrupted: bool) -> bool:
        """Return whether to run another chunk; the same in all processes.

        Args:
          interrupted: whether a signal came to this process.
        """
        if self.round >= self._run.rounds:
            return False
        flags = self._chunks.team.any_of(interrupted, self.enough)
        interrupted, self.enough = flags
        return not (interrupted or self.diverged or self.enough)

    def look(self, first: int, state: FedState, metrics: Metrics) -> int:
        """Check a chunk of rounds with ``Watch``.

        Args:
          first: number of its first round.
          state: the state after it.
          metrics: of its rounds, [length] each.
        """
        return self._watch.look(first, state, metrics)

    def enter(self, length: int, metrics: Metrics) -> Row:
        """Record a chunk of rounds and its evaluation; returns its row.

        Args:
          length: its rounds.
          metrics: of its rounds, [length] each.
        """
        self.round += length
        chunks, stops = self._chunks, self._run.on_nonfinite == "stop"
        taken = self._tally.names(metrics) | self._spent(0).keys()
        if self.diverged and not (stops and chunks.is_finite()):
            scores = self._scores.missing(self._run, chunks, self.history, taken)
        else:
            scores = self._scores.of(chunks, taken)
        scores = {**self._spent(self.round), **scores}
        row = {"round": self.round, **self._tally.row(metrics), **scores}
        self.history.append(row)
        self.shown = {"loss": row["loss"], **scores}
        self.seconds = time.perf_counter() - self._began - self._chunks.compile_seconds
        return row

    def score_clients(self) -> Row | None:
        """Return the clients' scores with the current model, whose time is not counted.

        None: they are not asked for, or the run diverged.
        """
        if self._scores.score_clients is None or self.diverged:
            return None
        began = time.perf_counter()
        found = {"round": self.round, **self._scores.of_clients(self._chunks)}
        self._began += time.perf_counter() - began
        return found

    def tell(self, row: Row) -> None:
        """Pass a row to the hooks and to ``stop_when``; the hooks' time is not counted.

        Args:
          row: the last row.
        """
        self._began += self._hooks(row)
        self.enough = not self.diverged and is_enough(self._stop_when, row)

    @property
    def stopped(self) -> str | None:
        """Reason why the run ended early, as in ``SimulationResult``."""
        if self.diverged:
            return "diverged"
        if self.round >= self._run.rounds:
            return None
        return "stop_when" if self.enough else "interrupt"

    def summary(self) -> Row:
        """Return the contents of summary.json."""
        return {
            "round": self.round,
            "seconds": self.seconds,
            "compile_seconds": self._chunks.compile_seconds,
            "interrupted": self.stopped == "interrupt",
            "stopped": self.stopped,
        }

    def result(self, signal: int | None) -> SimulationResult:
        """Return the result of the run.

        Args:
          signal: the signal that came to this process, or None.
        """
        return SimulationResult(
            jax.tree.map(lambda leaf: leaf, self._chunks.params),
            self._chunks.result(),
            self.history,
            self.seconds,
            self._chunks.compile_seconds,
            self.stopped,
            signal if self.stopped == "interrupt" else None,
        )


class Tally:
    """Exact totals since round 0, and the rows made from them.

    Args:
      algorithm: the method, which determines what a client sends, receives and computes.
      params: the global model.
      history: rows from before an interruption.
      counts_nonfinite: whether the metrics count clients that are not finite.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        params: Params,
        history: Sequence[Row] = (),
        counts_nonfinite: bool = True,
    ):
        self._traffic = algorithm.traffic(params)
        self._gradients_per_step = algorithm.gradients_per_step
        self._totals: dict[str, float] = dict.fromkeys(("bytes_up", "bytes_down", "gradients"), 0)
        if counts_nonfinite:
            self._totals["nonfinite_clients"] = 0
        if history:
            last = history[-1]
            known = [*self._totals, *([_TIME] if _TIME in last else [])]
            self._totals = {name: last[name] for name in known}

    def names(self, metrics: Mapping[str, Any]) -> set[str]:
        """Return the names of a row's entries, without those of an evaluation.

        Args:
          metrics: of rounds.
        """
        timed = (_TIME,) if "round_seconds" in metrics else ()
        return {"round", "seconds", "compile_seconds", *metrics, *self._totals, *timed}

    def row(self, metrics: Mapping[str, Any]) -> Row:
        """Compute the means over a chunk's rounds, and the new totals.

        A metric's mean is over the rounds that have it: those with a participant or, for metrics
        of the server's step, those in which the server takes one. NaN: no round has it.

        Args:
          metrics: of the rounds, stacked [rounds].

        Raises:
          RuntimeError: a Poisson cohort had more clients than slots.
        """
        metrics = {name: np.asarray(values, np.float64) for name, values in metrics.items()}
        _check_overflow(metrics.pop("overflow", False))
        finite, others = finite_and_other_clients(metrics)
        lost = lost_rounds(metrics)
        bytes_up, bytes_down = self._traffic.of_rounds(metrics)
        self._totals["bytes_up"] += bytes_up
        self._totals["bytes_down"] += bytes_down
        participants, steps = metrics.pop("participants"), metrics.pop("local_steps")
        self._totals["gradients"] += round((participants * steps).sum()) * self._gradients_per_step
        for name in ("bytes_up", "bytes_down", "message_parts"):
            metrics.pop(name, None)
        for name in ("nonfinite_clients", "finite_clients"):
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


def _mean(values: np.ndarray) -> float | list:
    """Average values [rounds, ...] over the rounds; NaN if there are none."""
    return as_value(values.mean(0) if len(values) else np.full(values.shape[1:], np.nan))


def _check_overflow(overflow: Any) -> None:
    if np.any(overflow):
        raise RuntimeError(
            "a Poisson cohort has more clients than slots, which has a probability of 1e-9 in a "
            "round; choose another seed."
        )


class Watch:
    """Checks a run for values that are not finite and unsolved quadratic programs, and warns.

    Args:
      algorithm: the method.
      on_nonfinite: as in ``simulate``.

    Attributes:
      diverged: whether the run has to end.
    """

    def __init__(self, algorithm: Algorithm, on_nonfinite: str):
        self._algorithm, self._stop_at_once = algorithm, on_nonfinite == "stop"
        self._params_are_finite = jax.jit(lambda state: tree.all_finite(algorithm.params(state)))
        self._told = self._told_of_programs = self._told_of_losses = False
        self.diverged = False

    def look(self, first: int, state: FedState, metrics: Mapping[str, Any]) -> int:
        """Check a chunk of rounds; returns the number of rounds before the one that ends the run.

        Args:
          first: number of its first round, from 0.
          state: the state after it.
          metrics: of its rounds, [length] each.

        Raises:
          RuntimeError: a Poisson cohort had more clients than slots.
        """
        _check_overflow(metrics.get("overflow", False))
        left, excluded = finite_and_other_clients(metrics)
        if self._stop_at_once and excluded.any():
            self.diverged = True
            at = int((excluded > 0).argmax())
            self._warn(f"diverged: on_nonfinite is 'stop': the run ends before round {first + at}.")
            return at
        if excluded.any() and not self._told:
            self._told = True
            at = int(excluded.argmax())
            self._warn(
                f"in round {first + at} of {self._algorithm.name} {excluded[at]:.0f} of "
                f"{excluded[at] + left[at]:.0f} clients gave values that are not finite and were "
                "left out; rows count them as nonfinite_clients."
            )
        odd = odd_losses(metrics)
        if odd.any() and not self._told_of_losses:
            self._told_of_losses = True
            at = int(odd.argmax())
            self._warn(
                f"in round {first + at} of {self._algorithm.name} the loss is "
                f"{metrics['loss'][at]}, {ODD_LOSS} The run continues."
            )
        if not self._told_of_programs:
            self._told_of_programs = self._warn_of_programs(first, metrics)
        lost = lost_rounds(metrics)
        if lost.any():
            self.diverged = True
            self._warn(f"diverged: in round {first + int(lost.argmax())} no client was finite.")
        elif not self._params_are_finite(state):
            self.diverged = True
            self._warn(f"diverged: the global model is not finite after round {first + len(left)}.")
        return len(left)

    def _warn_of_programs(self, first: int, metrics: Mapping[str, Any]) -> bool:
        found = {name: np.nan_to_num(metrics[name]) for name in QP_RESIDUALS if name in metrics}
        for name in unsolved({name: values.max() for name, values in found.items()}):
            at = int(found[name].argmax())
            self._warn(
                f"in round {first + at} of {self._algorithm.name} {name} is {found[name][at]:.2g}, "
                f"above {LARGEST_RESIDUAL:g}: its quadratic programs were not solved, and their "
                "results are no projections; reports mark the run."
            )
            return True
        return False

    def _warn(self, text: str) -> None:
        warnings.warn(text, UserWarning, stacklevel=5)
