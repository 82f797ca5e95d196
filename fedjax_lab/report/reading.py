"""Typed readers of a run directory's files; errors name the damaged file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_lab.storage.json_file import parse_json
from fedjax_lab.storage.run_dir import CONFIG, METRICS, differences, read_metrics
from fedjax_lab.storage.saved_run import load_run

_KINDS: dict[type, str] = {dict: "an object", int: "a whole number", str: "a text", list: "a list"}
# Of config.json; a dot leads into an object.
_REQUIRED = {"algorithm": str, "seed": int, "rounds": int}
_OPTIONAL = {
    **dict.fromkeys(("hyperparameters", "partition", "run_config", "data", "versions"), dict),
    **dict.fromkeys(("run_config.option", "run_config.model_option"), dict),
    **dict.fromkeys(("run_config.dataset", "partition.spec", "partition.hash", "data.hash"), str),
    **dict.fromkeys(("num_clients", "run_config.init_seed"), int),
}
_OF_CLIENTS = ("client_test_accuracy", "client_test_mean_squared_error", "client_test_examples")
_OF_SUMMARY = {"stopped": str, "round": int, **dict.fromkeys(_OF_CLIENTS, list)}
_OF_PARTITION = {"spec": str, "seed": int, "hash": str, "label_histogram": list, "names": list}
_OF_LANDSCAPE = dict.fromkeys(("eigenvalues", "offsets", "losses"), list)


def read_config(path: Path) -> dict[str, Any]:
    """Read and check a run's config.json.

    Raises:
      ValueError: it cannot be read, or lacks an entry of a config.
    """
    config = read_json(path, _OPTIONAL)
    for name, kind in _REQUIRED.items():
        if not _is(config.get(name), kind):
            raise ValueError(
                f"{path} is no run's config: {name!r} is {_shown(config.get(name))}; it must be "
                f"{_KINDS[kind]}."
            )
    if not config["algorithm"].isprintable():
        raise ValueError(f"{path}: 'algorithm' is {_shown(config['algorithm'])}; not printable.")
    return config


def read_summary(path: Path) -> dict[str, Any]:
    """Read a run's summary.json; {} if there is none.

    Raises:
      ValueError: it cannot be read, or a value has another type.
    """
    summary = read_json(path, _OF_SUMMARY, missing={})
    for name, value in summary.items():
        if name.startswith("worst_10_percent_"):
            _check_number(value, f"{path}: {name!r}")
    each = {name: summary[name] for name in _OF_CLIENTS if summary.get(name) is not None}
    for name, values in each.items():
        for value in values:
            _check_number(value, f"{path}: a value of {name!r}")
    if len({len(values) for values in each.values()}) > 1:
        raise ValueError(f"{path}: {' and '.join(map(repr, each))} must have equal lengths.")
    return summary


def read_partition(path: Path) -> dict[str, Any]:
    """Read a run's partition.json; {} if there is none.

    Raises:
      ValueError: as ``read_summary``.
    """
    partition = read_json(path, _OF_PARTITION, missing={})
    histogram = partition.get("label_histogram")
    if histogram is not None:
        _check_number(histogram, f"{path}: 'label_histogram'")
        lengths = {len(row) if isinstance(row, list) else 0 for row in histogram}
        named = {"spec", "seed"} <= partition.keys()
        if len(lengths) != 1 or not min(lengths) or not named:
            raise ValueError(
                f"{path}: 'label_histogram' must have rows of equal lengths, and a "
                "spec and a seed beside it."
            )
    return partition


def read_landscape(path: Path) -> dict[str, Any]:
    """Read a run's landscape.json; {} if there is none.

    Raises:
      ValueError: as ``read_summary``.
    """
    landscape = read_json(path, _OF_LANDSCAPE, missing={})
    for name in _OF_LANDSCAPE:
        _check_number(landscape.get(name), f"{path}: {name!r}")
    return landscape


def read_json(
    path: Path, kinds: Mapping[str, type], missing: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Read a file with a JSON object, and check its values' types.

    Args:
      path: the file.
      kinds: name -> type of its value, if present; a dot leads into an object.
      missing: default if there is no file; None: the file is required.

    Raises:
      ValueError: the file cannot be read, or a value has another type.
    """
    if missing is not None and not path.exists():
        return missing
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object.")
    for name, kind in kinds.items():
        outer, _, last = name.rpartition(".")
        holder = value.get(outer, {}) if outer else value  # checked before what it holds
        found = holder.get(last)
        missing_or_null = last not in holder or (found is None and kind is not dict)
        if not missing_or_null and not _is(found, kind):
            raise ValueError(f"{path}: {name!r} is {_shown(found)}; it must be {_KINDS[kind]}.")
    return value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of metrics.jsonl, times.jsonl or clients.jsonl; none if there is no file.

    Raises:
      ValueError: it cannot be read, a line is not a row, or rows are not in the order of rounds.
    """
    if not path.exists():
        return []
    try:
        rows = read_metrics(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}).") from error
    before = 0
    for line, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not _is(row.get("round"), int):
            raise ValueError(f"{path}, line {line}, is no row with a round.")
        for name, value in row.items():
            _check_number(value, f"{path}, line {line}: {name!r}")
        if row["round"] <= before:
            raise ValueError(f"{path}, line {line}: round {row['round']} comes after {before}.")
        before = row["round"]
    return rows


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read (config.json, rows of metrics.jsonl), and compare them with the last checkpoint.

    Raises:
      ValueError: a file is damaged, or differs from the checkpoint.
    """
    config = read_config(path / CONFIG)
    try:
        saved = load_run(path)  # before the rows: those of a run that goes on are then there, too
    except FileNotFoundError:
        saved = None
    rows = read_rows(path / METRICS)
    if rows and rows[-1]["round"] > config["rounds"]:
        raise ValueError(
            f"{path / METRICS} has round {rows[-1]['round']}, and config.json {config['rounds']} "
            "rounds; one of them was changed."
        )
    if saved is not None:
        _compare(path / METRICS, rows, saved.history, saved.round)
    return config, rows


def _compare(
    path: Path, rows: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], round: int
) -> None:
    """Check that rows equal those of the checkpoint of ``round``."""
    until = [row for row in rows if row["round"] <= round]
    if until == saved:
        return
    for here, there in zip(until, saved, strict=False):
        if found := differences(there, here, words=("there", "here")):
            raise ValueError(
                f"{path}, round {here['round']}, differs from the checkpoint of round {round}: "
                f"{found[0]}. Running the same again repairs it."
            )
    raise ValueError(
        f"{path} has {len(until)} rows up to round {round}, and the checkpoint of that round "
        f"{len(saved)}. Running the same again repairs it."
    )


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_number(value: Any, what: str) -> None:
    """Check that a value is a number, null, or a list of these."""
    if isinstance(value, list):
        for part in value:
            _check_number(part, what)
        return
    try:
        good = value is None or (isinstance(value, (int, float)) and math.isfinite(value))
    except OverflowError:  # a whole number beyond all floats
        good = False
    if not good:
        raise ValueError(f"{what} is {_shown(value)}; it must be a finite number or null.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."
