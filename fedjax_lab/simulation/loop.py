"""What the host does around compiled chunks of rounds: the start, the books, the way to stop."""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.data import FederatedArrays
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.recorder import Row
from fedjax_lab.simulation.rounds import Schedule
from fedjax_lab.types import FedState, Key, Params


def start_state(
    algorithm: Algorithm, params: Params, clients: FederatedArrays, schedule: Schedule, key: Key
) -> FedState:
    """The state before round 0; it owns its buffers, because the rounds donate them."""

    @jax.jit
    def start(params, clients, key):
        # Where a method makes no use of the first batch, none is drawn.
        batch = schedule.draw(clients, key, jnp.zeros((), jnp.int32))
        return jax.tree.map(jnp.copy, algorithm.init(params, clients.num_clients, batch))

    return start(params, clients, key)


class Tally:
    """Exact totals since round 0, and the rows of a history.

    Args:
      algorithm: the method, which knows what a client sends, receives and computes.
      params: the server model.
      schedule: with ``devices``, the simulated time is a total, too.
      history: rows of the rounds before, if there are any.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        params: Params,
        schedule: Schedule,
        history: Sequence[Row] = (),
    ):
        self._bytes_up, self._bytes_down = algorithm.uplink(params), algorithm.downlink(params)
        self._gradients_per_step = algorithm.gradients_per_step
        self._totals: dict[str, float] = dict.fromkeys(("bytes_up", "bytes_down", "gradients"), 0)
        if schedule.devices is not None:
            self._totals["simulated_seconds"] = 0.0
        if history:
            self._totals = {name: history[-1][name] for name in self._totals}

    def row(self, metrics: Mapping[str, Any]) -> Row:
        """Means over a chunk's rounds (``metrics`` are stacked [rounds]), and the new totals."""
        metrics = {name: np.asarray(values, np.float64) for name, values in metrics.items()}
        participants = metrics.pop("participants")
        steps = metrics.pop("local_steps")
        senders = round((participants * metrics.get("communicated", 1)).sum())
        self._totals["bytes_up"] += senders * self._bytes_up
        self._totals["bytes_down"] += senders * self._bytes_down
        self._totals["gradients"] += round((participants * steps).sum()) * self._gradients_per_step
        for name in ("bytes_up", "bytes_down"):
            metrics.pop(name)
        if "round_seconds" in metrics:
            self._totals["simulated_seconds"] += float(metrics["round_seconds"].sum())
        row = {name: float(values.mean()) for name, values in sorted(metrics.items())}
        return {**row, "local_steps": float(steps.mean()), **self._totals}


@contextmanager
def traced(folder: str | Path | None) -> Iterator[None]:
    """Write a profile of what is computed inside, with ``jax.profiler``; None: do nothing.

    It lies in ``folder/plugins/profile/DATE``: a .trace.json.gz, which https://ui.perfetto.dev
    opens in a browser, and a .xplane.pb for ``xprof`` or TensorBoard's plugin of that name.
    """
    if folder is None:
        yield
        return
    with jax.profiler.trace(str(folder)):
        yield


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request_stop(number, frame):
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, request_stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
