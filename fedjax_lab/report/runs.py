"""Reads run directories, and groups runs that differ only in their seeds."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_lab.checks import check_choice
from fedjax_lab.data.partition import PARTITIONS
from fedjax_lab.estimates import Estimate, estimate
from fedjax_lab.report.reading import DIVERGED, is_evaluated, read_partition, read_run
from fedjax_lab.report.settings import (
    SETTINGS,
    label_of,
    names_in_labels,
    parts_of,
    settings_of,
    shown_parts,
)
from fedjax_lab.report.statistics import OWN, Score, number
from fedjax_lab.storage.run_dir import CHECKPOINTS, CONFIG, PARTITION, SWEEP

REPORT, RERUN = "report.md", "rerun.json"
# Files of folders without a run that a pattern such as runs/* matches, and what such a folder is.
_NO_RUNS = {
    RERUN: "repeats another run",
    SWEEP: "has a sweep",
    REPORT: "is the folder of a report",
}
_LONG = 48  # characters of differing settings that fit into a label


class Run(NamedTuple):
    """One run directory.

    Attributes:
      path: the directory.
      algorithm: the method's name.
      seed: the run's seed.
      settings: name -> value of everything that may change the numbers, except seeds.
      rows: metrics.jsonl, a row per evaluation, with ``seconds`` if known, and ``own_accuracy`` (or
        another score): that of the models that the clients use on their own test examples.
      config: config.json.
      summary: summary.json; {} if the run did not end.
      partition: partition.json; {} if the run did not end, or was not made by ``runner.run``.
      landscape: landscape.json, the loss around the last model; {} if it was not computed.
      score: the score that the user chose to compare runs; None: one that a report knows.
      compare: settings that the user compares, which need not be equal in comparable runs.
    """

    path: Path
    algorithm: str
    seed: int
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    partition: dict[str, Any]
    landscape: dict[str, Any]
    score: Score | None = None
    compare: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """True if the run finished all rounds, or ended by ``stop_when``."""
        done = self.rows[-1]["round"] == self.config["rounds"]
        return (done or self.ended_early) and not self.diverged

    @property
    def ended_early(self) -> bool:
        """True if ``stop_when`` ended the run before its last round."""
        ended = self.summary.get("stopped") == "stop_when"
        return ended and self.summary.get("round") == self.rows[-1]["round"]

    @property
    def diverged(self) -> bool:
        """True if the run diverged."""
        return self.summary.get("stopped") == DIVERGED

    @property
    def seconds(self) -> float:
        """Seconds of rounds and evaluation; NaN if unknown."""
        return self.last("seconds")

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation; NaN if unknown."""
        return self.last("compile_seconds")

    @property
    def names(self) -> set[str]:
        """Names in its rows."""
        return {name for row in self.rows for name in row}

    def values(self, name: str) -> list[float]:
        """Return a metric of all rows; NaN if it is null or missing.

        Args:
          name: of the metric.
        """
        return [number(row.get(name)) for row in self.rows]

    def last(self, name: str) -> float:
        """Return a metric of the last row; NaN if it is null or missing.

        Args:
          name: of the metric.
        """
        return number(self.rows[-1].get(name))


class Group(NamedTuple):
    """Runs that differ only in their seeds, in the order of the seeds.

    Attributes:
      label: the method and the settings that differ from other groups; a number if they are many or
        look alike. No two groups have the same.
      runs: at least one.
      differs: settings that differ from other groups, such as "client_lr=0.1".
    """

    label: str
    runs: list[Run]
    differs: str

    def over_seeds(self, value: Callable[[Run], float]) -> Estimate:
        """Estimate a number of the runs, with its interval over the seeds.

        Args:
          value: the number of a run.
        """
        return estimate(list(map(value, self.runs)))


def load_runs(
    directories: Iterable[str | Path],
    *,
    metric: str | None = None,
    mode: str = "max",
    compare: Sequence[str] = (),
) -> list[Run]:
    """Read run directories; other directories are searched for runs.

    Runs below a directory without an evaluation are skipped. So are other paths that a pattern such
    as ``runs/*`` matches: files, folders of reports, sweeps, and runs that repeat another one
    (``rerun``).
    A run's rows and settings are compared with its last checkpoint, if there is one.

    Args:
      directories: run directories, or directories that contain some.
      metric: name in rows of the score that compares runs, such as "f1" of your ``evaluate``.
        None: accuracy, mean_squared_error or perplexity.
      mode: with ``metric``: "max" if more is better, "min" if less is.
      compare: settings of ``settings.SETTINGS`` that the runs may differ in and still be compared,
        such as "deadline": the tables tell them apart like hyperparameters.

    Raises:
      FileNotFoundError: a directory does not exist or has no run, or there is no run at all.
      ValueError: a file of a run is damaged, lacks an entry or was changed; a given run has no
        evaluation yet, or not the metric; or ``mode`` or ``compare`` is not allowed.
    """
    check_choice("mode", mode, ("max", "min"))
    if metric is None and mode == "min":
        raise ValueError("mode is 'min' and metric None; it belongs to a metric: give one.")
    score = None if metric is None else Score(metric, metric, 1.0 if mode == "max" else -1.0)
    for name in compare:
        check_choice("compare", name, SETTINGS)
    paths: dict[Path, Path] = {}
    passed_over: list[str] = []
    for directory in map(Path, directories):
        if directory.is_file():
            passed_over.append(f"{directory} is a file")
            continue
        if not directory.is_dir():
            raise FileNotFoundError(f"there is no directory {directory}.")
        found = _find(directory)
        if found != [directory]:
            found = [path for path in found if is_evaluated(path)]
        if not found:
            known = [words for name, words in _NO_RUNS.items() if (directory / name).exists()]
            if not known:
                raise FileNotFoundError(
                    f"{directory} is no run directory and holds no run with an evaluation."
                )
            passed_over.append(f"{directory} {known[0]}")
        paths.update({path.resolve(): path for path in found})
    if not paths:
        found_instead = f": {', '.join(passed_over)}" if passed_over else ""
        raise FileNotFoundError(f"no run directory was given{found_instead}.")
    return [_load(path, score, tuple(compare)) for path in paths.values()]


