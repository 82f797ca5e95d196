"""What a run returns."""

from typing import NamedTuple

from fedjax_lab.simulation.recorder import Row
from fedjax_lab.types import FedState, Params


class SimulationResult(NamedTuple):
    """What a run leaves.

    Attributes:
      params: the last server model.
      state: the method's last state.
      history: one row per evaluation. ``round`` counts finished rounds; ``bytes_up``,
        ``bytes_down`` and ``gradients`` (mini-batch gradients taken) are exact totals since
        round 0; other metrics of the rounds are means over the rounds since the last row;
        the rest is what ``evaluate`` returned.
      seconds: time spent in rounds and evaluation, compilation left out; the parts before an
        interruption are included.
      compile_seconds: time spent compiling rounds, likewise.
      stopped: why the run ended before its last round: "interrupt" (Ctrl-C or SIGTERM),
        "stop_when" or "diverged"; None: it did not.
      signal: the number of the signal that interrupted it; None: none did, or one that came to
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
        """Whether Ctrl-C or SIGTERM ended the run early."""
        return self.stopped == "interrupt"
