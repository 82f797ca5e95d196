"""The file with each participant's numbers of ``with_update_metrics(per_client=True)``."""

from pathlib import Path

import numpy as np

from fedjax_lab.clients.metrics import IS_KNOWN, PER_CLIENT
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.storage.run_dir import disk_full_in_one_line
from fedjax_lab.types import Metrics

UPDATES = "client_updates.csv"


class ClientUpdates:
    """Appends to ``client_updates.csv`` of a run directory: one line for a participant in a round.

    The columns are ``round``, counted from 1 as in rows, ``client``, its number from 0, and the
    numbers in alphabetical order. A run that continues first removes the lines of later rounds.
    """

    def __init__(self, run_dir: str | Path | None):
        self._path = None if run_dir is None else Path(run_dir) / UPDATES
        self._processes, self._is_open = Processes.here(), False

    def take(self, first: int, metrics: Metrics) -> Metrics:
        """Write the numbers of each client, and return the other metrics. All processes call it.

        Args:
          first: number of the first round, from 0.
          metrics: of consecutive rounds, [length] or [length, S].

        Raises:
          ValueError: there are such numbers, and no run directory; or the file is damaged.
        """
        numbers = {name: value for name, value in metrics.items() if name.startswith(PER_CLIENT)}
        if not numbers:
            return metrics
        if self._path is None:
            raise ValueError(
                "run_dir is None, and with_update_metrics(per_client=True) writes to a file of it; "
                "pass run_dir, or leave per_client out."
            )
        numbers = self._processes.gathered(numbers)
        if self._processes.is_first:
            with disk_full_in_one_line(self._path):
                self._append(first, {name: np.asarray(value) for name, value in numbers.items()})
        return {name: value for name, value in metrics.items() if name not in numbers}

    def _append(self, first: int, numbers: dict[str, np.ndarray]) -> None:
        assert self._path is not None
        ids = numbers.pop(f"{PER_CLIENT}client")
        took_part = numbers.pop(f"{PER_CLIENT}participates")
        known = {n: numbers.pop(n) for n in [*numbers] if n.endswith(IS_KNOWN)}
        names = sorted(numbers)
        if not self._is_open:
            header = ",".join(["round", "client", *(n.removeprefix(PER_CLIENT) for n in names)])
            write_text(self._path, "\n".join([header, *_lines_until(self._path, first), ""]))
            self._is_open = True
        with self._path.open("a", encoding="utf-8") as file:
            for at in zip(*np.nonzero(took_part), strict=True):
                place, slot = at
                has = {name: known.get(f"{name}{IS_KNOWN}", took_part)[at] for name in names}
                values = (f"{numbers[n][at]:.8g}" if has[n] else "" for n in names)
                line = [str(first + place + 1), str(ids[place, slot]), *values]
                file.write(",".join(line) + "\n")


def _lines_until(path: Path, rounds: int) -> list[str]:
    """Return the lines of a file that belong to the first rounds; none if there is no file.

    A run that was killed may have left a part of a line at the end.

    Raises:
      ValueError: a line does not begin with a round.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()[1:]
    try:
        return [line for line in lines if int(line.partition(",")[0]) <= rounds]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to continue the run.") from error
