"""``fedjax-lab rerun``: repeat a run from its config.json and compare bit for bit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_lab.command.commands import RerunCommand
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.launch import start, status_of
from fedjax_lab.machine.json_file import read_json
from fedjax_lab.report.runs import RERUN
from fedjax_lab.storage.rows import read_metrics
from fedjax_lab.storage.run_dir import (
    CONFIG,
    METRICS,
    SUMMARY,
    differences,
    read_config,
    write_json,
)
from fedjax_lab.storage.saved_run import SavedRun, load_run
from fedjax_lab.tree import path_text

_DIFFERS = 1


def rerun_command(command: RerunCommand) -> int:
    """Repeat a run and print whether the bits are equal; returns the exit status.

    Raises:
      FileNotFoundError: there is no such run.
      FileExistsError: the new directory has a finished run.
      ValueError: the run did not end, or was not made by the command line.
      TypeError, OSError, ImportError: as ``runner.run``.
    """
    old = Path(command.run_dir)
    new = Path(command.out or f"{str(old).rstrip('/')}-rerun")
    before = load_run(old)
    config = finished_config(old)
    if old.resolve() == new.resolve() or _has_ended(new):
        raise FileExistsError(
            f"out is {str(new)!r}, which has a finished run; delete it, or give another --out."
        )
    start(quiet=command.quiet)
    config = config.replace(run_dir=str(new), data_dir=command.data_dir)
    from fedjax_lab.command.runner import run

    result = run(config, progress=not command.quiet)
    if result.interrupted:
        return status_of(result)
    after = load_run(new)
    found = first_difference(old, new, before, after)
    write_json(new / RERUN, {"of": str(old.resolve()), "equal": found is None, "first": found})
    for line in described(found, before, after):
        print(line)
    return 0 if found is None else _DIFFERS


def finished_config(run_dir: str | Path) -> RunConfig:
    """Read the settings of a finished run of the command line.

    Raises:
      FileNotFoundError: there is no run in the directory.
      ValueError: the run has not ended, or the command line did not make it.
    """
    path = Path(run_dir)
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"run_dir is {str(path)!r}, which has no run: no {CONFIG}.")
    if not _has_ended(path):
        raise ValueError(f"run_dir is {str(path)!r}, an unfinished run; resume it first.")
    if "run_config" not in read_config(path):
        raise ValueError(
            f"run_dir is {str(path)!r}, whose {CONFIG} has no run_config: the command line did not "
            "make it and cannot repeat it."
        )
    return RunConfig.from_file(path / CONFIG)


def _has_ended(path: Path) -> bool:
    """Return True if a run finished or diverged."""
    try:
        return not read_json(path / SUMMARY)["interrupted"]
    except (OSError, ValueError, KeyError):
        return False


def first_difference(old: Path, new: Path, before: SavedRun, after: SavedRun) -> str | None:
    """Describe the first difference of two runs' metrics.jsonl or params; None if equal.

    Raises:
      ValueError: a metrics.jsonl is damaged.
    """
    rows = read_metrics(old / METRICS), read_metrics(new / METRICS)
    for there, now in zip(*rows, strict=False):
        for name in dict.fromkeys([*there, *now]):
            # As text: equal numbers have equal bits, but for the sign of 0.
            if json.dumps(there.get(name)) != json.dumps(now.get(name)):
                return (
                    f"{METRICS}, round {there['round']}: {name} "
                    f"(there {there.get(name)!r}, now {now.get(name)!r})"
                )
    if len(rows[0]) != len(rows[1]):
        return f"{METRICS}: there {len(rows[0])} rows, now {len(rows[1])}"
    if before.round != after.round:  # diverged, with another checkpoint_every
        return None
    # By their keys: two of them may have the same text.
    leaves = [dict(jax.tree_util.tree_leaves_with_path(run.params)) for run in (before, after)]
    for path in dict.fromkeys([*leaves[0], *leaves[1]]):
        name = path_text(path) or "params"
        if found := _different_leaf(name, *(of_run.get(path) for of_run in leaves)):
            return f"params, {found}"
    return None


def _different_leaf(name: str, there: Any, now: Any) -> str | None:
    if there is None or now is None:
        return f"{name}: {'there' if now is None else 'now'} only"
    if (there.shape, there.dtype) != (now.shape, now.dtype):
        return f"{name}: there {there.dtype}{there.shape}, now {now.dtype}{now.shape}"
    bits = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in (there, now)]
    places = np.flatnonzero(bits[0] != bits[1])
    if not len(places):
        return None
    index = np.unravel_index(places[0] // there.dtype.itemsize, there.shape)
    where = f"{name}{[int(i) for i in index]}"
    return f"{where} (there {there[index]!s}, now {now[index]!s})"


def described(found: str | None, before: SavedRun, after: SavedRun) -> Sequence[str]:
    """Describe the result of a repetition."""
    versions = differences(before.config.get("versions", {}), after.config.get("versions", {}))
    about = [f"versions that differ: {'; '.join(versions)}" if versions else "equal versions"]
    if found is None:
        numbers = sum(leaf.size for leaf in jax.tree.leaves(after.params))
        rows = len(after.history)
        return [f"equal bits: {rows} rows of {METRICS}, {numbers:,} numbers of params", *about]
    same = {name: None for name in ("versions", "run_config")}
    other = differences({**before.config, **same}, {**after.config, **same})
    about += [f"{CONFIG} differs: {'; '.join(other)}"] if other else []
    return [f"different bits, first at {found}", *about]
