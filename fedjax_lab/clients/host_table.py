"""Client state on the host, in a table that need not fit on a device."""

import errno
import math
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab.types import PyTree

PREFIX = "client-rows-"


class SeenRows(NamedTuple):
    """The rows of a ``HostTable`` that are stored in a checkpoint.

    Attributes:
      ids: int32 [n], the clients that have participated, in ascending order.
      rows: pytree [n, ...].
    """

    ids: np.ndarray
    rows: PyTree


class HostTable:
    """A table with one row per client, in memory-mapped files.

    All clients start with the same row, or with those of ``start``. A client's own row is stored
    when it is first written. Rows are stored in the order in which they are written, so a table of
    373 GiB takes only the disk space of the rows that were written. The files are deleted with the
    table; checkpoints remain.

    Args:
      first: the initial row of every client, pytree of arrays [...].
      num_clients: N.
      folder: folder of the files, for this table only; None: the system's temporary folder.

    Attributes:
      num_clients: N.
      folder: folder of the files, which are created when the first row is written.
      start: rows that the clients have in place of ``first``, pytree of NumPy arrays [N, ...], as
        of a state from which a run starts; None: all have ``first``.
      owned: bool [N], the clients whose rows this process stores, if several processes share the
        table; None: all.
    """

    def __init__(self, first: PyTree, num_clients: int, folder: str | Path | None = None):
        self._first = jax.tree.map(np.asarray, first)
        self._row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._first))
        self._files: list[np.memmap] | None = None
        self.num_clients, self.folder = num_clients, folder
        self.start: PyTree = None
        self.owned: np.ndarray | None = None
        self._count = 0
        # Positions in the files; -1 for rows that are in none, and for padding, the last entry.
        self._places = np.full(num_clients + 1, -1, np.int32)

    @property
    def seen(self) -> np.ndarray:
        """Clients whose rows have been written, bool [N]."""
        return self._places[:-1] >= 0

    def _open(self) -> list[np.memmap]:
        """Create the files, before the first row is written."""
        if self._files is not None:
            return self._files
        if self.folder is not None:  # a killed process may have left files
            for left in Path(self.folder).glob(f"{PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
        self.folder = tempfile.mkdtemp(prefix=PREFIX, dir=self.folder)
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(self._first) if leaf.nbytes]
        # As bytes, because NumPy's files have no bfloat16.
        self._files = [
            np.memmap(
                Path(self.folder) / f"{number}.bin", np.uint8, "w+", shape=(self.num_clients, size)
            )
            for number, size in enumerate(sizes)
        ]
        return self._files

    def __repr__(self) -> str:
        """Describe the table in one line: clients, rows written, size."""
        size = self._row_bytes * self.num_clients
        return (
            f"HostTable({self.num_clients:,} clients, {self._count:,} of them seen, "
            f"{size / 2**30:,.3g} GiB)"
        )

    def _checked(self, ids: Any) -> np.ndarray:
        """Return ids of clients as an array, integers [M]."""
        ids = np.asarray(ids)
        if not ids.size and ids.ndim == 1:  # an empty list is an array of floats
            return ids.astype(np.int32)
        allowed = f"integers [M] in [0, {self.num_clients}]; {self.num_clients} is padding"
        if ids.dtype.kind not in "iu":
            raise TypeError(f"ids has dtype {ids.dtype}; it must be {allowed}.")
        if ids.ndim != 1:
            raise ValueError(f"ids has shape {ids.shape}; it must be {allowed}.")
        wrong = np.flatnonzero((ids < 0) | (ids > self.num_clients))
        if wrong.size:
            raise ValueError(f"ids[{wrong[0]}] is {ids[wrong[0]]}; ids must be {allowed}.")
        return ids

    def read(self, ids: Any) -> PyTree:
        """Read rows: a pytree of NumPy arrays [M, ...].

        Args:
          ids: integers [M] in [0, N), or N for padding, which reads the initial row.

        Raises:
          TypeError: ``ids`` are not integers.
          ValueError: ``ids`` are not [M] or out of range, or a row is stored by another process.
        """
        ids = self._checked(ids)
        real = ids < self.num_clients
        if self.owned is not None and not self.owned[ids[real]].all():
            raise ValueError(
                "ids has clients whose rows another process stores; the attribute owned says which "
                "rows are here. fedjax_lab.simulation.host_store.all_rows gathers all rows."
            )
        places = self._places[ids]
        there = places >= 0
        files = iter(self._files or ())
        starts = iter(() if self.start is None else jax.tree.leaves(self.start))

        def one(first):
            rows = np.broadcast_to(first, (len(ids), *first.shape)).copy()
            if self.start is not None:
                rows[real] = next(starts)[ids[real]]
            if first.nbytes and there.any():
                rows.reshape(len(ids), -1).view(np.uint8)[there] = next(files)[places[there]]
            return rows

        return jax.tree.map(one, self._first)

    def write(self, ids: Any, rows: PyTree) -> None:
        """Write rows.

        Args:
          ids: distinct integers [M] in [0, N), or N for padding, which is not written.
          rows: pytree of arrays [M, ...].

        Raises:
          TypeError, ValueError: ``ids``, as in ``read``.
          OSError: the disk is full (``errno.ENOSPC``).
        """
        ids = self._checked(ids)
        real = ids < self.num_clients
        own = ids[real]
        if not len(own):  # no participants, or none whose rows are here
            return
        files = self._open()
        places = self._places[own]
        new = places < 0
        # Checked before, because a full disk behind a mapped file kills the process.
        if shutil.disk_usage(str(self.folder)).free < int(new.sum()) * self._row_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]
        leaves = [leaf for leaf in leaves if math.prod(leaf.shape[1:])]
        places[new] = self._count + np.arange(new.sum(), dtype=np.int32)
        for file, leaf in zip(files, leaves, strict=True):
            file[places] = np.ascontiguousarray(leaf[real]).reshape(len(own), -1).view(np.uint8)
        self._places[own] = places
        self._count += int(new.sum())

    def seen_rows(self) -> SeenRows:
        """Return the rows of all clients that have participated, in memory."""
        ids = np.flatnonzero(self.seen).astype(np.int32)
        return SeenRows(ids, self.read(ids))

    def load(self, saved: SeenRows) -> None:
        """Restore the result of ``seen_rows``; all other rows become the initial row.

        Args:
          saved: rows of a table with the same N and the same shapes.
        """
        self._places[:], self._count = -1, 0
        self.write(saved.ids, saved.rows)
