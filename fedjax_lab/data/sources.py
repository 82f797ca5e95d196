"""Data sets by name: read and checked host arrays in storage dtype.

Axes: n examples of a split; an image is [height, width, channels] (channels last); an example of
text is a sequence of L words.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import check_choice, check_int, errors_about
from fedjax_lab.data import cifar, emnist, files, image_folder, text, tfds
from fedjax_lab.data.dtypes import pieces, stored_dtype
from fedjax_lab.signatures import suggest_keywords

# Folder of Debian's package dataset-fashion-mnist.
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

DATASETS = {
    "digits": "1,797 real 8x8 digits, 10 classes, embedded: needs no download",
    "fashion_mnist": "60,000 + 10,000 images 28x28, 10 classes; IDX folder, Debian package or TFDS",
    "mnist": "60,000 + 10,000 images 28x28, 10 classes, through TFDS",
    "cifar10": "50,000 + 10,000 images 32x32x3, 10 classes, through TFDS; or see cifar10:PATH",
    "cifar100": "50,000 + 10,000 images 32x32x3, 100 classes, through TFDS; or see cifar100:PATH",
    "cifar10:PATH": "CIFAR-10's archive, python or binary, or its folder",
    "cifar100:PATH": "CIFAR-100's archive or folder, with fine or coarse labels",
    "emnist:PATH": "EMNIST's file .mat, or a folder with the IDX files of one split",
    "images:FOLDER": "image files, a sub-folder for each class; or train and test with those",
    "idx:FOLDER": "a folder with MNIST's four file names, .gz or not",
    "npz:FILE": "a file with the arrays x_train, y_train, x_test, y_test; y floats: a regression",
    "tfds:NAME": "any prepared image-classification set of tensorflow-datasets",
    "shakespeare:FOLDER": "Shakespeare's roles, a client each, by load_federated",
    "text:PATH": "a UTF-8 file, or a folder with train.txt and test.txt (or valid.txt)",
    "tfds_text:NAME": "any prepared text of tensorflow-datasets, such as lm1b",
}

# Names that are followed by a colon.
SCHEMES = tuple(form.partition(":")[0] for form in DATASETS if ":" in form)

# Options of ``load`` that only some sets use: their defaults, and whether a name's set does.
_TEXTS, _TFDS_ALIASES = ("text:", "tfds_text:"), ("mnist", "cifar10", "cifar100")
_IN_A_FOLDER = ("fashion_mnist", *_TFDS_ALIASES, "tfds:", "tfds_text:")
_OPTIONS: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "data_dir": (None, _IN_A_FOLDER, "is read from no folder of data sets"),
    "sequence_length": (35, _TEXTS, "is no text"),
    "vocabulary_size": (None, _TEXTS, "is no text"),
    "tokens": ("words", _TEXTS, "is no text"),
    "labels": ("fine", ("cifar100:",), "has labels of one kind"),
    "image_size": (None, ("images:",), "is no folder of images"),
}
LOAD_OPTIONS = tuple(_OPTIONS)

# Tables; the command line divides them into (train, test), and ``from_table`` reads them.
TABLES = ("csv", "parquet")


class Examples(NamedTuple):
    """A data set or a part of it: inputs and targets.

    Attributes:
      x: [n, ...] in its storage dtype (uint8 for images); images are [n, H, W, C], sequences of
        tokens int32 [n, L].
      y: int32 [n], class labels counted from 0; of sequences int32 [n, L], the token that follows
        each token of x; or any numbers [n, ...], the targets of a regression.
    """

    x: Any
    y: Any


@suggest_keywords
def load(
    name: str,
    *,
    data_dir: str | Path | None = None,
    sequence_length: int = 35,
    vocabulary_size: int | None = None,
    tokens: str = "words",
    labels: str = "fine",
    image_size: int | None = None,
) -> tuple[Examples, Examples]:
    """Load a data set as host (NumPy) arrays.

    Args:
      name: a key of ``DATASETS``; a colon is followed by a folder, a file or a TFDS name.
      data_dir: for ``fashion_mnist`` the IDX folder or the TFDS directory (default: the folder of
        Debian's package, then TFDS's own directory); for TFDS names the TFDS directory (default:
        TFDS's own).
      sequence_length: for text, the number of tokens of an example, L. See ``text.build_corpus``,
        which also describes the vocabulary.
      vocabulary_size: for text, the largest size of the vocabulary; None: all tokens.
      tokens: for text, "words", "characters" or "bytes".
      labels: for ``cifar100:``, "fine" (100 classes) or "coarse" (20).
      image_size: for ``images:``, height and width to which images are scaled; None: all must have
        one size.

    Returns:
      (train, test). ``x`` and the targets of a regression keep their storage dtype, except that
      64-bit numbers become 32-bit. Arrays of rank 3 are images and get a channel axis.

    Raises:
      ValueError: the name is unknown; a file is damaged; examples are inconsistent, not finite, or
        have labels outside [0, number of classes in train); a text is not UTF-8 or shorter than a
        sequence; or the set does not use an option.
      FileNotFoundError: the files are missing; the message says how to get them.
      ImportError: tensorflow-datasets or Pillow is required and missing.
      TypeError: ``name`` is no text.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"name is {name!r}, a {type(name).__name__}; it must be text, such as 'digits' or "
            "'npz:FILE'."
        )
    scheme, colon, rest = name.partition(":")
    has_scheme = bool(colon) and scheme in SCHEMES
    of_text = {
        "sequence_length": sequence_length,
        "vocabulary_size": vocabulary_size,
        "tokens": tokens,
    }
    if has_scheme or name in DATASETS:
        check_load_options(name, data_dir=data_dir, labels=labels, image_size=image_size, **of_text)
    if has_scheme:
        if not rest:
            raise ValueError(f"name is {name!r}; a folder, file or name must follow the colon.")
        if scheme == "shakespeare":
            raise ValueError(
                f"name is {name!r}, which comes with its clients: data.load_federated({scheme!r}, "
                f"{rest!r}) reads it."
            )
        if scheme in ("cifar10", "cifar100"):
            return checked_splits(name, *cifar.read_cifar(scheme, Path(rest), labels))
        if scheme == "emnist":
            return checked_splits(name, emnist.read_emnist(Path(rest), name))
        if scheme == "images":
            if image_size is not None:
                check_int("image_size", image_size, minimum=1)
            found = image_folder.read_image_folder(Path(rest), name, image_size)
            return checked_splits(name, *found)
        if scheme == "idx":
            return checked_splits(name, files.read_idx_files(Path(rest), name))
        if scheme == "npz":
            return checked_splits(rest, files.read_npz_splits(Path(rest), name))
        if scheme == "tfds":
            return _load_tfds(name, data_dir)
        return _load_text(name, data_dir, of_text)
    if scheme in TABLES or Path(name).suffix.lower() in (".csv", ".tsv", ".parquet"):
        raise ValueError(
            f"name is {name!r}; data.from_table({rest or name!r}, client=..., x=..., y=...) reads "
            "a table."
        )
    check_choice("name", name, DATASETS)
    if name in _TFDS_ALIASES:
        try:
            return _load_tfds(f"tfds:{name}", data_dir)
        except (ImportError, FileNotFoundError) as error:
            other = "idx:FOLDER" if name == "mnist" else f"{name}:PATH"
            raise type(error)(f"{error} {other} reads its files without it.") from error
    if name == "digits":
        path = Path(__file__).with_name("digits.npz")
        return checked_splits(name, files.read_npz_splits(path, name))
    return _load_fashion_mnist(data_dir)


