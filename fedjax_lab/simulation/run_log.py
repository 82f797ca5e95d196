"""The time of a run, and its rows and checkpoints in a run directory."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fedjax_lab.checks import warn
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.storage.checkpoint import Checkpoints
from fedjax_lab.storage.lock import RunDirLock
from fedjax_lab.storage.run_dir import (
    CHECKPOINTS,
    CLIENTS,
    METRICS,
    SUMMARY,
    TIMES,
    MetricsFile,
    disk_full_in_one_line,
    open_run_dir,
    plain_row,
    read_config,
    read_metrics,
    restored_row,
    run_id,
    stored_row,
    write_json,
    write_rounds,
)
from fedjax_lab.types import Params, PyTree

Row = dict[str, Any]


class Saved(Protocol):
    """What has checkpoints: the state of a run, or of the runs of a sweep, as in ``Chunks``."""

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling in this call so far."""

    @property
    def params(self) -> Params:
        """Global model."""

    def saved(self) -> PyTree:
        """Return the state for a checkpoint."""

    def template(self) -> PyTree:
        """Return a template of ``saved``."""

    def restore(self, saved: Any) -> None:
        """Restore the state."""


class Stopwatch:
    """Time spent in all calls: in rounds and evaluation, and compiling.

    Args:
      spent: (seconds, compile_seconds) of earlier calls.
      compiled: seconds spent compiling in this call so far.

    Attributes:
      seconds: time spent in rounds and evaluation, without compilation.
      compile_seconds: time spent compiling.
    """

    def __init__(self, spent: tuple[float, float] = (0.0, 0.0), compiled: float = 0.0):
        self.seconds, self._compiled_before = spent
        self._began = time.perf_counter() - self.seconds - compiled
        self.compile_seconds = self._compiled_before + compiled

    def measure(self, compiled: float) -> None:
        """Set both times."""
        self.compile_seconds = self._compiled_before + compiled
        self.seconds = time.perf_counter() - self._began - compiled

    def record(self) -> dict[str, float]:
        """Return both times, by name."""
        return {"seconds": self.seconds, "compile_seconds": self.compile_seconds}

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the time that is spent inside."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began


