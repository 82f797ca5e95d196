"""Chunks of rounds with client rows on the host: a chunk gets the rows of its own clients."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from fedjax_lab.clients.host_table import HostTable, SeenRows
from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.feed import Feed
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.run import Run
from fedjax_lab.simulation.team import Team
from fedjax_lab.types import FedState, Metrics, Params, PyTree


class HostChunks(Chunks):
    """``Chunks`` with all rows on the host; between chunks the state has one placeholder row.

    Cohorts depend only on the seed and the round, so a chunk's clients are known before it runs.
    Their rows, [M, ...] for at most M clients, are copied to the device with it. While it runs, the
    rows of the next chunk are read from the disk.

    Args:
      run: what is computed.
      place: where; ``shard_map`` divides a chunk's rows over its shares.
      feed: the clients' data.
      shapes: shapes of the state without frozen weights.
      progress: print the size of the table on stderr.

    Attributes:
      table: the rows of all clients.
    """

    def __init__(
        self, run: Run, place: Placement, feed: Feed, shapes: FedState, progress: bool = False
    ):
        self._shares = place.client_map.shares if place.client_map.divides_rows else 1
        self._progress = progress
        super().__init__(run, place, feed, shapes)
        rows = self.table.read(np.full(1, self.table.num_clients))
        self._row_sharding = place.row_sharding(rows)
        self._cohorts = jax.jit(self._draw_ids, static_argnames="length")
        self._pending: tuple[np.ndarray, PyTree] | None = None
        self._ahead: tuple[tuple[int, int], np.ndarray, PyTree] | None = None

    def _started(self, params: Params, shapes: FedState) -> FedState:
        clients = self._feed.clients
        arguments = self.team.local((params, clients, self._key, self._frozen))
        state, self.table = _start(self._run, clients.num_clients, arguments)
        if self._progress:
            message = f"{self._run.algorithm.name}: client rows stay on the host: {self.table!r}"
            print(message, file=sys.stderr, flush=True)
        return state

    def keep_beside(self, run_dir: Any) -> None:
        """As ``Chunks``; with several processes, only process 0 does so."""
        if run_dir is not None and self.team.is_first:
            self.table.folder = run_dir

    def _draw_ids(self, clients, key, first, length):
        draw = lambda round: self._run.draw(clients, key, round).client_ids  # noqa: E731
        return jax.lax.map(draw, first + jnp.arange(length, dtype=jnp.int32))

    def drawn(self, first: int, length: int) -> np.ndarray:
        """Return the clients of a chunk, int32 [at most M], in rising order.

        Args:
          first: number of its first round.
          length: its rounds.
        """
        drawn = self._cohorts(self._feed.index, self._key, jnp.asarray(first, jnp.int32), length)
        ids = np.unique(np.asarray(drawn))
        return ids[ids < self.table.num_clients]

    def window(self, first: int, length: int) -> np.ndarray:
        """Return the clients of a chunk, int32 [M], in rising order, padded with N.

        Args:
          first: number of its first round.
          length: its rounds.
        """
        own = self.drawn(first, length)
        window = np.full(self._most(length), self.table.num_clients, np.int32)
        window[: len(own)] = own
        return window

    def _most(self, length: int) -> int:
        """Return M, a multiple of the number of devices."""
        most = min(self.table.num_clients, length * self._run.schedule.slots(self._feed.index))
        return -(-most // self._shares) * self._shares

    def _which(self, piece: int, length: int) -> tuple[int, int]:
        return piece, length  # which says how many rows there are

    def _arguments(self, piece: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        most = self._most(length)

        def shape(leaf, sharding=None):
            return jax.ShapeDtypeStruct((most, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

        placed = () if self._row_sharding is None else (self._row_sharding,)
        (state, *others), named = super()._arguments(piece, length)
        state = state._replace(clients=jax.tree.map(shape, state.clients, *placed))
        return (state, *others), {**named, "window": jax.ShapeDtypeStruct((most,), jnp.int32)}

    def _forward(self, first: int, length: int, **named: Any) -> Metrics:
        """As ``Chunks``; ``_keep`` commits the rows, or the next chunk discards them."""
        self.prepare(length)
        nobody = self._state.clients
        if self._ahead is not None and self._ahead[0] == (first, length):
            _, window, rows = self._ahead
        else:
            window = self.window(first, length)
            rows = self.table.read(self._own(window))
        self._state = self._state._replace(clients=self._placed(rows))
        metrics = super()._forward(first, length, window=jnp.asarray(window), **named)
        self._pending = self._own(window), self._state.clients
        self._state = self._state._replace(clients=nobody)
        return metrics

    def _look_ahead(self, first: int, length: int) -> None:
        """Read the rows of the next chunk while one runs."""
        window = self.window(first, length)
        self._ahead = (first, length), window, self.table.read(self._own(window))

    def _keep(self) -> None:
        """Write the last chunk's rows to the table, and update rows that were read ahead."""
        if self._pending is None:
            return
        ids, rows = self._pending
        self._pending = None
        self.table.write(ids, self._fetched(rows))
        if self._ahead is not None:
            _, window, read = self._ahead
            ahead = self._own(window)
            again = np.isin(ahead, ids) & (ahead < self.table.num_clients)
            for leaf, new in zip(
                jax.tree.leaves(read), jax.tree.leaves(self.table.read(ahead[again])), strict=True
            ):
                leaf[again] = new

    def _own(self, window: np.ndarray) -> np.ndarray:
        """Return the ids of a window whose rows this process keeps; N for padding."""
        return window

    def _placed(self, rows: PyTree) -> PyTree:
        """Copy the rows of a chunk to the devices."""
        return jax.device_put(rows, self._row_sharding)

    def _fetched(self, rows: PyTree) -> PyTree:
        """Fetch the rows of a chunk to the host."""
        return jax.tree.map(np.asarray, rows)

    def result(self) -> FedState:
        """As in ``Chunks``; its ``clients`` is the ``HostTable``."""
        return super().result()._replace(clients=self.table)

    def saved(self) -> FedState:
        """As ``Chunks``, with the rows of clients that have participated."""
        return self._state._replace(clients=self.table.seen_rows())

    def template(self) -> FedState:
        """As ``Chunks``, except for the number of rows."""
        return self._state._replace(clients=self.table.seen_rows())

    def _adopted(self, saved: FedState) -> FedState:
        """Load the rows of a checkpoint into the table; returns its state with one row."""
        saved = self._told(saved)
        assert isinstance(saved.clients, SeenRows)
        self.table.load(saved.clients)
        nobody = self.table.read(np.full(1, self.table.num_clients))
        return saved._replace(clients=nobody)

    def _told(self, saved: FedState) -> FedState:
        """Distribute a checkpoint's state; each process gets the rows that it keeps."""
        return saved