def _find(directory: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(directory):
        if not {CONFIG, RERUN, SWEEP}.isdisjoint(files):
            found += [] if RERUN in files or SWEEP in files else [Path(folder)]
            folders.clear()
        folders[:] = sorted(name for name in folders if name != CHECKPOINTS and name[0] != ".")
    return found


def _load(path: Path, score: Score | None, compare: tuple[str, ...]) -> Run:
    config, rows, summary, landscape = read_run(path, None if score is None else score.name)
    rows = list(map(with_own, rows))
    if score is not None and summary.get("stopped") != DIVERGED:
        _check_metric(path, rows, score.name)
    return Run(
        path,
        config["algorithm"],
        config["seed"],
        settings_of(config),
        rows,
        config,
        summary,
        read_partition(path / PARTITION),
        landscape,
        score,
        compare,
    )


def _check_metric(path: Path, rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    """Check that a run has the chosen metric, as numbers; null is none."""
    names = {name: None for row in rows for name in row}
    numbers = [n for n in names if all(isinstance(r.get(n), int | float | None) for r in rows)]
    if metric not in numbers:
        known = [name for name in numbers if any(row.get(name) is not None for row in rows)]
        raise ValueError(f"metric is {metric!r}; {path} has {', '.join(known)}.")


def with_own(row: Mapping[str, Any]) -> dict[str, Any]:
    """Add the scores of the models that clients use, on their own test examples, to a row.

    These are the clients' own models, or the global model of a method that has no other.
    """
    own = {
        f"{OWN}{name.removeprefix(model)}": value
        for model in ("client_test_", "personal_")
        for name, value in row.items()
        if name.startswith(model)
    }
    return {**row, **own}


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs that differ only in their seeds.

    Labels name the settings that differ between groups.

    Args:
      runs: from ``load_runs``.

    Raises:
      ValueError: two runs have the same seed, too, so that an interval over both would be too
        narrow.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([run.algorithm, run.settings], sort_keys=True)
        groups.setdefault(key, []).append(run)
    members = [sorted(group, key=lambda run: run.seed) for group in groups.values()]
    for group in members:
        _check_distinct(group)
    methods = [group[0].algorithm for group in members]
    parts = [parts_of(group[0].settings) for group in members]
    names = names_in_labels(methods, parts)
    differs = [shown_parts(one, names) for one in parts]
    labels = list(map(label_of, methods, differs))
    if max(map(len, differs), default=0) > _LONG or len(set(labels)) < len(labels):
        labels = [f"{method} #{i}" for i, method in enumerate(methods, start=1)]
    return [Group(*one) for one in zip(labels, members, differs, strict=True)]


def _check_distinct(group: list[Run]) -> None:
    seen: dict[Any, Run] = {}
    drawn: dict[Any, Run] = {}
    for run in group:
        before = seen.setdefault(what_is_drawn(run), run)
        if before is not run and _examples(before) == _examples(run):
            raise ValueError(
                f"{before.path} and {run.path} hold the same run (seed {run.seed}, equal "
                "settings); leave one of them out."
            )
        partition = run.config.get("partition", {})
        if "data" not in run.config and _is_scheme(partition):
            # One scheme and one seed divide one data set in one way.
            before = drawn.setdefault((run.seed, partition.get("seed")), run)
        if before is not run:
            raise ValueError(
                f"{before.path} and {run.path} have equal settings and seeds ({run.seed}), but "
                "other data: they are not two seeds of one experiment. Give each its own seed, "
                'or name the data of each in simulate(config={"dataset": NAME}).'
            )


def what_is_drawn(run: Run) -> tuple[Any, ...]:
    """Return what tells the seeds of a group apart: those of run, data and first model."""
    config = run.config
    hashes = (config.get(part, {}).get("hash") for part in ("partition", "data"))
    return run.seed, *hashes, config.get("run_config", {}).get("init_seed")


def _examples(run: Run) -> Any:
    return run.config.get("content", {}).get("examples")


def _is_scheme(partition: Mapping[str, Any]) -> bool:
    spec = str(partition.get("spec")).partition(":")[:2]
    return any(spec == name.partition(":")[:2] for name in PARTITIONS)
