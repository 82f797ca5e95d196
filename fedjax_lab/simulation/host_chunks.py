"""Chunks of rounds whose client rows stay on the host: a chunk gets those of its own clients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab.clients.host_table import HostTable, SeenRows
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.clients.store import AXIS, client_mesh
from fedjax_lab.data import FederatedArrays
from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.rounds import Schedule, is_shardable
from fedjax_lab.types import FedState, Key, Metrics, PyTree


class HostChunks(Chunks):
    """As ``Chunks``; a state between them has one row, which stands for nobody's.

    Cohorts depend on the seed and the round alone, so that a chunk's clients are known before it
    runs. Their rows, [M, ...] for the M clients that it can have at most, go to the device with
    it. While it runs, those of the next chunk are read from the disk.

    Args:
      run_chunk: what ``build_chunk`` returned for the store "host".
      clients: the clients' data.
      key: the run's key.
      frozen: the weights that no round changes.
      table: the rows of all clients.
      schedule: how batches are drawn.
      client_map: where a chunk's rows are placed: sharded with ``shard_map``, else whole.
    """

    def __init__(
        self,
        run_chunk: jax.stages.Wrapped,
        clients: FederatedArrays,
        key: Key,
        frozen: PyTree,
        table: HostTable,
        schedule: Schedule,
        client_map: str,
    ):
        super().__init__(run_chunk, clients, key, frozen)
        self._table, self._schedule = table, schedule
        self._devices = 1
        self._sharding: NamedSharding | None = None
        devices = parse_client_map(client_map).devices
        if len(devices) > 1:
            shard = is_shardable(client_map)
            self._devices = len(devices) if shard else 1
            spec = PartitionSpec(AXIS) if shard else PartitionSpec()
            self._sharding = NamedSharding(client_mesh(devices), spec)
        self._cohorts = jax.jit(self._draw_ids, static_argnames="length")
        self._pending: tuple[np.ndarray, PyTree] | None = None
        self._ahead: tuple[tuple[int, int], np.ndarray, PyTree] | None = None

    def _draw_ids(self, clients, key, first, length):
        draw = lambda round: self._schedule.draw(clients, key, round).client_ids  # noqa: E731
        return jax.lax.map(draw, first + jnp.arange(length, dtype=jnp.int32))

    def drawn(self, first: int, length: int) -> np.ndarray:
        """The clients of a chunk, int32 [at most M] in rising order.

        Args:
          first: number of its first round.
          length: its rounds.
        """
        drawn = self._cohorts(self._clients, self._key, jnp.asarray(first, jnp.int32), length)
        return np.unique(np.asarray(drawn))

    def window(self, first: int, length: int) -> np.ndarray:
        """The clients of a chunk, int32 [M] in rising order, with N in places that nobody takes.

        Args:
          first: number of its first round.
          length: its rounds.
        """
        own = self.drawn(first, length)
        window = np.full(self._most(length), self._table.num_clients, np.int32)
        window[: len(own)] = own
        return window

    def _most(self, length: int) -> int:
        """M, a multiple of the devices."""
        most = min(self._table.num_clients, length * self._schedule.cohort_size)
        return -(-most // self._devices) * self._devices

    def _arguments(self, state: FedState, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        most = self._most(length)

        def shape(leaf):
            return jax.ShapeDtypeStruct(
                (most, *leaf.shape[1:]), leaf.dtype, sharding=self._sharding
            )

        state = state._replace(clients=jax.tree.map(shape, state.clients))
        first = jnp.zeros((), jnp.int32)
        window = jax.ShapeDtypeStruct((most,), jnp.int32)
        return (state, self._clients, self._key, first), {
            "length": length,
            "frozen": self._frozen,
            "window": window,
        }

    def run(self, state: FedState, first: int, length: int) -> tuple[FedState, Metrics]:
        """As of ``Chunks``; the rows are kept by ``keep``, or forgotten by another ``run``."""
        self.prepare(state, length)
        nobody = state.clients
        if self._ahead is not None and self._ahead[0] == (first, length):
            _, window, rows = self._ahead
        else:
            window = self.window(first, length)
            rows = self._table.read(self._own(window))
        state, metrics = self._compiled[length](
            state._replace(clients=self._placed(rows)),
            self._clients,
            self._key,
            jnp.asarray(first, jnp.int32),
            frozen=self._frozen,
            window=jnp.asarray(window),
        )
        self._pending = self._own(window), state.clients
        return state._replace(clients=nobody), metrics

    def look_ahead(self, first: int, length: int) -> None:
        """Read the rows of a chunk, while the one before it runs.

        Args:
          first: number of its first round.
          length: its rounds.
        """
        window = self.window(first, length)
        self._ahead = (first, length), window, self._table.read(self._own(window))

    def keep(self) -> None:
        """Write the rows that the last chunk left; those that were read ahead are renewed."""
        if self._pending is None:
            return
        ids, rows = self._pending
        self._pending = None
        self._table.write(ids, self._fetched(rows))
        if self._ahead is not None:
            _, window, read = self._ahead
            ahead = self._own(window)
            again = np.isin(ahead, ids) & (ahead < self._table.num_clients)
            for leaf, new in zip(
                jax.tree.leaves(read), jax.tree.leaves(self._table.read(ahead[again])), strict=True
            ):
                leaf[again] = new

    def _own(self, window: np.ndarray) -> np.ndarray:
        """The ids of a window whose rows this process keeps; N for places that nobody takes."""
        return window

    def _placed(self, rows: PyTree) -> PyTree:
        """Those rows on the devices."""
        return jax.device_put(rows, self._sharding)

    def _fetched(self, rows: PyTree) -> PyTree:
        """Those rows of a chunk's table, on the host."""
        return jax.tree.map(np.asarray, rows)

    def whole(self, state: FedState) -> FedState:
        """The state as a checkpoint has it, with the rows of those who have been there."""
        return state._replace(clients=self._table.seen_rows())

    def like(self, state: FedState) -> FedState:
        """The structure, shapes and dtypes of ``whole(state)``, but for the number of rows."""
        return state._replace(clients=self._table.seen_rows())

    def adopt(self, state: FedState) -> FedState:
        """Take over the rows of a checkpoint; returns its state with one row.

        Args:
          state: as ``whole`` gave it.
        """
        assert isinstance(state.clients, SeenRows)
        self._table.load(state.clients)
        nobody = self._table.read(np.full(1, self._table.num_clients))
        return state._replace(clients=nobody)

    def result(self, state: FedState) -> FedState:
        """The state that a run returns: its ``clients`` is the ``HostTable``."""
        return state._replace(clients=self._table)
