"""The data of each chunk of rounds: resident arrays, or a stream's examples fetched ahead.

It also attaches client times to the clients' data.
"""

import dataclasses
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import MOST_ROUNDS, warn
from fedjax_lab.data import ClientTimes, FederatedArrays, FederatedStream
from fedjax_lab.data.client_sampling import check_cohorts
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.data.streams import replace_index
from fedjax_lab.machine.keys import seeded
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.arguments import (
    are_broken,
    check_model,
    nonfinite_data,
    some_of,
)
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.storage.fingerprint import hash_arrays
from fedjax_lab.types import CohortBatch, Metrics, Params


class ClientData:
    """Resident data: every chunk gets the same arrays.

    Args:
      clients: the clients' data.
      eval_every: rounds of a chunk.

    Attributes:
      clients: the data argument of a program of rounds, by shapes and placement.
      index: the examples of each client.
      longest: maximum number of rounds of a program.
      note: a line about it for the progress of a run, or "".
    """

    note = ""

    def __init__(self, clients: FederatedArrays, eval_every: int):
        self.clients = self.index = clients
        self.longest = eval_every

    def place(self, place: Placement) -> None:
        """Copy the data to the devices that clients run on."""
        self.clients = self.index = place.clients(self.clients)

    def pieces(self, first: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield (first round, number of rounds) of the programs that make up a chunk."""
        for start in range(first, first + length, self.longest):
            yield start, min(self.longest, first + length - start)

    def take(self, first: int, length: int) -> FederatedArrays:
        """Return the data of some rounds; from ``ran`` on, the next ones are fetched.

        Args:
          length: rounds, at most ``longest``.
        """
        return self.clients

    def ran(self, metrics: Metrics) -> None:
        """Note that the program on the last ``take`` has been dispatched."""

    def content(self) -> str:
        """Return a hash of examples and index."""
        return hash_arrays((self.clients.examples, self.clients.indices))

    def check(self, run: Computation) -> None:
        """Refuse labels without a logit; warn of data and params that will not train.

        Raises:
          ValueError: a label is out of range.
        """
        if found := nonfinite_data(self.clients):
            warn(f"{found}; on_nonfinite decides what happens in a round that uses them.")
        check_model(run, self.clients)

    def record(self) -> dict[str, Any]:
        """Return the entries of config.json."""
        recorded = record_times(self.clients) | _record_steps(self.clients)
        if self.clients.weights is not None:
            recorded["client_weights"] = hash_arrays(self.clients.weights)
        if jax.tree.leaves(self.clients.constants):
            recorded["client_constants"] = hash_arrays(self.clients.constants)
        return recorded

    def close(self) -> None:
        """Stop fetching."""


class StreamedClientData(ClientData):
    """A stream: each chunk gets the examples that it draws; the next chunk's are fetched ahead.

    The device draws the next chunk before it runs this chunk's rounds, so that the draw does not
    wait for them. A thread gathers the drawn examples, waits until the previous chunk has run, and
    copies them. A device therefore never holds more than two chunks' examples. With several
    processes, each gathers what all clients draw, in the form that each device needs, and nothing
    is exchanged.

    Args:
      run: the computation; its schedule, key and number of rounds are used.
      stream: the clients' data.

    Raises:
      ValueError: the examples of a single round do not fit.
    """

    def __init__(self, run: Computation, stream: FederatedStream):
        self._stream, self._run, self._processes = stream, run, Processes.here()
        self.longest, self.count = _fit(stream, run.schedule, run.eval_every)
        self.note = self._sizes()
        # JAX's own setting is that of the thread that asks.
        self._x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

        def draw(index, key, first, length):  # the indices of all examples that the rounds draw
            rounds = first + jnp.arange(length, dtype=jnp.int32)
            return jax.lax.map(lambda round: _most(run.schedule.draw(index, key, round)), rounds)

        self._draw = jax.jit(draw, static_argnames="length")
        self._worker = ThreadPoolExecutor(1, "stream")
        self._next: tuple[tuple[int, int], jax.Array] | None = None  # drawn, not yet fetched
        self._ahead: tuple[tuple[int, int], Future] | None = None
        self._last: Metrics = {}
        self._broken: str | None = None  # examples that are not finite; "" when it has been told
        self.index = stream.index
        self._begin(self._fetch(self._drawn(0, min(self.longest, run.rounds)), {}))

    def _begin(self, clients: FederatedArrays) -> None:
        """Keep the data of the first rounds, which are there before the placement is chosen."""
        fetched: Future = Future()
        fetched.set_result(clients)
        self.clients, self._ahead = clients, ((0, min(self.longest, self._run.rounds)), fetched)

    def _sizes(self) -> str:
        stream, size = self._stream, self._stream.window_bytes(self.count)
        every = self._run.eval_every
        shorter = "" if self.longest == every else f" (eval_every is {every})"
        return (
            f"examples are streamed, {stream.nbytes / 2**20:,.1f} MiB {stream.examples.where}: "
            f"chunks of {self.longest} rounds{shorter} with at most {self.count:,} examples each; "
            f"a device holds those of two, twice {size / 2**20:,.1f} MiB, and an index of "
            f"{stream.index_bytes / 2**20:,.1f} MiB, of memory={stream.memory:,} bytes"
        )

    def place(self, place: Placement) -> None:
        """See ``ClientData``."""
        self.index = place.clients(self.index)
        self._begin(place.clients(self.clients))

    def take(self, first: int, length: int) -> FederatedArrays:
        """See ``ClientData``.

        Args:
          length: rounds, at most ``longest``.
        """
        if self._ahead is not None and self._ahead[0] == (first, length):
            clients = self._ahead[1].result()
        else:
            self._forget()
            clients = self._fetch(self._drawn(first, length), self._last)
        self._ahead = self._next = None
        if self._broken:
            warn(self._broken)
            self._broken = ""
        self.clients = dataclasses.replace(
            clients, examples=_shapes(clients.examples), window=_shapes(clients.window)
        )
        after = first + length
        if after < self._run.rounds:
            piece = after, min(self.longest, self._run.rounds - after)
            self._next = piece, self._drawn(*piece)
        return clients

    def ran(self, metrics: Metrics) -> None:
        """See ``ClientData``."""
        if self._next is not None:  # by now, nothing refers to the chunk before that one
            piece, drawn = self._next
            self._ahead = piece, self._worker.submit(self._fetch, drawn, self._last)
            self._next = None
        self._last = metrics

    def content(self) -> str:
        """See ``ClientData``."""
        return f"{self._stream.examples.content()[:16]} {hash_arrays(self._stream.index)}"

    def check(self, run: Computation) -> None:
        """See ``ClientData``; whether examples are finite is checked when they are drawn."""
        check_model(run, self._stream)

    def record(self) -> dict[str, Any]:
        """See ``ClientData``."""
        stream = {"rounds_at_once": self.longest, "examples_at_once": self.count}
        return {**super().record(), "stream": stream}

    def close(self) -> None:
        """See ``ClientData``."""
        self._forget()
        self._worker.shutdown()

    def _forget(self) -> None:
        """Drop examples that were fetched but are not needed."""
        if self._ahead is not None and not self._ahead[1].cancel():
            self._ahead[1].exception()
        self._ahead = None

    def _drawn(self, first: int, length: int) -> jax.Array:
        # On one device, whatever the client map is: the program is there before the map is known.
        start = jnp.asarray(first, jnp.int32)
        return self._draw(self._stream.index, self._run.key, start, length=length)

    def _fetch(self, drawn: jax.Array, after: Metrics) -> FederatedArrays:
        """Gather the drawn examples, and copy them when the previous rounds have run."""
        rows, window = self._stream.read(np.asarray(drawn), self.count)
        self._look(rows, window)
        jax.block_until_ready(after)
        with jax.enable_x64(self._x64):
            rows, window = self._processes.put((rows, window), self.index.indices.sharding)
        return dataclasses.replace(self.index, examples=rows, window=window)

    def _look(self, rows: Any, window: np.ndarray) -> None:
        """Check for examples that are not finite."""
        if self._broken is not None:
            return
        broken = are_broken(rows)
        if broken.any():
            self._broken = (
                f"the examples {some_of(window[broken].tolist())} hold values that are not finite; "
                "where they are drawn, on_nonfinite decides."
            )


def client_data_of(run: Computation, clients: FederatedArrays | FederatedStream) -> ClientData:
    """Open the clients' data of a run.

    Raises:
      TypeError, ValueError: the examples of a single round do not fit, or ``sample_cohort`` draws
        wrong cohorts.
    """
    if isinstance(clients, FederatedStream):
        client_data: ClientData = StreamedClientData(run, clients)
    else:
        client_data = ClientData(clients, run.eval_every)
    how = run.schedule
    if how.sample_cohort is not None:
        assert run.key is not None
        check_cohorts(how.sample_cohort, client_data.clients, run.key, how.cohort_size, run.rounds)
    return client_data


def without_examples(
    clients: FederatedArrays | FederatedStream, schedule: Schedule, length: int
) -> FederatedArrays:
    """Return the data argument of a program of rounds, with shapes for a stream's examples.

    Args:
      length: requested number of rounds; fewer if they do not fit.

    Raises:
      ValueError: the examples of a single round do not fit.
    """
    if isinstance(clients, FederatedArrays):
        return clients
    return clients.window_shapes(_fit(clients, schedule, length)[1])


def _fit(stream: FederatedStream, schedule: Schedule, eval_every: int) -> tuple[int, int]:
    """Compute (rounds of a program, a divisor of ``eval_every``; most examples that they draw)."""
    first = jax.ShapeDtypeStruct((), jnp.int32)
    batch = jax.eval_shape(schedule.draw, stream.index, seeded(0), first)
    numbers = _most(batch)
    slots = numbers.shape[0]
    room = stream.memory - stream.index_bytes
    count, size = 0, 0
    every = min(eval_every, MOST_ROUNDS)
    pairs = [(n, every // n) for n in range(1, math.isqrt(every) + 1) if every % n == 0]
    for rounds in sorted({divisor for pair in pairs for divisor in pair}, reverse=True):
        count = stream.most_examples(rounds, slots, numbers.size // slots)
        size = 2 * stream.window_bytes(count) + 4 * rounds * numbers.size
        if size <= room:
            return rounds, count
    raise ValueError(
        f"memory is {stream.memory:,} bytes, of which the indices take {stream.index_bytes:,}. A "
        f"round of {schedule.cohort_size} clients draws up to {count:,} examples; two rounds, "
        f"the running one and the next, take {size:,} bytes. Raise memory, or choose a smaller "
        "cohort, fewer local steps or smaller mini-batches."
    )


def _most(batch: CohortBatch) -> Any:
    """Return the indices of a batch's examples, [S, ...]; full data sets include the others."""
    return batch.examples if batch.full_examples is None else batch.full_examples


def _shapes(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def with_times(
    clients: Any, times: ClientTimes | None, algorithm: Algorithm, params: Params
) -> Any:
    """Attach ``times`` to the clients, with the sizes of the method's messages.

    Args:
      clients: the clients' data, on the device or a stream.
      times: as in ``simulate``; None leaves the clients unchanged.
      algorithm: the method, which determines the bytes that a client sends and receives, and the
        gradients of a local step.
      params: the global model, or its shapes.

    Raises:
      TypeError: ``times`` is no ``ClientTimes``.
      ValueError: an array has another N, or an asynchronous method has over-selection or a
        deadline.
    """
    if times is None:
        return clients
    if not isinstance(times, ClientTimes):
        raise TypeError(f"times is {type(times).__name__}; it must be a data.ClientTimes.")
    waits = times.over_selection > 1 or times.deadline is not None
    if waits and "buffered" in algorithm.wrappers:
        raise ValueError(
            f"times have over_selection {times.over_selection:g} and deadline {times.deadline}; "
            f"{algorithm.name} is asynchronous and has no cohort to wait for: omit both."
        )
    count = clients.num_clients
    up, down = algorithm.traffic(params).of_clients(count)
    resolved = times.resolve(count, up, down, algorithm.gradients_per_step)
    return replace_index(clients, times=resolved)


def record_times(clients: FederatedArrays) -> dict[str, Any]:
    """Return the entries of config.json about client times; empty if time is not simulated."""
    if clients.times is None:
        return {}
    names = ("over_selection", "deadline", "rounds_per_period")
    policy = {name: getattr(clients.times, name) for name in names}
    return {"times": {**policy, "arrays": hash_arrays(clients.times)}}


def _record_steps(clients: FederatedArrays) -> dict[str, Any]:
    """Return the entries of config.json about arrays of local steps; empty if there are none."""
    if clients.local_steps is None:
        return {}
    steps = np.asarray(clients.local_steps)
    summary = {"min": int(steps.min()), "mean": float(steps.mean()), "max": int(steps.max())}
    return {"client_local_steps": {**summary, "array": hash_arrays(clients.local_steps)}}
