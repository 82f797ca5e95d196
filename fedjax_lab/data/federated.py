"""A partitioned data set on the device: one resident copy and a flat table of indices.

Axes: n examples, m of them held by some client, N clients, C classes.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_lab.checks import check_int
from fedjax_lab.data.clock import RoundTimes
from fedjax_lab.data.dtypes import common_length, to_device
from fedjax_lab.data.heterogeneity import (
    Heterogeneity,
    describe,
    heterogeneity,
    labels_of,
    targets_of,
)
from fedjax_lab.data.partition import Partition, number_owners, split_indices
from fedjax_lab.data.partition_plot import plot_partition
from fedjax_lab.data.sources import Examples
from fedjax_lab.signatures import suggest_keywords

_MOST_NAMED = 10  # clients in a summary


@dataclasses.dataclass(frozen=True)
class PartitionInfo:
    """Origin of a partition; hashable, so that it may be a static argument.

    Attributes:
      spec: the scheme, such as "dirichlet:0.1".
      seed: seed of the draw.
      hash: 16 hexadecimal digits, different for different partitions.
    """

    spec: str
    seed: int
    hash: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FederatedArrays:
    """All clients' data on the device; a pytree that can be passed to jitted functions.

    Client i holds ``examples[indices[starts[i] : starts[i] + sizes[i]]]``.

    Attributes:
      examples: pytree with leading axis n (usually ``Examples``) in storage dtype. Several
        federations may share it and use different parts.
      indices: int32 [m], example indices, grouped by client.
      starts: int32 [N], where each client's indices begin.
      sizes: int32 [N], examples of each client.
      nonempty: int32 [M], ids of the clients with data; None: all clients have data.
      num_clients: N.
      min_size: smallest number of examples of a client with data.
      max_size: largest number of examples of a client.
      partition: scheme, seed and hash.
      names: N client ids as text; None: clients have only numbers.
      window: int32 [P] in rising order, the indices in a larger set of the ``examples`` [P, ...];
        the largest int32 is padding. None: ``examples`` is the whole set.
      categories: (column, its values in the order of their codes) for each text column of a table.
      times: a ``RoundTimes``, set by ``simulate(times=...)``; None: time is not simulated.
      local_steps: int32 [N], the local steps of each client, set by ``simulate(local_steps=...)``
        and ``simulate(local_epochs=...)`` with arrays; None: the schedule determines them.
      weights: float32 [N], the weights of the clients, set by ``simulate(weights=...)`` with an
        array; None: the schedule determines them.
      constants: pytree [N, ...], set by ``simulate(client_constants=...)``; () if there are none.
      numbers: int32 [N], the ids by which ``simulate(devices=...)`` knows the clients, set by
        ``tune(hold_out="clients")``; None: their ids here.
    """

    examples: Any
    indices: jax.Array
    starts: jax.Array
    sizes: jax.Array
    nonempty: jax.Array | None
    num_clients: int = dataclasses.field(metadata={"static": True})
    min_size: int = dataclasses.field(metadata={"static": True})
    max_size: int = dataclasses.field(metadata={"static": True})
    partition: PartitionInfo = dataclasses.field(metadata={"static": True})
    names: tuple[str, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    window: jax.Array | None = None
    times: RoundTimes | None = None
    categories: tuple[tuple[str, tuple[str, ...]], ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )
    local_steps: jax.Array | None = None
    weights: jax.Array | None = None
    constants: Any = ()
    numbers: jax.Array | None = None

    @property
    def num_available(self) -> int:
        """Number of clients with data."""
        return self.num_clients if self.nonempty is None else self.nonempty.shape[0]

    def heterogeneity(self) -> Heterogeneity:
        """Compute label histogram, sizes and distances to the global label distribution (host).

        Raises:
          ValueError: the examples have no class labels.
        """
        labels = labels_of(self.examples)
        if labels is None:
            y = targets_of(self.examples)
            found = "there are none" if y is None else f"y has shape {y.shape} and dtype {y.dtype}"
            raise ValueError(
                f"examples have no class labels, integers y [n] from 0, to be counted; {found}."
            )
        return heterogeneity(labels, self.host_partition())

    def label_histogram(self) -> np.ndarray:
        """Count the examples of each class for each client, int64 [N, C] (host).

        Raises:
          ValueError: the examples have no class labels.
        """
        return self.heterogeneity().label_histogram

    def summary(self) -> str:
        """Summarise scheme, sizes, names and (with class labels) label skew in a few lines."""
        lines = [describe(labels_of(self.examples), self.host_partition())]
        if self.names is not None:
            more = ", ..." if len(self.names) > _MOST_NAMED else ""
            lines.append(f"names: {', '.join(self.names[:_MOST_NAMED])}{more}")
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.examples))
        return "\n".join([*lines, f"on the device: {size / 2**20:,.1f} MiB"])

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot the partition: sizes above, label shares below (if there are class labels).

        With more than 100 clients, 100 are shown, evenly spaced in the order of size.

        Args:
          path: file of the figure; its suffix selects the format.

        Returns:
          The matplotlib Figure.

        Raises:
          ImportError: matplotlib is missing.
        """
        measured = None if labels_of(self.examples) is None else self.heterogeneity()
        sizes = np.asarray(self.sizes)
        figure = plot_partition(self.partition.spec, sizes, measured, self.names)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def share(self, host: Partition, names: tuple[str, ...] | None) -> "FederatedArrays":
        """Create a federation with another partition of the same examples.

        Args:
          host: the partition; it says which client has which example.
          names: the clients' ids, N of them, or None.

        Raises:
          ValueError: there is no client, or none with data.
        """
        shared = from_resident(self.examples, host, names)
        return dataclasses.replace(shared, categories=self.categories)

    def host_partition(self) -> Partition:
        """Return the partition on the host."""
        info = self.partition
        return Partition(np.asarray(self.indices), np.asarray(self.sizes), info.spec, info.seed)


