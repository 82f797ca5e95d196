"""Weight files in the safetensors format: one file, or several with an index.

The library ``safetensors`` reads and checks each file's header: opening a file that is damaged,
truncated or longer than its header says is an error. Nothing is unpickled. Names, shapes and dtypes
are known before any number is read. Numbers are read here, row by row, because the library would
load a complete array to read a part of it, or map the file into memory.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import errors_about
from fedjax_lab.data.dtypes import to_native
from fedjax_lab.machine.atomic_files import new_folder
from fedjax_lab.machine.extras import imported
from fedjax_lab.machine.json_file import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
_SIZES = {
    **{kind: dtype.itemsize for kind, dtype in _FLOATS.items()},
    **{"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}


class Entry(NamedTuple):
    """An array in a file.

    Attributes:
      file: path of the file.
      shape: shape as stored.
      dtype: dtype of floats; None for anything else.
      kind: the format's name of the dtype, such as "BF16".
      offset: position of the array's first byte in the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype | None
    kind: str
    offset: int


class WeightFiles:
    """Weight files whose arrays are read one at a time.

    Attributes:
      entries: name of an array -> ``Entry``.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the files and check their headers.

        Args:
          path: a file ending in .safetensors, or a folder with ``model.safetensors`` or with
            ``model.safetensors.index.json`` and the files that it names.

        Raises:
          FileNotFoundError: there is no such file or folder, or a file is missing.
          ValueError: a file is damaged, or the index does not agree with the files.
          ImportError: the package safetensors is missing, or too old.
        """
        self.entries: dict[str, Entry] = {}
        folder, index = _find(Path(path))
        indexed = {} if index is None else _weight_map(index)
        files = (
            [folder] if index is None else [folder / name for name in sorted({*indexed.values()})]
        )
        for file in files:
            for name, entry in _entries(file):
                if name in self.entries:
                    raise ValueError(f"{name!r} is in {self.entries[name].file} and in {file}.")
                self.entries[name] = entry
        if index is not None:
            _check_index(index, indexed, self.entries)

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> np.ndarray:
        """Read an array of floats, or a part of it.

        Args:
          rows: part of its first axis; None: all.
          columns: part of its second axis; None: all.

        Returns:
          A new array, in the dtype of the file.

        Raises:
          ValueError: a number is not finite, or the file has changed since it was opened.
        """
        entry = self.entries[name]
        assert entry.dtype is not None
        first, last = (0, 1) if not entry.shape else (0, entry.shape[0])
        if rows is not None:
            first, last = rows.start, rows.stop
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        size, offset = (last - first) * row, entry.offset + first * row
        read = np.fromfile(entry.file, np.uint8, size, offset=offset)
        if len(read) < size:
            raise ValueError(f"{entry.file} has been cut off since it was opened.")
        shape = (last - first, *entry.shape[1:]) if entry.shape else ()
        found = read.view(entry.dtype).reshape(shape)
        return _finite(entry, name, found if columns is None else found[:, columns])


