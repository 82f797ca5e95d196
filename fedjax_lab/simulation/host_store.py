"""Client rows on the host: a chunk of rounds gets the rows of its own clients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from fedjax_lab import tree
from fedjax_lab.clients.host_table import HostTable, SeenRows
from fedjax_lab.data import FederatedArrays
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement, Request
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.storage.fingerprint import are_the_same
from fedjax_lab.types import FedState, Key, Params, PyTree


class HostStore:
    """All client rows on the host; between chunks the state has one placeholder row.

    Cohorts depend only on the seed and the round, so a chunk's clients are known before it runs.
    Their rows, [M, ...] for at most M clients, are copied to the device with it. While it runs, the
    rows of the next chunk are read from the disk.

    With several processes, of D devices in the order of the mesh, device j owns the clients from
    j N // D on, and its process keeps their rows. A device's part of a chunk's window therefore has
    only its own clients. Rows move between hosts only in a round, as with any sharded table.

    Attributes:
      table: the rows of all clients.
      note: a line about the table for the progress of a run.
    """

    def __init__(self, run: Computation, place: Placement, index: Any, key: Key, table: HostTable):
        self.table, self._processes, self._index, self._key = table, Processes.here(), index, key
        self.note = f"client rows stay on the host: {table!r}"
        self._slots = run.schedule.slots(index)
        self._row_sharding = place.row_sharding(table.read(np.full(1, table.num_clients)))
        self._shares = place.client_map.shares if place.client_map.divides_rows else 1
        # A part of a window has the clients of a process, or of each device of several processes.
        parts = self._shares if self._processes.is_multiprocess else 1
        self._bounds = [i * table.num_clients // parts for i in range(parts + 1)]
        self._here = [0]  # the parts of this process
        if self._processes.is_multiprocess:
            order = enumerate(jax.tree.leaves(self._row_sharding)[0].mesh.devices.flat)
            here = self._processes.index
            self._here = [i for i, device in order if device.process_index == here]
            table.owned = np.zeros(table.num_clients, bool)
            for i in self._here:
                table.owned[self._bounds[i] : self._bounds[i + 1]] = True

        def draw_ids(clients, key, first, length):
            draw = lambda round: run.draw(clients, key, round).client_ids  # noqa: E731
            return jax.lax.map(draw, first + jnp.arange(length, dtype=jnp.int32))

        self._draw = jax.jit(draw_ids, static_argnames="length")
        self._nobody: PyTree = None
        self._window = np.zeros(0, np.int32)  # ids of the rows in the state
        self._ahead: tuple[tuple[int, int], np.ndarray, PyTree] | None = None

    def size(self, length: int) -> int:
        """Return M, a multiple of the number of devices, for any clients that may be drawn."""
        parts = len(self._bounds) - 1
        most = min(-(-self.table.num_clients // parts), length * self._slots) * parts
        return -(-most // self._shares) * self._shares

    def shapes(self, state: FedState, length: int) -> tuple[FedState, dict[str, Any]]:
        """See ``stores.DeviceStore``."""
        size = self.size(length)
        rows = tree.with_rows(state.clients, size)
        if self._row_sharding is not None:
            rows = jax.tree.map(lambda leaf, to: leaf.update(sharding=to), rows, self._row_sharding)
        window = jax.ShapeDtypeStruct((size,), jnp.int32)
        return state._replace(clients=rows), {"window": window}

    def load(self, state: FedState, first: int, length: int) -> tuple[FedState, dict[str, Any]]:
        """See ``stores.DeviceStore``."""
        if self._ahead is not None and self._ahead[0] == (first, length):
            _, window, rows = self._ahead
        else:
            window, rows = self._read(first, length)
        self._nobody, self._window = state.clients, self._own(window)
        rows = self._put(rows)
        return state._replace(clients=rows), {"window": jnp.asarray(window)}

    def prefetch(self, first: int, length: int) -> None:
        """See ``stores.DeviceStore``."""
        self._ahead = (first, length), *self._read(first, length)

    def _read(self, first: int, length: int) -> tuple[np.ndarray, PyTree]:
        """Return the ids of a chunk's window, int32 [M], and the rows that are here.

        Padding comes first in each part and repeats the last id of the part before it. The ids
        therefore never decrease, and the first place of each id holds its client.
        """
        drawn = self._draw(self._index, self._key, jnp.asarray(first, jnp.int32), length)
        ids = np.unique(np.asarray(drawn))
        parts = len(self._bounds) - 1
        of_parts = np.empty((parts, self.size(length) // parts), np.int32)
        for part, start, end in zip(of_parts, self._bounds, self._bounds[1:], strict=False):
            mine = ids[(ids >= start) & (ids < end)]
            part[:] = start - 1
            part[len(part) - len(mine) :] = mine
        window = of_parts.reshape(-1)
        return window, self.table.read(self._own(window))

    def _own(self, window: np.ndarray) -> np.ndarray:
        """Return the ids of a window whose rows this process keeps; N for padding."""
        parts = window.reshape(len(self._bounds) - 1, -1)[self._here]
        before = np.array([self._bounds[place] for place in self._here])[:, None]
        return np.where(parts < before, self.table.num_clients, parts).reshape(-1)

    def _put(self, rows: PyTree) -> PyTree:
        """Copy the rows of a window that are here to the devices."""
        if not self._processes.is_multiprocess:
            return jax.device_put(rows, self._row_sharding)

        def one(leaf, sharding):
            size = leaf.shape[0] // len(self._here)
            parts = leaf.reshape(len(self._here), size, *leaf.shape[1:])
            by_start = {i * size: part for i, part in zip(self._here, parts, strict=True)}
            shape = (self._shares * size, *leaf.shape[1:])
            take = lambda index: by_start[index[0].start or 0]  # noqa: E731
            return jax.make_array_from_callback(shape, sharding, take)

        return jax.tree.map(one, rows, self._row_sharding)

    def _fetch(self, rows: PyTree) -> PyTree:
        """Copy the rows of a window that are kept here to the host."""
        if not self._processes.is_multiprocess:
            return jax.tree.map(np.asarray, rows)

        def one(leaf):
            size = leaf.shape[0] // self._shares
            if not leaf.size:  # which the compiler leaves anywhere
                return np.zeros((size * len(self._here), *leaf.shape[1:]), leaf.dtype)
            parts = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
            return np.concatenate([np.asarray(parts[i * size]) for i in self._here])

        return jax.tree.map(one, rows)

    def commit(self, state: FedState) -> FedState:
        """Write the last chunk's rows to the table, and update rows that were read ahead."""
        ids = self._window
        self.table.write(ids, self._fetch(state.clients))
        if self._ahead is not None:
            _, window, read = self._ahead
            ahead = self._own(window)
            again = np.isin(ahead, ids) & (ahead < self.table.num_clients)
            for leaf, new in zip(
                jax.tree.leaves(read), jax.tree.leaves(self.table.read(ahead[again])), strict=True
            ):
                leaf[again] = new
        return state._replace(clients=self._nobody)

    def snapshot(self, state: FedState) -> FedState:
        """Return the state with the rows of clients that have participated."""
        mine, processes = self.table.seen_rows(), self._processes
        if not processes.is_multiprocess:
            return state._replace(clients=mine)
        rows = _of_all(processes, mine, processes.is_first)
        state = processes.gathered(state._replace(clients=()))
        return state._replace(clients=rows) if processes.is_first else state

    def template(self, state: FedState) -> FedState:
        """See ``stores.DeviceStore``."""
        return state._replace(clients=self.table.seen_rows())

    def restore(self, saved: FedState, state: FedState) -> FedState:
        """See ``stores.DeviceStore``."""
        if self._processes.is_multiprocess:
            saved = self._told(saved, state._replace(clients=()))
        assert isinstance(saved.clients, SeenRows)
        self.table.load(saved.clients)
        nobody = self.table.read(np.full(1, self.table.num_clients))
        return saved._replace(clients=nobody)

    def _told(self, saved: FedState, state: FedState) -> FedState:
        """Distribute a checkpoint's state; each process gets the rows that it keeps."""
        processes = self._processes
        rest = processes.broadcast(
            saved._replace(clients=()) if processes.is_first else None, state
        )
        count = processes.first_says(len(saved.clients.ids) if processes.is_first else None)
        like = tree.with_rows(self.table.seen_rows(), count)
        assert self.table.owned is not None
        [ids] = processes.sent([saved.clients.ids] if processes.is_first else None, [like.ids], 0)
        wanted = self.table.owned[ids]
        rows = processes.sent(
            saved.clients.rows if processes.is_first else None, like.rows, 0, wanted
        )
        return rest._replace(clients=SeenRows(ids[wanted], rows))

    def result(self, state: FedState) -> FedState:
        """Return the state with the ``HostTable`` as its ``clients``."""
        return state._replace(clients=self.table)


