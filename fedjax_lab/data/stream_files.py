"""Examples in memory-mapped files, written atomically and identified by a hash.

A folder has a ``.npy`` file for each leaf of the examples, and ``stream.json`` with the structure
of the pytree. The SHA-256 of each file is stored next to it, so that the file need not be read
again.

Axes: n examples.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_tilde, errors_about, warn
from fedjax_lab.data.dtypes import common_length, pieces, stored_dtype
from fedjax_lab.data.sources import Examples
from fedjax_lab.machine.atomic_files import new_folder, write_text
from fedjax_lab.signatures import suggest_keywords

DESCRIPTION = "stream.json"
_VERSION = 1


@suggest_keywords
def write_stream(folder: str | Path, examples: Any) -> Path:
    """Write examples to files for ``stream``, one for each leaf.

    The files are written to a temporary folder, which is renamed when it is complete: an
    interrupted call leaves no ``folder``.

    Args:
      folder: a new folder.
      examples: ``Examples``, a tuple (x, y), or dicts, lists and tuples of arrays with leading axis
        n. For data that do not fit in memory, an iterator of such parts. 64-bit numbers become
        32-bit, as on a device.

    Returns:
      ``folder``.

    Raises:
      FileExistsError: ``folder`` exists and is not empty.
      TypeError: the examples are in another kind of container.
      ValueError: there are no examples; leaves have different lengths; parts have different
        structures; leaves are not numeric or have integers beyond 32 bits; or ``folder`` begins
        with a ~.
      OSError: the disk is full.
    """
    check_tilde("folder", folder)
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    parts = examples if isinstance(examples, Iterator) else iter((examples,))
    with new_folder(folder) as half, contextlib.ExitStack() as opened:
        _write_parts(half, parts, opened)
    return folder


@suggest_keywords
def open_stream(folder: str | Path) -> Any:
    """Memory-map the examples that ``write_stream`` wrote, without reading them.

    Args:
      folder: the folder.

    Returns:
      The examples, with read-only ``np.memmap`` leaves.

    Raises:
      FileNotFoundError: there is no such folder, or a file is missing.
      ValueError: a file is damaged.
    """
    folder = Path(folder)
    file = folder / DESCRIPTION
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {DESCRIPTION}; data.write_stream makes it.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version, names, n = content["version"], content["leaves"], content["examples"]
        leaves = [(str(name), jnp.dtype(kind), tuple(shape)) for name, kind, shape in names]
        tree = _built(content["tree"], list(range(len(leaves))))
    except Exception as error:  # a description of another form
        raise ValueError(f"{file} is damaged: {error!r}.") from error
    for name, *_ in leaves:
        if Path(name).name != name:
            raise ValueError(f"{file} is damaged: {name!r} is no name of a file in its folder.")
    if version != _VERSION:
        raise ValueError(f"{file} has version {version}; this one reads {_VERSION}.")
    arrays = []
    for name, dtype, shape in leaves:
        array = map_file(folder / f"{name}.npy")
        if array.dtype.itemsize != dtype.itemsize or array.shape != (n, *shape):
            raise ValueError(
                f"{folder / name}.npy has shape {array.shape} and dtype {array.dtype}; {file} says "
                f"{(n, *shape)} and {dtype}."
            )
        arrays.append(array if array.dtype == dtype else array.view(dtype))
    return jax.tree.map(lambda number: arrays[number], tree)


def map_file(path: str | Path) -> np.ndarray:
    """Memory-map the array [n, ...] of a ``.npy`` file, read-only.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, truncated, has objects, or is an archive of several arrays.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    with errors_about(f"{path}: not readable as an array of NumPy's"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError(
            f"{path} is an .npz archive, which cannot be memory-mapped; numpy.save writes one "
            "array to a .npy file, and data.write_stream the arrays of many files to a folder."
        )
    return array


def content_of(array: np.ndarray) -> str:
    """Hash an array's bits, shape and dtype.

    The hash of a mapped ``.npy`` file is stored next to it in FILE.sha256, with the file's size and
    modification time. While these are the same, the file is not read again. A change that keeps
    both is not noticed.

    Args:
      array: [n, ...].

    Returns:
      64 hexadecimal digits.

    Raises:
      ValueError: a file changed while it was read.
    """
    path = _whole_file(array)
    if path is None:
        digest = hashlib.sha256()
        for piece in pieces(array):
            digest.update(_bytes_of(piece))
        bits = digest.hexdigest()
    else:
        bits = hash_of_file(path, skip=path.stat().st_size - array.nbytes)
    text = json.dumps([bits, list(array.shape), str(array.dtype)])
    return hashlib.sha256(text.encode()).hexdigest()


def _write_parts(folder: Path, parts: Iterator[Any], opened: contextlib.ExitStack) -> None:
    files: list[_LeafFile] = []
    first, count = None, 0
    for part in parts:
        structure = _described(part, itertools.count())
        leaves = [np.asanyarray(leaf) for leaf in jax.tree.leaves(part)]
        count += common_length("examples", leaves)
        dtypes = [stored_dtype("examples", leaf) for leaf in leaves]
        kinds = [(str(kind), leaf.shape[1:]) for kind, leaf in zip(dtypes, leaves, strict=True)]
        if first is None:
            first = structure, kinds
            names = _names(structure, len(leaves))
            for name, dtype, leaf in zip(names, dtypes, leaves, strict=True):
                file = opened.enter_context((folder / f"{name}.npy").open("wb"))
                files.append(_LeafFile(file, dtype, leaf.shape[1:]))
        elif (structure, kinds) != first:
            raise ValueError(
                f"examples has a part {structure} with {kinds}; the first one is {first[0]} with "
                f"{first[1]}, and all must have the same structure, shapes and dtypes."
            )
        for leaf_file, leaf in zip(files, leaves, strict=True):
            leaf_file.add(leaf)
    if not count or first is None:
        raise ValueError("examples is empty; there must be at least one.")
    for leaf_file in files:
        leaf_file.finish()
    description, kinds = first
    kept = [[one.path.stem, *kind] for one, kind in zip(files, kinds, strict=True)]
    content = {"version": _VERSION, "examples": count, "leaves": kept, "tree": description}
    write_text(folder / DESCRIPTION, json.dumps(content))


class _LeafFile:
    """A ``.npy`` file that grows along its leading axis, and its SHA-256."""

    def __init__(self, file: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]):
        self.path = Path(file.name)
        self._file, self._dtype, self._shape, self._rows = file, dtype, shape, 0
        self._digest = hashlib.sha256()
        self._data = self._head()

    def _head(self) -> int:
        """Write the header; returns where the data begin."""
        # NumPy's format does not know the dtypes of ml_dtypes; stream.json has their names.
        dtype = self._dtype
        known = np.dtype(f"V{dtype.itemsize}") if dtype.kind == "V" else dtype
        shape = (self._rows, *self._shape)
        header = {"descr": known.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def add(self, rows: np.ndarray) -> None:
        for piece in pieces(rows):
            raw = _bytes_of(piece.astype(self._dtype, copy=False))
            self._file.write(raw)
            self._digest.update(raw)
        self._rows += len(rows)

    def finish(self) -> None:
        self._file.seek(0)
        assert self._head() == self._data  # NumPy's header has room for a longer leading axis
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        _keep_hash(self.path, self._digest.hexdigest())


def _described(tree: Any, number: Iterator[int]) -> Any:
    """Describe a tree of containers as JSON, with the leaves numbered in their order."""
    if isinstance(tree, Examples) or (type(tree) is tuple and len(tree) == 2):
        return {"Examples": [_described(child, number) for child in tree]}
    if isinstance(tree, dict):
        if not all(isinstance(name, str) for name in tree):
            raise TypeError(f"examples has a dict with the keys {list(tree)}; they must be text.")
        return {"dict": {name: _described(tree[name], number) for name in sorted(tree)}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_described(child, number) for child in tree]}
    if not hasattr(tree, "shape"):
        raise TypeError(
            f"examples has a {type(tree).__name__}; it must be Examples, or dicts, lists and "
            "tuples of arrays."
        )
    return next(number)


