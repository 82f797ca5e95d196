"""Clients' data that do not fit on a device: examples on the host, indices on the device.

A cohort's mini-batches depend only on the seed and the round, so the examples of a chunk of rounds
are known before it runs. They are gathered on the host while the previous chunk runs, and copied to
the device as the chunk's ``source``. The bits are the same as with all examples on the device.

Axes: n examples, m of them held by some client, N clients, S slots of the cohort, P the largest
number of examples of a chunk.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_int
from fedjax_lab.data.federated import (
    FederatedArrays,
    PartitionInfo,
    as_examples,
    divide,
    from_resident,
)
from fedjax_lab.data.heterogeneity import Heterogeneity, describe, labels_of
from fedjax_lab.data.host_examples import HostArrays, HostExamples, Records
from fedjax_lab.data.partition import Partition
from fedjax_lab.data.stream_files import open_stream
from fedjax_lab.machine.device_memory import device_memory
from fedjax_lab.signatures import suggest_keywords

_SHARE = 0.25  # share of a device's memory for a stream, by default
NOBODY = np.iinfo(np.int32).max  # padding of a window


class FederatedStream:
    """All clients' data; a device holds the indices and the examples of two chunks of rounds.

    ``simulate`` accepts it in place of ``FederatedArrays``. ``stream`` creates it.

    Args:
      examples: on the host.
      host: the partition; it says which client has which example.
      names: the clients' ids as text, or None.
      memory: bytes of a device for index and examples.

    Attributes:
      examples: the examples, on the host.
      index: ``FederatedArrays`` without examples, on the device.
      memory: bytes of a device for index and examples.
    """

    def __init__(
        self,
        examples: HostExamples,
        host: Partition,
        names: tuple[str, ...] | None,
        memory: int,
    ):
        self.examples, self.memory = examples, memory
        self.index = from_resident((), host, names)

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return self.index.num_clients

    @property
    def num_available(self) -> int:
        """Number of clients with data."""
        return self.index.num_available

    @property
    def partition(self) -> PartitionInfo:
        """Origin of the partition: scheme, seed and hash."""
        return self.index.partition

    @property
    def names(self) -> tuple[str, ...] | None:
        """Clients' ids as text, or None."""
        return self.index.names

    @property
    def indices(self) -> jax.Array:
        """See ``FederatedArrays``; int32 [m]."""
        return self.index.indices

    @property
    def starts(self) -> jax.Array:
        """See ``FederatedArrays``; int32 [N]."""
        return self.index.starts

    @property
    def sizes(self) -> jax.Array:
        """See ``FederatedArrays``; int32 [N]."""
        return self.index.sizes

    @property
    def example_bytes(self) -> int:
        """Bytes of an example on a device."""
        shapes = jax.tree.leaves(self.examples.shapes)
        return sum(int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize for leaf in shapes)

    @property
    def nbytes(self) -> int:
        """Bytes that all examples would take on a device."""
        return self.example_bytes * jax.tree.leaves(self.examples.shapes)[0].shape[0]

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.index))

    def heterogeneity(self) -> Heterogeneity:
        """See ``FederatedArrays``."""
        return self._with_targets().heterogeneity()

    def label_histogram(self) -> np.ndarray:
        """See ``FederatedArrays``; int64 [N, C]."""
        return self._with_targets().label_histogram()

    def plot(self, path: str | Path | None = None) -> Any:
        """See ``FederatedArrays``.

        Args:
          path: where to save the figure.
        """
        return self._with_targets().plot(path)

    def summary(self) -> str:
        """Summarise scheme, sizes, label skew (with class labels) and memory in a few lines."""
        whole = self._with_targets()
        lines = describe(labels_of(whole.examples), whole.host_partition())
        return (
            f"{lines}\n{self.examples.where}: {self.nbytes / 2**20:,.1f} MiB; on the device: an "
            f"index of {self.index_bytes / 2**20:,.1f} MiB, and the examples of two chunks of "
            f"rounds, together at most {self.memory / 2**20:,.1f} MiB"
        )

    def _with_targets(self) -> FederatedArrays:
        return dataclasses.replace(self.index, examples={"y": self.examples.targets})

    def most_examples(self, rounds: int, cohort_size: int, most_of_client: int) -> int:
        """Return P, an upper bound on the examples of these rounds for any cohorts.

        Args:
          rounds: number of rounds.
          cohort_size: S.
          most_of_client: largest number of examples that a client draws in a round.
        """
        sizes = np.minimum(np.asarray(self.index.sizes, np.int64), most_of_client)
        of_round = int(np.sort(sizes)[::-1][:cohort_size].sum())
        return min(rounds * of_round, self.index.indices.shape[0])

    def window_bytes(self, count: int) -> int:
        """Compute the bytes on a device of P examples with their indices.

        Args:
          count: P.
        """
        return count * (self.example_bytes + 4)

    def window_shapes(self, count: int) -> FederatedArrays:
        """Return the shapes of a chunk's examples without reading them.

        Args:
          count: P.
        """
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype),
            self.examples.shapes,
        )
        window: Any = jax.ShapeDtypeStruct((count,), jnp.int32)
        return dataclasses.replace(self.index, examples=shapes, window=window)

    def read(self, drawn: np.ndarray, count: int) -> tuple[Any, np.ndarray]:
        """Read (examples [P, ...], window int32 [P]) on the host, each drawn example once.

        Args:
          drawn: integers of any shape, the indices of examples.
          count: P, at least the number of distinct indices.
        """
        ids = np.unique(drawn)
        window = np.full(count, NOBODY, np.int32)
        window[: len(ids)] = ids
        return self.examples.read(ids, count), window

    def share(self, host: Partition, names: tuple[str, ...] | None) -> "FederatedStream":
        """Create a federation with another partition of the same examples.

        Args:
          host: the partition; it says which client has which example.
          names: the clients' ids as text, or None.
        """
        return FederatedStream(self.examples, host, names, self.memory)


