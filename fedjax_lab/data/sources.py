"""Data sets as host arrays: embedded, IDX, NPZ and text files, and tensorflow-datasets.

Axes: n examples of a split; an image is [height, width, channels] (channels last); an example of
text is a sequence of L words.
"""

import gzip
import importlib.resources
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab.checks import check_choice
from fedjax_lab.data import text

# Where Debian's package dataset-fashion-mnist puts its files.
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

DATASETS = {
    "digits": "1,797 real 8x8 digits, 10 classes, embedded: needs no download",
    "fashion_mnist": "60,000 + 10,000 images 28x28, 10 classes; IDX folder, Debian package or TFDS",
    "mnist": "60,000 + 10,000 images 28x28, 10 classes, through TFDS",
    "cifar10": "50,000 + 10,000 images 32x32x3, 10 classes, through TFDS",
    "cifar100": "50,000 + 10,000 images 32x32x3, 100 classes, through TFDS",
    "idx:FOLDER": "a folder with MNIST's four file names, .gz or not",
    "npz:FILE": "a file with the arrays x_train, y_train, x_test, y_test",
    "tfds:NAME": "any prepared image-classification set of tensorflow-datasets",
    "text:PATH": "a UTF-8 file, or a folder with train.txt and test.txt (or valid.txt); by words",
    "tfds_text:NAME": "any prepared text of tensorflow-datasets, such as lm1b",
}

# What may stand before a colon.
SCHEMES = tuple(form.partition(":")[0] for form in DATASETS if ":" in form)

