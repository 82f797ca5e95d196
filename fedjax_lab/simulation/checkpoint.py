"""Checkpoints of (state, round) through orbax, verified when they are read."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_lab.types import PyTree

_BESIDE = 2**17  # bytes of a checkpoint's metadata


class _DamagedError(ValueError):
    """A checkpoint that cannot be used, where an older one may be."""


class Checkpoints:
    """The checkpoints of one run, one step per saved round; the last two are kept.

    A save is atomic: a step appears under its final name when it is complete. Each holds a
    digest of its arrays, so that damage on the disk is noticed and not trained on.
    """

    def __init__(self, directory: Path, run_id: str = ""):
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._directory = Path(directory).absolute()
        self._run_id = run_id  # whose they are: a folder from another run is refused
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, create=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def save(self, round: int, state: PyTree, extra: dict[str, Any]) -> None:
        """Save a state.

        Args:
          round: finished rounds.
          state: pytree of arrays.
          extra: any JSON value.

        Raises:
          OSError: there is no room for it (``errno.ENOSPC``).
        """
        if round in self._manager.all_steps():
            return
        arrays = _to_arrays(state)
        # Where the disk is full, the threads of the storage library print traces of their own.
        needed = sum(leaf.nbytes for leaf in arrays.values()) + len(json.dumps(extra)) + _BESIDE
        if shutil.disk_usage(self._directory).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._directory))
        meta = {"run": self._run_id, "digest": _digest(arrays, extra), "extra": extra}
        with _raised_not_logged():
            self._manager.save(
                round,
                args=self._ocp.args.Composite(
                    state=self._ocp.args.StandardSave(arrays), meta=self._ocp.args.JsonSave(meta)
                ),
            )
            self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """The last saved round; None if there is none."""
        return self._manager.latest_step()

    def rounds(self) -> list[int]:
        """The saved rounds, the last one first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def restore(
        self, like: PyTree, is_wanted: Callable[[int], bool] = lambda round: True
    ) -> tuple[int, PyTree, dict[str, Any]]:
        """The last checkpoint that is wanted and whole: (round, state, extra).

        One that is damaged is left out with a warning. Later ones are then taken away.

        Args:
          like: a state of the same structure, shapes and dtypes.
          is_wanted: of a number of rounds, whether its checkpoint counts.

        Raises:
          ValueError: all checkpoints are damaged, or one belongs to another run.
          FileNotFoundError: there is no checkpoint.
        """
        saved = self.rounds()
        rounds = [round for round in saved if is_wanted(round)]
        if not rounds:
            raise FileNotFoundError(f"there is no checkpoint in {self._directory}.")
        damage = ""
        for round in rounds:
            try:
                found = self._read(round, like)
            except _DamagedError as error:
                damage = damage or str(error)
                continue
            for newer in (step for step in saved if step > round):
                if newer in rounds:
                    warnings.warn(
                        f"{damage} The run goes on from round {round}.", UserWarning, stacklevel=2
                    )
                shutil.rmtree(self._directory / str(newer), ignore_errors=True)
            self._manager.reload()
            return found
        raise ValueError(
            f"{damage} No other one is whole: delete {self._directory} to begin again, or choose "
            "another run_dir."
        )

    def _read(self, round: int, like: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
        where = self._directory / str(round)
        expected = _to_arrays(like)
        try:
            with _raised_not_logged():
                restored = self._manager.restore(
                    round,
                    args=self._ocp.args.Composite(
                        state=self._ocp.args.StandardRestore(), meta=self._ocp.args.JsonRestore()
                    ),
                )
            arrays, meta = restored["state"], restored["meta"]
            intact = meta["digest"] == _digest(arrays, meta["extra"])
        except Exception as error:  # orbax and tensorstore raise many kinds for a damaged file
            raise _DamagedError(
                f"the checkpoint {where} cannot be read ({type(error).__name__}: "
                f"{str(error).splitlines()[0][:200] if str(error) else 'no details'})."
            ) from error
        if not intact:
            raise _DamagedError(
                f"the checkpoint {where} is damaged: its content does not match its digest."
            )
        if meta["run"] != self._run_id:
            raise ValueError(
                f"the checkpoint {where} belongs to another run than the config.json beside it; "
                "put the right folder back, or choose another run_dir."
            )
        shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in arrays.items()}
        if shapes != {name: (leaf.shape, leaf.dtype) for name, leaf in expected.items()}:
            raise ValueError(
                f"the checkpoint {where} holds arrays of other names, shapes or dtypes than this "
                "run's state: it belongs to another model or method."
            )
        leaves = [arrays[name] for name in expected]
        return round, jax.tree.unflatten(jax.tree.structure(like), leaves), meta["extra"]

    def close(self) -> None:
        """Release what orbax holds."""
        self._manager.close()


@contextlib.contextmanager
def _raised_not_logged() -> Iterator[None]:
    """Leave out orbax's log, a page of threads' traces, where it raises the error as well."""
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _to_arrays(state: PyTree) -> dict[str, np.ndarray]:
    """Leaves by path, on the host. Orbax forgets NamedTuples and empty tuples; paths do not."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        f"{number:04d}{jax.tree_util.keystr(path)}".replace("/", "|"): np.asarray(leaf)
        for number, (path, leaf) in enumerate(leaves)
    }


def _digest(arrays: dict[str, np.ndarray], extra: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(extra, sort_keys=True).encode())
    for name in sorted(arrays):
        leaf = np.ascontiguousarray(arrays[name])
        digest.update(json.dumps([name, leaf.shape, str(leaf.dtype)]).encode())
        digest.update(leaf.view(np.uint8).data if leaf.ndim else leaf.tobytes())
    return digest.hexdigest()
