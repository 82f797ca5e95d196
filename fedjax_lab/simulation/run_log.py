"""The identity of a run; its rows and checkpoints in a run directory."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from fedjax_lab.checks import warn
from fedjax_lab.clients.metrics import is_reserved
from fedjax_lab.data.clock import ClientTimes
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.descriptions import ARRAY, describe
from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.client_data import ClientData
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.storage.checkpoint import Checkpoints
from fedjax_lab.storage.fingerprint import hash_arrays, hash_function, hash_program
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
    versions,
    write_json,
    write_rounds,
)
from fedjax_lab.types import Params, PyTree

Row = dict[str, Any]


class Saved(Protocol):
    """What has checkpoints: the state of a run, or of the runs of a sweep, as in ``Chunks``.

    Attributes:
      compile_seconds: time spent compiling in this call so far.
    """

    compile_seconds: float

    @property
    def params(self) -> Params:
        """Global model."""

    def saved(self) -> PyTree:
        """Return the state for a checkpoint."""

    def template(self) -> PyTree:
        """Return a template of ``saved``."""

    def restore(self, saved: Any) -> None:
        """Restore the state."""


def identity(
    run: Computation,
    client_data: ClientData,
    place: Placement,
    functions: Mapping[str, Callable[..., Any] | None],
    seed: int,
    config: Mapping[str, Any],
    is_kept: bool,
    given: Schedule,
    times: ClientTimes | None = None,
) -> Row:
    """Return the identity of a run, by name and by content: entries of config.json.

    A run directory is bound to it, and all processes of a run must have the same one.

    Args:
      functions: the caller's functions, by the names of ``simulate``'s arguments.
      is_kept: whether there is a run directory. With one, or with several processes, arrays and
        functions are hashed; the program is hashed by ``with_program``.

    Raises:
      ValueError: ``config`` has an entry of the run.
    """
    asked = place.record()
    del asked["num_devices"]
    algorithm, schedule = run.algorithm, run.schedule
    entries: Row = {
        "algorithm": algorithm.name,
        "hyperparameters": dict(algorithm.hyperparameters),
        "partition": dataclasses.asdict(client_data.clients.partition),
        "num_clients": client_data.clients.num_clients,
        **schedule.record(),
        "rounds": run.rounds,
        "eval_every": run.eval_every,
        **asked,
        "on_nonfinite": run.on_nonfinite,
        **({} if run.lowering == "auto" else {"lowering": run.lowering}),
        "seed": seed,
        **client_data.record(),
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
        "versions": versions(),
        "asked": asked,
    }
    if is_kept:
        described = {"loss_fn": algorithm.loss_fn, "sample_cohort": schedule.sample_cohort}
        entries["functions"] = {
            name: describe(function) for name, function in described.items() if function is not None
        }
    if algorithm.personal is not None:
        entries["personal_models"] = True
    if arrays := _arrays_of(given, times):
        entries["arrays"] = arrays
    if is_kept or place.processes.is_multiprocess:
        entries["content"] = {
            "params": hash_arrays(run.params),
            "state": None if run.state is None else hash_arrays(run.state),
            "examples": client_data.content(),
            **{name: hash_function(function) for name, function in functions.items()},
            "sample_cohort": hash_function(schedule.sample_cohort),
        }
        if jax.tree.leaves(run.frozen):
            entries["content"]["frozen"] = hash_arrays(run.frozen)
    for name in config:
        if name in (*entries, "num_devices"):
            raise ValueError(f"config has the name {name!r}, which is reserved for the run.")
    return entries


def _arrays_of(schedule: Schedule, times: ClientTimes | None) -> dict[str, Any]:
    """Describe the caller's arrays, under the names of the arguments."""
    given = {name: getattr(schedule, name) for name in ("local_steps", "local_epochs", "weights")}
    found: dict[str, Any] = {name: _range_of(n) for name, n in given.items() if np.ndim(n)}
    if times is not None:  # not those of a method, with the bytes of its messages
        fields = ((field, getattr(times, field.name)) for field in dataclasses.fields(times))
        found["times"] = {
            field.name: _range_of(value) if np.ndim(value) else value
            for field, value in fields
            if np.ndim(value) or value != field.default
        }
    if schedule.client_constants is not None:
        leaves = map(np.asarray, jax.tree.leaves(schedule.client_constants))
        shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        hashed = hash_arrays(schedule.client_constants)
        found["client_constants"] = {ARRAY: shown, "hash": hashed}
    return found


