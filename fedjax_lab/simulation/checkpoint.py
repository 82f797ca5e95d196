"""Checkpoints of (state, round) through orbax, verified when they are read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_lab.types import PyTree


class Checkpoints:
    """The checkpoints of one run, one step per saved round; the last two are kept.

    A save is atomic: a step appears under its final name when it is complete. Each holds a
    digest of its arrays, so that damage on the disk is noticed and not trained on.
    """

    def __init__(self, directory: Path):
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._directory = Path(directory).absolute()
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
        """
        if round in self._manager.all_steps():
            return
        arrays = _to_arrays(state)
        self._manager.save(
            round,
            args=self._ocp.args.Composite(
                state=self._ocp.args.StandardSave(arrays),
                meta=self._ocp.args.JsonSave({"digest": _digest(arrays), "extra": extra}),
            ),
        )
        self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """The last saved round; None if there is none."""
        return self._manager.latest_step()

    def restore(self, like: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
        """The last checkpoint: (round, state, extra).

        Args:
          like: a state of the same structure, shapes and dtypes.

        Raises:
          ValueError: the checkpoint is damaged, or belongs to another model or method.
          FileNotFoundError: there is no checkpoint.
        """
        round = self.latest()
        if round is None:
            raise FileNotFoundError(f"there is no checkpoint in {self._directory}.")
        where = self._directory / str(round)
        expected = _to_arrays(like)
        try:
            restored = self._manager.restore(
                round,
                args=self._ocp.args.Composite(
                    state=self._ocp.args.StandardRestore(), meta=self._ocp.args.JsonRestore()
                ),
            )
            arrays, meta = restored["state"], restored["meta"]
            intact = meta["digest"] == _digest(arrays)
        except Exception as error:  # orbax and tensorstore raise many kinds for a damaged file
            raise ValueError(
                f"the checkpoint {where} cannot be read ({type(error).__name__}: "
                f"{str(error).splitlines()[0][:200] if str(error) else 'no details'}). Delete this "
                "folder to resume from an older checkpoint."
            ) from error
        if not intact:
            raise ValueError(
                f"the checkpoint {where} is damaged: its arrays do not match their digest. Delete "
                "this folder to resume from an older checkpoint."
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


def _to_arrays(state: PyTree) -> dict[str, np.ndarray]:
    """Leaves by path, on the host. Orbax forgets NamedTuples and empty tuples; paths do not."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        f"{number:04d}{jax.tree_util.keystr(path)}".replace("/", "|"): np.asarray(leaf)
        for number, (path, leaf) in enumerate(leaves)
    }


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        leaf = np.ascontiguousarray(arrays[name])
        digest.update(json.dumps([name, leaf.shape, str(leaf.dtype)]).encode())
        digest.update(leaf.view(np.uint8).data if leaf.ndim else leaf.tobytes())
    return digest.hexdigest()
