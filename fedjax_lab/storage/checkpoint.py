"""Checkpoints of (state, round) through orbax, verified when they are read."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_lab.checks import warn
from fedjax_lab.clients.host_table import SeenRows
from fedjax_lab.storage.fingerprint import add_array
from fedjax_lab.tree import named_keys
from fedjax_lab.types import Params, PyTree

_BESIDE = 2**17  # bytes of a checkpoint's metadata
_LOOKS = 100  # attempts to list a directory whose checkpoints change, before a reader gives up


class _DamagedError(ValueError):
    """A checkpoint is damaged; an older one may be usable."""


class Checkpoints:
    """The checkpoints of a run, one for each saved round; the last two are kept.

    A save is atomic: a checkpoint gets its final name when it is complete. Each has a digest of its
    arrays and its round, so that damage or renaming is detected. The first saved checkpoint is read
    back.
    """

    def __init__(self, directory: Path, run_id: str = "", *, read_only: bool = False):
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._directory = Path(directory).absolute()
        self._run_id = run_id  # identity of the run; checkpoints of another run are refused
        self._reads_back = True
        with _raised_not_logged():  # orbax warns about a read-only manager
            if not read_only:
                self._directory.mkdir(parents=True, exist_ok=True)
            here = jax.process_index()  # only this process, so that orbax does not wait for others
            options = ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else 2,
                create=False,
                enable_async_checkpointing=False,
                read_only=read_only,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=here, active_processes={here}
                ),
            )
            self._manager = _listed(lambda: ocp.CheckpointManager(self._directory, options=options))

    def save(self, round: int, state: PyTree, extra: dict[str, Any], params: Params = ()) -> None:
        """Save a state.

        Args:
          params: the global model, pytree of arrays; stored separately, so that it can be read
            without the method.

        Raises:
          OSError: the disk is full (``errno.ENOSPC``), or the written files are missing.
        """
        if round in self._manager.all_steps():
            return
        arrays, model = _to_arrays(state), _to_arrays(params)
        # On a full disk, the threads of the storage library would print their own traces.
        size = sum(leaf.nbytes for leaf in (*arrays.values(), *model.values()))
        needed = size + len(json.dumps(extra)) + _BESIDE
        if shutil.disk_usage(self._directory).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._directory))
        leaves = jax.tree_util.tree_leaves_with_path(params)
        paths = [[_key(entry) for entry in named_keys(path)] for path, _ in leaves]
        named = dict(zip(model, paths, strict=True))
        about = [round, extra]
        meta = {
            "run": self._run_id,
            "round": round,
            "digest": _digest(arrays, about),
            "extra": extra,
            "params": {"paths": named, "digest": _digest(model, [named, about])},
            "empty": {"state": _empty(arrays), "params": _empty(model)},
        }
        items = {"state": _with_values(arrays), "params": _with_values(model)}
        items = {name: kept for name, kept in items.items() if kept}
        with _raised_not_logged():
            self._manager.save(
                round,
                args=self._ocp.args.Composite(
                    **{name: self._ocp.args.StandardSave(kept) for name, kept in items.items()},
                    meta=self._ocp.args.JsonSave(meta),
                ),
            )
            self._manager.wait_until_finished()
        if self._reads_back:
            self._read_back(round, list(items))
            self._reads_back = False

    def _read_back(self, round: int, items: list[str]) -> None:
        """Read the new checkpoint back, in case the file system behaves unexpectedly."""
        try:
            for item in items:
                self._read(round, item)
        except _DamagedError as error:
            raise OSError(
                errno.EIO,
                f"the first checkpoint was written but cannot be read ({error}) Choose another "
                "run_dir, such as one on another disk",
                str(self._directory),
            ) from error

    def rounds(self) -> list[int]:
        """Return the saved rounds, the last one first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def restore(
        self, like: PyTree, is_wanted: Callable[[int], bool] = lambda round: True
    ) -> tuple[int, PyTree, dict[str, Any]]:
        """Restore the last valid checkpoint: (round, state, extra).

        A damaged checkpoint is skipped with a warning. Later checkpoints are deleted.

        Args:
          like: template of the state: structure, shapes and dtypes, except the length of its
            ``SeenRows``.
          is_wanted: round -> whether its checkpoint may be used.

        Raises:
          ValueError: all checkpoints are damaged, or one belongs to another run.
          FileNotFoundError: there is no checkpoint.
        """
        expected = _by_name(like)
        free = dict(zip(expected, _is_of_any_length(like), strict=True))

        def shapes_of(arrays):
            return {name: (x.shape[free.get(name, 0) :], x.dtype) for name, x in arrays.items()}

        def read(round: int) -> tuple[PyTree, dict[str, Any]]:
            arrays, meta = self._read(round, "state")
            if shapes_of(expected) != shapes_of(arrays):
                raise ValueError(
                    f"the checkpoint {self._directory / str(round)} has arrays with other names, "
                    "shapes or dtypes than this run's state: it belongs to another model or method."
                )
            leaves = [arrays[name] for name in expected]
            return jax.tree.unflatten(jax.tree.structure(like), leaves), meta

        round, state, meta = self._newest(read, is_wanted)
        for newer in (step for step in self.rounds() if step > round):
            shutil.rmtree(self._directory / str(newer), ignore_errors=True)
        self._manager.reload()
        return round, state, meta["extra"]

    def restore_params(self) -> tuple[int, list[tuple[list[str | int], np.ndarray]], Any]:
        """Restore the params of the last intact checkpoint: (round, [(path, array)], extra).

        No file is changed. A path consists of a leaf's keys and indices, from the root.

        Raises:
          ValueError: all checkpoints are damaged, or one belongs to another run.
          FileNotFoundError: there is no checkpoint, or the last one has no separate params.
        """

        def read(round: int) -> tuple[PyTree, dict[str, Any]]:
            where = self._directory / str(round)
            if where.exists() and not (where / "params").exists():
                # A running simulation may have just deleted it.
                error = _DamagedError if self._is_out_of_date() else FileNotFoundError
                raise error(
                    f"the checkpoint {where} has no separate params, like those of earlier "
                    "versions; run the same settings in a new directory."
                )
            return self._read(round, "params")

        round, arrays, meta = self._newest(read)
        paths = meta["params"]["paths"]
        return round, [(paths[name], np.asarray(arrays[name])) for name in paths], meta["extra"]

    def _newest(
        self, read: Callable[[int], Any], is_wanted: Callable[[int], bool] = lambda round: True
    ) -> tuple[int, Any, dict[str, Any]]:
        """Return (round, result of ``read``, meta) of the last wanted and intact checkpoint."""
        looks = 1
        damage: list[str] = []  # what is wrong with the newest ones
        while rounds := [round for round in self.rounds() if is_wanted(round)]:
            if len(damage) == len(rounds):
                raise ValueError(
                    f"{damage[0]} No other checkpoint is intact: delete {self._directory} to begin "
                    "again, or choose another run_dir."
                )
            round = rounds[len(damage)]
            try:
                found, meta = read(round)
            except _DamagedError as error:
                if looks < _LOOKS and self._is_out_of_date():  # it was replaced by a newer one
                    _listed(self._manager.reload)
                    looks, damage = looks + 1, []
                else:
                    damage.append(str(error))
                continue
            if damage:
                warn(f"{damage[0]} The last intact checkpoint is that of round {round}.")
            return round, found, meta
        raise FileNotFoundError(f"there is no checkpoint in {self._directory}.")

    def _is_out_of_date(self) -> bool:
        """Return True if the checkpoints on disk have changed, because a run continues."""
        there = {int(path.name) for path in self._directory.iterdir() if path.name.isdecimal()}
        return there != set(self._manager.all_steps())

    def _read(self, round: int, item: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Read (arrays, meta) of a checkpoint's "state" or "params"."""
        where = self._directory / str(round)
        items = {item: self._ocp.args.StandardRestore(), "meta": self._ocp.args.JsonRestore()}
        try:
            with _raised_not_logged():
                restored = self._manager.restore(round, args=self._ocp.args.Composite(**items))
            arrays, meta = restored[item], restored["meta"]
            arrays |= _from_empty(meta.get("empty", {}).get(item, {}))
            saved_as, about = _round_of(meta, round)
            if item == "state":
                intact = meta["digest"] == _digest(arrays, about)
            else:
                about = [meta["params"]["paths"], about]
                intact = meta["params"]["digest"] == _digest(arrays, about)
        except Exception as error:  # orbax and tensorstore raise many kinds for a damaged file
            raise _DamagedError(
                f"the checkpoint {where} cannot be read ({type(error).__name__}: "
                f"{str(error).splitlines()[0][:200] if str(error) else 'no details'})."
            ) from error
        if not intact:
            raise _DamagedError(
                f"the checkpoint {where} is damaged: its content does not match its digest."
            )
        if saved_as != round:
            raise _DamagedError(
                f"the checkpoint {where} does not match its name: it was saved after round "
                f"{saved_as}."
            )
        if meta["run"] != self._run_id:
            raise ValueError(
                f"the checkpoint {where} and the config.json next to it belong to different runs; "
                "restore the right folder, or choose another run_dir."
            )
        return arrays, meta

    def close(self) -> None:
        """Release orbax's resources."""
        self._manager.close()


# When one array cannot be read, orbax closes its event loop while others are still being read. Each
# of them would print a trace when it comes, or when its task is collected.


class _Quiet:
    """A hook for exceptions that nobody can catch, which passes over those of a closed loop."""

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, found: Any) -> None:
        if not (
            isinstance(found.exc_value, RuntimeError) and "loop is closed" in str(found.exc_value)
        ):
            self._hook(found)