def check_load_options(name: str, **options: Any) -> None:
    """Check that a data set uses the options that differ from their defaults.

    Args:
      **options: options of ``load`` by name.

    Raises:
      ValueError: an option has no effect.
    """
    scheme, colon, _ = name.partition(":")
    for option, value in options.items():
        default, of, why = _OPTIONS[option]
        if value != default and scheme + colon not in of:
            raise ValueError(
                f"{option} is {value!r}; {name} {why}, so that {option} has no effect: omit it."
            )


def num_classes(train: Any) -> int:
    """Compute the number of classes: the largest label plus one.

    For sequences it is the size of the vocabulary: the largest token in ``x`` or ``y`` plus one, at
    least 2 (``<unk>`` and ``<eos>``). Of bytes, which are 256, some may not occur.

    Args:
      train: ``Examples``, or anything with ``y``: integers [n], or with ``x`` and ``y`` [n, L].

    Raises:
      ValueError: ``y`` is neither.
    """
    y = np.asarray(train.y)
    if y.dtype.kind not in "iu" or y.ndim not in (1, 2):
        raise ValueError(
            f"train.y has shape {y.shape} and dtype {y.dtype}; classes are integers [n], words "
            "integers [n, L]."
        )
    largest = int(y.max())
    if y.ndim > 1:
        words = getattr(train.x, "tokens", train.x)
        largest = max(largest, int(np.max(np.asarray(words))), 1)
    return largest + 1


