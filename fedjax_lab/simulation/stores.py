"""Client rows during a run: on the devices, or on the host with a window for each chunk.

A store is opened before the first chunk. It loads the rows that a chunk of rounds needs into the
state, and commits them once the chunk counts. It also writes them to checkpoints and reads them
from there.
"""

from pathlib import Path
from typing import Any

import jax

from fedjax_lab.simulation.client_data import ClientData
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.host_store import HostStore, host_start
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.types import FedState, Key, Params, PyTree


class DeviceStore:
    """Client rows as a part of the state on the devices: "device" and "sharded"; no windows."""

    note = ""

    def size(self, length: int) -> int:
        """Return the number of rows in the window of a chunk; 0: there is no window."""
        return 0

    def shapes(self, state: FedState, length: int) -> tuple[FedState, dict[str, Any]]:
        """Return the shapes of what ``load`` returns."""
        return state, {}

    def load(self, state: FedState, first: int, length: int) -> tuple[FedState, dict[str, Any]]:
        """Return (the state with the rows of a chunk, further arguments of its programs)."""
        return state, {}

    def prefetch(self, first: int, length: int) -> None:
        """Read the rows of the next chunk while one runs."""

    def commit(self, state: FedState) -> FedState:
        """Store the rows of the last chunk, and return the state without them."""
        return state

    def snapshot(self, state: FedState) -> FedState:
        """Return the state for a checkpoint; with several processes, only in process 0."""
        return Processes.here().gathered(state)

    def template(self, state: FedState) -> FedState:
        """Return a template of ``snapshot``: structure, shapes and dtypes."""
        return state

    def restore(self, saved: FedState, state: FedState) -> FedState:
        """Return the state of a checkpoint, ``saved`` in process 0, placed like ``state``."""
        return Processes.here().broadcast(saved, state)

    def result(self, state: FedState) -> FedState:
        """Return the state for the caller."""
        return state


Store = DeviceStore | HostStore


def open_store(
    run: Computation,
    place: Placement,
    client_data: ClientData,
    inputs: tuple[Params, Key, PyTree],
    shapes: FedState,
    run_dir: str | Path | None = None,
) -> tuple[FedState, Store]:
    """Open the store of a run; returns (the state before round 0, the store).

    Args:
      inputs: (global model, key, frozen weights), on the devices.
      shapes: shapes of the state without frozen weights.
      run_dir: as in ``simulate``; rows on the host are stored there.

    Raises:
      ValueError: rows that the clients start with cannot be kept on the host.
    """
    (params, key, frozen), processes = inputs, Processes.here()
    if place.is_on_host:
        state, table = host_start(run, *processes.local((client_data.clients, inputs)))
        table.folder = run_dir if processes.is_first else None
        if run.state is not None:
            table.start, state = run.state.clients, run.state._replace(clients=state.clients)
        return state, HostStore(run, place, client_data.index, key, table)
    if run.state is not None:
        return run.state, DeviceStore()
    start = jax.jit(run.start, out_shardings=place.state_sharding(shapes))
    return start(params, client_data.clients, key, frozen), DeviceStore()