class HeldArrays:
    """Arrays in memory, with the interface of ``WeightFiles``.

    Attributes:
      entries: name of an array -> ``Entry``.
    """

    def __init__(self, source: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Hold the arrays.

        Args:
          arrays: name -> array [...].
        """
        self._arrays = {name: to_native(array) for name, array in arrays.items()}
        self.entries = {}
        for name, array in self._arrays.items():
            dtype = array.dtype if array.dtype in _FLOATS.values() else None
            self.entries[name] = Entry(Path(source), array.shape, dtype, array.dtype.name, 0)

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> np.ndarray:
        """Read an array of floats, or a part of it.

        Raises:
          ValueError: a number is not finite.
        """
        found = self._arrays[name]
        found = found if rows is None else found[rows]
        return _finite(self.entries[name], name, found if columns is None else found[:, columns])


def _finite(entry: Entry, name: str, found: np.ndarray) -> np.ndarray:
    if not np.isfinite(found).all():
        raise ValueError(f"{entry.file}: {name!r} has a number that is not finite.")
    return found


def _find(path: Path) -> tuple[Path, Path | None]:
    """Find the file, (file, None), or the folder and its index, (folder, index)."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"path is {str(path)!r}; it must end in .safetensors.")
        return path, None
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {str(path)!r}.")
    single, index = (path / name for name in (SINGLE, INDEX))
    if single.is_file() and index.is_file():
        raise ValueError(f"{path} has both {SINGLE} and {INDEX}; one must go.")
    if single.is_file():
        return single, None
    if index.is_file():
        return path, index
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    raise FileNotFoundError(
        f"{path} has neither {SINGLE} nor {INDEX}."
        + (f" {pickled[0]} is not read: unpickling runs code." if pickled else "")
    )


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index} has no weight_map from names of arrays to names of files.")
    for name, file in found.items():
        plain = isinstance(file, str) and file.endswith(".safetensors")
        if not plain or "\0" in file or any(mark in file for mark in ("/", "\\", ":")):
            raise ValueError(
                f"{index}: {name!r} is in {file!r}; it must be the name of a .safetensors file in "
                "the same folder."
            )
    return found


def _check_index(index: Path, indexed: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    for name in sorted(indexed.keys() | entries.keys()):
        there = entries[name].file.name if name in entries else "no file"
        claimed = indexed.get(name, "no file")
        if claimed != there:
            raise ValueError(f"{index}: {name!r} is listed in {claimed}; it is in {there}.")


def _entries(file: Path) -> Iterator[tuple[str, Entry]]:
    """Yield the arrays of a file's header; they follow one another in the file without gaps."""
    library = imported("safetensors", "reading .safetensors needs safetensors", "safetensors")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}, which the index names.")
    found = []
    with (
        errors_about(f"{file} is no whole file of safetensors"),
        library.safe_open(file, framework="numpy") as handle,
    ):
        for name in handle.offset_keys():
            part = handle.get_slice(name)
            found.append((name, str(part.get_dtype()), tuple(part.get_shape())))
    sizes = []
    for name, kind, shape in found:
        if kind not in _SIZES:
            raise ValueError(f"{file}: {name!r} holds {kind}, which is not read.")
        sizes.append(_SIZES[kind] * math.prod(shape))
    offset = file.stat().st_size - sum(sizes)
    for (name, kind, shape), size in zip(found, sizes, strict=True):
        yield name, Entry(file, shape, _FLOATS.get(kind), kind, offset)
        offset += size


# --- writing


def write_folder(
    folder: Path,
    fields: Mapping[str, Any],
    arrays: Mapping[str, tuple[int, Callable[[], np.ndarray]]],
    max_shard_bytes: int,
    names: tuple[str, str] = ("config.json", SINGLE),
) -> None:
    """Write the configuration and the arrays atomically, in as few files as possible.

    Args:
      folder: must not exist, or be empty.
      arrays: name -> (bytes, function that returns the array); those of a file are made together.
      names: names of the configuration's file, and of the arrays' file if there is only one.

    Raises:
      FileExistsError: the folder is not empty.
      FileNotFoundError: the parent folder does not exist.
      ImportError: the package safetensors is missing.
    """
    needs = "writing .safetensors needs safetensors"
    library = imported("safetensors.numpy", needs, "safetensors")
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"folder is {str(folder)!r}; there is no {folder.parent}.")
    sizes = {name: size for name, (size, _) in arrays.items()}
    shards = _divide(sizes, max_shard_bytes)
    with new_folder(folder) as scratch:
        (scratch / names[0]).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        files = [
            names[1] if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            for i in range(1, len(shards) + 1)
        ]
        for name, shard in zip(files, shards, strict=True):
            held = {array: np.ascontiguousarray(arrays[array][1]()) for array in shard}
            library.save_file(held, scratch / name, metadata={"format": "pt"})
            del held
        if len(shards) > 1:
            where = {
                array: name for name, shard in zip(files, shards, strict=True) for array in shard
            }
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
            (scratch / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
