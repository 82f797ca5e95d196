"""Comparable runs: those with the same data set, metric, number of rounds and setting; their tail.

A setting is the task that methods are compared on: the partition, the cohort, the local work, the
mini-batches, the model, the clients' devices and the attack. Hyperparameters of a method are none.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fedjax_lab.checks import warn
from fedjax_lab.clients.metrics import OWN_METRICS
from fedjax_lab.markdown import printable
from fedjax_lab.report.runs import Group, Run, group_runs, names_that_differ, show
from fedjax_lab.report.statistics import (
    ACCURACY,
    ERROR,
    OWN,
    PERPLEXITY,
    best,
    mean,
    number,
    tail_start,
)

_METRICS = {ERROR: "mean squared error", PERPLEXITY: "perplexity", ACCURACY: "accuracy"}
SETTINGS = (
    *("target", "x", "task", "categories", "missing", "labels", "image_size"),
    *("partition", "num_clients", "min_client_size", "test_split"),
    *("cohort_size", "sampling", "local_steps", "local_epochs", "batch_size"),
    *("model", "compute_dtype", "sequence_length", "vocabulary_size", "tokens", "flip", "crop"),
    *("min_local_steps", "time_budget", "step_time", "step_time_spread", "dropout"),
    *("times", "over_selection", "deadline", "attack", "attack_share", "attack_strength"),
)
MODEL_OPTION = "model."  # before the name of one


class Section(NamedTuple):
    """Groups of comparable runs.

    Attributes:
      title: common data set, metric and rounds, such as "digits, accuracy, 100 rounds", and the
        setting where there are others, such as "partition dirichlet:0.1".
      dataset: name of the data set; "" if unknown.
      rounds: number of rounds of all runs.
      groups: the best one first.
      setting: the settings that differ from those of other sections.
    """

    title: str
    dataset: str
    rounds: int
    groups: list[Group]
    setting: dict[str, Any]


def setting_of(run: Run) -> dict[str, Any]:
    """Return the settings that runs must have in common to be compared."""
    return {
        name: value
        for name, value in run.settings.items()
        if name in SETTINGS or name.startswith(MODEL_OPTION)
    }


class Tail(NamedTuple):
    """The last tenth of the rounds, the same for all runs of a table.

    Attributes:
      name: name of its mean in a table.
      rounds: rounds of the evaluations in the tail that all finished runs have.
      end: the last round.
    """

    name: str
    rounds: frozenset[int]
    end: int

    def mean(self, run: Run, metric: str = ACCURACY) -> float:
        """Compute the mean of a run's metric over the tail; NaN if the run did not reach it.

        Args:
          run: one of the runs of the tail.
          metric: name of the metric.
        """
        if run.rows[-1]["round"] != self.end:
            return math.nan
        return mean([number(row.get(metric)) for row in run.rows if row["round"] in self.rounds])


def tail_of(runs: Iterable[Run]) -> Tail:
    """Compute the common tail of runs.

    Args:
      runs: runs with equal numbers of rounds.

    Raises:
      ValueError: the runs cannot be compared.
    """
    runs = list(runs)
    check_comparable(runs)
    end = runs[0].config["rounds"]
    start = tail_start(end)
    tails = [{row["round"] for row in run.rows if row["round"] >= start} for run in runs]
    ended = [rounds for rounds in tails if end in rounds]
    shared = frozenset(set.intersection(*ended)) if ended else frozenset()
    name = f"rounds {start:,} to {end:,}" if start < end else f"round {end:,}"
    return Tail(f"mean of {name}", shared, end)


def metric_of(runs: Iterable[Run]) -> str:
    """Return the metric of runs: "mean_squared_error", "perplexity", "accuracy", or ""."""
    names = {name for run in runs for row in run.rows for name in row}
    return next((metric for metric in _METRICS if metric in names), "")


def tell_unknown_scores(runs: Sequence[Run]) -> None:
    """Warn if runs have scores, but none by which they could be ranked."""
    rows = {name for run in runs for row in run.rows for name in row}
    rows |= {name for run in runs for name in run.config.get("client_metrics", ())}
    personal = "personal_"  # ``load_runs`` adds copies of these scores
    copies = {f"{OWN}{name.removeprefix(personal)}" for name in rows if name.startswith(personal)}
    own = sorted(name for name in rows - OWN_METRICS - copies if not name.startswith("client_"))
    if own and not metric_of(runs):
        warn(
            f"no run has {', '.join(_METRICS)}, by which a report ranks. The rows have "
            f"{', '.join(own)}: return what ranks from evaluate, under one of those names."
        )


def check_comparable(runs: Sequence[Run]) -> None:
    """Check that runs are comparable.

    Raises:
      ValueError: they differ in data set, metric, number of rounds or setting.
    """
    titles = [title for title, _, _ in _divided(runs)]
    if len(titles) > 1:
        raise ValueError(
            f"runs are of {'; '.join(titles)}: a table compares runs of one data set, metric, "
            "number of rounds and setting; sections_of puts those together."
        )


def sections_of(runs: Iterable[Run]) -> list[Section]:
    """Divide runs into comparable sections, and group each section by settings.

    Args:
      runs: from ``load_runs``.

    Raises:
      ValueError: as ``group_runs``.
    """
    return [
        Section(title, dataset_of(some[0]), some[0].config["rounds"], groups, setting)
        for title, some, setting in _divided(list(runs))
        for groups in [best_first(group_runs(some))]
    ]


def _divided(runs: Sequence[Run]) -> list[tuple[str, list[Run], dict[str, Any]]]:
    """Return (title, runs, settings that differ from other sections), in the order of the runs."""
    found: dict[Any, list[Run]] = {}
    for run in sorted(runs, key=lambda run: not metric_of([run])):  # those without one come last
        about, metric = _task(run), metric_of([run])
        # A run that diverged at once has no metric; it is judged by that of the others.
        known = [key for key in found if key[0] == about]
        found.setdefault(known[0] if known and not metric else (about, metric), []).append(run)
    order = {id(run): place for place, run in enumerate(runs)}
    parts = [sorted(some, key=lambda run: order[id(run)]) for some in found.values()]
    parts.sort(key=lambda some: order[id(some[0])])
    titles = [_title(some) for some in parts]
    settings: list[dict[str, Any]] = [{} for _ in parts]
    for title in set(titles):
        alike = [place for place, other in enumerate(titles) if other == title]
        differing = differing_settings([parts[place][0] for place in alike])
        for place, setting in zip(alike, differing, strict=True):
            settings[place] = setting
            titles[place] += "".join(f", {printable(n)} {show(v)}" for n, v in setting.items())
    return [
        (f"{title}, data {some[0].settings.get('data_hash', 'unknown')}", some, setting)
        if titles.count(title) > 1
        else (title, some, setting)
        for title, some, setting in zip(titles, parts, settings, strict=True)
    ]


def _task(run: Run) -> tuple[Any, ...]:
    data = run.settings.get("data_hash") or dataset_of(run)
    return data, run.config["rounds"], json.dumps(setting_of(run), sort_keys=True)


def differing_settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return for each run its settings that differ among the runs."""
    found = [setting_of(run) for run in runs]
    differ = names_that_differ(found)
    return [{name: one[name] for name in differ if name in one} for one in found]


