"""The directory of a search, from which it resumes."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_lab.machine.atomic_files import write_atomically
from fedjax_lab.machine.json_file import plain_number_or_text, read_json
from fedjax_lab.storage.rows import plain_row
from fedjax_lab.storage.run_dir import write_json
from fedjax_lab.tuning.candidates import Candidate
from fedjax_lab.tuning.search_result import Trial

TRIALS = "trials.json"


class SearchLog:
    """The directory of a search: trials, and the states of the points that continue.

    Raises:
      FileExistsError: the directory has another search.
      ValueError: its file of trials is damaged.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any]):
        self._folder = None if folder is None else Path(folder)
        text = json.dumps(settings, sort_keys=True, default=plain_number_or_text)
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        self._done: dict[str, Any] = {}
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / TRIALS
        if not file.exists():
            return
        found = read_json(file, {"search": str}, hint="Choose another run_dir.")
        if found["search"] != self._digest:
            raise FileExistsError(
                f"run_dir {str(self._folder)!r} holds another search: other methods, spaces, data, "
                "rounds, seeds or versions. Choose another directory."
            )
        self._done = found["methods"]

    def load(self, name: str) -> tuple[int, list[Candidate], list[Trial]]:
        """Load (number of finished rungs, candidates that continue, trials) of a method."""
        if self._folder is None or name not in self._done:
            return 0, [], []
        found = self._done[name]
        candidates = [
            Candidate(**{**candidate, "score": _number(candidate["score"])})
            for candidate in found["lanes"]
        ]
        if found["states"]:
            with np.load(self._folder / found["states"], allow_pickle=False) as file:
                leaves = [file[f"leaf{i}"] for i in range(len(file.files))]
            # NumPy forgets what bfloat16 is, but for its size.
            dtypes = found.get("dtypes", [leaf.dtype for leaf in leaves])
            leaves = [leaf.view(jnp.dtype(d)) for leaf, d in zip(leaves, dtypes, strict=True)]
            for i, place in enumerate(found["held"]):
                candidates[place].leaves = [leaf[i] for leaf in leaves]
        trials = [Trial(**{**t, "score": _number(t["score"])}) for t in found["trials"]]
        return found["rungs"], candidates, trials

    def save(
        self, name: str, rungs: int, candidates: Sequence[Candidate], trials: Sequence[Trial]
    ) -> None:
        """Store a method's search after a rung, or after a batch of the first one."""
        if self._folder is None:
            return
        before = self._done.get(name, {}).get("states")
        held = [place for place, candidate in enumerate(candidates) if candidate.leaves is not None]
        states = None
        arrays: dict[str, Any] = {}
        if held:
            leaves = zip(*(candidates[place].leaves or [] for place in held), strict=True)
            arrays = {f"leaf{i}": np.stack(leaf) for i, leaf in enumerate(leaves)}
            # A name of its own: an interruption before the last line leaves the old pair.
            states = f"{hashlib.sha256(name.encode()).hexdigest()[:16]}-{rungs}-{len(trials)}.npz"
            with write_atomically(self._folder / states, "wb") as file:
                np.savez(file, **arrays)
        without = [dataclasses.replace(candidate, leaves=None) for candidate in candidates]
        self._done[name] = {
            "rungs": rungs,
            "lanes": [plain_row(dataclasses.asdict(candidate)) for candidate in without],
            "held": held,
            "states": states,
            "dtypes": [str(leaf.dtype) for leaf in arrays.values()],
            "trials": [plain_row(trial._asdict()) for trial in trials],
        }
        write_json(self._folder / TRIALS, {"search": self._digest, "methods": self._done})
        if before and before != states:
            (self._folder / before).unlink(missing_ok=True)


def _number(score: float | None) -> float:
    return math.nan if score is None else score
