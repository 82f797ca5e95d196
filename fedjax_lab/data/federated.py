"""A partitioned data set on the device: one resident copy and a flat index table.

Axes: n examples, N clients, C classes.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_int
from fedjax_lab.data.heterogeneity import Heterogeneity, describe, heterogeneity
from fedjax_lab.data.partition import Partition
from fedjax_lab.data.partition import split_indices as _split_indices
from fedjax_lab.types import PyTree

# More clients than this cannot be told apart in a figure.
_MAX_PLOTTED = 100


@dataclasses.dataclass(frozen=True)
class PartitionInfo:
    """Where a partition comes from; hashable, so that it may be a static argument.

    Attributes:
      spec: the scheme, such as "dirichlet:0.1".
      seed: the seed that it was drawn with.
      hash: 16 hexadecimal digits, different for different partitions.
    """

    spec: str
    seed: int
    hash: str


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["examples", "indices", "starts", "sizes", "nonempty"],
    meta_fields=["num_clients", "min_size", "max_size", "partition"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class FederatedArrays:
    """All clients' data, resident on the device; a pytree, to be passed to jitted functions.

    Client i holds ``examples[indices[starts[i] : starts[i] + sizes[i]]]``.

    Attributes:
      examples: pytree with leading axis n and an attribute ``y`` (``Examples`` in practice),
        in storage dtype.
      indices: int32 [n], example indices, client after client.
      starts: int32 [N], where each client's indices begin.
      sizes: int32 [N], examples of each client.
      nonempty: int32 [M], ids of the clients with data; None: all clients have data.
      num_clients: N.
      min_size: smallest number of examples of a client with data.
      max_size: largest number of examples of a client.
      partition: scheme, seed and hash.
    """

    examples: Any
    indices: jax.Array
    starts: jax.Array
    sizes: jax.Array
    nonempty: jax.Array | None
    num_clients: int
    min_size: int
    max_size: int
    partition: PartitionInfo

    @property
    def num_available(self) -> int:
        """Number of clients with data."""
        return self.num_clients if self.nonempty is None else self.nonempty.shape[0]

    def heterogeneity(self) -> Heterogeneity:
        """Label histogram, sizes and distances to the global label distribution (host)."""
        return heterogeneity(self.examples.y, self._host_partition())

    def label_histogram(self) -> np.ndarray:
        """int64 [N, C], how many examples of each class a client has (host)."""
        return self.heterogeneity().label_histogram

    def summary(self) -> str:
        """Scheme, sizes and label skew in a few lines."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.examples))
        return (
            f"{describe(self.examples.y, self._host_partition())}\n"
            f"on the device: {size / 2**20:,.1f} MiB"
        )

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw who holds what: sizes above, label shares below.

        Beyond 100 clients, 100 of them are shown, evenly spaced among the clients in order
        of size.

        Args:
          path: where to save the figure; its ending selects the format.

        Returns:
          The matplotlib Figure.

        Raises:
          ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "plot needs matplotlib: `pip install 'fedjax-lab[report]'`."
            ) from error
        measured = self.heterogeneity()
        figure = _draw(Figure, measured, self.partition.spec)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def _host_partition(self) -> Partition:
        info = self.partition
        return Partition(np.asarray(self.indices), np.asarray(self.sizes), info.spec, info.seed)


def partition(
    train: Any,
    spec: str | np.ndarray,
    num_clients: int,
    seed: int = 0,
    min_size: int = 2,
) -> FederatedArrays:
    """Divide ``train`` among clients and put it on the device.

    Args:
      train: ``Examples``, or any pytree of arrays with leading axis n and labels [n] (or the
        targets of sequences, [n, L]) in ``y``.
      spec: a key of ``PARTITIONS`` with its number, such as "dirichlet:0.1", or an integer
        array [n] with the client of each example. See ``split_indices``.
      num_clients: N.
      seed: the same seed gives the same partition.
      min_size: examples that every client has at least; 0 allows empty clients, which are
        never drawn.

    Raises:
      TypeError, ValueError: as ``split_indices``, and for leaves of unequal length.
    """
    if not hasattr(train, "y"):
        raise TypeError(f"train is a {type(train).__name__}; it must have its labels in `y`.")
    labels = np.asarray(train.y)
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(train)}
    if lengths != {labels.shape[:1]}:
        raise ValueError(
            f"train has leaves with leading axes {sorted(lengths)}; all must be the "
            f"{labels.shape[:1]} of its labels."
        )
    if labels.size and labels.min() < 0:
        raise ValueError(f"train has the label {labels.min()}; labels are counted from 0.")
    host = _split_indices(labels, spec, num_clients, seed, min_size)
    return from_partition(train, host)


def from_partition(train: Any, host: Partition) -> FederatedArrays:
    """Put ``train`` and a ``Partition`` of it on the device.

    Args:
      train: pytree of arrays with leading axis n.
      host: who holds which of them.

    Raises:
      ValueError: there is no client.
    """
    check_int("num_clients", host.num_clients, minimum=1)
    nonempty = np.flatnonzero(host.sizes).astype(np.int32)
    return FederatedArrays(
        examples=jax.tree.map(_put, train),
        indices=_put(host.indices),
        starts=_put(host.starts),
        sizes=_put(host.sizes),
        nonempty=None if len(nonempty) == host.num_clients else _put(nonempty),
        num_clients=host.num_clients,
        min_size=int(host.sizes[nonempty].min()),
        max_size=int(host.sizes.max()),
        partition=PartitionInfo(host.spec, host.seed, host.hash),
    )


def _put(array: PyTree) -> jax.Array:
    # A copy: on the CPU the device array may alias the host's, and a later write would show.
    return jnp.array(array, copy=True)


def _draw(figure_type: Any, measured: Heterogeneity, spec: str) -> Any:
    num_clients, num_classes = measured.label_histogram.shape
    if num_clients > _MAX_PLOTTED:
        by_size = np.argsort(measured.sizes, kind="stable")
        shown = by_size[np.linspace(0, num_clients - 1, _MAX_PLOTTED).round().astype(int)]
        xlabel = f"client ({_MAX_PLOTTED} of {num_clients:,}, in order of size)"
    else:
        shown = np.arange(num_clients)
        xlabel = "client"
    sizes = measured.sizes[shown]
    histogram = measured.label_histogram[shown]
    share = histogram / np.maximum(histogram.sum(1, keepdims=True), 1)
    figure = figure_type(figsize=(9, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.5))
    low, median, high = measured.size_range
    top.bar(np.arange(len(shown)), sizes, width=0.9, color="#35608d")
    top.set_ylabel("examples")
    top.set_title(
        f"{spec}: {num_clients:,} clients, {low:,} to {high:,} examples (median {median:,.10g}), "
        f"label skew {measured.mean_tv_distance:.2f}",
        fontsize=11,
    )
    image = bottom.imshow(
        share.T,
        aspect="auto",
        origin="lower",
        cmap="YlGnBu",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    bottom.set_xlabel(xlabel)
    bottom.set_ylabel("class")
    bottom.set_yticks(np.arange(0, num_classes, max(1, num_classes // 10)))
    if num_clients > _MAX_PLOTTED:
        bottom.set_xticks([])
    else:
        bottom.locator_params(axis="x", integer=True)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.colorbar(image, ax=bottom, label="share of the client's data", pad=0.01)
    return figure
