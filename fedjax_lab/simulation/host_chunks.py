"""Chunks of rounds whose client rows stay on the host: a chunk gets those of its own clients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.clients.host_table import HostTable, SeenRows
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.clients.model_axis import ModelLayout
from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.feed import Feed
from fedjax_lab.simulation.rounds import Schedule, is_shardable
from fedjax_lab.simulation.stores import row_sharding
from fedjax_lab.types import FedState, Key, Metrics, PyTree


class HostChunks(Chunks):
    """As ``Chunks``; a state between them has one row, which stands for nobody's.

    Cohorts depend on the seed and the round alone, so that a chunk's clients are known before it
    runs. Their rows, [M, ...] for the M clients that it can have at most, go to the device with
    it. While it runs, those of the next chunk are read from the disk.

    Args:
      run_chunk: what ``build_chunk`` returned for the store "host".
      feed: the clients' data.
      key: the run's key.
      frozen: the weights that no round changes.
      table: the rows of all clients.
      schedule: how batches are drawn.
      client_map: where a chunk's rows are placed: sharded with ``shard_map``, else whole.
      layout: of a model that is divided, as its rows then are.
    """

    def __init__(
        self,
        run_chunk: jax.stages.Wrapped,
        feed: Feed,
        key: Key,
        frozen: PyTree,
        table: HostTable,
        schedule: Schedule,
        client_map: str,
        layout: ModelLayout | None = None,
    ):
        super().__init__(run_chunk, feed, key, frozen)
        self._table, self._schedule = table, schedule
        self._devices = parse_client_map(client_map).shares if is_shardable(client_map) else 1
        rows = table.read(np.full(1, table.num_clients))
        self._sharding = row_sharding(rows, client_map, layout)
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
        drawn = self._cohorts(self._feed.index, self._key, jnp.asarray(first, jnp.int32), length)
        ids = np.unique(np.asarray(drawn))
        return ids[ids < self._table.num_clients]

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
        most = min(self._table.num_clients, length * self._schedule.slots(self._feed.index))
        return -(-most // self._devices) * self._devices

    def _which(self, piece: int, length: int) -> tuple[int, int]:
        return piece, length  # which says how many rows there are

    def _arguments(
        self, state: FedState, piece: int, length: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        most = self._most(length)

        def shape(leaf, sharding=None):
            return jax.ShapeDtypeStruct((most, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

        placed = () if self._sharding is None else (self._sharding,)
        state = state._replace(clients=jax.tree.map(shape, state.clients, *placed))
        arguments, named = super()._arguments(state, piece, length)
        return arguments, {**named, "window": jax.ShapeDtypeStruct((most,), jnp.int32)}

    def run(self, state: FedState, first: int, length: int) -> tuple[FedState, Metrics]:
        """As of ``Chunks``; the rows are kept by ``keep``, or forgotten by another ``run``."""
        self.prepare(state, length)
        nobody = state.clients
        if self._ahead is not None and self._ahead[0] == (first, length):
            _, window, rows = self._ahead
        else:
            window = self.window(first, length)
            rows = self._table.read(self._own(window))
        state = state._replace(clients=self._placed(rows))
        state, metrics = self._run(state, first, length, window=jnp.asarray(window))
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