@suggest_keywords
def partition(
    train: Any,
    spec: str | np.ndarray,
    num_clients: int | None = None,
    seed: int = 0,
    min_size: int | None = None,
) -> FederatedArrays:
    """Divide ``train`` among clients and put it on the device.

    Args:
      train: ``Examples``, a tuple (x, y), or any pytree of arrays with leading axis n. Schemes by
        label need integers [n] from 0 in ``y``; the others do not read it.
      spec: a key of ``PARTITIONS`` with its number, such as "dirichlet:0.1", or an array [n]
        with the id of each example's client: integers or text. See ``split_indices``.
      num_clients: N. None, only for ids: the number of distinct ids; clients are numbered in the
        order of their ids, which become ``names``. With N, ids are integers below N, or N distinct
        strings.
      seed: the same seed gives the same partition.
      min_size: smallest number of examples of a client; 0 allows empty clients, which are never
        sampled. None: 2 for a scheme, 1 for ids.

    Raises:
      TypeError, ValueError: as in ``split_indices``; or leaves have different lengths, are text, or
        have integers beyond 32 bits.
    """
    train = as_examples(train)
    n = common_length("train", train)
    host, names = divide(targets_of(train), n, spec, num_clients, seed, min_size)
    return from_partition(train, host, names)


def divide(
    targets: Any | None,
    n: int,
    spec: str | np.ndarray,
    num_clients: int | None,
    seed: int,
    min_size: int | None,
) -> tuple[Partition, tuple[str, ...] | None]:
    """Compute the partition and the clients' names.

    Args:
      targets: an array [n, ...], or None.

    Raises:
      TypeError, ValueError: as ``partition``.
    """
    names = None
    if min_size is None:
        min_size = 2 if isinstance(spec, str) else 1
    if isinstance(spec, str):
        if num_clients is None:
            raise TypeError(
                f"num_clients is None; with spec {spec!r} it must be the number of clients, an "
                "integer. Only an array of ids determines the number by itself."
            )
    elif num_clients is None or np.asarray(spec).dtype.kind in "OUST":
        names, spec = number_owners(spec, check_int("min_size", min_size, minimum=0))
        if num_clients not in (None, len(names)):
            raise ValueError(
                f"num_clients is {num_clients}; spec has {len(names)} different text ids: omit "
                "num_clients."
            )
        num_clients = len(names)
    assert num_clients is not None
    labels = np.empty((n, 0)) if targets is None else np.asarray(targets)
    return split_indices(labels, spec, num_clients, seed, min_size), names


def as_examples(tree: Any) -> Any:
    """Convert a plain tuple (x, y) to ``Examples``; return anything else unchanged.

    Args:
      tree: a pytree of arrays [n, ...].
    """
    return Examples(*tree) if type(tree) is tuple and len(tree) == 2 else tree


def from_partition(
    train: Any, host: Partition, names: tuple[str, ...] | None = None
) -> FederatedArrays:
    """Put ``train`` and its ``Partition`` on the device.

    Args:
      host: the partition; it says which client has which example.
      names: the clients' ids, N of them, or None.

    Raises:
      ValueError: there is no client, or none with data; or leaves hold no numbers, or integers
        beyond 32 bits.
    """
    return from_resident(jax.tree.map(_put, train), host, names)


def from_resident(
    examples: Any, host: Partition, names: tuple[str, ...] | None = None
) -> FederatedArrays:
    """Create a federation from examples that are on the device, without a copy.

    Args:
      host: the partition; some examples may belong to no client.
      names: the clients' ids, N of them, or None.

    Raises:
      ValueError: there is no client, or none with data.
    """
    check_int("num_clients", host.num_clients, minimum=1)
    nonempty = np.flatnonzero(host.sizes).astype(np.int32)
    if not len(nonempty):
        raise ValueError(
            f"num_clients is {host.num_clients}, and no client has data; at least one must."
        )
    return FederatedArrays(
        examples=examples,
        indices=_put(host.indices),
        starts=_put(host.starts),
        sizes=_put(host.sizes),
        nonempty=None if len(nonempty) == host.num_clients else _put(nonempty),
        num_clients=host.num_clients,
        min_size=int(host.sizes[nonempty].min()),
        max_size=int(host.sizes.max()),
        partition=PartitionInfo(host.spec, host.seed, host.hash),
        names=names,
    )


def _put(array: Any) -> jax.Array:
    # A copy: on the CPU the device array may alias the host's, and a later write would show.
    return to_device("train", array, copy=True)
