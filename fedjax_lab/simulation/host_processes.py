"""Client rows on the hosts of several processes: each keeps those that its devices own."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_lab.clients.host_table import HostTable, SeenRows
from fedjax_lab.simulation import processes
from fedjax_lab.simulation.host_chunks import HostChunks
from fedjax_lab.types import FedState, PyTree


class DividedHostChunks(HostChunks):
    """As ``HostChunks``, with a table in each process.

    Of D devices, in the order of the mesh, device j owns the clients from j N // D on. Their rows
    stay with its process, and so its part of a chunk's window holds its own clients alone: no row
    travels between hosts but in a round, as that of any sharded table.
    """

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._place = jax.tree.leaves(self._sharding)[0]  # of all rows
        order = self._place.mesh.devices.flat
        count = self._table.num_clients
        self._bounds = [place * count // self._devices for place in range(self._devices + 1)]
        here = jax.process_index()
        self._places = [i for i, device in enumerate(order) if device.process_index == here]
        owned = np.zeros(count, bool)
        for place in self._places:
            owned[self._bounds[place] : self._bounds[place + 1]] = True
        self._table.owned = owned

    def _most(self, length: int) -> int:
        """M: all clients of a chunk may be those of one device."""
        largest = -(-self._table.num_clients // self._devices)
        return min(largest, length * self._schedule.slots(self._feed.index)) * self._devices

    def window(self, first: int, length: int) -> np.ndarray:
        """The clients of a chunk, int32 [M]: [M / D] of each device, in rising order.

        Places that nobody takes come first in each part, and hold the last id of the part before
        it, so that the whole does not fall, and each id is found where it stands first.

        Args:
          first: number of its first round.
          length: its rounds.
        """
        drawn = self.drawn(first, length)
        window = np.empty((self._devices, self._most(length) // self._devices), np.int32)
        for part, start, end in zip(window, self._bounds, self._bounds[1:], strict=False):
            mine = drawn[(drawn >= start) & (drawn < end)]
            part[:] = start - 1
            part[len(part) - len(mine) :] = mine
        return window.reshape(-1)

    def _own(self, window: np.ndarray) -> np.ndarray:
        parts = window.reshape(self._devices, -1)[self._places]
        before = np.array([self._bounds[place] for place in self._places])[:, None]
        return np.where(parts < before, self._table.num_clients, parts).reshape(-1)

    def _placed(self, rows: PyTree) -> PyTree:
        def one(leaf):
            parts = leaf.reshape(len(self._places), -1, *leaf.shape[1:])
            size = parts.shape[1]
            by_start = {i * size: part for i, part in zip(self._places, parts, strict=True)}
            shape = (self._devices * size, *leaf.shape[1:])

            def part(index):
                return by_start[index[0].start or 0]

            return jax.make_array_from_callback(shape, self._place, part)

        return jax.tree.map(one, rows)

    def _fetched(self, rows: PyTree) -> PyTree:
        def one(leaf):
            parts = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
            size = leaf.shape[0] // self._devices
            return np.concatenate([np.asarray(parts[i * size]) for i in self._places])

        return jax.tree.map(one, rows)

    def whole(self, state: FedState) -> FedState:
        """As of ``HostChunks``, in process 0; all processes hand it their rows."""
        mine = self._table.seen_rows()
        counts = multihost_utils.process_allgather(np.array([len(mine.ids)], np.uint32)).ravel()
        found: list[SeenRows] = []
        for process, count in enumerate(counts.tolist()):
            speaks = process == jax.process_index()
            rows = processes.sent(mine if speaks else None, _shapes(mine, count), process)
            found += [rows] if processes.is_first() else []
        state = processes.gathered(state._replace(clients=()))
        if not processes.is_first():
            return state
        rows = jax.tree.map(lambda *parts: np.concatenate(parts), *found)
        order = np.argsort(rows.ids)
        return state._replace(clients=jax.tree.map(lambda leaf: leaf[order], rows))

    def handed_out(self, saved: FedState, state: FedState) -> FedState:
        """As of ``Chunks``: each process gets the rows of its own clients."""
        rest = processes.handed_out(saved._replace(clients=()), state._replace(clients=()))
        is_first = processes.is_first()
        count = processes.first_says(len(saved.clients.ids) if is_first else None)
        mine = self._table.seen_rows()
        like = _shapes(mine, count)
        assert self._table.owned is not None
        [ids] = processes.sent([saved.clients.ids] if is_first else None, [like.ids], 0)
        wanted = self._table.owned[ids]
        rows = processes.sent(saved.clients.rows if is_first else None, like.rows, 0, wanted)
        return rest._replace(clients=SeenRows(ids[wanted], rows))


def _shapes(rows: SeenRows, count: int) -> SeenRows:
    """Of as many rows."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), rows)


def all_rows(table: HostTable) -> PyTree:
    """The rows of all clients, pytree [N, ...], in the memory of each process.

    All processes call it.

    Args:
      table: ``result.state.clients`` of a run with the store "host".
    """
    if table.owned is None:
        return table.read(np.arange(table.num_clients))
    mine = np.flatnonzero(table.owned)
    owners = multihost_utils.process_allgather(table.owned).argmax(0)

    def one(rows):
        whole = np.zeros((table.num_clients, *rows.shape[1:]), rows.dtype)
        whole[mine] = rows
        raw = whole.reshape(len(owners), -1).view(np.uint8)
        parts = multihost_utils.process_allgather(raw)
        raw = parts[owners, np.arange(len(owners))]
        return np.ascontiguousarray(raw).view(rows.dtype).reshape(whole.shape)

    return jax.tree.map(one, table.read(mine))
