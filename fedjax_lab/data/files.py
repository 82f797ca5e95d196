"""Files of NumPy (.npz), MNIST (IDX) and Parquet, with checks for damaged ones."""

import contextlib
import gzip
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fedjax_lab.checks import errors_about
from fedjax_lab.machine.extras import imported

# "train" and "test" -> x [n, ...] and y [n, ...] of a file, not checked yet.
Splits = Mapping[str, tuple[np.ndarray, np.ndarray]]

# How the names of the two files of a split begin, in MNIST.
_MNIST = {"train": "train", "test": "t10k"}
_IN_NPZ = ("x_train", "y_train", "x_test", "y_test")
_IDX_TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32"}
_CHUNK = 1 << 20
_LIMIT = "FEDJAX_LAB_UNPACKED_GIB"
_GIB = 8.0  # largest unpacked size of a file, unless the environment variable sets another


def read_idx_files(folder: Path, name: str, beginnings: Mapping[str, str] = _MNIST) -> Splits:
    """Read training and test data from IDX files.

    Args:
      beginnings: how the names of the two files of each split begin; by default as of MNIST's.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged.
    """

    def read(file_name: str, ndim: int) -> np.ndarray:
        path = _find_idx(folder, file_name)
        if path is None:
            raise FileNotFoundError(f"{name}: {folder} has neither {file_name} nor {file_name}.gz.")
        return read_idx(path, ndim=ndim)

    return {
        part: (read(f"{begin}-images-idx3-ubyte", 3), read(f"{begin}-labels-idx1-ubyte", 1))
        for part, begin in beginnings.items()
    }


@contextlib.contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a UTF-8 file for reading; a byte order mark is left out.

    Args:
      newline: as of ``open``.

    Raises:
      ValueError: what is read in the context is not UTF-8.
    """
    with path.open(encoding="utf-8-sig", newline=newline) as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise _not_utf8(path) from error


def _not_utf8(path: Path) -> ValueError:
    """Build the error for a text file that is not UTF-8, with the line and what to do."""
    with path.open("rb") as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            what, encoding = "line 1 begins as UTF-16 does; convert the file", "utf-16"
        else:
            file.seek(0)
            what, encoding = _first_bad_line(file), "latin1"
    return ValueError(
        f"{path} is no UTF-8 text: {what}, for example by `iconv -f {encoding} -t utf-8 "
        f"{path.name}`."
    )


def _first_bad_line(file: Any) -> str:
    for number, line in enumerate(file, start=1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = line[error.start]
            return f"line {number} has the byte 0x{byte:02x}; if it is Latin-1, convert the file"
    return "convert the file"


def has_idx(folder: Path) -> bool:
    """Return True if a folder has MNIST's training images."""
    return _find_idx(folder, "train-images-idx3-ubyte") is not None


def _find_idx(folder: Path, file_name: str) -> Path | None:
    paths = (folder / file_name, folder / f"{file_name}.gz")
    return next((path for path in paths if path.is_file()), None)


