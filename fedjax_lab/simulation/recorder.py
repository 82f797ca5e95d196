"""What a run leaves on disk while it goes on, and what it goes on from."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.simulation.checkpoint import Checkpoints
from fedjax_lab.simulation.run_dir import (
    CHECKPOINTS,
    METRICS,
    SUMMARY,
    TIMES,
    MetricsFile,
    open_run_dir,
    read_metrics,
    write_json,
)
from fedjax_lab.types import PyTree

Row = dict[str, Any]


class Recorder:
    """Keeps a run's rows and checkpoints; does nothing without a run directory.

    Args:
      run_dir: the directory, or None.
      every: rounds between checkpoints.
      config: what the directory's config.json has to be.

    Raises:
      FileExistsError: ``run_dir`` holds another run.
    """

    def __init__(self, run_dir: str | Path | None, *, every: int, config: Row):
        self._every = every
        self._saved = 0
        self.spent = (0.0, 0.0)  # (seconds, compile_seconds) before this call
        self._path = None if run_dir is None else Path(run_dir)
        if self._path is not None:
            open_run_dir(self._path, config)

    def begin(self, state: PyTree) -> tuple[int, PyTree, list[Row]]:
        """(round, state, history) to go on from; ``state`` is that before round 0."""
        if self._path is None:
            return 0, state, []
        self._checkpoints = Checkpoints(self._path / CHECKPOINTS)
        history: list[Row] = []
        times: list[Row] = []
        if self._checkpoints.latest() is not None:
            try:
                self._saved, state, _ = self._checkpoints.restore(like=state)
            except ValueError:
                self._checkpoints.close()
                raise
            rows = read_metrics(self._path / METRICS)
            history = [row for row in rows if row["round"] <= self._saved]
            state = jax.tree.map(jnp.asarray, state)
            if (self._path / TIMES).exists():
                times = [r for r in read_metrics(self._path / TIMES) if r["round"] <= self._saved]
        if times:
            self.spent = (times[-1]["seconds"], times[-1]["compile_seconds"])
        self._metrics = MetricsFile(self._path / METRICS, history)
        self._times = MetricsFile(self._path / TIMES, times)
        return self._saved, state, history

    def row(self, row: Row, seconds: float, compile_seconds: float) -> None:
        """Append a row; times go to a file of their own: equal runs have equal metrics."""
        if self._path is not None:
            self._metrics.append(row)
            times = {"seconds": seconds, "compile_seconds": compile_seconds}
            self._times.append({"round": row["round"], **times})

    def checkpoint(self, round: int, state: PyTree, history: list[Row], *, last: bool) -> None:
        """Save the state if it is time to, or if this is the last chance."""
        if self._path is not None and (last or round - self._saved >= self._every):
            self._checkpoints.save(round, state, {"rows": len(history)})
            self._saved = round

    def summarise(self, **summary: Any) -> None:
        """Write summary.json."""
        if self._path is not None:
            write_json(self._path / SUMMARY, summary)

    def close(self) -> None:
        """Close the files."""
        if self._path is not None:
            self._metrics.close()
            self._times.close()
            self._checkpoints.close()