class RunLog:
    """A run's time, and its rows and checkpoints in a run directory, if there is one.

    With several processes, process 0 writes. It gathers what is sharded over processes, so a run
    directory does not depend on the number of processes, and need not be on a shared disk. Orbax
    can save sharded arrays itself, in half the time. But if one process then fails to write
    or to read its part, the others wait for it for minutes, and no older checkpoint is tried.

    A larger number of ``rounds`` extends a run. It is written to config.json first. From then on,
    checkpoints inside a chunk of the longer run, where the shorter one ended, are ignored, and
    there is no summary.json until the run ends again.

    Args:
      run_dir: the directory, or None.
      every: rounds between checkpoints.
      config: the required contents of config.json, except the number of ``rounds``.
      scored: whether the clients are scored, see ``client_row``.

    Attributes:
      saved: rounds in the last checkpoint.
      clock: the run's time, from ``resume`` on; that of checkpoints is not counted.
      unscored: whether the clients' scores of the restored round are missing.

    Raises:
      FileExistsError: ``run_dir`` has another run.
      ValueError: it has more rounds than the run.
      BlockingIOError: another process is writing to it.
    """

    def __init__(self, run_dir: str | Path | None, every: int, config: Row, scored: bool = False):
        self._every, self._config, self._scored = every, config, scored
        self._processes = Processes.here()
        self._keeps = run_dir is not None
        self.saved, self.clock, self.unscored = 0, Stopwatch(), False
        self._path = Path(run_dir) if run_dir is not None and self._processes.is_first else None
        self._open = ExitStack()  # files and the lock
        self._passes: Callable[[int], bool] = lambda step: True
        if self._path is None:
            return
        with disk_full_in_one_line(self._path), ExitStack() as opened:
            self._path.mkdir(parents=True, exist_ok=True)
            opened.callback(RunDirLock(self._path).release)
            open_run_dir(self._path, config)
            # The recorded choice, because "auto" may be another one on another machine.
            owner = run_id(read_config(self._path))
            self._checkpoints = Checkpoints(self._path / CHECKPOINTS, owner)
            opened.callback(self._checkpoints.close)
            self._set_rounds(config)
            self._open = opened.pop_all()

    def _set_rounds(self, config: Row) -> None:
        """Set the number of rounds, which decides which checkpoints are valid."""
        assert self._path is not None
        rounds, eval_every = config["rounds"], config["eval_every"]
        self._passes = lambda step: step % eval_every == 0 or step == rounds
        saved = self._checkpoints.rounds()
        most = saved[0] if saved else 0
        if rounds < most:
            raise ValueError(
                f"rounds is {rounds}; it must be at least {most}, the number of rounds in run_dir "
                f"{str(self._path)!r}. For a shorter run, choose another directory."
            )
        if most > eval_every and not any(map(self._passes, saved)):
            raise ValueError(
                f"rounds is {rounds}; run_dir {str(self._path)!r} can only have {most}: it "
                f"has no checkpoint at a multiple of eval_every ({eval_every}) to continue from. "
                "Choose another directory."
            )
        if read_config(self._path).get("rounds") != rounds:
            self._drop_summary()
        write_rounds(self._path, config)

    def resume(self, chunks: Saved) -> list[Row]:
        """Restore the last checkpoint's state in all processes; only process 0 reads it.

        Args:
          chunks: receive the state; unchanged if there is no checkpoint. Their state is saved.

        Returns:
          The rows of earlier calls.

        Raises:
          RuntimeError: process 0 could not read the run directory.
        """
        self._chunks, processes = chunks, self._processes
        state, history, spent = processes.together(lambda: self._begin(chunks))
        first = processes.first_says([history, spent, self.saved, self.unscored])
        history, spent, self.saved, self.unscored = first
        if self.saved:
            chunks.restore(state)
        is_finished = self.saved and self.saved >= self._config["rounds"]
        self.clock = Stopwatch(spent, 0.0 if is_finished else chunks.compile_seconds)
        return list(map(restored_row, history))

    def _begin(self, chunks: Saved) -> tuple[PyTree, list[Row], tuple[float, float]]:
        """Return (state, history, times) to resume from, in the process that writes."""
        spent = 0.0, 0.0
        if self._path is None:
            return None, [], spent
        history: list[Row] = []
        rows: list[Row] = []  # of the history, as the file has them
        times: list[Row] = []
        state: PyTree = None
        if any(map(self._passes, self._checkpoints.rounds())):
            self.saved, state, extra = self._checkpoints.restore(chunks.template(), self._passes)
            history, times = extra["rows"], extra["times"]
            rows = [plain_row(restored_row(row)) for row in history]
            if self._rows_of(METRICS) != rows:
                warn(
                    f"{self._path / METRICS} lacks some of the {len(rows)} rows of the checkpoint "
                    f"of round {self.saved}, or has others; they are restored from the checkpoint."
                )
        if times:
            spent = times[-1]["seconds"], times[-1]["compile_seconds"]
        with disk_full_in_one_line(self._path):
            self._metrics, self._times = self._file(METRICS, rows), self._file(TIMES, times)
            if self._scored:
                scored = self._rows_of(CLIENTS) or []
                self._clients = self._file(CLIENTS, scored)
                self.unscored = self.saved > 0 and self.saved not in [r["round"] for r in scored]
        self._all_times = times
        return state, history, spent

    def _file(self, name: str, rows: list[Row]) -> MetricsFile:
        """Open a file that begins with rows of earlier calls."""
        assert self._path is not None
        return self._open.enter_context(closing(MetricsFile(self._path / name, rows)))

    def _rows_of(self, name: str) -> list[Row] | None:
        """Read the rows of a file up to the restored round; None: it is missing or damaged."""
        assert self._path is not None
        with suppress(OSError, ValueError):
            return [row for row in read_metrics(self._path / name) if row["round"] <= self.saved]
        return None

    def rows(self, rows: Sequence[Row]) -> None:
        """Take the time, and append the rows of an evaluation: one, or one for each run of a sweep.

        Seconds go to another file, so that equal runs have equal metrics files.

        Args:
          rows: the rows; all have the same ``round``.
        """
        self.clock.measure(self._chunks.compile_seconds)
        if self._path is not None:
            self._all_times.append({"round": rows[0]["round"], **self.clock.record()})
            with disk_full_in_one_line(self._path):
                self._drop_summary()
                for row in rows:
                    self._metrics.append(row)
                self._times.append(self._all_times[-1])

    def client_row(self, row: Row | None) -> None:
        """Append the clients' scores to a file of their own, because they are no metrics of rounds.

        Args:
          row: ``round`` and the scores; None: nothing is written.
        """
        if self._path is not None and row is not None:
            with disk_full_in_one_line(self._path):
                self._clients.append(row)

    def checkpoint(self, round: int, history: list[Row], *, ends: bool = False) -> None:
        """Save the state if a checkpoint is due; all processes call it.

        It is also due if a longer run would resume here: where no whole chunk is left.

        Args:
          ends: whether the run ends here, whatever rounds are left.
        """
        if not self._keeps:
            return
        last = ends or round + self._config["eval_every"] > self._config["rounds"]
        if round > self.saved if last else round - self.saved >= self._every:
            with self.clock.uncounted():
                state, params = self._chunks.saved(), self._chunks.params
                self._processes.together(lambda: self._save(round, state, params, history))
            self.saved = round

    def _save(self, round: int, state: PyTree, params: Params, history: list[Row]) -> None:
        if self._path is not None:
            with disk_full_in_one_line(self._path):
                self._metrics.sync()
                rows = [stored_row(row) for row in history]
                extra = {"rows": rows, "times": list(self._all_times)}
                self._checkpoints.save(round, state, extra, params)

    def _drop_summary(self) -> None:
        """Delete summary.json, which describes an earlier end of the run, and another model."""
        assert self._path is not None
        (self._path / SUMMARY).unlink(missing_ok=True)

    def summarise(self, summary: Row) -> None:
        """Write summary.json, which a run that goes on does not have."""
        if self._path is not None:
            with disk_full_in_one_line(self._path):
                write_json(self._path / SUMMARY, plain_row(summary))

    def close(self) -> None:
        """Close the files and release the lock."""
        with suppress(OSError):  # a full disk was reported before
            self._open.close()
