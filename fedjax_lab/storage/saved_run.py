"""Reads a run directory without the method that wrote it, and exports its params."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from fedjax_lab.machine.atomic_files import write_atomically
from fedjax_lab.machine.extras import imported
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.storage.checkpoint import Checkpoints
from fedjax_lab.storage.rows import plain_row, restored_row
from fedjax_lab.storage.run_dir import CHECKPOINTS, CONFIG, read_config, run_id
from fedjax_lab.tree import by_path
from fedjax_lab.types import Params, PyTree

Leaves = list[tuple[list[str | int], np.ndarray]]  # each with its path


class SavedRun(NamedTuple):
    """Contents of a run directory.

    Attributes:
      params: the global model of the last checkpoint, NumPy arrays in nested dicts with the keys of
        the run's params; lists become dicts with integer keys.
      history: the rows up to that round, as ``simulate`` returns them, with None for values that
        are not finite.
      config: contents of config.json; for a run of the command line, ``config["run_config"]`` has
        its settings.
      round: finished rounds.
    """

    params: Params
    history: list[dict[str, Any]]
    config: dict[str, Any]
    round: int


@suggest_keywords
def load_run(run_dir: str | Path, *, like: PyTree = None) -> SavedRun:
    """Read the global model, the history and the settings of a run, finished or not.

    No file is changed. If the newest checkpoint is damaged, the previous one is used, with a
    warning.

    Args:
      run_dir: directory of ``simulate`` or of the command line.
      like: template for the structure of ``params``, such as tuples and modules: a pytree of arrays
        or of ``jax.ShapeDtypeStruct``. None: nested dicts.

    Raises:
      FileNotFoundError: there is no such directory, no run in it, or no checkpoint yet.
      ValueError: a file is damaged, checkpoints belong to another run, or the params have other
        names, shapes or dtypes than ``like``, or two leaves of one path.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"run_dir is {str(path)!r}; there is no such directory.")
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"run_dir is {str(path)!r}, which has no run: no {CONFIG}.")
    config = read_config(path)
    if not (path / CHECKPOINTS).is_dir():
        raise FileNotFoundError(f"run_dir is {str(path)!r}, which has no checkpoint yet.")
    checkpoints = Checkpoints(path / CHECKPOINTS, run_id(config), read_only=True)
    try:
        round, leaves, extra = checkpoints.restore_params()
    finally:
        checkpoints.close()
    params = _nested(leaves) if like is None else _structured(leaves, like)
    history = [plain_row(restored_row(row)) for row in extra["rows"]]
    return SavedRun(params, history, config, round)


def _nested(leaves: Leaves) -> Params:
    """Build nested dicts; a tree of one array becomes that array."""
    if [path for path, _ in leaves] == [[]]:
        return leaves[0][1]
    tree: dict[str | int, Any] = {}
    for path, leaf in leaves:
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = leaf
    return tree


def _structured(leaves: Leaves, like: PyTree) -> Params:
    def kind(leaf: Any) -> str:
        return "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"

    there, asked = by_path(_nested(leaves)), by_path(like)
    for name in sorted({*there, *asked}):
        found, wanted = kind(there.get(name)), kind(asked.get(name))
        if found != wanted:
            raise ValueError(
                f"like has {wanted} at {name or 'params'!r}, where the run's params have {found}."
            )
    return jax.tree.unflatten(jax.tree.structure(like), [there[name] for name in asked])


def export_params(params: Params, file: str | Path) -> dict[str, np.ndarray]:
    """Write params to a .npz, .safetensors or .pt file, named by path, for other programs.

    A name is such as "blocks_0/dense/kernel"; that of a tree of one array is "params". The file is
    written atomically.

    Args:
      params: pytree of arrays [...].
      file: path with the suffix .npz (``numpy.load``), .safetensors (PyTorch, JAX and others) or
        .pt (``torch.load``; needs PyTorch). An existing file is replaced.

    Returns:
      The written arrays: {name: array [...]}.

    Raises:
      ValueError: the file has another suffix, two leaves have the same path, or .npz does not
        support a leaf's dtype.
      ImportError: the package safetensors, or PyTorch, is missing.
      FileNotFoundError: the file's folder does not exist.
    """
    path = Path(file)
    if path.suffix not in _WRITERS:
        raise ValueError(f"file is {str(file)!r}; it must end in {' or '.join(_WRITERS)}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"file is {str(file)!r}; there is no directory {path.parent}.")
    leaves = by_path(params)
    if list(leaves) == [""]:
        leaves = {"params": leaves[""]}
    arrays = {n: np.ascontiguousarray(x).reshape(np.shape(x)) for n, x in leaves.items()}
    with write_atomically(path, "wb") as out:
        _WRITERS[path.suffix](arrays, out)
    return arrays


def _check_plain(arrays: Mapping[str, np.ndarray], suffix: str) -> None:
    for name, leaf in arrays.items():
        if leaf.dtype.kind == "V":  # what NumPy knows by its size alone, such as bfloat16
            raise ValueError(
                f"params has dtype {leaf.dtype} at {name!r}, which {suffix} does not support; "
                "export to .safetensors."
            )


def _write_npz(arrays: Mapping[str, np.ndarray], out: IO[bytes]) -> None:
    _check_plain(arrays, ".npz")
    # Not numpy.savez, whose own arguments would shadow a leaf of that name.
    with zipfile.ZipFile(out, "w") as archive:
        for name, leaf in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, leaf, allow_pickle=False)


def _write_safetensors(arrays: Mapping[str, np.ndarray], out: IO[bytes]) -> None:
    needs = ".safetensors needs the package safetensors"
    out.write(imported("safetensors.numpy", needs, "safetensors").save(dict(arrays)))


def _write_pt(arrays: Mapping[str, np.ndarray], out: IO[bytes]) -> None:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            ".pt needs PyTorch: `pip install torch`; or write .safetensors."
        ) from error
    _check_plain(arrays, ".pt")
    torch.save({name: torch.tensor(leaf) for name, leaf in arrays.items()}, out)


_WRITERS = {".npz": _write_npz, ".safetensors": _write_safetensors, ".pt": _write_pt}