def with_all_rows(state: FedState) -> FedState:
    """Return a state with its client rows in memory, where a run left them in a ``HostTable``.

    Args:
      state: ``result.state`` of a run; all processes call it.
    """
    if not isinstance(getattr(state, "clients", None), HostTable):
        return state
    return state._replace(clients=all_rows(state.clients))


def all_rows(table: HostTable) -> PyTree:
    """Gather the rows of all clients, pytree [N, ...], in the memory of each process.

    All processes call it.

    Args:
      table: ``result.state.clients`` of a run with ``client_store="host"``.
    """
    if table.owned is None:
        return table.read(np.arange(table.num_clients))
    mine = np.flatnonzero(table.owned).astype(np.int32)
    return _of_all(Processes.here(), SeenRows(mine, table.read(mine)), True).rows


def _of_all(processes: Processes, mine: SeenRows, is_wanted: bool) -> SeenRows:
    """Gather the rows of all processes, in the order of their ids; ``mine`` where unwanted."""
    counts = processes.stacked(np.array(len(mine.ids), np.uint32))
    found: list[SeenRows] = []
    for process, count in enumerate(counts.tolist()):
        like = tree.with_rows(mine, count)
        rows = processes.sent(mine, like, process)
        found += [rows] if is_wanted else []
    if not is_wanted:
        return mine
    rows = jax.tree.map(lambda *parts: np.concatenate(parts), *found)
    order = np.argsort(rows.ids)
    return jax.tree.map(lambda leaf: leaf[order], rows)


