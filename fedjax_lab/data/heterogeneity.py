"""Heterogeneity of the clients of a partition.

Axes: n examples, N clients, C classes, L words of an example of text.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.data.partition import Partition

# Integers that exceed this and the number of targets are not class labels.
_MOST_CLASSES = 2**16


class Heterogeneity(NamedTuple):
    """Heterogeneity of clients. For sequences, the labels are their words.

    Attributes:
      label_histogram: int64 [N, C].
      sizes: int64 [N].
      tv_distance: float64 [N], total variation distance of each client's label distribution
        to that of all data together; NaN for a client without data.
      classes_per_client: int64 [N].
    """

    label_histogram: np.ndarray
    sizes: np.ndarray
    tv_distance: np.ndarray
    classes_per_client: np.ndarray

    @property
    def mean_tv_distance(self) -> float:
        """Mean over the clients with data, in [0, 1); 0 if all have the global distribution."""
        return float(np.nanmean(self.tv_distance))

    @property
    def size_range(self) -> tuple[int, float, int]:
        """Minimum, median and maximum of the sizes."""
        return int(self.sizes.min()), float(np.median(self.sizes)), int(self.sizes.max())


def targets_of(examples: Any) -> Any | None:
    """Return the targets, ``examples.y`` or ``examples["y"]``, or None.

    Returns:
      An array [n, ...], or None.
    """
    y = examples.get("y") if isinstance(examples, Mapping) else getattr(examples, "y", None)
    return y if hasattr(y, "shape") else None


def labels_of(examples: Any) -> np.ndarray | None:
    """Return the class labels of examples, or the words of sequences, or None.

    Returns:
      Integers [n] or [n, L] from 0. None if there are no targets, they are not integers, or some
      are negative or exceed the largest number of classes (65,536, or the number of targets).
    """
    targets = targets_of(examples)
    if targets is None or targets.ndim not in (1, 2) or targets.size == 0:
        return None
    labels = np.asarray(targets)
    most = max(_MOST_CLASSES, labels.size)
    is_label = labels.dtype.kind in "iu" and 0 <= labels.min() <= labels.max() < most
    return labels if is_label else None


def heterogeneity(labels: Any, partition: Partition) -> Heterogeneity:
    """Compute label histogram, sizes, and distances to the global label distribution.

    Args:
      labels: integers [n], or [n, L] of sequences, from 0.
      partition: a ``Partition`` of them (or anything with its ``indices`` and ``sizes``).
    """
    labels = np.asarray(labels)
    sizes = np.asarray(partition.sizes).astype(np.int64)
    num_clients, num_classes = len(sizes), int(labels.max()) + 1
    owners = np.repeat(np.arange(num_clients), sizes)
    targets = labels[np.asarray(partition.indices)].reshape(len(owners), -1).astype(np.int64)
    cells = (owners[:, None] * num_classes + targets).ravel()
    histogram = np.bincount(cells, minlength=num_clients * num_classes)
    histogram = histogram.reshape(num_clients, num_classes)
    overall = histogram.sum(0) / histogram.sum()
    distance = np.full(num_clients, np.nan)
    held = sizes > 0
    shares = histogram[held] / histogram[held].sum(1, keepdims=True)
    distance[held] = 0.5 * np.abs(shares - overall).sum(1)
    return Heterogeneity(histogram, sizes, distance, (histogram > 0).sum(1))


def describe(labels: Any, partition: Partition) -> str:
    """Summarise a partition in a few lines.

    Args:
      labels: integers [n], or targets [n, L]; None: no summary of labels.
    """
    sizes = np.asarray(partition.sizes)
    empty = int((sizes == 0).sum())
    lines = [
        f"{partition.spec}, seed {partition.seed}, hash {partition.hash}",
        f"{sizes.sum():,} examples, {len(sizes):,} clients"
        + (f", {empty:,} of them empty" if empty else ""),
        f"examples per client: min {sizes.min():,}, median {np.median(sizes):,.10g}, "
        f"max {sizes.max():,}",
    ]
    if labels is None:
        return "\n".join(lines)
    measured = heterogeneity(labels, partition)
    classes = measured.classes_per_client
    kind = "classes" if np.ndim(labels) == 1 else "words"
    lines += [
        f"{kind} per client: min {classes.min()}, median {np.median(classes):.10g}, "
        f"max {classes.max()} of {measured.label_histogram.shape[1]}",
        f"label skew (mean total variation distance to the global mix): "
        f"{measured.mean_tv_distance:.3f}",
    ]
    return "\n".join(lines)