def _is_no_lost_read(record: logging.LogRecord) -> bool:
    """Return False for asyncio's word on a read of a checkpoint that nobody waited for."""
    message = record.getMessage()
    return not ("exception was never retrieved" in message and "OCDBT" in message)


@contextlib.contextmanager
def _raised_not_logged() -> Iterator[None]:
    """Suppress traces that orbax prints where it also raises the error."""
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    before, log.disabled = log.disabled, True
    logging.getLogger("asyncio").addFilter(_is_no_lost_read)  # once, however often it is added
    if not isinstance(hook, _Quiet):
        sys.unraisablehook = _Quiet(hook)
    try:
        yield
        sys.unraisablehook = hook  # it stays after an error, as arrays may still come
    finally:
        log.disabled = before


def _listed(look: Callable[[], Any]) -> Any:
    """Call ``look`` again if a checkpoint disappears while the directory is listed."""
    for _ in range(_LOOKS - 1):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return look()
    return look()


def _by_name(state: PyTree) -> dict[str, Any]:
    """Return leaves by path, because orbax loses NamedTuples and empty tuples."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        f"{number:04d}{jax.tree_util.keystr(path)}".replace("/", "|"): leaf
        for number, (path, leaf) in enumerate(leaves)
    }


def _to_arrays(state: PyTree) -> dict[str, np.ndarray]:
    """Return leaves by path, on the host."""
    return {name: np.asarray(leaf) for name, leaf in _by_name(state).items()}


def _round_of(meta: dict[str, Any], round: int) -> tuple[int, Any]:
    """Return (round of a checkpoint, the other contents of its digests)."""
    if "round" in meta:
        return meta["round"], [meta["round"], meta["extra"]]
    # Versions before 0.4.0: the last row, which the digest is about, has the round.
    rows = meta["extra"].get("rows")
    return (rows[-1]["round"] if rows else round), meta["extra"]


# Orbax saves no array of size 0, such as the rows of clients of whom none has been there.


def _with_values(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: leaf for name, leaf in arrays.items() if leaf.size}


def _empty(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return shapes and dtypes of leaves without values, as JSON."""
    empty = {name: leaf for name, leaf in arrays.items() if not leaf.size}
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in empty.items()}


def _from_empty(shapes: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, jax.numpy.dtype(kind)) for name, (shape, kind) in shapes.items()}


def _is_of_any_length(state: PyTree) -> list[int]:
    """Return for each leaf 1 if the length of its first axis is free, else 0."""

    def of(node):
        return jax.tree.map(lambda _: int(isinstance(node, SeenRows)), node)

    return jax.tree.leaves(jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, SeenRows)))


def _key(entry: Any) -> str | int:
    """Return one level of a leaf's path: a dict key, a list index, or an attribute name."""
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            key = getattr(entry, name)
            return key if isinstance(key, int) else str(key)
    return str(entry)


def _digest(arrays: dict[str, np.ndarray], extra: Any) -> str:
    digest = hashlib.sha256(json.dumps(extra, sort_keys=True).encode())
    for name in sorted(arrays):
        add_array(digest, name, arrays[name])
    return digest.hexdigest()
