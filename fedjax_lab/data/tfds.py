"""Data sets of tensorflow-datasets, read by index without TensorFlow."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import check_choice
from fedjax_lab.data.files import Splits
from fedjax_lab.machine.extras import imported


class PreparedSet(NamedTuple):
    """A prepared set of tensorflow-datasets.

    Attributes:
      name: kind, a colon, and the name of the set in TFDS.
      tfds: ``tensorflow_datasets``.
      builder: TFDS's builder of the set.
      prepare: how to prepare it again.
    """

    name: str
    tfds: Any
    builder: Any
    prepare: str

    def records(self, split: str, **options: Any) -> Any:
        """Open the records of a split for reading by index.

        Raises:
          ValueError: there is no such split, or the set's format cannot be read by index.
        """
        check_choice(f"split of {self.name}", split, self.builder.info.splits)
        try:
            return self.builder.as_data_source(split=split, **options)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.name} is prepared in {self.builder.data_path} in a format that cannot be "
                f"read by index. Prepare it anew: {self.prepare}"
            ) from error

    def train_and_test(self) -> dict[str, Any]:
        """Open train and test for reading by index.

        Raises:
          ValueError: the set has no such splits, or its format cannot be read by index.
        """
        splits = self.builder.info.splits
        test = next((split for split in ("test", "validation") if split in splits), None)
        if "train" not in splits or test is None:
            raise ValueError(
                f"{self.name} has the splits {', '.join(splits)}; there must be train and test (or "
                "validation)."
            )
        return {"train": self.records("train"), "test": self.records(test)}

    def image_and_label(self) -> tuple[str, str]:
        """Return the feature names of the images and labels.

        Raises:
          ValueError: it is no image classification.
        """
        info = self.builder.info
        supervised = info.supervised_keys
        if supervised is None or not all(isinstance(key, str) for key in supervised[:2]):
            raise ValueError(f"{self.name} has no (image, label) pair to learn from.")
        if not isinstance(info.features[supervised[1]], self.tfds.features.ClassLabel):
            raise ValueError(f"{self.name}: {supervised[1]!r} is no class label.")
        return supervised[:2]


def open_tfds(name: str, data_dir: str | Path | None) -> PreparedSet:
    """Open a prepared set.

    Args:
      data_dir: the TFDS directory; None: TFDS's own.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared.
      ValueError: TFDS knows no such set.
    """
    needs = f"{name} needs the package tensorflow-datasets"
    tfds = imported("tensorflow_datasets", needs, "data")
    its_name = name.partition(":")[2]
    prepare = (
        f"`tfds build {its_name} --file_format=array_record"
        + (f" --data_dir={data_dir}`" if data_dir is not None else "`")
        + " downloads and prepares it once (this step alone needs TensorFlow)."
    )
    try:
        # As in tfds.data_source, which does not report whether the data are prepared: if a
        # directory has data, these determine the file format.
        file_format = {} if data_dir is not None else {"file_format": "array_record"}
        builder = tfds.builder(its_name, data_dir=data_dir, **file_format)
        prepared = builder.is_prepared()
    except tfds.core.DatasetNotFoundError as error:
        raise ValueError(f"{name}: tensorflow-datasets knows no such data set.") from error
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{name}: {error}") from error
    if not prepared:
        raise FileNotFoundError(f"{name} is not prepared in {builder.data_path}. {prepare}")
    return PreparedSet(name, tfds, builder, prepare)


def read_images(name: str, data_dir: str | Path | None) -> tuple[Splits, int]:
    """Read a prepared image-classification set.

    Args:
      data_dir: the TFDS directory; None: TFDS's own.

    Returns:
      x and y of each split, and the number of classes.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared.
      ValueError: TFDS knows no such set, or it is no image classification.
    """
    found = open_tfds(name, data_dir)
    sources, keys = found.train_and_test(), found.image_and_label()
    splits = {part: _read_source(name, source, keys) for part, source in sources.items()}
    return splits, found.builder.info.features[keys[1]].num_classes


def read_lines(name: str, data_dir: str | Path | None) -> tuple[Iterator[str], Iterator[str]]:
    """Read the lines of train and test: the records' texts in TFDS's order.

    Args:
      data_dir: the TFDS directory; None: TFDS's own.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared.
      ValueError: the set does not exist, or a record does not have one text.
    """
    found = open_tfds(name, data_dir)
    sources, kinds = found.train_and_test(), found.builder.info.features.items()
    texts = sorted(key for key, kind in kinds if isinstance(kind, found.tfds.features.Text))
    if "text" not in texts and len(texts) != 1:
        raise ValueError(
            f"{name} has the text features {', '.join(texts) or '(none)'}; there must be only one, "
            "or one that is called text."
        )
    key = "text" if "text" in texts else texts[0]

    def lines(source: Any) -> Iterator[str]:
        for i in range(len(source)):
            # An empty record is an empty line.
            yield from source[i][key].decode("utf-8").rstrip("\n").split("\n")

    return lines(sources["train"]), lines(sources["test"])


def read_columns(
    name: str, features: Sequence[str], split: str, data_dir: str | Path | None
) -> dict[str, list]:
    """Read some features of all records of a split.

    Args:
      data_dir: the TFDS directory; None: TFDS's own.

    Returns:
      Feature -> its value in each record, in TFDS's order.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared.
      ValueError: TFDS knows no such set, or it has no such split or feature.
    """
    found = open_tfds(name, data_dir)
    source = found.records(split)
    for feature in features:
        check_choice(f"feature of {name}", feature, found.builder.info.features)
    columns: dict[str, list] = {feature: [] for feature in features}
    for i in range(len(source)):
        record = source[i]
        for feature, column in columns.items():
            column.append(record[feature])
    return columns


def _read_source(name: str, source: Any, keys: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    # Filled in place, because a list of all examples would double the memory.
    x, y = np.empty((0,)), np.empty((len(source),), np.int64)
    for i in range(len(source)):
        row = source[i]
        example = np.asarray(row[keys[0]])
        if i == 0:
            x = np.empty((len(source), *example.shape), example.dtype)
        store(name, x, i, example, i)
        y[i] = row[keys[1]]
    return x, y


def store(name: str, images: np.ndarray, place: int, image: np.ndarray, number: int) -> None:
    """Write an image at its place among others.

    Args:
      images: [n, ...].
      image: [...].

    Raises:
      ValueError: the image has another shape than the others.
    """
    if image.shape != images.shape[1:]:
        raise ValueError(
            f"{name}: example {number} has shape {image.shape}, example 0 {images.shape[1:]}; all "
            "must have the same shape."
        )
    images[place] = image