def _range_of(values: Any) -> dict[str, str]:
    values = np.asarray(values)
    numbers = 1 * values  # of truth values, too
    shown = f"{numbers.min():.6g} to {numbers.max():.6g}, mean {numbers.mean():.4g}"
    return {ARRAY: shown, "hash": hash_arrays(values)}


def with_program(entries: Row, run: Computation, place: Placement, chunks: Chunks) -> Row:
    """Return an identity with the chosen placement and the program's hash.

    All processes call it.

    Raises:
      ValueError: the processes have different programs.
    """
    recorded = {**entries, **place.record()}
    if "content" in recorded:
        program = chunks.lower(run.eval_every)
        recorded["content"] = {**recorded["content"], "program": hash_program(program)}
        if names := sorted(name for name in program.out_info[1] if not is_reserved(name)):
            recorded["client_metrics"] = names
        place.processes.agree({"content": recorded["content"]})
    return recorded


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
      processes: the processes of the run.
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

    def __init__(
        self,
        run_dir: str | Path | None,
        *,
        every: int,
        config: Row,
        processes: Processes,
        scored: bool = False,
    ):
        self._every, self._processes, self._scored = every, processes, scored
        self._config = config
        self._keeps = run_dir is not None
        self.saved, self.clock, self.unscored = 0, Stopwatch(), False
        self._path = Path(run_dir) if run_dir is not None and processes.is_first else None
        self._open: list[Any] = []  # resources for ``close``, in this order
        self._passes: Callable[[int], bool] = lambda step: True
        if self._path is None:
            return
        with disk_full_in_one_line(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
            self._open = [RunDirLock(self._path).release]
            try:
                open_run_dir(self._path, config)
                # The recorded choice, because "auto" may be another one on another machine.
                owner = run_id(read_config(self._path))
                self._checkpoints = Checkpoints(self._path / CHECKPOINTS, owner)
                self._open.insert(0, self._checkpoints.close)
                self._set_rounds(config)
            except BaseException:
                self.close()
                raise

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
            self._compare_rows(rows)
        if times:
            spent = times[-1]["seconds"], times[-1]["compile_seconds"]
        with disk_full_in_one_line(self._path):
            self._metrics = MetricsFile(self._path / METRICS, rows)
            self._times = MetricsFile(self._path / TIMES, times)
            self._open_clients()
        self._all_times = times
        self._open = [self._metrics.close, self._times.close, *self._open]
        return state, history, spent

    def _open_clients(self) -> None:
        """Open the file of the clients' scores, with the rows up to the restored round."""
        assert self._path is not None
        if not self._scored:
            return
        rows: list[Row] = []
        with suppress(OSError, ValueError):  # what is damaged is left out
            rows = [row for row in read_metrics(self._path / CLIENTS) if row["round"] <= self.saved]
        self._clients = MetricsFile(self._path / CLIENTS, rows)
        self._open = [self._clients.close, *self._open]
        self.unscored = self.saved > 0 and self.saved not in (row["round"] for row in rows)

    def _compare_rows(self, expected: list[Row]) -> None:
        """Warn if the file's rows differ from the checkpoint's, which replace them."""
        assert self._path is not None
        file = self._path / METRICS
        in_file: list[Row] | None = None
        with suppress(OSError, ValueError):
            in_file = [row for row in read_metrics(file) if row["round"] <= self.saved]
        if in_file != expected:
            warn(
                f"{file} lacks some of the {len(expected)} rows of the checkpoint of round "
                f"{self.saved}, or has others; they are restored from the checkpoint.",
            )

    def rows(self, rows: Sequence[Row]) -> None:
        """Take the time, and append the rows of an evaluation: one, or one for each run of a sweep.

        Seconds go to another file, so that equal runs have equal metrics files.

        Args:
          rows: the rows; all have the same ``round``.
        """
        self.clock.measure(self._chunks.compile_seconds)
        if self._path is not None:
            times = {"seconds": self.clock.seconds, "compile_seconds": self.clock.compile_seconds}
            self._all_times.append({"round": rows[0]["round"], **times})
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

    def summarise(self, **summary: Any) -> None:
        """Write summary.json, which a run that goes on does not have."""
        if self._path is not None:
            with disk_full_in_one_line(self._path):
                write_json(self._path / SUMMARY, plain_row(summary))

    def close(self) -> None:
        """Close the files and release the lock."""
        for close in self._open:
            with suppress(OSError):  # a full disk was reported before
                close()
        self._open = []
