"""Params as state dicts of PyTorch: its names and layouts, in memory or in files.

A table says how each leaf is stored: ``torch_table`` for the networks of this package, and one of
your own, path of a leaf -> ``Stored``, for any other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_lab.checks import errors_about
from fedjax_lab.data.files import read_npz
from fedjax_lab.models.pretrained import read_into
from fedjax_lab.models.weight_files import HeldArrays, WeightFiles
from fedjax_lab.models.weight_tables import Table, stored_leaves, torch_table
from fedjax_lab.tree import by_path
from fedjax_lab.types import Params, PyTree

COUNTERS = ("*num_batches_tracked",)  # of batch norms; the params have no place for them
_PICKLED = (".pt", ".pth", ".bin")
_SAFE_TORCH = (2, 6)  # the first version whose weights_only=True runs no code of a file's


def load_state_dict(
    source: str | Path | Mapping[str, Any],
    into: PyTree,
    table: Table | None = None,
    *,
    ignore: Sequence[str] = COUNTERS,
) -> Params:
    """Read a state dict of PyTorch into params.

    ::

        shapes = jax.eval_shape(model.init, key, x)
        params = models.load_state_dict("cnn.safetensors", shapes)

    Args:
      source: a file .safetensors, .npz or (with PyTorch 2.6 or later installed) .pt, .pth or .bin,
        which is read with ``weights_only=True``, so that unpickling runs no code of the file's; or
        a mapping from names to arrays or tensors, such as ``module.state_dict()``.
      into: pytree of arrays or of ``jax.ShapeDtypeStruct`` with the shapes and the dtypes of the
        params; floats are converted.
      table: path of a leaf -> its name, or how it is ``Stored``. None: ``torch_table(into)``.
      ignore: patterns of names that are left out, or a single one.

    Returns:
      A pytree like ``into``.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: a package that reads the file is missing, or too old.
      TypeError: a value of the mapping is no array or tensor.
      ValueError: a file is damaged or of another kind; an array is missing, left over, of another
        shape, not of floats, or not finite; or the table does not fit ``into``.
    """
    table = torch_table(into) if table is None else table
    return read_into(_opened(source), into, table, ignore)


def to_state_dict(params: Params, table: Table | None = None) -> dict[str, np.ndarray]:
    """Convert params to a state dict of PyTorch: the inverse of ``load_state_dict``.

    ::

        state = models.to_state_dict(params)
        export_params(state, "cnn.safetensors")  # or .npz, or .pt
        module.load_state_dict({name: torch.from_numpy(a) for name, a in state.items()})

    PyTorch starts the counters of batch norms, which are left out, at 0.

    Args:
      params: pytree of arrays.
      table: as in ``load_state_dict``.

    Returns:
      {name: array [...]}. bfloat16, which NumPy does not have, becomes float32.

    Raises:
      ValueError: the table does not fit the params.
    """
    table = torch_table(params) if table is None else table
    leaves = {path: np.asarray(leaf) for path, leaf in by_path(params).items()}
    found = stored_leaves(leaves, table, "params", "table")
    state: dict[str, np.ndarray] = {}
    for path in table:  # in its order
        leaf, stored = found[path]
        leaf = leaf.astype(np.float32) if leaf.dtype.kind == "V" else leaf
        state |= {name: make().copy() for name, (_, make) in stored.parts(leaf).items()}
    return state


def _opened(source: str | Path | Mapping[str, Any]) -> HeldArrays | WeightFiles:
    if isinstance(source, Mapping):
        return HeldArrays("source", {name: _array(name, value) for name, value in source.items()})
    path = Path(source)
    if path.suffix == ".npz":
        return HeldArrays(path, read_npz(path, "source", None))
    if path.suffix in _PICKLED:
        return HeldArrays(path, _unpickled(path))
    if path.suffix == ".safetensors":
        return WeightFiles(path)
    allowed = ", ".join((".safetensors", ".npz", *_PICKLED))
    raise ValueError(f"source is {str(path)!r}; the file must end in one of {allowed}.")


def _unpickled(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"source is {str(path)!r}; there is no such file.")
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{path} is a pickle, which needs PyTorch: `pip install torch`; or, where it is "
            "installed, save the state dict by safetensors.torch.save_file."
        ) from error
    if tuple(map(int, torch.__version__.split(".")[:2])) < _SAFE_TORCH:
        raise ImportError(
            f"{path} is a pickle, whose code PyTorch {torch.__version__} may run in spite of "
            "weights_only=True (CVE-2025-32434): `pip install 'torch>=2.6'`; or save the state "
            "dict by safetensors.torch.save_file."
        )
    about = f"{path} is damaged, or no state dict (torch.save(module.state_dict(), ...))"
    with errors_about(about):
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} has a {type(state).__name__}; it must be a state dict.")
    return {name: _array(name, value) for name, value in state.items()}


def _array(name: str, value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    if not hasattr(value, "shape"):
        raise TypeError(
            f"the state dict has a {type(value).__name__} at {name!r}; it must have arrays or "
            "tensors. If it is one itself, pass it alone."
        )
    return np.asarray(value)