class DividedHostChunks(HostChunks):
    """``HostChunks`` with a part of the table in each of several processes.

    Of D devices in the order of the mesh, device j owns the clients from j N // D on, and its
    process keeps their rows. A device's part of a chunk's window therefore has only its own
    clients. Rows move between hosts only in a round, as with any sharded table.
    """

    def __init__(
        self, run: Run, place: Placement, feed: Feed, shapes: FedState, progress: bool = False
    ):
        super().__init__(run, place, feed, shapes, progress)
        self._of_rows = jax.tree.leaves(self._row_sharding)[0]
        order = self._of_rows.mesh.devices.flat
        count = self.table.num_clients
        self._bounds = [i * count // self._shares for i in range(self._shares + 1)]
        here = self.team.index
        self._places = [i for i, device in enumerate(order) if device.process_index == here]
        owned = np.zeros(count, bool)
        for i in self._places:
            owned[self._bounds[i] : self._bounds[i + 1]] = True
        self.table.owned = owned

    def _most(self, length: int) -> int:
        """Return M for the case that one device owns all clients of a chunk."""
        largest = -(-self.table.num_clients // self._shares)
        return min(largest, length * self._run.schedule.slots(self._feed.index)) * self._shares

    def window(self, first: int, length: int) -> np.ndarray:
        """Return the clients of a chunk, int32 [M]: [M / D] of each device, in rising order.

        Padding comes first in each part and repeats the last id of the part before it. The ids
        therefore never decrease, and the first place of each id holds its client.

        Args:
          first: number of its first round.
          length: its rounds.
        """
        drawn = self.drawn(first, length)
        window = np.empty((self._shares, self._most(length) // self._shares), np.int32)
        for part, start, end in zip(window, self._bounds, self._bounds[1:], strict=False):
            mine = drawn[(drawn >= start) & (drawn < end)]
            part[:] = start - 1
            part[len(part) - len(mine) :] = mine
        return window.reshape(-1)

    def _own(self, window: np.ndarray) -> np.ndarray:
        parts = window.reshape(self._shares, -1)[self._places]
        before = np.array([self._bounds[place] for place in self._places])[:, None]
        return np.where(parts < before, self.table.num_clients, parts).reshape(-1)

    def _placed(self, rows: PyTree) -> PyTree:
        def one(leaf):
            size = leaf.shape[0] // len(self._places)
            parts = leaf.reshape(len(self._places), size, *leaf.shape[1:])
            by_start = {i * size: part for i, part in zip(self._places, parts, strict=True)}
            shape = (self._shares * size, *leaf.shape[1:])

            def part(index):
                return by_start[index[0].start or 0]

            return jax.make_array_from_callback(shape, self._of_rows, part)

        return jax.tree.map(one, rows)

    def _fetched(self, rows: PyTree) -> PyTree:
        def one(leaf):
            size = leaf.shape[0] // self._shares
            if not leaf.size:  # which the compiler leaves anywhere
                return np.zeros((size * len(self._places), *leaf.shape[1:]), leaf.dtype)
            parts = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
            return np.concatenate([np.asarray(parts[i * size]) for i in self._places])

        return jax.tree.map(one, rows)

    def saved(self) -> FedState:
        """As ``HostChunks``, in process 0; all processes send it their rows."""
        team = self.team
        mine = self.table.seen_rows()
        counts = team.stacked(np.array(len(mine.ids), np.uint32))
        found: list[SeenRows] = []
        for process, count in enumerate(counts.tolist()):
            speaks = process == team.index
            rows = team.sent(mine if speaks else None, _shapes(mine, count), process)
            found += [rows] if team.is_first else []
        state = team.gathered(self._state._replace(clients=()))
        if not team.is_first:
            return state
        rows = jax.tree.map(lambda *parts: np.concatenate(parts), *found)
        order = np.argsort(rows.ids)
        return state._replace(clients=jax.tree.map(lambda leaf: leaf[order], rows))

    def _told(self, saved: FedState) -> FedState:
        team, state = self.team, self._state._replace(clients=())
        rest = team.broadcast(saved._replace(clients=()) if team.is_first else None, state)
        count = team.first_says(len(saved.clients.ids) if team.is_first else None)
        mine = self.table.seen_rows()
        like = _shapes(mine, count)
        assert self.table.owned is not None
        [ids] = team.sent([saved.clients.ids] if team.is_first else None, [like.ids], 0)
        wanted = self.table.owned[ids]
        rows = team.sent(saved.clients.rows if team.is_first else None, like.rows, 0, wanted)
        return rest._replace(clients=SeenRows(ids[wanted], rows))


def _shapes(rows: SeenRows, count: int) -> SeenRows:
    """Return the shapes with another number of rows."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), rows)


def all_rows(table: HostTable) -> PyTree:
    """Gather the rows of all clients, pytree [N, ...], in the memory of each process.

    All processes call it.

    Args:
      table: ``result.state.clients`` of a run with ``client_store="host"``.
    """
    team = Team.here()
    if table.owned is None:
        return table.read(np.arange(table.num_clients))
    mine = np.flatnonzero(table.owned)
    owners = team.stacked(table.owned).argmax(0)

    def one(rows):
        whole = np.zeros((table.num_clients, *rows.shape[1:]), rows.dtype)
        whole[mine] = rows
        if not whole.size:
            return whole
        raw = whole.reshape(len(owners), -1).view(np.uint8)
        parts = team.stacked(raw)
        raw = parts[owners, np.arange(len(owners))]
        return np.ascontiguousarray(raw).view(rows.dtype).reshape(whole.shape)

    return jax.tree.map(one, table.read(mine))


def _start(run: Run, num_clients: int, arguments: Any) -> tuple[FedState, HostTable]:
    """Compute the state before round 0 with one placeholder row, and create the table.

    Args:
      run: what is computed.
      num_clients: N.
      arguments: arguments of ``run.init``.

    Raises:
      ValueError: the clients do not all start with the same row, or the global model depends on all
        rows, as with ``with_personal``.
    """
    repeats = _repeats_one_row(jax.make_jaxpr(lambda *given: run.init(*given).clients)(*arguments))

    @jax.jit
    def start(*given):
        state = run.init(*given)
        tables = zip(jax.tree.leaves(state.clients), repeats, strict=True)
        alike = [(table == table[:1]).all() for table, repeated in tables if not repeated]
        first = jax.tree.map(lambda table: table[0], state.clients)
        return jax.tree.map(jnp.copy, state._replace(clients=(), frozen=())), first, alike

    state, first, alike = start(*arguments)
    name = run.algorithm.name
    if not all(map(bool, alike)):
        raise ValueError(
            f"client_store is 'host', but the clients of {name} start with different rows; "
            "choose another store."
        )
    one = state._replace(clients=jax.tree.map(lambda leaf: leaf[None], first))
    other = one._replace(clients=jax.tree.map(_another, one.clients))
    if not _equal(run.served(one), run.served(other)):
        raise ValueError(
            f"client_store is 'host', but the global model of {name} depends on the rows of all "
            "clients; choose another store."
        )
    table = HostTable(first, num_clients)
    return one, table


def _repeats_one_row(traced: ClosedJaxpr) -> list[bool]:
    """Return for each result whether it repeats one row, without computing the table."""
    written = {v: eqn for eqn in traced.jaxpr.eqns for v in eqn.outvars}

    def repeats(result):
        eqn = None if isinstance(result, Literal) else written.get(result)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        return 0 not in eqn.params["broadcast_dimensions"]

    return [repeats(result) for result in traced.jaxpr.outvars]


def check_host_store(run: Run, place: Placement, diagnose: Any) -> None:
    """Refuse features that need the whole table on a device.

    Args:
      run: what is computed.
      place: the requested placement.
      diagnose: as given to ``simulate``.

    Raises:
      ValueError: a ``state`` or ``diagnose`` is given, or rounds are to be measured.
    """
    for wrong, what in (
        (run.state is not None, "a state to start from"),
        (diagnose is not None, "diagnose"),
        (place.client_map.name == "measure", "client_map='measure'"),
    ):
        if wrong:
            raise ValueError(
                f"client_store is 'host', with which no device has all client rows; {what} needs "
                "them. Choose another store, or omit it."
            )


def _another(leaf: jax.Array) -> jax.Array:
    return ~leaf if jnp.issubdtype(leaf.dtype, jnp.bool_) else leaf + 1


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
