"""A run directory: config.json, metrics.jsonl, times.jsonl, clients.jsonl, checkpoints/ and so on.

No file is half-written, except the last line of a .jsonl file. The last checkpoint also contains
the rows of ``metrics.jsonl`` up to its round, and they are read from there.
"""

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from fedjax_lab.checks import warn
from fedjax_lab.descriptions import may_agree
from fedjax_lab.machine.atomic_files import write_atomically
from fedjax_lab.machine.json_file import Kinds, plain_number, read_json
from fedjax_lab.storage.fingerprint import has_old_scheme
from fedjax_lab.storage.lock import HOLDER, LOCK

CONFIG, METRICS, TIMES = "config.json", "metrics.jsonl", "times.jsonl"
CHECKPOINTS, SUMMARY, PARTITION = "checkpoints", "summary.json", "partition.json"
CLIENTS = "clients.jsonl"
SWEEP = "sweep.json"  # in the directory of a sweep: its points and seeds
# Entries of config.json that simulations read, not only compare.
_KINDS = {
    **dict.fromkeys(("rounds", "eval_every", "seed", "num_devices"), int),
    **dict.fromkeys(("algorithm", "client_map", "client_store"), str),
    **dict.fromkeys(("hyperparameters", "partition", "content", "versions", "asked"), dict),
}
_VERSIONED = ("fedjax_lab", "jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine a run's numbers."""
    from fedjax_lab.version import __version__

    found = {name: metadata.version(name) for name in _VERSIONED[1:]}
    return {"fedjax_lab": __version__, **found}


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: a reader sees the old or the new file, never a part.

    A scalar of NumPy becomes the number that it is.
    """
    with write_atomically(path) as file:
        json.dump(value, file, indent=2, sort_keys=True, allow_nan=False, default=plain_number)
        file.write("\n")


def open_run_dir(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Create the run directory, or check that an existing one belongs to the same config.

    These may differ: ``versions`` and ``num_devices``, the choices of "auto" that depend on them,
    and then the hash of the program; and the number of ``rounds``, which ``write_rounds`` changes.
    Everything else must be equal.

    Args:
      config: identity of the run; a JSON object.

    Returns:
      The config as the directory has it.

    Raises:
      FileExistsError: the directory has another run, or other files.
      ValueError: its config.json cannot be read.
    """
    config = json.loads(json.dumps(config, default=plain_number))
    file = path / CONFIG
    if not file.exists():
        if any(file for file in path.iterdir() if not is_leftover(file.name)):
            raise FileExistsError(
                f"run_dir is {str(path)!r}, which has files but no {CONFIG}; it must be empty, "
                "new, or a directory of the same run."
            )
        write_json(file, config)
        return config
    before = read_config(path)
    if "asked" not in before:  # a directory of version 0.3.0, which knows what ran alone
        config = {name: value for name, value in config.items() if name != "asked"}
    config["hyperparameters"] = _reconciled(before, config)
    _take_old_hashes(path, before, config)
    changed = differences(_comparable(before, config), _comparable(config, before))
    if changed:
        asked, there = config.get("rounds"), before.get("rounds")
        hint = "" if asked == there else _OTHER_ROUNDS.format(asked=asked, there=there)
        raise FileExistsError(
            f"run_dir is {str(path)!r}, which has a run with another config: "
            f"{'; '.join(changed)}.{hint} Choose another directory."
        )
    devices, now = (found.get("num_devices") for found in (before, config))
    if devices != now:
        warn(
            f"run_dir is {str(path)!r}, whose first rounds ran on {devices} devices; the next "
            f"ones run on {now}. Sums are added in another order, so results agree with an "
            "uninterrupted run only up to rounding.",
        )
    return before


# Hyperparameters of wrappers; the hash of the program distinguishes directories without them.
_NOT_RECORDED_IN_0_4 = ("is_personal", "fine_tune_")


def _reconciled(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters as ``before`` may have them: described otherwise, or missing."""
    there, here = (config.get("hyperparameters", {}) for config in (before, now))
    return {
        name: there[name] if name in there and may_agree(there[name], value) else value
        for name, value in here.items()
        if name in there or not name.startswith(_NOT_RECORDED_IN_0_4)
    }


def _take_old_hashes(path: Path, before: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Take over hashes of functions by version 0.4, which nothing can be compared with."""
    there, here = (found.get("content") or {} for found in (before, config))
    functions = ("evaluate", "diagnose", "sample_cohort")
    old = [name for name in functions if here.get(name) and has_old_scheme(there.get(name))]
    if old:
        config["content"] = {**here, **{name: there[name] for name in old}}
        warn(
            f"run_dir is {str(path)!r}, which version 0.4 or an earlier one began; whether "
            f"{' and '.join(old)} is still the same function is not checked.",
        )


_OTHER_ROUNDS = (
    " The run had {there} rounds, and now {asked} are requested. If nothing else was changed, a "
    "schedule depends on their number, such as cosine; it would change the finished rounds, so "
    "such a run cannot be extended."
)


def write_rounds(path: Path, config: Mapping[str, Any], rounds: int) -> None:
    """Update the number of rounds in config.json, which has ``config``."""
    after = _with_rounds(config, rounds)
    if after != config:
        write_json(path / CONFIG, after)


def _with_rounds(config: Mapping[str, Any], rounds: int | None) -> dict[str, Any]:
    """Return a config with another number of rounds, also in the settings of the command line."""
    changed = {**config, "rounds": rounds}
    settings = config.get("run_config")
    if isinstance(settings, Mapping) and "rounds" in settings:
        changed["run_config"] = {**settings, "rounds": rounds}
    return changed


def read_config(
    path: Path, required: Kinds | None = None, optional: Kinds | None = None
) -> dict[str, Any]:
    """Read a run directory's config.json.

    Args:
      required, optional: entries that the caller reads besides, as in ``read_json``.

    Raises:
      ValueError: the file cannot be read, lacks an entry, or an entry has another type.
    """
    hint = "Restore a copy of it, or choose another run_dir."
    config = read_json(path / CONFIG, required, {**_KINDS, **(optional or {})}, hint)
    settings = config.get("run_config")
    if isinstance(settings, dict):
        config["run_config"] = renamed_settings(settings)
    return config


def renamed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings of the command line from versions before 0.4.0.

    Args:
      settings: settings by name.
    """
    return {_RENAMED.get(name, name): value for name, value in settings.items()}


_RENAMED = {"dp_clip": "dp_clip_norm", "dp_noise": "dp_noise_multiplier"}


def is_leftover(name: str) -> bool:
    """Return True if a run that was killed before its first file was whole may have left this one.

    Args:
      name: name of a file in a run directory.
    """
    return name in (LOCK, HOLDER) or name.endswith(".tmp")


def _comparable(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the entries that may differ."""
    kept = _on_any_machine(config)
    content = kept.get("content")
    others = any(
        config.get(name) != other.get(name) for name in ("versions", "num_devices", "client_map")
    )
    if not others and "asked" not in config:
        kept["client_store"] = config.get("client_store")
    elif others and isinstance(content, dict):
        # Another version, and a program for other devices, may write the same operations
        # differently.
        kept["content"] = {**content, "program": None}
    return kept


def _on_any_machine(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without rounds, versions, and entries that depend on the devices."""
    kept = {**_with_rounds(config, None), "versions": None, "num_devices": None}
    if kept.get("client_store") == "sharded":  # whether rows can be divided is up to the devices
        kept["client_store"] = "device"
    kept |= kept.pop("asked", {})  # of "auto", what it came to is up to the devices, too
    # To be read; the program and other entries have what they compute.
    for name in ("functions", "personal_models", "arrays", "client_metrics"):
        kept.pop(name, None)
    if isinstance(data := kept.get("data"), dict):  # its ``table`` is to be read, too
        kept["data"] = {name: value for name, value in data.items() if name != "table"}
    return kept


def run_id(config: Mapping[str, Any]) -> str:
    """Hash the identity of a run, which its checkpoints store; it does not depend on ``rounds``."""
    kept = _on_any_machine(config)
    kept["content"] = {**kept.get("content", {}), "program": None}
    text = json.dumps(kept, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def disk_full_in_one_line(path: Path) -> Iterator[None]:
    """Turn the errors that libraries raise on a full disk into one clear ``OSError``.

    Raises:
      OSError: with ``errno.ENOSPC``.
    """
    try:
        yield
    except Exception as error:
        if not _says_disk_full(error):
            raise
        raise OSError(
            errno.ENOSPC,
            "the disk is full; the earlier files are intact, and the same call resumes from them "
            "once there is space",
            str(path),
        ) from None


def _says_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


_NAMES = {
    "params": "the first params",
    "state": "the first state",
    "frozen": "the frozen weights",
    "examples": "the clients' data",
    "program": "the compiled rounds: loss, method, optimisers, schedules",
    "evaluate": "the function evaluate",
    "diagnose": "the function diagnose",
    "sample_cohort": "the function sample_cohort",
}


def differences(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    prefix: str = "",
    words: tuple[str, str] = ("there", "now"),
) -> list[str]:
    """Describe the differences between two configs, once for each innermost value.

    Args:
      words: words before a value of ``before`` and before a value of ``now``.
    """
    found = []
    for key in sorted({*before, *now}):
        there, here = before.get(key), now.get(key)
        if isinstance(there, dict) and isinstance(here, dict):
            found += differences(there, here, f"{prefix}{key}.", words)
        elif there != here and prefix == "content.":
            said = f"{words[0]} {there}, {words[1]} {here}"
            found.append(f"{_NAMES.get(key, key)} ({prefix}{key}: {said})")
        elif there != here:
            found.append(f"{prefix}{key} ({words[0]} {there!r}, {words[1]} {here!r})")
    return found
