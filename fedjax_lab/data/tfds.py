"""Data sets of tensorflow-datasets, read by index without TensorFlow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def read_images(name: str, data_dir: str | Path | None) -> tuple[dict[str, np.ndarray], int]:
    """Read a prepared image-classification set.

    Args:
      name: what TFDS calls it.
      data_dir: the TFDS directory; None: TFDS's own.

    Returns:
      x_train, y_train, x_test and y_test, and the number of classes.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared.
      ValueError: TFDS knows no such set, or it is no image classification.
    """
    tfds, info, sources = _open_tfds(f"tfds:{name}", data_dir)
    supervised = info.supervised_keys
    if supervised is None or not all(isinstance(key, str) for key in supervised[:2]):
        raise ValueError(f"tfds:{name} has no (image, label) pair to learn from.")
    label = info.features[supervised[1]]
    if not isinstance(label, tfds.features.ClassLabel):
        raise ValueError(f"tfds:{name}: {supervised[1]!r} is no class label.")
    arrays: dict[str, np.ndarray] = {}
    for part, source in sources.items():
        arrays[f"x_{part}"], arrays[f"y_{part}"] = _read_source(
            f"tfds:{name}", source, supervised[:2]
        )
    return arrays, label.num_classes


def read_lines(name: str, data_dir: str | Path | None) -> tuple[Iterator[str], Iterator[str]]:
    """The lines of train and test: those of the records, in the order in which TFDS keeps them.

    Args:
      name: ``tfds_text:`` and what TFDS calls the set.
      data_dir: the TFDS directory; None: TFDS's own.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared.
      ValueError: TFDS knows no such set, or it has not one text.
    """
    tfds, info, sources = _open_tfds(name, data_dir)
    kinds = info.features.items()
    texts = sorted(key for key, kind in kinds if isinstance(kind, tfds.features.Text))
    if "text" not in texts and len(texts) != 1:
        raise ValueError(
            f"{name} has the texts {', '.join(texts) or 'none'}; there must be one, or one that is "
            "called text."
        )
    key = "text" if "text" in texts else texts[0]

    def lines(source: Any) -> Iterator[str]:
        for i in range(len(source)):
            # An empty record is an empty line.
            yield from source[i][key].decode("utf-8").rstrip("\n").split("\n")

    return lines(sources["train"]), lines(sources["test"])


def _open_tfds(name: str, data_dir: str | Path | None) -> tuple[Any, Any, dict[str, Any]]:
    """(tensorflow_datasets, the set's info, {"train", "test"} -> records by index)."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            f"{name} needs the package tensorflow-datasets: `pip install 'fedjax-lab[data]'`."
        ) from error
    its_name = name.partition(":")[2]
    prepare = (
        f"`tfds build {its_name} --file_format=array_record"
        + (f" --data_dir={data_dir}`" if data_dir is not None else "`")
        + " downloads and prepares it once (this step alone needs TensorFlow)."
    )
    try:
        # As tfds.data_source does, which would not tell us whether the data are prepared:
        # a directory with data in it decides the file format itself.
        file_format = {} if data_dir is not None else {"file_format": "array_record"}
        builder = tfds.builder(its_name, data_dir=data_dir, **file_format)
        prepared = builder.is_prepared()
    except tfds.core.DatasetNotFoundError as error:
        raise ValueError(f"{name}: tensorflow-datasets knows no such data set.") from error
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{name}: {error}") from error
    if not prepared:
        raise FileNotFoundError(f"{name} is not prepared in {builder.data_path}. {prepare}")
    splits = builder.info.splits
    test_split = next((split for split in ("test", "validation") if split in splits), None)
    if "train" not in splits or test_split is None:
        raise ValueError(
            f"{name} has the splits {', '.join(splits)}; there must be train and test (or "
            "validation)."
        )
    try:
        sources = {
            part: builder.as_data_source(split=split)
            for part, split in (("train", "train"), ("test", test_split))
        }
    except NotImplementedError as error:
        raise ValueError(
            f"{name} is prepared in {builder.data_path} in a format that cannot be read by "
            f"index. Prepare it anew: {prepare}"
        ) from error
    return tfds, builder.info, sources


def _read_source(name: str, source: Any, keys: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    # Filled in place: a list of all examples would need the memory twice.
    x, y = np.empty((0,)), np.empty((len(source),), np.int64)
    for i in range(len(source)):
        row = source[i]
        example = np.asarray(row[keys[0]])
        if i == 0:
            x = np.empty((len(source), *example.shape), example.dtype)
        if example.shape != x.shape[1:]:
            raise ValueError(
                f"{name}: example {i} has shape {example.shape}, example 0 {x.shape[1:]}; all "
                "must have one shape."
            )
        x[i], y[i] = example, row[keys[1]]
    return x, y