def read_idx(path: Path, *, ndim: int) -> np.ndarray:
    """Read one IDX file of unsigned bytes, plain or (ending in .gz) compressed.

    Returns:
      uint8 [...] of rank ``ndim``.

    Raises:
      ValueError: the file is not such an IDX file, is truncated, or has extra bytes.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    about = f"{path}: damaged or cut short gzip file; get it again"
    kinds = (EOFError, gzip.BadGzipFile, zlib.error)
    with errors_about(about, kinds), opener(path, "rb") as file:
        header = _read_up_to(file, 4)
        if len(header) < 4 or header[:2] != b"\0\0":
            raise ValueError(f"{path}: magic number {header.hex()}; IDX files begin with 0000.")
        kind, rank = header[2], header[3]
        if kind != 0x08:
            found = _IDX_TYPES.get(kind, "unknown")
            raise ValueError(
                f"{path}: data type 0x{kind:02x} ({found}); it must be uint8. "
                "Write other types to an .npz file, for npz:FILE."
            )
        if rank != ndim:
            raise ValueError(f"{path}: {rank} dimensions; there must be {ndim}.")
        sizes = _read_up_to(file, 4 * ndim)
        if len(sizes) < 4 * ndim:
            raise ValueError(f"{path}: the file ends within its header.")
        shape = struct.unpack(f">{ndim}I", sizes)
        count = math.prod(shape)
        if opener is gzip.open:
            check_unpacked(path, count)
        values = _read_up_to(file, count)
        if len(values) < count:
            raise ValueError(
                f"{path}: the file ends after {len(values):,} of {count:,} values of {shape}."
            )
        # Reading past the end also makes gzip verify its checksum.
        if file.read(1):
            raise ValueError(f"{path}: there are extra bytes after the values of {shape}.")
    return np.frombuffer(values, np.uint8).reshape(shape)


def check_unpacked(path: Path, size: int) -> None:
    """Refuse a file that declares a far larger unpacked size, before it is unpacked.

    Raises:
      ValueError: the size exceeds the limit, or the limit is not a number.
    """
    text = os.environ.get(_LIMIT) or str(_GIB)
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise ValueError(f"{_LIMIT} is {text!r}; it must be a number greater than 0.")
    there = path.stat().st_size
    if size > limit * 2**30 and size > 2 * there:
        raise ValueError(
            f"{path}: its {there:,} bytes would unpack to {size:,} ({size / 2**30:,.1f} GiB); "
            f"{limit:g} GiB are allowed. If you trust the file, set {_LIMIT} to a larger number."
        )


def _read_up_to(file: Any, count: int) -> bytearray:
    # In pieces: a damaged header may announce more bytes than there is memory.
    buffer = bytearray()
    while len(buffer) < count:
        piece = file.read(min(_CHUNK, count - len(buffer)))
        if not piece:
            break
        buffer += piece
    return buffer


def read_npz_splits(path: Path, name: str) -> Splits:
    """Read the arrays x_train, y_train, x_test and y_test of an .npz file.

    Raises:
      FileNotFoundError, ValueError: as ``read_npz``.
    """
    arrays = read_npz(path, name)
    return {part: (arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test")}


def read_npz(path: Path, name: str, keys: Sequence[str] | None = _IN_NPZ) -> dict[str, np.ndarray]:
    """Read arrays of an .npz file; never pickled objects.

    Args:
      keys: names of the arrays; None: all.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, lacks an array, or exceeds the allowed unpacked size.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{name}: there is no file {path}.")
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path}: damaged or no .npz file (a zip archive of arrays); get or write it again."
        )
    with errors_about(f"{path}: damaged zip archive"), zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    asked = sizes if keys is None else [file for key in keys for file in (key, f"{key}.npy")]
    check_unpacked(path, sum(sizes.get(file, 0) for file in asked))
    with (
        errors_about(f"{path}: not readable as an .npz file of plain arrays"),
        # NumPy would leave a file that it opened itself open on a damaged archive.
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        found = list(archive.files)
        wanted = found if keys is None else keys
        absent = [key for key in wanted if key not in found]
        arrays = {} if absent else {key: archive[key] for key in wanted}
    if absent:
        raise ValueError(
            f"{path}: no array {', '.join(absent)}; it has {', '.join(found) or 'none'}. "
            f"There must be {', '.join(wanted)}."
        )
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{path}: {key} is no array in NumPy's format.")
    return arrays


def read_parquet(argument: str, path: Path) -> Any:
    """Read a Parquet file as an Arrow table; pages that have a checksum are checked.

    Raises:
      ImportError: pyarrow is missing.
      ValueError: the file is damaged.
    """
    needs = f"{argument} is {str(path)!r}, which needs pyarrow"
    parquet = imported("pyarrow.parquet", needs, "tables")
    about = (
        f"{argument} is {str(path)!r}, which is no Parquet file, or a damaged one; get or write "
        "the file again"
    )
    with errors_about(about):
        return parquet.read_table(path, page_checksum_verification=True)
