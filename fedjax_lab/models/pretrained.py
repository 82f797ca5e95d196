"""Reads and writes pretrained weights.

Names, shapes and dtypes are checked before any number is read. Then each array is copied to its
devices block by block, so the host never holds a second copy of the weights: arrays larger than a
block are assembled on the device.
"""

import fnmatch
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from fedjax_lab.checks import check_int
from fedjax_lab.models.base import Model
from fedjax_lab.models.decoder import decoder, params_shapes
from fedjax_lab.models.decoder_config import DecoderConfig, config_fields, read_decoder_config
from fedjax_lab.models.weight_files import HeldArrays, WeightFiles, write_folder
from fedjax_lab.models.weight_tables import (
    DECODER_IGNORED,
    EMBEDDING,
    HEAD,
    Stored,
    Table,
    decoder_table,
    few,
    stored_leaves,
)
from fedjax_lab.tree import by_path
from fedjax_lab.types import Params, PyTree

BLOCK_BYTES = 2**24  # part of a larger array that the host holds at a time
# Placement of params: None (the default device), one sharding for all, or shapes -> shardings.
Placement = Sharding | Callable[[PyTree], PyTree] | None


def load_pretrained(
    folder: str | Path,
    *,
    dtype: Any = None,
    sharding: Placement = None,
    remat: bool = False,
    adapter_dropout: float = 0.0,
) -> tuple[Model, Params]:
    """Load a Llama or Qwen2 model from a folder written by ``transformers``.

    ::

        model, params = models.load_pretrained("qwen2-0.5b")
        logits = model.apply(params, tokens)  # int [B, T] -> float32 [B, T, V]

    Nothing is downloaded or unpickled.

    Args:
      folder: folder with ``config.json``, and ``model.safetensors`` or an index and its files.
      dtype: dtype of the params, such as "bfloat16"; None: that of the files' first array.
      sharding: placement of the params. None: the default device. A ``jax.sharding.Sharding``: that
        of all params. Or a function of the params' shapes that returns a pytree of shardings, such
        as ``lambda shapes: fedjax_lab.model_shardings(shapes, "shard_map:1x4")``; each device then
        receives only its part.
      remat, adapter_dropout: as for ``models.decoder``.

    Returns:
      (model, params).

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, the decoder does not support the configuration, or an array is
        missing, left over, of another shape or has numbers that are not finite. A head beside
        tied embeddings is left out if it equals them; if not, it is an error.
      TypeError: ``sharding`` is of another kind.
      ImportError: the package safetensors is missing.
    """
    config = read_decoder_config(folder)
    files = WeightFiles(folder)
    if dtype is None:
        dtype = next((e.dtype for e in files.entries.values() if e.dtype is not None), "float32")
    model = decoder(config, dtype=dtype, remat=remat, adapter_dropout=adapter_dropout)
    shapes = params_shapes(model)
    ignored: tuple[str, ...] = DECODER_IGNORED
    if config.tie:
        _check_tied(files)
        ignored = (*ignored, HEAD)
    return model, read_into(files, _placed(shapes, sharding), decoder_table(config), ignored)