def _load_fashion_mnist(data_dir: str | Path | None) -> tuple[Examples, Examples]:
    folder = DEBIAN_FASHION_MNIST if data_dir is None else Path(data_dir)
    if files.has_idx(folder):
        return checked_splits("fashion_mnist", files.read_idx_files(folder, "fashion_mnist"))
    try:
        return _load_tfds("tfds:fashion_mnist", data_dir)
    except (ImportError, FileNotFoundError) as error:
        omitted = "" if data_dir is None else " and omit data_dir"
        raise FileNotFoundError(
            f"fashion_mnist: no IDX files in {folder}. Install them with "
            f"`apt-get install dataset-fashion-mnist`{omitted}, pass the folder that has them as "
            f"data_dir, or use tensorflow-datasets, which said: {error}"
        ) from error


def _load_tfds(name: str, data_dir: str | Path | None) -> tuple[Examples, Examples]:
    return checked_splits(name, *tfds.read_images(name, data_dir))


def _load_text(
    name: str, data_dir: str | Path | None, options: Mapping[str, Any]
) -> tuple[Examples, Examples]:
    scheme, _, rest = name.partition(":")
    lines = text.read_lines(Path(rest)) if scheme == "text" else tfds.read_lines(name, data_dir)
    with errors_about(name, ValueError):
        corpus = text.build_corpus(*lines, **options)
    return Examples(*corpus.train), Examples(*corpus.test)


def checked_splits(
    name: str, splits: files.Splits, classes: int | None = None
) -> tuple[Examples, Examples]:
    """Check arrays and convert them to (train, test) in storage dtype.

    Args:
      splits: of "train" and "test", x [n, ...] and y [n], or [n, ...] for a regression.
      classes: number of classes; None: the number in the training labels.

    Raises:
      ValueError: arrays are inconsistent (such as one x of integers and the other of floats), not
        finite or labelled out of range.
    """
    train = _checked(f"{name}, train", *splits["train"], classes)
    if classes is None and train.y.dtype.kind != "f":
        classes = num_classes(train)
    test = _checked(f"{name}, test", *splits["test"], classes)
    if train.x.shape[1:] != test.x.shape[1:]:
        raise ValueError(
            f"{name}: training examples have shape {train.x.shape[1:]}, test examples "
            f"{test.x.shape[1:]}; they must be equal."
        )
    if (train.x.dtype.kind == "f") != (test.x.dtype.kind == "f"):
        raise ValueError(
            f"{name}: training examples have dtype {splits['train'][0].dtype}, test examples "
            f"{splits['test'][0].dtype}; both must be integers or both floats, on the same scale."
        )
    if (train.y.dtype, train.y.shape[1:]) != (test.y.dtype, test.y.shape[1:]):
        raise ValueError(
            f"{name}: training targets have shape {train.y.shape[1:]} and dtype {train.y.dtype}, "
            f"test targets {test.y.shape[1:]} and {test.y.dtype}; they must be equal."
        )
    return train, test


def _checked(name: str, x: np.ndarray, y: np.ndarray, classes: int | None) -> Examples:
    if x.size == 0:
        raise ValueError(f"{name}: no examples (shape {x.shape}); there must be at least one.")
    regression = y.dtype.kind == "f"
    if x.ndim == 0 or y.ndim == 0 or (y.ndim > 1 and not regression) or len(x) != len(y):
        raise ValueError(
            f"{name}: examples have shape {x.shape} and labels {y.shape}; there must be n "
            "examples, and labels of shape [n]."
        )
    if regression:
        return Examples(_storage(name, x), _numbers(f"{name}: targets", y))
    if y.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: labels of dtype {y.dtype}; they must be integers, or floats in a regression."
        )
    low, high = int(y.min()), int(y.max())
    limit = np.iinfo(np.int32).max if classes is None else classes
    if low < 0 or high >= limit:
        allowed = "at least 0" if classes is None and high < limit else f"in [0, {limit})"
        raise ValueError(f"{name}: labels between {low} and {high}; they must be {allowed}.")
    return Examples(_storage(name, x), y.astype(np.int32))


def _storage(name: str, x: np.ndarray) -> np.ndarray:
    return _numbers(f"{name}: examples", x[..., None] if x.ndim == 3 else x)


def _numbers(name: str, x: np.ndarray) -> np.ndarray:
    """Convert to finite real numbers in the dtype that a device stores."""
    if x.dtype.kind not in "biuf":
        raise ValueError(f"{name} of dtype {x.dtype}; they must be real numbers.")
    x = x.astype(stored_dtype(name, x), copy=False)
    if x.dtype.kind == "f" and not all(np.isfinite(piece).all() for piece in pieces(x)):
        raise ValueError(f"{name} that are NaN or infinite (as {x.dtype}).")
    return x
