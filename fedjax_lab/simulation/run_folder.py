"""The run directory of a run that is running: rows, times, clients' scores and checkpoints."""

from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from fedjax_lab.checks import warn
from fedjax_lab.storage.checkpoint import Checkpoints
from fedjax_lab.storage.lock import one_writer
from fedjax_lab.storage.rows import (
    MetricsFile,
    Row,
    plain_row,
    read_metrics,
    restored_row,
    stored_row,
)
from fedjax_lab.storage.run_dir import (
    CHECKPOINTS,
    METRICS,
    SUMMARY,
    disk_full_in_one_line,
    open_run_dir,
    run_id,
    write_json,
    write_rounds,
)
from fedjax_lab.types import Params, PyTree


class RunFolder:
    """A run directory, with the lock of the one process that writes to it.

    A larger number of ``rounds`` extends a run. It is written to config.json first. From then on,
    checkpoints inside a chunk of the longer run, where the shorter one ended, are ignored, and
    there is no summary.json until the run ends again.

    Args:
      path: the directory.
      config: the required contents of config.json, except the number of ``rounds``.

    Raises:
      FileExistsError: ``path`` has another run.
      ValueError: it has more rounds than the run.
      BlockingIOError: another process is writing to it.
    """

    def __init__(self, path: Path, config: Row):
        self._path, self._rounds, self._eval_every = path, config["rounds"], config["eval_every"]
        self._files: dict[str, MetricsFile] = {}
        with disk_full_in_one_line(path), ExitStack() as opened:
            path.mkdir(parents=True, exist_ok=True)  # the run directory has been checked
            opened.enter_context(one_writer(path))
            recorded = open_run_dir(path, config)
            # The recorded choice, because "auto" may be another one on another machine.
            self._checkpoints = Checkpoints(path / CHECKPOINTS, run_id(recorded))
            opened.callback(self._checkpoints.close)
            self._check_rounds()
            if recorded.get("rounds") != self._rounds:
                self.drop_summary()
            write_rounds(path, recorded, self._rounds)
            self._open = opened.pop_all()

    def _check_rounds(self) -> None:
        """Check that the run can go on from a checkpoint to its number of rounds."""
        saved = self._checkpoints.rounds()
        most = saved[0] if saved else 0
        if self._rounds < most:
            raise ValueError(
                f"rounds is {self._rounds}; it must be at least {most}, the number of rounds in "
                f"run_dir {str(self._path)!r}. For a shorter run, choose another directory."
            )
        if most > self._eval_every and not any(map(self._ends_chunk, saved)):
            raise ValueError(
                f"rounds is {self._rounds}; run_dir {str(self._path)!r} can only have {most}: it "
                f"has no checkpoint at a multiple of eval_every ({self._eval_every}) to continue "
                "from. Choose another directory."
            )

    def _ends_chunk(self, round: int) -> bool:
        """Return True if a chunk of the run ends here, so that it can go on from a checkpoint."""
        return round % self._eval_every == 0 or round == self._rounds

    def restore(self, template: PyTree) -> tuple[int, PyTree, list[Row], list[Row]]:
        """Restore the last checkpoint: (its round, the state, rows and times as it has them).

        Args:
          template: structure, shapes and dtypes of the state.

        Returns:
          (0, None, [], []) without a checkpoint.
        """
        if not any(map(self._ends_chunk, self._checkpoints.rounds())):
            return 0, None, [], []
        round, state, extra = self._checkpoints.restore(template, self._ends_chunk)
        rows = [plain_row(restored_row(row)) for row in extra["rows"]]
        if self.rows_of(METRICS, round) != rows:
            warn(
                f"{self._path / METRICS} lacks some of the {len(rows)} rows of the checkpoint "
                f"of round {round}, or has others; they are restored from the checkpoint."
            )
        return round, state, extra["rows"], extra["times"]

    def rows_of(self, name: str, round: int) -> list[Row] | None:
        """Read the rows of a file up to a round; None: it is missing or damaged."""
        with suppress(OSError, ValueError):
            return [row for row in read_metrics(self._path / name) if row["round"] <= round]
        return None

    def begin(self, name: str, rows: list[Row]) -> None:
        """Open a file of rows, which begins with those of earlier calls."""
        with disk_full_in_one_line(self._path):
            file = MetricsFile(self._path / name, rows)
            self._files[name] = self._open.enter_context(closing(file))

    def append(self, name: str, rows: Sequence[Row]) -> None:
        """Append rows to a file that was begun."""
        with disk_full_in_one_line(self._path):
            for row in rows:
                self._files[name].append(row)

    def save(
        self, round: int, state: PyTree, params: Params, history: list[Row], times: list[Row]
    ) -> None:
        """Save a checkpoint, after the rows up to it."""
        with disk_full_in_one_line(self._path):
            self._files[METRICS].sync()
            extra = {"rows": list(map(stored_row, history)), "times": times}
            self._checkpoints.save(round, state, extra, params)

    def summarise(self, summary: Row) -> None:
        """Write summary.json."""
        with disk_full_in_one_line(self._path):
            write_json(self._path / SUMMARY, plain_row(summary))

    def drop_summary(self) -> None:
        """Delete summary.json, which describes an earlier end of the run, and another model."""
        (self._path / SUMMARY).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files and release the lock."""
        with suppress(OSError):  # a full disk was reported before
            self._open.close()
