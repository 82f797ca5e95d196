"""A run directory: config.json, metrics.jsonl, times.jsonl, checkpoints/, summary.json.

Nothing in it is half-written, save the last line of a .jsonl file.
"""

import json
import math
import os
from importlib import metadata
from pathlib import Path
from typing import Any

CONFIG, METRICS, TIMES = "config.json", "metrics.jsonl", "times.jsonl"
CHECKPOINTS, SUMMARY, PARTITION = "checkpoints", "summary.json", "partition.json"
_VERSIONED = ("fedjax_lab", "jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str]:
    """Versions of the packages that decide a run's numbers."""
    from fedjax_lab.version import __version__

    found = {name: metadata.version(name) for name in _VERSIONED[1:]}
    return {"fedjax_lab": __version__, **found}


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: whoever reads it finds the old or the new one, whole.

    Args:
      path: the file.
      value: any JSON value.
    """
    scratch = path.with_name(path.name + ".tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def open_run_dir(path: Path, config: dict[str, Any]) -> bool:
    """Create the run directory, or check that an existing one belongs to the same config.

    ``versions`` may differ; everything else may not.

    Args:
      path: the directory.
      config: what the run is; a JSON object.

    Returns:
      Whether there was a run before.

    Raises:
      FileExistsError: the directory holds another run, or something else.
      ValueError: its config.json cannot be read.
    """
    config = json.loads(json.dumps(config))
    file = path / CONFIG
    if not file.exists():
        if path.exists() and any(path.iterdir()):
            raise FileExistsError(
                f"run_dir is {str(path)!r}, which holds files but no {CONFIG}; it must be empty, "
                "new, or a directory of the same run."
            )
        path.mkdir(parents=True, exist_ok=True)
        write_json(file, config)
        return False
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}).") from error
    changed = _differences({**before, "versions": None}, {**config, "versions": None})
    if changed:
        raise FileExistsError(
            f"run_dir is {str(path)!r}, which holds a run with another config: "
            f"{'; '.join(changed)}. Choose another directory."
        )
    return True


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two JSON objects, said once for each innermost value."""
    found = []
    for key in sorted({*before, *now}):
        there, here = before.get(key), now.get(key)
        if isinstance(there, dict) and isinstance(here, dict):
            found += _differences(there, here, f"{prefix}{key}.")
        elif there != here:
            found.append(f"{prefix}{key} (there {there!r}, now {here!r})")
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl.

    Args:
      path: the file.

    Raises:
      ValueError: a line is no JSON object (the last one may be cut off and is then ignored).
    """
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break  # the run was killed while it wrote this line
            raise ValueError(f"{path}, line {number}, is not valid JSON ({error}).") from error
    return rows


class MetricsFile:
    """Appends rows to metrics.jsonl; begins with the rows that a resumed run keeps."""

    def __init__(self, path: Path, kept: list[dict[str, Any]]):
        scratch = path.with_name(path.name + ".tmp")
        scratch.write_text("".join(map(_line, kept)), encoding="utf-8")
        os.replace(scratch, path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and flush it.

        Args:
          row: {name: number}; NaN and infinities become null.
        """
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(row: dict[str, Any]) -> str:
    # JSON has no NaN or infinity: a diverged run's loss is null.
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
