"""Comparable runs: those with the same data set, metric and number of rounds; their tail."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fedjax_lab.estimates import printable
from fedjax_lab.report.runs import Group, Run, group_runs
from fedjax_lab.report.statistics import ERROR, best, mean, number, tail_start

ACCURACY, PERPLEXITY = "accuracy", "perplexity"
_METRICS = {ERROR: "mean squared error", PERPLEXITY: "perplexity", ACCURACY: "accuracy"}


class Section(NamedTuple):
    """Groups of comparable runs.

    Attributes:
      title: common data set, metric and rounds, such as "digits, accuracy, 100 rounds".
      dataset: name of the data set; "" if unknown.
      rounds: number of rounds of all runs.
      groups: the best one first.
    """

    title: str
    dataset: str
    rounds: int
    groups: list[Group]


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
    """Return the metric of runs: "mean_squared_error", "perplexity", "accuracy", or "".

    Args:
      runs: their rows determine the metric.
    """
    names = {name for run in runs for row in run.rows for name in row}
    return next((metric for metric in _METRICS if metric in names), "")


def check_comparable(runs: Sequence[Run]) -> None:
    """Check that runs are comparable.

    Args:
      runs: at least one.

    Raises:
      ValueError: they differ in data set, metric or number of rounds.
    """
    titles = [title for title, _ in _divided(runs)]
    if len(titles) > 1:
        raise ValueError(
            f"runs are of {'; '.join(titles)}: a table compares runs of one data set, metric and "
            "number of rounds; sections_of puts those together."
        )


def sections_of(runs: Iterable[Run]) -> list[Section]:
    """Divide runs into comparable sections, and group each section by settings.

    Args:
      runs: from ``load_runs``.

    Raises:
      ValueError: as ``group_runs``.
    """
    return [
        Section(title, _dataset(some[0]), some[0].config["rounds"], best_first(group_runs(some)))
        for title, some in _divided(list(runs))
    ]


def _divided(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Return (title, runs) of each section, in the order of the runs."""
    found: dict[Any, list[Run]] = {}
    for run in sorted(runs, key=lambda run: not metric_of([run])):  # those without one come last
        data = run.settings.get("data_hash") or _dataset(run)
        about, metric = (data, run.config["rounds"]), metric_of([run])
        # A run that diverged at once has no metric; it is judged by that of the others.
        known = [key for key in found if key[:2] == about]
        found.setdefault(known[0] if known and not metric else (*about, metric), []).append(run)
    order = {id(run): place for place, run in enumerate(runs)}
    parts = [sorted(some, key=lambda run: order[id(run)]) for some in found.values()]
    parts.sort(key=lambda some: order[id(some[0])])
    titles = [_title(some) for some in parts]
    return [
        (f"{title}, data {some[0].settings.get('data_hash', 'unknown')}", some)
        if titles.count(title) > 1
        else (title, some)
        for title, some in zip(titles, parts, strict=True)
    ]


def _title(runs: Sequence[Run]) -> str:
    rounds = runs[0].config["rounds"]
    about = [_dataset(runs[0]), _METRICS.get(metric_of(runs), ""), f"{rounds:,} rounds"]
    return ", ".join(filter(None, about))


def _dataset(run: Run) -> str:
    return printable(str(run.settings.get("dataset", "")))


def best_first(groups: Iterable[Group]) -> list[Group]:
    """Sort groups by their means over the tail, then by their best evaluations.

    Args:
      groups: comparable groups.

    Raises:
      ValueError: they cannot be compared.
    """
    groups = list(groups)
    runs = [run for group in groups for run in group.runs]
    sign, metric = direction(runs)
    tail = tail_of(runs)

    def key(group: Group) -> list[float]:
        tails = mean([sign * tail.mean(run, metric) for run in group.runs])
        bests = mean([best([sign * v for v in run.values(metric)]) for run in group.runs])
        return [math.inf if math.isnan(value) else -value for value in (tails, bests)]

    return sorted(groups, key=key)


def direction(runs: Iterable[Run]) -> tuple[float, str]:
    """Return (1, "accuracy"), or (-1, "mean_squared_error") if smaller is better."""
    return (-1.0, ERROR) if metric_of(runs) == ERROR else (1.0, ACCURACY)
