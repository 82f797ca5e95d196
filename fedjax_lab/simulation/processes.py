"""Communication between the processes of one run; with one process, nothing is sent.

With ``jax.distributed`` each process calls ``simulate`` with the same arguments. Values that all
processes have are placed on all devices without being sent. Values of one process, such as a
checkpoint or a signal, are sent to the others between chunks of rounds.
"""

import collections
import contextlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab.clients.mapping import ClientMap
from fedjax_lab.clients.store import AXIS
from fedjax_lab.machine.keys import is_key
from fedjax_lab.storage.run_dir import differences
from fedjax_lab.types import PyTree

_BLOCK = 2**26  # bytes of a table that are sent at once
_LEAST = 2**10  # smallest size of a text in bytes, so that few lengths need few programs
_NAMED = 3  # processes in an error
_DAY = 86_400_000  # milliseconds; a lost process is detected earlier, by its heartbeat
_meetings = itertools.count()
# How XLA's errors begin, for any Python exception.
_STATUS = re.compile(
    r"\b(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|FAILED_PRECONDITION|ABORTED|INTERNAL"
    r"|UNAVAILABLE|DATA_LOSS): "
)
_GONE = ("heartbeat", "Gloo", "Connection", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED")


class ElsewhereError(RuntimeError):
    """Another process of the run has failed; the message is the one of its error."""


class Processes:
    """Processes of a run and their communication; this base class is a single process.

    Attributes:
      size: number of processes.
      index: index of this process.
    """

    size = 1
    index = 0

    @staticmethod
    def here() -> "Processes":
        """Return the processes of the running program."""
        return Processes() if jax.process_count() == 1 else _SeveralProcesses()

    @property
    def is_multiprocess(self) -> bool:
        """True if the run spans several processes."""
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """True in process 0, which writes and prints for all."""
        return self.index == 0

    def check_single(self, what: str) -> None:
        """Check that there is one process.

        Args:
          what: what needs that, such as "a sweep".

        Raises:
          ValueError: there are several.
        """
        if self.is_multiprocess:
            raise ValueError(
                f"there are {self.size} processes; {what} runs in one. Run a part of it in each "
                "process, without jax.distributed."
            )

    def check_map(self, client_map: ClientMap) -> None:
        """Check that a client map uses the devices of all processes.

        Raises:
          ValueError: it omits devices, it is "measure", or the processes have different numbers of
            devices.
        """

    def put(self, values: PyTree, sharding: Any) -> PyTree:
        """Put values that all processes have onto the devices of all.

        Args:
          values: pytree of arrays, the same in each process; or arrays that lie on all devices.
          sharding: a sharding, or a pytree of them like ``values``; with one process also None.
        """
        return jax.device_put(values, sharding)

    def local(self, values: PyTree) -> PyTree:
        """Convert replicated arrays to arrays of this process; others stay unchanged."""
        return values

    def collected(self, values: PyTree) -> PyTree:
        """Gather all values into the memory of each process.

        All processes call it.
        """
        return values

    def gathered(self, values: PyTree, everywhere: bool = False) -> PyTree:
        """Gather values on the host, including those that are sharded over processes.

        All processes call it. With one process the values are returned unchanged.

        Args:
          everywhere: whether all processes get the values; else only process 0 does, and the others
            get None.
        """
        return values

    def broadcast(self, values: PyTree, like: PyTree) -> PyTree:
        """Broadcast process 0's arrays to the devices of all processes.

        Args:
          values: pytree of arrays on the host; ignored in other processes.
          like: arrays on all devices with the structure, shapes, dtypes and shardings of the
            result.
        """
        return values

    def sent(
        self, values: PyTree, like: PyTree, process: int, wanted: np.ndarray | None = None
    ) -> PyTree:
        """Send one process's arrays to the hosts of all processes, in blocks of the leading axis n.

        Args:
          values: pytree of arrays [n, ...]; ignored in other processes.
          wanted: bool [n], the rows to keep in this process; None: all.
        """
        return values

    def stacked(self, values: np.ndarray) -> np.ndarray:
        """Gather the arrays of all processes, [processes, ...].

        Args:
          values: array of the same shape in each process.
        """
        return values[None]

    def first_says(self, value: Any) -> Any:
        """Return process 0's value.

        Args:
          value: any JSON value; ignored in other processes.
        """
        return value

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set in any process.

        Args:
          *flags: the same number in each process.
        """
        return flags

    def meet(self) -> None:
        """Wait until all processes are here; a barrier without JAX's time limit for collectives."""

    def agree(self, mine: Mapping[str, Any]) -> None:
        """Check that all processes have the same values.

        Raises:
          ValueError: values differ; the message is the same in all processes and names them.
        """

    def together(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` in all processes; raise an error everywhere if it fails in one.

        Args:
          action: function that may fail in one process; it must not communicate.

        Raises:
          Exception: the action's own error, in the process where it failed.
          ElsewhereError: it failed in another process.
        """
        return action()

    @contextlib.contextmanager
    def reporting_losses(self) -> Iterator[None]:
        """Turn JAX's errors about a lost process into one sentence.

        Raises:
          ConnectionError: another process has ended or does not answer.
        """
        yield


class _SeveralProcesses(Processes):
    """Several processes of ``jax.distributed``; see ``Processes``."""

    def __init__(self) -> None:
        self.size, self.index = jax.process_count(), jax.process_index()

    def check_map(self, client_map: ClientMap) -> None:
        _check_devices()
        if client_map.parts > 1:
            raise ValueError(
                f"client_map is {client_map.name!r} with {self.size} processes; a model is "
                "divided among the devices of one process. Choose 'shard_map'."
            )
        devices = jax.device_count()
        everywhere = client_map.kind == "shard_map" and len(client_map.devices) == devices
        if client_map.name != "auto" and not everywhere:
            raise ValueError(
                f"client_map is {client_map.name!r}; with {self.size} processes it must be "
                f"'auto', or 'shard_map' over all of their {devices} devices."
            )

    def put(self, values: PyTree, sharding: Any) -> PyTree:
        def one(leaf, where):
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                return jax.device_put(leaf, where)
            if is_key(leaf):
                wrap = jax.jit(
                    lambda bits: jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
                )
                return wrap(one(jax.random.key_data(leaf), where))
            leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
            return jax.make_array_from_callback(leaf.shape, where, lambda index: leaf[index])

        return jax.tree.map(one, values, jax.tree.broadcast(sharding, values))

    def local(self, values: PyTree) -> PyTree:
        def one(leaf):
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
            return leaf

        return jax.tree.map(one, values)

    def collected(self, values: PyTree) -> PyTree:
        return jax.tree.map(jnp.asarray, self.gathered(values, everywhere=True))

    def gathered(self, values: PyTree, everywhere: bool = False) -> PyTree:
        wanted = everywhere or self.is_first

        def one(leaf):
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                return _put_together(leaf, wanted)
            if not wanted:
                return None
            return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf

        return jax.tree.map(one, self.local(values))

    def broadcast(self, values: PyTree, like: PyTree) -> PyTree:
        def one(value, like):
            if like.is_fully_replicated:
                return self.put(self._bytes_of(0, value, like.shape, like.dtype), like.sharding)
            wanted = np.zeros(like.shape[0], bool)
            for index in like.sharding.addressable_devices_indices_map(like.shape).values():
                wanted[index[0]] = True
            kept = self._sent_in_blocks(0, value, like, wanted)
            places = np.cumsum(wanted) - 1  # of the wanted rows in ``kept``
            part = lambda index: kept[places[index[0]]]  # noqa: E731
            return jax.make_array_from_callback(like.shape, like.sharding, part)

        return self._receive(0, one, values, like)

    def sent(
        self, values: PyTree, like: PyTree, process: int, wanted: np.ndarray | None = None
    ) -> PyTree:
        def one(value, like):
            return self._sent_in_blocks(process, value, like, wanted)

        return self._receive(process, one, values, like)

    def stacked(self, values: np.ndarray) -> np.ndarray:
        found = multihost_utils.process_allgather(values)
        return np.asarray(found).reshape(self.size, *values.shape)

    def first_says(self, value: Any) -> Any:
        return json.loads(_texts(json.dumps(value) if self.is_first else "")[0])

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        found = multihost_utils.process_allgather(np.array(flags, np.uint8))
        return tuple(map(bool, found.any(0)))

    def meet(self) -> None:
        # JAX caches compiled programs only in process 0, so in a second run this process has them
        # at once, and the others only after compiling.
        _wait_at_barrier(f"fedjax_lab/{next(_meetings)}")

    def agree(self, mine: Mapping[str, Any]) -> None:
        texts = _texts(json.dumps(mine, sort_keys=True, default=str))
        if len(set(texts)) == 1:
            return
        first, *others = map(json.loads, texts)
        words = ("process 0 has", "it has")
        differing = [
            f"process {i}: {'; '.join(differences(first, theirs, words=words))}"
            for i, theirs in enumerate(others, start=1)
            if theirs != first
        ]
        raise ValueError(
            f"all processes must have the same arguments, but {'. '.join(differing[:_NAMED])}."
        )

    def together(self, action: Callable[[], Any]) -> Any:
        failed, result = None, None
        try:
            result = action()
        except Exception as error:
            failed = error
        if self.any_of(failed is not None)[0]:
            texts = _texts("" if failed is None else f"{type(failed).__name__}: {failed}")
            if failed is not None:
                raise failed
            process, text = next((i, text) for i, text in enumerate(texts) if text)
            raise ElsewhereError(f"process {process} stopped with {text}")
        return result

    @contextlib.contextmanager
    def reporting_losses(self) -> Iterator[None]:
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # also when a value is fetched
            if not _is_loss(error):
                raise
            message = (
                f"process {self.index} of {self.size}: another process has ended or does not "
                "answer, so the run cannot continue. The last checkpoint is intact; the same "
                "call resumes from it, with any number of processes."
            )
            # Before JAX ends the process.
            print(f"fedjax_lab: {message}", file=sys.stderr, flush=True)
            raise ConnectionError(message) from error

    def _receive(
        self, process: int, one: Callable[[Any, Any], Any], values: PyTree, like: PyTree
    ) -> PyTree:
        """Apply ``one(value, like)`` to all leaves; a value is None if another process sends it."""
        given, structure = jax.tree.flatten(like)
        leaves = jax.tree.leaves(values) if self.index == process else [None] * len(given)
        found = [one(value, leaf) for value, leaf in zip(leaves, given, strict=True)]
        return jax.tree.unflatten(structure, found)

    def _sent_in_blocks(
        self, process: int, value: Any, like: Any, wanted: np.ndarray | None
    ) -> np.ndarray:
        """Receive the wanted rows of an array [n, ...], block by block."""
        wanted = np.ones(like.shape[0], bool) if wanted is None else wanted
        parts = [np.empty((0, *like.shape[1:]), like.dtype)]
        for block in _blocks(like):
            shape = (block.stop - block.start, *like.shape[1:])
            there = None if value is None else value[block]
            parts.append(self._bytes_of(process, there, shape, like.dtype)[wanted[block]])
        return np.concatenate(parts)

    def _bytes_of(self, process: int, value: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Receive an array of one process; sent as bytes, so that a sum with zeros is exact."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        speaks = self.index == process
        raw = np.zeros(size, np.uint8)
        if speaks:
            raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        found = multihost_utils.broadcast_one_to_all(raw, is_source=speaks)
        return np.array(found).view(dtype).reshape(shape)


def _wait_at_barrier(name: str) -> None:
    """Wait until all processes have reached the barrier of this name, for a day at most.

    The barrier belongs to JAX's coordination service, which is in no public module. The public
    ``multihost_utils.sync_global_devices`` is a collective, which on CPU fails if the other
    processes take more than 30 seconds.

    Raises:
      ImportError: this release of JAX has moved the service.
    """
    try:
        from jax._src import distributed

        client: Any = distributed.global_state.client
        wait = client.wait_at_barrier
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"jax {jax.__version__} has moved its coordination service, which a run of several "
            "processes needs; install a release of jax that pyproject.toml allows."
        ) from error
    wait(name, _DAY)


def _is_loss(error: Exception) -> bool:
    """Return True for an error of communication; a user's own may contain the same words."""
    own = isinstance(error, ValueError) and not _STATUS.search(str(error))
    return not own and any(word in str(error) for word in _GONE)


def _check_devices() -> None:
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        found = ", ".join(f"process {i} has {n}" for i, n in sorted(counts.items()))
        raise ValueError(f"{found} devices; all processes of a run must have the same number.")


def _put_together(table: jax.Array, wanted: bool) -> np.ndarray | None:
    """Gather a table whose rows are sharded over the devices; None if it is not wanted here."""
    assert isinstance(table.sharding, NamedSharding)
    mesh = table.sharding.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    split, same = PartitionSpec(AXIS), PartitionSpec()
    share = table.shape[0] // mesh.size
    rows = min(share, -(-next(_blocks(table)).stop // mesh.size))  # of each device at once
    part_of = jax.shard_map(
        lambda own, first: jax.lax.dynamic_slice_in_dim(own, first, rows),
        mesh=mesh,
        in_specs=(split, same),
        out_specs=split,
    )
    take = jax.jit(part_of, out_shardings=NamedSharding(mesh, same))
    whole = np.empty((mesh.size, share, *table.shape[1:]), table.dtype) if wanted else None
    for start in range(0, share, rows):
        first = min(start, share - rows)
        block = take(table, np.int32(first))
        if whole is not None:
            parts = np.asarray(block.addressable_data(0)).reshape(mesh.size, rows, *whole.shape[2:])
            whole[:, first : first + rows] = parts
    return None if whole is None else whole.reshape(table.shape)


def _blocks(leaf: Any) -> Iterator[slice]:
    """Yield slices of the leading axis of at most ``_BLOCK`` bytes, or of one row."""
    count = leaf.shape[0]
    step = max(1, _BLOCK * count // max(1, leaf.size * leaf.dtype.itemsize))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _texts(mine: str) -> Sequence[str]:
    """Gather a text from all processes."""
    raw = mine.encode()
    longest = multihost_utils.process_allgather(np.array([len(raw)], np.uint32)).ravel()
    size = _LEAST
    while size < longest.max():
        size *= 2
    padded = np.zeros(size, np.uint8)
    padded[: len(raw)] = np.frombuffer(raw, np.uint8)
    found = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes().decode() for row, length in zip(found, longest, strict=True)]
