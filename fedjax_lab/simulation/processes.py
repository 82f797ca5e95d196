"""One run in several processes of ``jax.distributed``: what they agree on, and what they exchange.

Each process calls ``simulate`` with the same arguments. A value that all have is placed on all
devices without being sent; what one process alone knows, such as a checkpoint or a signal, goes
to the others between chunks of rounds. With one process, each function here does what is plain.
"""

import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # the barrier below is nowhere else
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab.clients.mapping import parse_client_map, parts_of_a_model
from fedjax_lab.clients.store import sharded_rows
from fedjax_lab.simulation.run_dir import differences
from fedjax_lab.types import PyTree

_BLOCK = 2**26  # bytes of a table that travel at once
_LEAST = 2**10  # bytes of a text that travel at once: few lengths, few programs
_NAMED = 3  # processes in an error
_DAY = 86_400_000  # milliseconds; a process that is gone is noticed earlier, by its heartbeat
_meetings = itertools.count()
_GONE = ("heartbeat", "Gloo", "Connection", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED")


def several() -> bool:
    """Whether there are other processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes and speaks for all."""
    return jax.process_index() == 0


def _check_devices() -> None:
    counts: dict[int, int] = {}
    for device in jax.devices():
        counts[device.process_index] = counts.get(device.process_index, 0) + 1
    if len(set(counts.values())) > 1:
        told = ", ".join(f"process {i} has {n}" for i, n in sorted(counts.items()))
        raise ValueError(f"{told} devices; all processes of a run must have the same number.")


def check_map(client_map: str) -> None:
    """Check that a client map has work for all processes.

    Args:
      client_map: as given to ``simulate``.

    Raises:
      ValueError: it leaves devices out, is to be measured, or the processes have unlike numbers of
        devices.
    """
    if not several():
        return
    _check_devices()
    if client_map.startswith("shard_map") and parts_of_a_model(client_map) > 1:
        raise ValueError(
            f"client_map is {client_map!r} with {jax.process_count()} processes; a model is "
            "divided among the devices of one process. Choose 'shard_map'."
        )
    spreads = client_map.startswith("shard_map")
    devices = jax.device_count()
    if client_map != "auto" and not (
        spreads and len(parse_client_map(client_map).devices) == devices
    ):
        raise ValueError(
            f"client_map is {client_map!r}; with {jax.process_count()} processes it must be "
            f"'auto', or 'shard_map' over all of their {devices} devices."
        )


def put(values: PyTree, sharding: Any) -> PyTree:
    """Put values that each process has onto the devices of all.

    Args:
      values: pytree of arrays, the same in each process; or arrays that lie on all devices.
      sharding: a sharding, or a pytree of them like ``values``; with one process also None.
    """
    if not several():
        return jax.device_put(values, sharding)

    def one(leaf, where):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, where)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            wrap = jax.jit(
                lambda bits: jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
            )
            return wrap(one(jax.random.key_data(leaf), where))
        leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
        return jax.make_array_from_callback(leaf.shape, where, lambda index: leaf[index])

    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: one(leaf, sharding), values)
    return jax.tree.map(one, values, sharding)


def local(values: PyTree) -> PyTree:
    """A process's own copy of what lies whole on all devices; the rest stays as it is.

    Args:
      values: pytree of arrays.
    """

    def one(leaf):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
        return leaf

    return jax.tree.map(one, values) if several() else values


def own(values: PyTree) -> PyTree:
    """A process's own copy of all values, put together where they are divided over processes.

    All processes call it.

    Args:
      values: pytree of arrays.
    """
    return jax.tree.map(jnp.asarray, gathered(values, everywhere=True)) if several() else values