def _check_tied(files: WeightFiles) -> None:
    """Check that the head's own array in the files of a tied model, if any, is the embedding."""
    head, embedding = files.entries.get(HEAD), files.entries.get(EMBEDDING)
    if head is None or embedding is None:
        return
    is_equal = (head.shape, head.kind) == (embedding.shape, embedding.kind)
    if is_equal and head.dtype is not None and len(head.shape) == 2:
        count, width = head.shape
        rows = max(1, BLOCK_BYTES // max(8, width * 8))
        blocks = [slice(top, min(top + rows, count)) for top in range(0, count, rows)]
        is_equal = all(
            np.array_equal(files.read(HEAD, block), files.read(EMBEDDING, block))
            for block in blocks
        )
    if not is_equal:
        raise ValueError(
            f"{head.file}: {HEAD!r} differs from {EMBEDDING!r}, and tie_word_embeddings is true: "
            "versions of transformers differ in which of them they use as the head. Set "
            "tie_word_embeddings to false in config.json for a head of its own, or leave "
            f"{HEAD!r} out of the file."
        )


def save_pretrained(
    folder: str | Path,
    config: DecoderConfig,
    params: Params,
    *,
    max_shard_bytes: int = 2**30,
) -> None:
    """Write a decoder for ``transformers``: ``config.json`` and ``*.safetensors``.

    Args:
      folder: folder to create; an existing one must be empty.
      config: the decoder's configuration.
      params: params of ``models.decoder(config)``, without attached adapters: merge them first.
      max_shard_bytes: largest size of a file, unless a single array is larger. The host holds about
        as much of the params at a time.

    Raises:
      ValueError: the params are not those of the configuration, hold numbers that are not finite,
        or ``transformers`` has no such configuration.
      FileExistsError: the folder is not empty.
      FileNotFoundError: the parent folder does not exist.
      ImportError: the package safetensors is missing.
    """
    check_int("max_shard_bytes", max_shard_bytes, minimum=1)
    fields, table = config_fields(config), decoder_table(config)
    leaves = by_path(params)
    expected = by_path(params_shapes(decoder(config)))
    wanted = {path: leaf.shape for path, leaf in expected.items()}
    for path in sorted({*wanted, *leaves}):
        found = leaves[path].shape if path in leaves else "nothing"
        if found != wanted.get(path, "nothing"):
            raise ValueError(
                f"params have {found} at {path!r}; the configuration has "
                f"{wanted.get(path, 'nothing')}."
            )
        if not jnp.isfinite(leaves[path]).all():
            raise ValueError(f"params have a number at {path!r} that is not finite.")
    fields["torch_dtype"] = np.dtype(leaves["embedding"].dtype).name
    arrays: dict[str, Any] = {}
    for path, stored in table.items():
        arrays |= stored.parts(leaves[path])
    write_folder(Path(folder), fields, arrays, max_shard_bytes)


def load_safetensors(
    path: str | Path,
    into: PyTree,
    rename: Table | Callable[[str], Stored | str] | None = None,
    *,
    ignore: Sequence[str] = (),
) -> Params:
    """Read arrays into a pytree of known shapes.

    Args:
      path: a file ending in .safetensors; or a folder with ``model.safetensors``, or with an index
        and the files it names.
      into: pytree of arrays or of ``jax.ShapeDtypeStruct`` with the shapes, the dtypes (floats are
        converted) and, if a leaf has one, the sharding. Arrays are not changed.
      rename: path of a leaf, such as "layers/query/kernel" -> its name in the file, or how it is
        ``Stored``; a mapping or a function. None: the leaf's path, as in files that the package
        exports. ``weight_tables`` has tables for the decoder and for PyTorch's convolutional nets.
      ignore: patterns of additional names in the files, such as ``"*num_batches_tracked"``, or a
        single one.

    Returns:
      A pytree like ``into``.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged; an array is missing, left over, of another shape, not of
        floats, or not finite; or ``rename`` has no entry for a leaf.
      ImportError: the package safetensors is missing.
    """
    table: Table
    if rename is None:
        table = {path: path for path in by_path(into)}
    elif callable(rename):
        table = {path: rename(path) for path in by_path(into)}
    else:
        table = rename
    return read_into(WeightFiles(path), into, table, ignore, "rename")


def read_into(
    files: WeightFiles | HeldArrays,
    into: PyTree,
    table: Table,
    ignore: Sequence[str],
    argument: str = "table",
) -> Params:
    """Read arrays into a pytree of known shapes, after a check of names, shapes and dtypes.

    Args:
      table: path of a leaf -> how it is stored.
      argument: the argument that gave the table, for errors.

    Raises:
      ValueError: as ``load_safetensors``.
    """
    leaves = by_path(into)
    for path, leaf in leaves.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"into has {leaf.dtype} at {path!r}; it must hold floats.")
    plan = [*stored_leaves(leaves, table, "into", argument).values()]
    names = [name for leaf, stored in plan for name in stored.names(leaf.shape)]
    wanted = set(names)
    ignore = [ignore] if isinstance(ignore, str) else ignore
    left = [
        name
        for name in files.entries
        if name not in wanted and not any(fnmatch.fnmatchcase(name, p) for p in ignore)
    ]
    if missing := [name for name in names if name not in files.entries]:
        besides = f"; they have {few(left)} besides" if left else ""
        raise ValueError(f"the files lack {few(missing)}{besides}.")
    if left:
        raise ValueError(f"the files have {few(left)} besides, for which the model has no place.")
    for leaf, stored in plan:
        expected = stored.stored_shape(leaf.shape)
        for name in stored.names(leaf.shape):
            entry = files.entries[name]
            if entry.shape != expected or entry.dtype is None:
                raise ValueError(
                    f"{entry.file}: {name!r} is {entry.kind}{list(entry.shape)}; it must be floats "
                    f"{list(expected)}."
                )
    filled = [_fill(files, leaf, stored) for leaf, stored in plan]
    return jax.tree.unflatten(jax.tree.structure(into), filled)


