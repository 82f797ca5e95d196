"""A prepared tensorflow-datasets set, read by index from its array_record files.

Axes: n examples.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_lab.data.sources import Examples
from fedjax_lab.data.stream_files import hash_of_file
from fedjax_lab.data.tfds import open_tfds, store


class Records:
    """Images and labels of a prepared set; images are decoded each time they are read.

    Args:
      images: records by index, from tensorflow-datasets.
      labels: int32 [n].
      keys: keys of the image and the label in a record.
      paths: the files of the records.
      name: ``tfds:`` and what TFDS calls the set.

    Attributes:
      shapes: (x, y), as ``jax.ShapeDtypeStruct`` [n, ...].
      targets: int32 [n].
      where: location, for messages.
    """

    def __init__(
        self, images: Any, labels: np.ndarray, keys: Sequence[str], paths: Sequence[Any], name: str
    ):
        self._images, self._key, self._paths, self._name = images, keys[0], paths, name
        first = np.asarray(images[0][keys[0]])
        self.targets = labels
        self.shapes = Examples(
            jax.ShapeDtypeStruct((len(labels), *first.shape), first.dtype),
            jax.ShapeDtypeStruct(labels.shape, labels.dtype),
        )
        self.where = f"in the records of {name}"

    def read(self, ids: np.ndarray, rows: int) -> Examples:
        """Read the records ``ids`` into arrays [rows, ...], padded with zeros.

        Args:
          ids: integers [k], in rising order.
          rows: at least k.

        Raises:
          ValueError: an image has another shape than the first one.
        """
        x = np.zeros((rows, *self.shapes.x.shape[1:]), self.shapes.x.dtype)
        y = np.zeros(rows, np.int32)
        y[: len(ids)] = self.targets[ids]
        for place, record in enumerate(self._images.__getitems__(ids.tolist())):
            store(self._name, x, place, np.asarray(record[self._key]), ids[place])
        return Examples(x, y)

    def content(self) -> str:
        """Return a hash of the files, and of the order of the records in them."""
        hashes = "".join(hash_of_file(Path(path)) for path in self._paths)
        return hashlib.sha256(hashes.encode() + self.targets.tobytes()).hexdigest()


def open_records(name: str, data_dir: str | Path | None) -> Records:
    """Open the training split of a prepared image-classification set for reading by index.

    The labels are read now, the images when they are sampled.

    Args:
      data_dir: the TFDS directory; None: TFDS's own.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared.
      ValueError: the set does not exist, is not an image classification, or is not in the format
        array_record.
    """
    found = open_tfds(name, data_dir)
    records, keys = found.records("train"), found.image_and_label()
    # Labels without their images.
    raw = found.records("train", decoders={keys[0]: found.tfds.decode.SkipDecoding()})
    labels = np.array([raw[i][keys[1]] for i in range(len(raw))], np.int32)
    return Records(records, labels, keys, found.builder.info.splits["train"].filepaths, name)