def _built(structure: Any, leaves: list[Any]) -> Any:
    """Build the tree of a description with these leaves."""
    if isinstance(structure, int):
        return leaves[structure]
    ((kind, children),) = structure.items()
    if kind == "dict":
        return {name: _built(child, leaves) for name, child in children.items()}
    built = [_built(child, leaves) for child in children]
    if kind == "Examples":
        return Examples(*built)
    return {"list": list, "tuple": tuple}[kind](built)


def _names(structure: Any, count: int) -> list[str]:
    """Return the names of the leaves' files: their paths, or their numbers for other characters."""
    paths = jax.tree_util.tree_leaves_with_path(_built(structure, list(range(count))))
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    plain = all(name.replace(".", "").replace("_", "").isalnum() for name in names)
    is_safe = plain and len({name.lower() for name in names}) == count
    return names if is_safe else [str(number) for number in range(count)]


def _bytes_of(array: np.ndarray) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _whole_file(array: np.ndarray) -> Path | None:
    """Return the file that consists of this array alone, or None."""
    name = getattr(array, "filename", None)
    if not isinstance(array, np.memmap) or name is None or not array.flags.c_contiguous:
        return None
    is_whole = int(array.offset) + array.nbytes == Path(name).stat().st_size
    return Path(name) if is_whole else None


def hash_of_file(path: Path, skip: int = 0) -> str:
    """Return the stored SHA-256 of a file, or compute and store it.

    Raises:
      ValueError: the file changed while it was read.
    """
    before = path.stat()
    try:
        kept = json.loads(_beside(path).read_text(encoding="utf-8"))
        known = [before.st_size, before.st_mtime_ns] == [kept["size"], kept["mtime_ns"]]
        if known and len(kept["sha256"]) == 64:
            return kept["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    with path.open("rb") as file:
        file.seek(skip)
        found = hashlib.file_digest(file, "sha256").hexdigest()
    after = path.stat()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ValueError(f"{path} changed while it was read; nothing may write to it.")
    try:
        _keep_hash(path, found)
    except OSError as error:
        warn(
            f"the hash of {path} cannot be stored next to it, so every run reads the whole file "
            f"again: {error}",
        )
    return found


def _keep_hash(path: Path, found: str) -> None:
    now = path.stat()
    known = {"size": now.st_size, "mtime_ns": now.st_mtime_ns, "sha256": found}
    write_text(_beside(path), json.dumps(known))


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