def _title(runs: Sequence[Run]) -> str:
    rounds = runs[0].config["rounds"]
    about = [dataset_of(runs[0]), _METRICS.get(metric_of(runs), ""), f"{rounds:,} rounds"]
    return ", ".join(filter(None, about))


def dataset_of(run: Run) -> str:
    """Return the name of a run's data set; "" if unknown."""
    return printable(str(run.settings.get("dataset", "")))


def best_first(groups: Iterable[Group]) -> list[Group]:
    """Sort groups by their means over the tail, then by their best evaluations.

    Raises:
      ValueError: they cannot be compared.
    """
    groups = list(groups)
    runs = runs_of(groups)
    (sign, metric), tail = direction(runs), tail_of(runs)

    def key(group: Group) -> list[float]:
        tails = mean([sign * tail.mean(run, metric) for run in group.runs])
        bests = mean([best([sign * v for v in run.values(metric)]) for run in group.runs])
        return [math.inf if math.isnan(value) else -value for value in (tails, bests)]

    return sorted(groups, key=key)


def is_personal(runs: Iterable[Run]) -> bool:
    """Return True if a run has scores of the clients' own models.

    All of its section is then compared by the models that the clients use.
    """
    return any(name.startswith("personal_") for run in runs for row in run.rows for name in row)


def direction(runs: Iterable[Run]) -> tuple[float, str]:
    """Return the sign and the name in rows of the score that compares runs.

    The sign is -1 for an error, of which smaller is better. The name is "accuracy", or
    "own_accuracy" where a run has personal models: that of the model that each client uses, on the
    client's own test examples.
    """
    runs = list(runs)
    sign, metric = (-1.0, ERROR) if metric_of(runs) == ERROR else (1.0, ACCURACY)
    return sign, f"{OWN}{metric}" if is_personal(runs) else metric


def accuracy_of(runs: Iterable[Run]) -> str:
    """Return the name in rows of the accuracy that compares runs, as ``direction`` does."""
    return f"{OWN}{ACCURACY}" if is_personal(runs) else ACCURACY


def runs_of(groups: Iterable[Group]) -> list[Run]:
    """Return the runs of all groups."""
    return [run for group in groups for run in group.runs]