def host_start(
    run: Computation, clients: FederatedArrays, inputs: tuple[Params, Key, PyTree]
) -> tuple[FedState, HostTable]:
    """Compute the state before round 0 with one placeholder row, and create the table.

    Raises:
      ValueError: the clients do not all start with the same row, or the global model depends on all
        rows, as with ``with_personal``.
    """
    params, key, frozen = inputs
    arguments = params, clients, key, frozen
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
    model_of = run.algorithm.params
    if not are_the_same(model_of(one), model_of(other)):
        raise ValueError(
            f"client_store is 'host', but the global model of {name} depends on the rows of all "
            "clients; choose another store."
        )
    return one, HostTable(first, clients.num_clients)


def _repeats_one_row(traced: ClosedJaxpr) -> list[bool]:
    """Return for each result whether it repeats one row, without computing the table."""
    written = {v: eqn for eqn in traced.jaxpr.eqns for v in eqn.outvars}

    def repeats(result):
        eqn = None if isinstance(result, Literal) else written.get(result)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        return 0 not in eqn.params["broadcast_dimensions"]

    return [repeats(result) for result in traced.jaxpr.outvars]


def check_host_store(asked: Request, diagnose: Any) -> None:
    """Refuse features that need the whole table on a device.

    Raises:
      ValueError: ``diagnose`` is given, or rounds are to be measured.
    """
    if diagnose is not None or asked.client_map.name == "measure":
        what = "client_map='measure'" if diagnose is None else "diagnose"
        raise ValueError(
            f"client_store is 'host', with which no device has all client rows; {what} needs them. "
            "Choose another store, or omit it."
        )


def _another(leaf: jax.Array) -> jax.Array:
    return ~leaf if jnp.issubdtype(leaf.dtype, jnp.bool_) else leaf + 1