def _fill(files: WeightFiles | HeldArrays, leaf: Any, stored: Stored) -> jax.Array:
    """Read a leaf and place it on its devices."""
    # As JAX holds it: without 64 bits, a number beyond float32 would become infinite on the device.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    shape, sharding = leaf.shape, getattr(leaf, "sharding", None)
    names = stored.names(shape)
    if np.dtype(dtype).itemsize * leaf.size <= BLOCK_BYTES:
        whole = np.empty(shape, dtype)
        for layer, name in enumerate(names):
            place = whole[layer, ...] if stored.is_stacked else whole
            place[...] = _in_dtype(stored.to_leaf(files.read(name)), dtype, files, name)
        return jnp.asarray(whole) if sharding is None else jax.device_put(whole, sharding)
    if sharding is None:
        return _fill_part(files, shape, dtype, stored, (slice(None),) * len(shape), None)
    parts = [
        _fill_part(files, shape, dtype, stored, index, device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _in_dtype(
    numbers: np.ndarray, dtype: Any, files: WeightFiles | HeldArrays, name: str
) -> np.ndarray:
    """Convert finite numbers of a file to a leaf's dtype, which must hold them."""
    if numbers.dtype == dtype:
        return numbers
    with np.errstate(over="ignore"):
        converted = numbers.astype(dtype)
    if not np.isfinite(converted).all():
        raise ValueError(
            f"{files.entries[name].file}: {name!r} has a number that {np.dtype(dtype)} does not "
            "hold."
        )
    return converted


def _fill_part(
    files: WeightFiles | HeldArrays,
    shape: tuple[int, ...],
    dtype: Any,
    stored: Stored,
    index: tuple[slice, ...],
    device: Any,
) -> jax.Array:
    """Assemble a device's part of a leaf, block by block."""
    ranges = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
    sizes = tuple(stop - start for start, stop in ranges)
    part = jnp.zeros(sizes, dtype, device=device)
    layers = range(*ranges[0]) if stored.is_stacked else (0,)
    inner = ranges[1:] if stored.is_stacked else ranges
    axes = tuple(range(len(inner))) if stored.axes is None else stored.axes
    names = stored.names(shape)
    for place, layer in enumerate(layers):
        for block, starts in _blocks(files, names[layer], stored, inner, axes):
            starts = (place, *starts) if stored.is_stacked else starts
            block = _in_dtype(block, dtype, files, names[layer])
            block = jax.device_put(block, part.sharding if device is None else device)
            part = _put(part, block, starts, axes)
            part.block_until_ready()  # otherwise blocks in transit would accumulate
    return part


def _blocks(
    files: WeightFiles | HeldArrays,
    name: str,
    stored: Stored,
    inner: list[tuple[int, int]],
    axes: tuple[int, ...],
) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """Yield parts of a stored array, and their positions in the device's part of the leaf."""
    if stored.image is not None or len(inner) not in (1, 2):
        # Small in practice: read entirely, then sliced.
        part: tuple[Any, ...] = (*(slice(*r) for r in inner), ...)
        whole = stored.to_leaf(files.read(name))[part]
        yield whole.transpose(np.argsort(axes)), (0,) * len(inner)
        return
    wanted = [inner[axes.index(axis)] for axis in range(len(axes))]  # in the file's order
    (first, last), rest = wanted[0], wanted[1:]
    width = rest[0][1] - rest[0][0] if rest else 1
    rows = max(1, BLOCK_BYTES // (width * 8))
    columns = slice(*rest[0]) if rest else None
    for top in range(first, last, rows):
        block = files.read(name, slice(top, min(top + rows, last)), columns)
        at = (top - first, *(0 for _ in rest))
        yield block, tuple(at[axis] for axis in axes)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(
    part: jax.Array, block: jax.Array, starts: tuple[jax.Array, ...], axes: tuple[int, ...]
) -> jax.Array:
    block = block.transpose(axes).astype(part.dtype)
    block = block.reshape((1,) * (part.ndim - block.ndim) + block.shape)
    return jax.lax.dynamic_update_slice(part, block, starts)


def _placed(shapes: PyTree, sharding: Placement) -> PyTree:
    if sharding is None:
        return shapes
    if not isinstance(sharding, Sharding) and not callable(sharding):
        raise TypeError(
            f"sharding is a {type(sharding).__name__}; it must be None, a jax.sharding.Sharding, or"
            " a function of the params' shapes."
        )
    where: Any = sharding if isinstance(sharding, Sharding) else sharding(shapes)
    where = jax.tree.broadcast(where, shapes) if isinstance(where, Sharding) else where
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        where,
    )
