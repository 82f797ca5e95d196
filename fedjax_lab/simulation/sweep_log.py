"""The directory of a sweep: a folder with rows and checkpoints for each group of runs."""

from pathlib import Path

from fedjax_lab.machine.json_file import read_json
from fedjax_lab.simulation.run_folder import RunFolder
from fedjax_lab.simulation.run_log import RunLog, Saved
from fedjax_lab.storage.rows import Row
from fedjax_lab.storage.run_dir import SWEEP, is_leftover, write_json

_GROUP = "group{}"  # folder of a group, by its number


class SweepFolder:
    """The directory of a sweep.

    Args:
      run_dir: the directory, or None.
      every: rounds between checkpoints.
      config: identity of the sweep; ignored without a directory.

    Attributes:
      runs_at_once: size of the groups in the directory; None: it has none yet.

    Raises:
      FileExistsError: the directory has another sweep, or other files.
      ValueError: it has more rounds, or is damaged.
      BlockingIOError: another process is writing to it.
    """

    def __init__(self, run_dir: str | Path | None, every: int, config: Row):
        self._every, self._config = every, config
        self._path = None if run_dir is None else Path(run_dir)
        self.runs_at_once: int | None = None
        if self._path is None:
            return
        file = self._path / SWEEP
        if file.exists():
            found = read_json(file, {"runs_at_once": int}, hint="Choose another run_dir.")
            self.runs_at_once = size = found["runs_at_once"]
            # Refuse another sweep before compiling.
            RunFolder(self._path / _GROUP.format(0), self._config_of(0, size)).close()
        elif self._path.exists() and not all(is_leftover(f.name) for f in self._path.iterdir()):
            raise FileExistsError(
                f"run_dir is {str(self._path)!r}, which has files but no {SWEEP}; it must be "
                "empty, new, or the directory of the same sweep."
            )

    def open(self, index: int, runs_at_once: int, group: Saved) -> RunLog:
        """Open the folder of a group, which goes on from there; close it afterwards."""
        if self._path is None:
            return RunLog(None, self._every, {}, group)
        if not (self._path / SWEEP).exists():
            self._path.mkdir(parents=True, exist_ok=True)
            sweep = {**self._config["sweep"], "runs_at_once": runs_at_once}
            write_json(self._path / SWEEP, sweep)
        config = self._config_of(index, runs_at_once)
        return RunLog(self._path / _GROUP.format(index), self._every, config, group)

    def _config_of(self, index: int, runs_at_once: int) -> Row:
        """Return the config of a group."""
        sweep = {**self._config["sweep"], "runs_at_once": runs_at_once, "group": index}
        return {**self._config, "sweep": sweep}
