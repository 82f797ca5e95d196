"""Reads the files of a run directory; errors name the damaged file."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_lab.machine.json_file import Kinds, no_numbers, read_json, shown
from fedjax_lab.report.statistics import ACCURACY, ERROR, PERPLEXITY
from fedjax_lab.storage.rows import read_metrics
from fedjax_lab.storage.run_dir import (
    CLIENTS,
    CONFIG,
    METRICS,
    SUMMARY,
    TIMES,
    differences,
    read_config,
)
from fedjax_lab.storage.saved_run import load_run

# Of config.json, besides what a simulation reads; a dot leads into an object.
_REQUIRED = {"algorithm": str, "seed": int, "rounds": int}
_TEXTS = ("run_config.dataset", "partition.spec", "partition.hash", "data.hash")
_OPTIONAL = {
    **dict.fromkeys(("run_config", "data"), dict),
    **dict.fromkeys(("run_config.option", "run_config.model_option"), dict),
    **dict.fromkeys(_TEXTS, str | None),
    **dict.fromkeys(("num_clients", "run_config.init_seed"), int | None),
    "client_metrics": list | None,
}
_OF_CLIENTS = ("client_test_accuracy", "client_test_mean_squared_error", "client_test_examples")
_OF_SUMMARY = {
    **{"stopped": str | None, "round": int | None},
    **dict.fromkeys(_OF_CLIENTS, list | None),
}
_OF_PARTITION = {
    **dict.fromkeys(("spec", "hash"), str | None),
    **{"seed": int | None, "label_histogram": list | None, "names": list | None},
}
LANDSCAPE = "landscape.json"
_OF_LANDSCAPE = dict.fromkeys(("eigenvalues", "offsets", "losses"), list | None)
DIVERGED = "diverged"
# Names, or their beginnings, of what a run that diverged has none of.
_SCORES = (
    *(ACCURACY, ERROR, PERPLEXITY, "test_loss", "personal_", "client_test_", "worst_10_percent_"),
    *(f"client_{ACCURACY}", f"client_{ERROR}"),
)


def read_run(
    path: Path, metric: str | None
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Read (config.json, rows of all .jsonl files, summary.json, landscape.json) of a run.

    A run that diverged has null for scores, also before its end.

    Args:
      metric: name of a score besides the known ones; None: there is no other.

    Raises:
      ValueError: a file is damaged, or differs from the last checkpoint; or the run has no
        evaluation yet.
    """
    config = read_config(path, _REQUIRED, _OPTIONAL)
    if not config["algorithm"].isprintable():
        said = shown(config["algorithm"])
        raise ValueError(f"{path / CONFIG}: 'algorithm' is {said}; not printable.")
    rows = _checked_rows(path, config["rounds"])
    summary = read_summary(path / SUMMARY)
    landscape = _read_if_there(path / LANDSCAPE, _OF_LANDSCAPE, tuple(_OF_LANDSCAPE))
    diverged = summary.get("stopped") == DIVERGED
    # Metrics of local steps that are called like a score of test examples.
    taken = {name for name in config.get("client_metrics") or () if name.startswith(_SCORES)}
    rows = [{name: value for name, value in row.items() if name not in taken} for row in rows]
    if not rows and not diverged:
        raise ValueError(f"{path} has no evaluation yet: {METRICS} is empty or missing.")
    if not rows:  # it diverged before its first evaluation
        metric_of_task = ERROR if "outputs" in config.get("data", {}) else ACCURACY
        counts = dict.fromkeys(("bytes_up", "bytes_down", "gradients"), 0)
        rows = [{"round": 0, "loss": None, metric_of_task: None, **counts}]
    beside: dict[int, dict[str, Any]] = {}
    for row in (*read_rows(path / TIMES), *read_rows(path / CLIENTS)):
        beside.setdefault(row["round"], {}).update(row)
    rows = [beside.get(row["round"], {}) | row for row in rows]
    if diverged:
        rows = [_without_scores(row, metric) for row in rows]
        summary, landscape = _without_scores(summary, metric), {}
    return config, rows, summary, landscape


def _without_scores(row: Mapping[str, Any], metric: str | None) -> dict[str, Any]:
    return {n: None if n == metric or n.startswith(_SCORES) else v for n, v in row.items()}


def is_evaluated(path: Path) -> bool:
    """Return True if a run has an evaluation, or diverged before its first one."""
    return (
        bool(read_rows(path / METRICS)) or read_summary(path / SUMMARY).get("stopped") == DIVERGED
    )


def read_summary(path: Path) -> dict[str, Any]:
    """Read a run's summary.json; {} if there is none.

    Raises:
      ValueError: it cannot be read, or a value has another type.
    """
    summary = _read_if_there(path, _OF_SUMMARY, ("worst_10_percent_", *_OF_CLIENTS))
    each = {name: summary[name] for name in _OF_CLIENTS if summary.get(name) is not None}
    if len({len(values) for values in each.values()}) > 1:
        raise ValueError(f"{path}: {' and '.join(map(repr, each))} must have equal lengths.")
    return summary


def read_partition(path: Path) -> dict[str, Any]:
    """Read a run's partition.json; {} if there is none.

    Raises:
      ValueError: as ``read_summary``.
    """
    partition = _read_if_there(path, _OF_PARTITION, ("label_histogram",))
    histogram = partition.get("label_histogram")
    if histogram is not None:
        lengths = {len(row) if isinstance(row, list) else 0 for row in histogram}
        named = {"spec", "seed"} <= partition.keys()
        if len(lengths) != 1 or not min(lengths) or not named:
            raise ValueError(
                f"{path}: 'label_histogram' must have rows of equal lengths, and a "
                "spec and a seed beside it."
            )
    return partition


def _read_if_there(path: Path, kinds: Kinds, numbers: tuple[str, ...]) -> dict[str, Any]:
    """Read a JSON file; {} if there is none.

    Args:
      numbers: beginnings of the names whose values are numbers, null, or lists of these.
    """
    found = read_json(path, optional=kinds) if path.exists() else {}
    for name, value in found.items():
        if name.startswith(numbers) and (wrong := no_numbers(value)):
            raise ValueError(
                f"{path}: {name!r} has the value {shown(wrong[0])}; it must be a number or null."
            )
    return found


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
    rounds = [row["round"] for row in rows]
    for line, (before, now) in enumerate(itertools.pairwise(rounds), start=2):
        if now <= before:
            raise ValueError(f"{path}, line {line}: round {now} comes after {before}.")
    return rows


def _checked_rows(path: Path, rounds: int) -> list[dict[str, Any]]:
    """Read the rows of metrics.jsonl, and compare them with the last checkpoint."""
    try:
        saved = load_run(path)  # before the rows: those of a run that goes on are then there, too
    except FileNotFoundError:
        saved = None
    rows = read_rows(path / METRICS)
    if rows and rows[-1]["round"] > rounds:
        raise ValueError(
            f"{path / METRICS} has round {rows[-1]['round']}, and config.json {rounds} rounds; "
            "one of them was changed."
        )
    if saved is not None:
        _compare(path / METRICS, rows, saved.history, saved.round)
    return rows


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