_TFDS_ALIASES = ("mnist", "cifar10", "cifar100")
_IDX_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
_IDX_TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32"}
_CHUNK = 1 << 20
# What zipfile and NumPy raise on a damaged archive.
_NPZ_ERRORS = (
    ValueError,
    OSError,
    EOFError,
    KeyError,
    NotImplementedError,
    OverflowError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


class Examples(NamedTuple):
    """A data set or a part of it, with what a model has to predict.

    Attributes:
      x: [n, ...] in its storage dtype (uint8 for images); images are [n, H, W, C], sequences of
        words int32 [n, L].
      y: int32 [n], class labels counted from 0; or, of sequences, int32 [n, L], the word that
        follows each word of x.
    """

    x: Any
    y: Any


def load(
    name: str,
    *,
    data_dir: str | Path | None = None,
    sequence_length: int = 35,
    vocabulary_size: int | None = None,
) -> tuple[Examples, Examples]:
    """Load a data set as host (NumPy) arrays.

    Args:
      name: a key of ``DATASETS``, where ``idx:``, ``npz:``, ``tfds:``, ``text:`` and
        ``tfds_text:`` are followed by a folder, a file or a TFDS name.
      data_dir: for ``fashion_mnist`` the IDX folder or the TFDS directory; for TFDS names
        the TFDS directory (default: TFDS's own).
      sequence_length: of text, the words of an example, L. See ``text.build_corpus``, also for
        how words are numbered.
      vocabulary_size: of text, the most words to be told apart; None: all.

    Returns:
      (train, test). ``x`` keeps its storage dtype, except that 64-bit numbers become 32-bit,
      which is what a device holds; arrays of rank 3 are images and get a channel axis.

    Raises:
      ValueError: unknown name, damaged file, or examples that are inconsistent, not finite
        or labelled outside [0, number of classes in train); a text that is no UTF-8, or shorter
        than a sequence.
      FileNotFoundError: the files are not there; the message says how to get them.
      ImportError: tensorflow-datasets is needed and missing.
    """
    scheme, colon, rest = name.partition(":")
    if colon and scheme in SCHEMES:
        if not rest:
            raise ValueError(f"name is {name!r}; something must follow the colon, as in DATASETS.")
        if scheme == "idx":
            return _load_idx(Path(rest), name)
        if scheme == "npz":
            return _load_npz(Path(rest), name)
        if scheme == "tfds":
            return _load_tfds(rest, data_dir)
        return _load_text(name, data_dir, sequence_length, vocabulary_size)
    check_choice("name", name, DATASETS)
    if name in _TFDS_ALIASES:
        return _load_tfds(name, data_dir)
    if name == "digits":
        with importlib.resources.as_file(
            importlib.resources.files("fedjax_lab.data") / "digits.npz"
        ) as path:
            return _load_npz(path, name)
    if name == "fashion_mnist":
        return _load_fashion_mnist(data_dir)
    raise ValueError(f"name is {name!r}; replace the capitals: {DATASETS[name]}.")


def num_classes(train: Any) -> int:
    """Number of classes: the largest label plus one.

    Of sequences it is the size of the vocabulary: the largest word in ``x`` or ``y`` plus one, and
    at least 2 (``<unk>`` and ``<eos>``).

    Args:
      train: ``Examples``, or anything with ``y``: integers [n], or with ``x`` and ``y`` [n, L].
    """
    largest = int(np.max(np.asarray(train.y)))
    if np.ndim(train.y) > 1:
        largest = max(largest, int(np.max(np.asarray(train.x))), 1)
    return largest + 1


def _load_fashion_mnist(data_dir: str | Path | None) -> tuple[Examples, Examples]:
    for folder in (data_dir, DEBIAN_FASHION_MNIST):
        if folder is not None and _find_idx(Path(folder), _IDX_FILES["x_train"]) is not None:
            return _load_idx(Path(folder), "fashion_mnist")
    try:
        return _load_tfds("fashion_mnist", data_dir)
    except (ImportError, FileNotFoundError) as error:
        looked_in = f"{data_dir} and " if data_dir is not None else ""
        raise FileNotFoundError(
            f"fashion_mnist: no IDX files in {looked_in}{DEBIAN_FASHION_MNIST}. Install them with "
            "`apt-get install dataset-fashion-mnist`, pass the folder that has them as data_dir, "
            f"or use tensorflow-datasets, which said: {error}"
        ) from error


def _load_idx(folder: Path, name: str) -> tuple[Examples, Examples]:
    arrays = {}
    for key, file_name in _IDX_FILES.items():
        path = _find_idx(folder, file_name)
        if path is None:
            raise FileNotFoundError(f"{name}: {folder} has neither {file_name} nor {file_name}.gz.")
        arrays[key] = read_idx(path, ndim=3 if key.startswith("x") else 1)
    return _checked_splits(name, arrays)


def _find_idx(folder: Path, file_name: str) -> Path | None:
    paths = (folder / file_name, folder / f"{file_name}.gz")
    return next((path for path in paths if path.is_file()), None)


def read_idx(path: Path, *, ndim: int) -> np.ndarray:
    """Read one IDX file of unsigned bytes, plain or (ending in .gz) compressed.

    Args:
      path: the file.
      ndim: the rank that it must have.

    Returns:
      uint8 [...] of rank ``ndim``.

    Raises:
      ValueError: the file is no such IDX file, is cut short, or has bytes left over.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            header = _read_up_to(file, 4)
            if len(header) < 4 or header[:2] != b"\0\0":
                raise ValueError(f"{path}: magic number {header.hex()}; IDX files begin with 0000.")
            kind, rank = header[2], header[3]
            if kind != 0x08:
                found = _IDX_TYPES.get(kind, "unknown")
                raise ValueError(f"{path}: data type 0x{kind:02x} ({found}); it must be uint8.")
            if rank != ndim:
                raise ValueError(f"{path}: {rank} dimensions; there must be {ndim}.")
            sizes = _read_up_to(file, 4 * ndim)
            if len(sizes) < 4 * ndim:
                raise ValueError(f"{path}: the file ends within its header.")
            shape = struct.unpack(f">{ndim}I", sizes)
            count = 1
            for size in shape:
                count *= size
            values = _read_up_to(file, count)
            if len(values) < count:
                raise ValueError(
                    f"{path}: the file ends after {len(values):,} of {count:,} values of {shape}."
                )
            # Reading past the end also makes gzip verify its checksum.
            if file.read(1):
                raise ValueError(f"{path}: bytes are left over after the values of {shape}.")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged or cut short gzip file: {error}") from error
    return np.frombuffer(values, np.uint8).reshape(shape)


def _read_up_to(file: Any, count: int) -> bytearray:
    # In pieces: a damaged header may announce more bytes than there is memory.
    buffer = bytearray()
    while len(buffer) < count:
        piece = file.read(min(_CHUNK, count - len(buffer)))
        if not piece:
            break
        buffer += piece
    return buffer


def _load_npz(path: Path, name: str) -> tuple[Examples, Examples]:
    keys = ("x_train", "y_train", "x_test", "y_test")
    if not path.is_file():
        raise FileNotFoundError(f"{name}: there is no file {path}.")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: damaged or no .npz file (a zip archive of arrays).")
    try:
        # NumPy would leave a file that it opened itself open on a damaged archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            found = list(archive.files)
            missing = [key for key in keys if key not in found]
            arrays = {} if missing else {key: archive[key] for key in keys}
    except _NPZ_ERRORS as error:
        raise ValueError(
            f"{path}: not readable as an .npz file of plain arrays: {error}"
        ) from error
    if missing:
        raise ValueError(
            f"{path}: no array {', '.join(missing)}; it has {', '.join(found) or 'none'}. "
            f"There must be {', '.join(keys)}."
        )
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{path}: {key} is no array in NumPy's format.")
    return _checked_splits(str(path), arrays)


def _load_tfds(name: str, data_dir: str | Path | None) -> tuple[Examples, Examples]:
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
    return _checked_splits(f"tfds:{name}", arrays, label.num_classes)


def _load_text(
    name: str, data_dir: str | Path | None, sequence_length: int, vocabulary_size: int | None
) -> tuple[Examples, Examples]:
    scheme, _, rest = name.partition(":")
    lines = text.read_lines(Path(rest)) if scheme == "text" else _tfds_lines(name, data_dir)
    try:
        corpus = text.build_corpus(
            *lines, sequence_length=sequence_length, vocabulary_size=vocabulary_size
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return Examples(*corpus.train), Examples(*corpus.test)


def _tfds_lines(name: str, data_dir: str | Path | None) -> tuple[Iterator[str], Iterator[str]]:
    """The lines of train and test: those of the records, in the order in which TFDS keeps them."""
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


def _checked_splits(
    name: str, arrays: dict[str, np.ndarray], classes: int | None = None
) -> tuple[Examples, Examples]:
    train = _checked(f"{name}, train", arrays["x_train"], arrays["y_train"], classes)
    if classes is None:
        classes = num_classes(train)
    test = _checked(f"{name}, test", arrays["x_test"], arrays["y_test"], classes)
    if train.x.shape[1:] != test.x.shape[1:]:
        raise ValueError(
            f"{name}: training examples have shape {train.x.shape[1:]}, test examples "
            f"{test.x.shape[1:]}; they must be equal."
        )
    return train, test


def _checked(name: str, x: np.ndarray, y: np.ndarray, classes: int | None) -> Examples:
    if x.size == 0:
        raise ValueError(f"{name}: no examples (shape {x.shape}); there must be at least one.")
    if x.ndim == 0 or y.ndim != 1 or len(x) != len(y):
        raise ValueError(
            f"{name}: examples of shape {x.shape} and labels of shape {y.shape}; there must be n "
            "examples and as many labels, of shape [n]."
        )
    if y.dtype.kind not in "iu":
        raise ValueError(f"{name}: labels of dtype {y.dtype}; they must be integers.")
    low, high = int(y.min()), int(y.max())
    limit = np.iinfo(np.int32).max if classes is None else classes
    if low < 0 or high >= limit:
        allowed = "at least 0" if classes is None and high < limit else f"in [0, {limit})"
        raise ValueError(f"{name}: labels between {low} and {high}; they must be {allowed}.")
    return Examples(_storage(name, x), y.astype(np.int32))


def _storage(name: str, x: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "biuf":
        raise ValueError(f"{name}: examples of dtype {x.dtype}; they must be real numbers.")
    if x.ndim == 3:
        x = x[..., None]
    stored = jax.dtypes.canonicalize_dtype(x.dtype)
    if x.dtype.kind in "iu" and stored != x.dtype:
        limits = np.iinfo(stored)
        if int(x.min()) < limits.min or int(x.max()) > limits.max:
            raise ValueError(f"{name}: examples of dtype {x.dtype} do not fit into {stored}.")
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):
            x = x.astype(stored, copy=False)
        for start in range(0, len(x), 4096):
            if not np.isfinite(x[start : start + 4096]).all():
                raise ValueError(f"{name}: examples that are NaN or infinite (as {x.dtype}).")
    return x.astype(stored, copy=False)
