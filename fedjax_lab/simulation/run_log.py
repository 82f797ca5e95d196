"""What a run records: its time, its rows and its checkpoints."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.run_folder import RunFolder
from fedjax_lab.simulation.stopwatch import Stopwatch
from fedjax_lab.simulation.sweep_program import Group
from fedjax_lab.storage.rows import Row, restored_row
from fedjax_lab.storage.run_dir import CLIENTS, METRICS, TIMES
from fedjax_lab.types import Params, PyTree

Saved = Chunks | Group  # what has checkpoints: the state of a run, or of the runs of a sweep


class RunLog:
    """A run's time, and its rows and checkpoints in a run directory, if there is one.

    A run that the directory has begun goes on from its last checkpoint, in all processes.

    With several processes, process 0 reads and writes. It gathers what is sharded over processes,
    so a run directory does not depend on the number of processes, and need not be on a shared disk.
    Orbax can save sharded arrays itself, in half the time. But if one process then fails to write
    or to read its part, the others wait for it for minutes, and no older checkpoint is tried.

    Args:
      run_dir: the directory, or None.
      every: rounds between checkpoints.
      config: the required contents of config.json, see ``RunFolder``.
      chunks: the state that is saved; restored, or unchanged if there is no checkpoint.
      scored: whether the clients are scored, see ``client_row``.

    Attributes:
      saved: rounds in the last checkpoint.
      history: the rows of earlier calls.
      clock: the run's time; that of checkpoints is not counted.
      unscored: whether the clients' scores of the restored round are missing.

    Raises:
      FileExistsError, ValueError, BlockingIOError: as ``RunFolder``.
      RuntimeError: process 0 could not read the run directory.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        every: int,
        config: Row,
        chunks: Saved,
        scored: bool = False,
    ):
        self._every, self._config, self._chunks = every, config, chunks
        self._keeps = run_dir is not None
        self._processes = processes = Processes.here()
        with ExitStack() as opened:

            def open_folder() -> RunFolder | None:
                if run_dir is None or not processes.is_first:
                    return None
                return opened.enter_context(closing(RunFolder(Path(run_dir), config)))

            self._folder = processes.together(open_folder)
            state, found = processes.together(lambda: self._restored(scored))
            self.saved, rows, self._times, self.unscored = processes.first_says(found)
            if self.saved:
                chunks.restore(state)
            self._open = opened.pop_all()
        self.history = list(map(restored_row, rows))
        last = self._times[-1] if self._times else {"seconds": 0.0, "compile_seconds": 0.0}
        is_finished = self.saved and self.saved >= config["rounds"]
        self.clock = Stopwatch(
            (last["seconds"], last["compile_seconds"]),
            0.0 if is_finished else chunks.compile_seconds,
        )

    def _restored(self, scored: bool) -> tuple[PyTree, list[Any]]:
        """Read the last checkpoint and open the files; JSON values except for the state."""
        if self._folder is None:
            return None, [0, [], [], False]
        round, state, rows, times = self._folder.restore(self._chunks.template())
        self._folder.begin(METRICS, list(map(restored_row, rows)))
        self._folder.begin(TIMES, times)
        unscored = False
        if scored:
            scores = self._folder.rows_of(CLIENTS, round) or []
            self._folder.begin(CLIENTS, scores)
            unscored = round > 0 and round not in [row["round"] for row in scores]
        return state, [round, rows, times, unscored]

    def rows(self, rows: Sequence[Row]) -> None:
        """Take the time, and append the rows of an evaluation: one, or one for each run of a sweep.

        Seconds go to another file, so that equal runs have equal metrics files.

        Args:
          rows: the rows; all have the same ``round``.
        """
        self.clock.measure(self._chunks.compile_seconds)
        self._times.append({"round": rows[0]["round"], **self.clock.record()})
        if self._folder is not None:
            self._folder.drop_summary()
            self._folder.append(METRICS, rows)
            self._folder.append(TIMES, self._times[-1:])

    def client_row(self, row: Row | None) -> None:
        """Append the clients' scores to a file of their own, because they are no metrics of rounds.

        Args:
          row: ``round`` and the scores; None: nothing is written.
        """
        if self._folder is not None and row is not None:
            self._folder.append(CLIENTS, [row])

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
        if self._folder is not None:
            self._folder.save(round, state, params, history, list(self._times))

    def summarise(self, summary: Row) -> None:
        """Write summary.json, which a run that goes on does not have."""
        if self._folder is not None:
            self._folder.summarise(summary)

    def close(self) -> None:
        """Close the run directory."""
        self._open.close()