AnyClients = TypeVar("AnyClients", bound=FederatedArrays | FederatedStream)


def replace_index(clients: AnyClients, **fields: Any) -> AnyClients:
    """Replace fields of the clients' ``FederatedArrays``, which is the index of a stream.

    Args:
      **fields: new values by the names of the fields.
    """
    replaced: Any
    if isinstance(clients, FederatedArrays):
        replaced = dataclasses.replace(clients, **fields)
    else:
        replaced = copy.copy(clients)
        replaced.index = dataclasses.replace(clients.index, **fields)
    return replaced


@suggest_keywords
def stream(
    train: Any,
    spec: str | np.ndarray,
    num_clients: int | None = None,
    seed: int = 0,
    min_size: int | None = None,
    *,
    memory: int | None = None,
    data_dir: str | Path | None = None,
) -> FederatedStream:
    """Divide examples that stay on the host among clients; the counterpart of ``partition``.

    The same arguments give the same partition, and a run gives the same bits.

    Args:
      train: a folder of ``write_stream``; "tfds:NAME", the training split of a prepared
        tensorflow-datasets set in the format array_record; or ``Examples``, a tuple (x, y) or any
        pytree of arrays with leading axis n, such as ``np.memmap``, or of paths of ``.npy`` files.
      spec: a scheme, or the id of each example's client [n]; as in ``partition``.
      num_clients, seed, min_size: as in ``partition``.
      memory: bytes of each device for the indices and the examples of two chunks of rounds, the
        running one and the next. If ``eval_every`` rounds need more, they run as shorter chunks.
        None: a quarter of the device.
      data_dir: for "tfds:NAME", the TFDS directory; None: TFDS's own.

    Raises:
      TypeError, ValueError: as ``partition``; ``memory`` is not positive, or less than the index.
      FileNotFoundError: there is no such folder, file or prepared set.
      ImportError: tensorflow-datasets is required and missing.
    """
    if memory is None:
        memory = int(_SHARE * device_memory())
    memory = check_int("memory", memory, minimum=1)
    examples: HostExamples
    if isinstance(train, str) and train.startswith("tfds:"):
        examples = Records(train, data_dir)
    else:
        if isinstance(train, (str, Path)) and not Path(train).is_file():
            train = open_stream(train)
        examples = HostArrays(as_examples(train))
    n = jax.tree.leaves(examples.shapes)[0].shape[0]
    host, names = divide(examples.targets, n, spec, num_clients, seed, min_size)
    clients = FederatedStream(examples, host, names, memory)
    if clients.index_bytes >= memory:
        raise ValueError(
            f"memory is {memory:,} bytes; the index of {n:,} examples takes {clients.index_bytes:,}"
            " of them."
        )
    return clients


def check_resident(clients: Any, what: str) -> None:
    """Refuse a stream for a feature that needs all clients' examples on the device.

    Raises:
      TypeError: ``clients`` is a stream.
    """
    if isinstance(clients, FederatedStream):
        raise TypeError(
            f"clients is a FederatedStream, whose examples stay on the host; {what} needs them on "
            "the device: use data.partition."
        )


def check_no_stream(test: Any) -> None:
    """Refuse a stream in place of test examples.

    Raises:
      TypeError: ``test`` is a stream.
    """
    if isinstance(test, FederatedStream):
        raise TypeError(
            "test is a FederatedStream, whose examples stay on the host; an evaluation needs them "
            "on the device: stream.read(np.asarray(stream.indices), stream.indices.size)[0]."
        )


def check_clients(clients: Any, argument: str = "clients") -> None:
    """Check that clients' data are a federation.

    Raises:
      TypeError: it is neither.
    """
    if not isinstance(clients, (FederatedArrays, FederatedStream)):
        raise TypeError(
            f"{argument} is {type(clients).__name__}, not FederatedArrays; see "
            "fedjax_lab.data.partition."
        )