def gathered(values: PyTree, everywhere: bool = False) -> PyTree:
    """Values on the host, those that are divided over processes put together.

    All processes call it. With one process the values are returned as they are.

    Args:
      values: pytree of arrays.
      everywhere: each process gets them; else process 0 alone, and the others None in their place.
    """
    if not several():
        return values
    wanted = everywhere or is_first()

    def one(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf if wanted else None
        if leaf.is_fully_addressable:
            return np.asarray(leaf) if wanted else None
        if leaf.is_fully_replicated:
            return np.asarray(leaf.addressable_data(0)) if wanted else None
        return _put_together(leaf, wanted)

    return jax.tree.map(one, values)


def _put_together(table: jax.Array, wanted: bool) -> np.ndarray | None:
    """A table whose rows are divided among the devices; None where it is not wanted."""
    assert isinstance(table.sharding, NamedSharding)
    mesh = table.sharding.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    take = jax.jit(sharded_rows(mesh).take, out_shardings=NamedSharding(mesh, PartitionSpec()))
    whole = np.empty(table.shape, table.dtype) if wanted else None
    blocks = list(_blocks(table))
    size = -(-(blocks[0].stop - blocks[0].start) // mesh.size) * mesh.size
    for rows in blocks:
        ids = np.minimum(rows.start + np.arange(size, dtype=np.int32), table.shape[0] - 1)
        block = take(table, ids)
        if whole is not None:
            whole[rows] = np.asarray(block.addressable_data(0))[: rows.stop - rows.start]
    return whole


def _blocks(leaf: Any) -> Iterator[slice]:
    """Slices of the leading axis, of at most ``_BLOCK`` bytes where a row is not larger."""
    count = leaf.shape[0]
    step = max(1, _BLOCK * count // max(1, leaf.size * leaf.dtype.itemsize))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def handed_out(values: PyTree, like: PyTree) -> PyTree:
    """What process 0 has, placed on the devices of all.

    Args:
      values: pytree of arrays on the host; of the other processes' nothing is looked at.
      like: arrays on all devices, whose structure, shapes, dtypes and shardings it shall have.
    """
    leaves = jax.tree.leaves(values) if is_first() else [None] * len(jax.tree.leaves(like))

    def one(value, like):
        if like.is_fully_replicated:
            return put(_bytes_of(0, value, like.shape, like.dtype), like.sharding)
        own = like.sharding.addressable_devices_indices_map(like.shape).values()
        mine = sorted({_rows(index, like.shape[0]) for index in own})
        wanted = np.zeros(like.shape[0], bool)
        for start, stop in mine:
            wanted[start:stop] = True
        kept = _sent_in_blocks(0, value, like, wanted)
        first = np.cumsum(wanted) - 1  # where a row lies in ``kept``

        def part(index):
            start, stop = _rows(index, like.shape[0])
            return kept[first[start] : first[start] + stop - start]

        return jax.make_array_from_callback(like.shape, like.sharding, part)

    given = jax.tree.leaves(like)
    placed = [one(value, leaf) for value, leaf in zip(leaves, given, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def sent(values: PyTree, like: PyTree, process: int, wanted: np.ndarray | None = None) -> PyTree:
    """What one process has, on the host of each; in blocks of the leading axis, n.

    Args:
      values: pytree of arrays [n, ...]; of the other processes' nothing is looked at.
      like: of its structure, shapes and dtypes.
      process: which one.
      wanted: bool [n], the rows that are kept here; None: all.
    """
    given = jax.tree.leaves(like)
    speaks = jax.process_index() == process
    leaves = jax.tree.leaves(values) if speaks else [None] * len(given)
    found = [
        _sent_in_blocks(process, value, leaf, wanted)
        for value, leaf in zip(leaves, given, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(like), found)


def _sent_in_blocks(process: int, value: Any, like: Any, wanted: np.ndarray | None) -> np.ndarray:
    """The rows of an array [n, ...] that are wanted here."""
    wanted = np.ones(like.shape[0], bool) if wanted is None else wanted
    parts = [np.empty((0, *like.shape[1:]), like.dtype)]
    for block in _blocks(like):
        shape = (block.stop - block.start, *like.shape[1:])
        there = None if value is None else value[block]
        parts.append(_bytes_of(process, there, shape, like.dtype)[wanted[block]])
    return np.concatenate(parts)


def _rows(index: tuple[slice, ...] | None, count: int) -> tuple[int, int]:
    assert index is not None
    start, stop, _ = index[0].indices(count)
    return start, stop


def _bytes_of(process: int, value: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of one process; as bytes, of which a sum with zeros changes none."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    speaks = jax.process_index() == process
    raw = np.zeros(size, np.uint8)
    if speaks:
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    found = multihost_utils.broadcast_one_to_all(raw, is_source=speaks)
    return np.array(found).view(dtype).reshape(shape)


def first_says(value: Any) -> Any:
    """Process 0's value.

    Args:
      value: any JSON value; that of the other processes does not count.
    """
    if not several():
        return value
    return json.loads(_texts(json.dumps(value) if is_first() else "")[0])


def any_of(*flags: bool) -> tuple[bool, ...]:
    """Of each flag, whether it is set in any process.

    Args:
      *flags: as many in each process.
    """
    if not several():
        return flags
    found = multihost_utils.process_allgather(np.array(flags, np.uint8))
    return tuple(map(bool, found.any(0)))


def meet() -> None:
    """Wait until all processes are here, however much longer one of them compiles.

    An exchange on CPU gives the others 30 seconds to come to it. JAX keeps the compiled programs of
    process 0 alone, so that a second run has them there at once, and elsewhere after compiling.
    """
    if several():
        client = distributed.global_state.client
        assert client is not None
        client.wait_at_barrier(f"fedjax_lab/{next(_meetings)}", _DAY)


def agree(mine: Mapping[str, Any]) -> None:
    """Check that all processes have the same.

    Args:
      mine: a JSON object.

    Raises:
      ValueError: they have not; all processes say the same, and what differs.
    """
    if not several():
        return
    text = json.dumps(mine, sort_keys=True, default=str)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    digests = multihost_utils.process_allgather(digest)
    if (digests == digests[0]).all():
        return
    first, *others = map(json.loads, _texts(text))
    told = [
        f"process {i}: {'; '.join(differences(first, theirs, words=('process 0 has', 'it has')))}"
        for i, theirs in enumerate(others, start=1)
        if theirs != first
    ]
    raise ValueError(f"all processes must be given the same, but {'. '.join(told[:_NAMED])}.")


def together(action: Callable[[], Any]) -> Any:
    """What ``action`` returns here, if it succeeds in all processes.

    Args:
      action: what may fail in one process; it exchanges nothing.

    Raises:
      Exception: the action's own, where it failed.
      RuntimeError: it failed in another process.
    """
    if not several():
        return action()
    failed, result = None, None
    try:
        result = action()
    except Exception as error:
        failed = error
    if any_of(failed is not None)[0]:
        texts = _texts("" if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None:
            raise failed
        process, text = next((i, text) for i, text in enumerate(texts) if text)
        raise RuntimeError(f"process {process} stopped with {text}")
    return result


def _texts(mine: str) -> Sequence[str]:
    """The texts of all processes."""
    raw = mine.encode()
    longest = multihost_utils.process_allgather(np.array([len(raw)], np.uint32)).ravel()
    size = _LEAST
    while size < longest.max():
        size *= 2
    padded = np.zeros(size, np.uint8)
    padded[: len(raw)] = np.frombuffer(raw, np.uint8)
    found = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes().decode() for row, length in zip(found, longest, strict=True)]


@contextlib.contextmanager
def told_of_losses() -> Iterator[None]:
    """Say in one sentence that another process is gone, where JAX says so in its own way.

    Raises:
      ConnectionError: another process has ended or does not answer.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter where a value is fetched
        if not several() or not any(word in str(error) for word in _GONE):
            raise
        told = (
            f"process {jax.process_index()} of {jax.process_count()}: another process has ended or "
            "does not answer, so that the run cannot go on. What the last checkpoint holds is "
            "whole; the same call, with as many processes or others, goes on from there."
        )
        print(f"fedjax_lab: {told}", file=sys.stderr, flush=True)  # before JAX ends the process
        raise ConnectionError(told) from error
