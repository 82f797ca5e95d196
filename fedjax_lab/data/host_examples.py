"""Examples on the host that are read by index: arrays, or a prepared tensorflow-datasets set.

Axes: n examples.
"""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_lab.data.dtypes import common_length, stored_dtype, to_native
from fedjax_lab.data.heterogeneity import targets_of
from fedjax_lab.data.sources import Examples
from fedjax_lab.data.stream_files import content_of, hash_of_file, map_file
from fedjax_lab.data.tfds import open_tfds, store


class HostArrays:
    """Examples in NumPy arrays, in memory or memory-mapped.

    Args:
      examples: pytree of arrays [n, ...], or of paths of ``.npy`` files.

    Attributes:
      shapes: of the examples on a device: pytree of ``jax.ShapeDtypeStruct`` [n, ...].
      targets: array [n, ...], or None.
      where: location, for messages.

    Raises:
      ValueError: leaves have different lengths, are not numeric, or have integers beyond 32 bits.
      FileNotFoundError: there is no such file.
    """

    def __init__(self, examples: Any):
        self._arrays = jax.tree.map(
            lambda leaf: map_file(leaf) if isinstance(leaf, (str, Path)) else np.asanyarray(leaf),
            examples,
        )
        leaves = jax.tree.leaves(self._arrays)
        common_length("examples", leaves)
        self.shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, stored_dtype("examples", leaf)),
            self._arrays,
        )
        targets = targets_of(self._arrays)
        self.targets = None if targets is None else to_native(targets)
        mapped = any(isinstance(leaf, np.memmap) for leaf in leaves)
        self.where = "in mapped files" if mapped else "in the host's memory"

    def read(self, ids: np.ndarray, rows: int) -> Any:
        """Read the examples ``ids`` into arrays [rows, ...], padded with zeros.

        Args:
          ids: integers [k], in rising order.
          rows: at least k.
        """

        def one(array, shape):
            found = np.zeros((rows, *array.shape[1:]), array.dtype)
            # "clip" writes directly to out; with "raise" NumPy copies twice. All ids are in range.
            np.take(array, ids, axis=0, out=found[: len(ids)], mode="clip")
            return found.astype(shape.dtype, copy=False)

        return jax.tree.map(one, self._arrays, self.shapes)

    def content(self) -> str:
        """Return a hash of all examples; see ``stream_files.content_of``."""
        leaves = jax.tree_util.tree_leaves_with_path(self._arrays)
        lines = [f"{jax.tree_util.keystr(path)} {content_of(leaf)}" for path, leaf in leaves]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Records:
    """Images and labels of the training split of a set, read from its array_record files.

    The labels are read at once, an image is decoded each time it is read.

    Args:
      name: ``tfds:`` and what TFDS calls the set.
      data_dir: the TFDS directory; None: TFDS's own.

    Attributes:
      shapes: (x, y), as ``jax.ShapeDtypeStruct`` [n, ...].
      targets: int32 [n].
      where: location, for messages.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared.
      ValueError: the set does not exist, is not an image classification, or is not in the format
        array_record.
    """

    def __init__(self, name: str, data_dir: str | Path | None):
        found = open_tfds(name, data_dir)
        self._name, self._images = name, found.records("train")
        self._key, label = found.image_and_label()
        # Labels without their images.
        raw = found.records("train", decoders={self._key: found.tfds.decode.SkipDecoding()})
        self.targets = np.array([raw[i][label] for i in range(len(raw))], np.int32)
        self._paths = found.builder.info.splits["train"].filepaths
        first = np.asarray(self._images[0][self._key])
        self.shapes = Examples(
            jax.ShapeDtypeStruct((len(self.targets), *first.shape), first.dtype),
            jax.ShapeDtypeStruct(self.targets.shape, self.targets.dtype),
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


HostExamples = HostArrays | Records
