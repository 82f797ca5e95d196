"""CIFAR-10 and CIFAR-100, from the archives that their page offers or from the unpacked folders.

Both forms have an image as 3,072 bytes: a red, a green and a blue plane of 32 x 32. A file of the
binary form has one byte of label before each image (CIFAR-100: two, coarse and fine). A file of the
Python form is a pickled dict. It is read without running what a pickle may name.

Source: Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009.
"""

import lzma
import pickle
import tarfile
import zlib
from collections.abc import Container, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import check_choice, errors_about
from fedjax_lab.data.files import Splits, check_unpacked

LABELS = ("fine", "coarse")
_PIXELS = 3 * 32 * 32
_CHUNK = 1 << 20
_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))


class _Form(NamedTuple):
    """Files of one form: their folder in the archive, and their names."""

    folder: str
    train: tuple[str, ...]
    test: str
    is_pickled: bool

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test)


_FORMS = {
    "cifar10": (
        _Form("cifar-10-batches-py", _BATCHES, "test_batch", True),
        _Form(
            "cifar-10-batches-bin", tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin",
            False,
        ),
    ),
    "cifar100": (
        _Form("cifar-100-python", ("train",), "test", True),
        _Form("cifar-100-binary", ("train.bin",), "test.bin", False),
    ),
}  # fmt: skip
# Labels of a set -> (key in a pickled file, number of classes), in the order of the binary form.
_KINDS = {
    "cifar10": {"fine": (b"labels", 10)},
    "cifar100": {"coarse": (b"coarse_labels", 20), "fine": (b"fine_labels", 100)},
}


def read_cifar(name: str, path: Path, labels: str) -> tuple[Splits, int]:
    """Read CIFAR-10 or CIFAR-100.

    Args:
      name: "cifar10" or "cifar100".
      path: the archive of the Python or of the binary form; or the folder that it contains.
      labels: of CIFAR-100, "fine" (100 classes) or "coarse" (20).

    Returns:
      Of each split, x uint8 [n, 32, 32, 3] and y integers [n]; and the number of classes.

    Raises:
      FileNotFoundError: there is no such archive or folder.
      ValueError: a file is missing, damaged, or has labels of no class; or ``labels`` is not of
        this set.
    """
    check_choice(f"labels of {name}", labels, _KINDS[name])
    if path.is_dir():
        form, contents = _read_folder(name, path)
    elif path.is_file():
        form, contents = _read_archive(name, path)
    else:
        raise FileNotFoundError(f"{name}: there is no archive or folder {path}.")
    read = _read_pickled if form.is_pickled else _read_binary
    parts = {file: read(f"{path}: {file}", name, contents[file], labels) for file in form.files}
    x, y = (np.concatenate([parts[file][i] for file in form.train]) for i in (0, 1))
    return {"train": (x, y), "test": parts[form.test]}, _KINDS[name][labels][1]


def _read_folder(name: str, folder: Path) -> tuple[_Form, dict[str, bytes]]:
    found = [file.name for file in folder.iterdir() if file.is_file()]
    form = _form_of(name, folder, {form: found for form in _FORMS[name]})
    return form, {file: (folder / file).read_bytes() for file in form.files}


def _read_archive(name: str, path: Path) -> tuple[_Form, dict[str, bytes]]:
    """Read the files from the archive into memory; nothing is extracted to the disk."""
    held: dict[_Form, dict[str, bytes]] = {form: {} for form in _FORMS[name]}
    about = f"{path}: no tar archive, or a damaged or cut short one; get it again"
    kinds = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)
    with errors_about(about, kinds), tarfile.open(path) as archive:
        for member in archive:
            folder, _, file = member.name.removeprefix("./").rpartition("/")
            for form, files in held.items():
                if member.isfile() and folder == form.folder and file in form.files:
                    check_unpacked(path, member.size)
                    content = archive.extractfile(member)
                    assert content is not None  # a regular file
                    files[file] = content.read()
        assert archive.fileobj is not None
        while archive.fileobj.read(_CHUNK):  # the checksum is behind the last member
            pass
    form = _form_of(name, path, held)
    return form, held[form]


def _form_of(name: str, path: Path, found: Mapping[_Form, Container[str]]) -> _Form:
    """Return the form of which there are all files."""
    missing = {form: [file for file in form.files if file not in found[form]] for form in found}
    best = min(missing, key=lambda form: len(missing[form]))
    if not missing[best]:
        return best
    if len(missing[best]) < len(best.files):
        raise ValueError(f"{path}: no file {', '.join(missing[best])} of {name}; get it again.")
    wanted = " or ".join(f"{form.folder} ({', '.join(form.files)})" for form in found)
    raise ValueError(f"{path}: no files of {name}; there must be those of {wanted}.")


def _read_binary(
    where: str, name: str, content: bytes, labels: str
) -> tuple[np.ndarray, np.ndarray]:
    kinds = list(_KINDS[name])
    record = len(kinds) + _PIXELS
    if not content or len(content) % record:
        raise ValueError(
            f"{where} has {len(content):,} bytes; it must be records of {record:,} bytes."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    y = _checked(where, rows[:, kinds.index(labels)].astype(np.int64), _KINDS[name][labels][1])
    return _channels_last(rows[:, len(kinds) :]), y


def _read_pickled(
    where: str, name: str, content: bytes, labels: str
) -> tuple[np.ndarray, np.ndarray]:
    key, classes = _KINDS[name][labels]
    about = (
        f"{where} is damaged, or no batch of {name} (a pickled dict with data [n, {_PIXELS:,}] "
        f"and {key.decode()} [n])"
    )
    with errors_about(about):
        batch = _Unpickler(BytesIO(content), encoding="bytes").load()
        _, shape, dtype, is_fortran, data = batch[b"data"].state
        if dtype.arguments[0] not in (b"u1", "u1"):
            raise ValueError(f"images of dtype {dtype.arguments[0]!r}, not uint8")
        rows = np.frombuffer(data, np.uint8).reshape(shape, order="F" if is_fortran else "C")
        y = np.array(batch[key])
        if rows.shape != (len(y), _PIXELS) or y.dtype.kind not in "iu" or y.ndim != 1:
            raise ValueError(f"images of shape {rows.shape} and labels of shape {y.shape}")
    return _channels_last(rows), _checked(where, y, classes)


def _channels_last(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _checked(where: str, y: np.ndarray, classes: int) -> np.ndarray:
    if len(y) and not 0 <= y.min() <= y.max() < classes:
        raise ValueError(
            f"{where} has labels between {y.min()} and {y.max()}; they must be in [0, {classes})."
        )
    return y


class _Stored:
    """Stands for a NumPy object in a pickle: what it is made with, and its state."""

    state: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


def _encode(text: str, encoding: str) -> bytes:  # bytes that Python 3 pickled for Python 2
    return text.encode(encoding if encoding == "latin1" else "ascii")


# What the files name: how NumPy restores an array, and bytes.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Stored,
    ("numpy._core.multiarray", "_reconstruct"): _Stored,
    ("numpy", "ndarray"): _Stored,
    ("numpy", "dtype"): _Stored,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run")
        return _ALLOWED[module, name]
