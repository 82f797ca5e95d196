"""Client rows on the host: a table that need not fit on a device."""

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
    """What a checkpoint has of a ``HostTable``: the rows of clients that have been there.

    Attributes:
      ids: int32 [n], in rising order.
      rows: pytree [n, ...].
    """

    ids: np.ndarray
    rows: PyTree


class HostTable:
    """One row per client in files that are mapped into memory.

    A row exists from the moment when its client has been written; until then it is the first one,
    with which every client starts. Rows lie in the files in the order in which they came: of
    373 GiB, only what was written takes room. The files are gone with the table; what lasts is a
    checkpoint.

    Args:
      first: the row with which each client starts, pytree of arrays [...].
      num_clients: N.
      folder: where the files lie, of this table alone; None: the system's folder for such files.

    Attributes:
      num_clients: N.
      folder: where the files lie, or are to lie when the first row is written.
      owned: bool [N], whose rows it keeps, where several processes share them; None: all.
    """

    def __init__(self, first: PyTree, num_clients: int, folder: str | Path | None = None):
        self._first = jax.tree.map(np.asarray, first)
        self._row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._first))
        self._files: list[np.memmap] | None = None
        self.num_clients, self.folder = num_clients, folder
        self.owned: np.ndarray | None = None
        self._count = 0
        self._places = np.full(num_clients, -1, np.int32)  # in the files

    @property
    def seen(self) -> np.ndarray:
        """bool [N], whose rows have been written."""
        return self._places >= 0

    def _open(self) -> list[np.memmap]:
        """The files, made before the first row is written."""
        if self._files is not None:
            return self._files
        if self.folder is not None:  # what a process that was killed has left
            for left in Path(self.folder).glob(f"{PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
        self.folder = tempfile.mkdtemp(prefix=PREFIX, dir=self.folder)
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(self._first) if leaf.nbytes]
        # As bytes: a file knows no bfloat16.
        self._files = [
            np.memmap(
                Path(self.folder) / f"{number}.bin", np.uint8, "w+", shape=(self.num_clients, size)
            )
            for number, size in enumerate(sizes)
        ]
        return self._files

    def __repr__(self) -> str:
        """In one line: how many rows, how many of them seen."""
        size = self._row_bytes * self.num_clients
        return (
            f"HostTable({self.num_clients:,} clients, {self._count:,} of them seen, "
            f"{size / 2**30:,.3g} GiB)"
        )

    def read(self, ids: Any) -> PyTree:
        """Rows, a pytree of NumPy arrays [M, ...].

        Args:
          ids: integers [M] in [0, N), or N for a place that nobody takes: it reads the first row.

        Raises:
          ValueError: another process keeps one of them.
        """
        ids = np.asarray(ids)
        if self.owned is not None and not self.owned[ids[ids < self.num_clients]].all():
            raise ValueError(
                "ids holds clients whose rows another process keeps; owned says whose are here, "
                "and fedjax_lab.simulation.host_chunks.all_rows puts all together."
            )
        places = np.where(
            ids < self.num_clients, self._places[np.minimum(ids, self.num_clients - 1)], -1
        )
        there = places >= 0
        files = iter(self._files or ())

        def one(first):
            rows = np.broadcast_to(first, (len(ids), *first.shape)).copy()
            if first.nbytes and there.any():
                rows.reshape(len(ids), -1).view(np.uint8)[there] = next(files)[places[there]]
            return rows

        return jax.tree.map(one, self._first)

    def write(self, ids: Any, rows: PyTree) -> None:
        """Replace rows.

        Args:
          ids: distinct integers [M] in [0, N), or N for what is not to be written.
          rows: pytree of arrays [M, ...].

        Raises:
          OSError: there is no room for them on the disk (``errno.ENOSPC``).
        """
        ids = np.asarray(ids)
        real = ids < self.num_clients
        own = ids[real]
        if not len(own):  # nobody came to a chunk, or nobody whose rows are here
            return
        files = self._open()
        places = self._places[own]
        new = places < 0
        # Where a mapped file finds no room the process is killed.
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
        """The rows of clients that have been there, in memory."""
        ids = np.flatnonzero(self.seen).astype(np.int32)
        return SeenRows(ids, self.read(ids))

    def load(self, saved: SeenRows) -> None:
        """Take over what ``seen_rows`` gave; nobody else has been seen then.

        Args:
          saved: of a table of the same N and rows.
        """
        self._places[:], self._count = -1, 0
        self.write(saved.ids, saved.rows)
