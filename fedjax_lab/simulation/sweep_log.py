"""The directory of a sweep: a folder with rows and checkpoints for each group of runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from fedjax_lab.machine.json_file import read_json
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.run_log import Row, RunLog
from fedjax_lab.simulation.sweep_result import Point
from fedjax_lab.storage.fingerprint import hash_arrays, hash_program
from fedjax_lab.storage.run_dir import SWEEP, is_leftover, write_json
from fedjax_lab.types import Params

_GROUP = "group{}"  # folder of a group, by its number


def sweep_identity(
    one: Row,
    of_runs: Placement,
    asked: Mapping[str, str],
    points: Sequence[Point],
    seeds: Sequence[int],
    models: Sequence[Params],
    program: jax.stages.Lowered,
) -> Row:
    """Return the identity of a sweep, by name and by content: entries of config.json.

    Args:
      one: identity of the first run.
      asked: the maps, by the names of ``sweep``'s arguments.
      models: initial global model of each seed.
      program: the rounds of a run.
    """
    entries = dict(one)
    del entries["seed"]
    fixed = entries["hyperparameters"].items()
    return {
        **entries,
        "hyperparameters": {name: value for name, value in fixed if name not in points[0]},
        "asked": {**entries["asked"], **asked},
        "content": {
            **entries["content"],
            "params": hash_arrays(models),
            "program": hash_program(program),
        },
        "run_map": of_runs.client_map.name,
        "num_devices": of_runs.record()["num_devices"],
        "sweep": {"points": list(points), "seeds": list(seeds)},
    }


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
            self.runs_at_once = found["runs_at_once"]
            self.open(0, found["runs_at_once"]).close()  # refuse another sweep before compiling
        elif self._path.exists() and not all(is_leftover(f.name) for f in self._path.iterdir()):
            raise FileExistsError(
                f"run_dir is {str(self._path)!r}, which has files but no {SWEEP}; it must be "
                "empty, new, or the directory of the same sweep."
            )

    def open(self, index: int, runs_at_once: int) -> RunLog:
        """Open the folder of a group; close it afterwards."""
        if self._path is None:
            return RunLog(None, every=self._every, config={}, processes=Processes())
        sweep = {**self._config["sweep"], "runs_at_once": runs_at_once}
        if not (self._path / SWEEP).exists():
            self._path.mkdir(parents=True, exist_ok=True)
            write_json(self._path / SWEEP, sweep)
        config = {**self._config, "sweep": {**sweep, "group": index}}
        folder = self._path / _GROUP.format(index)
        return RunLog(folder, every=self._every, config=config, processes=Processes())
