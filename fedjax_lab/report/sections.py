"""Comparable runs: those with the same data set, metric, number of rounds and setting; their tail.

A setting is the task that methods are compared on: the partition, the cohort, the local work, the
mini-batches, the model, the clients' devices and the attack. Hyperparameters of a method are none.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_lab.checks import warn
from fedjax_lab.clients.metrics import OWN_METRICS
from fedjax_lab.markdown import printable
from fedjax_lab.report.runs import Group, Run, group_runs
from fedjax_lab.report.settings import MODEL_OPTION, SETTINGS, names_that_differ, show
from fedjax_lab.report.statistics import (
    ACCURACY,
    ERROR,
    OWN,
    PERPLEXITY,
    UNKNOWN,
    Score,
    best,
    mean,
    number,
    tail_start,
)

_PERSONAL = "personal_"  # before a score of the clients' own models


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

    @property
    def score(self) -> Score:
        """The score that compares its runs; ``UNKNOWN`` if they have none."""
        return score_of(runs_of(self.groups))


def setting_of(run: Run) -> dict[str, Any]:
    """Return the settings that runs must have in common to be compared."""

    def shared(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: shared(value) if isinstance(value, Mapping) else value
            for name, value in settings.items()
            if name not in run.compare
        }

    decide = (name for name in run.settings if name in SETTINGS or name.startswith(MODEL_OPTION))
    return shared({name: run.settings[name] for name in decide})


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
      ValueError: the runs differ in data set, metric, number of rounds or setting.
    """
    runs = list(runs)
    parts = _divided(runs)
    if len(parts) > 1:
        titles = "; ".join(title for title, _ in _titles(parts))
        raise ValueError(
            f"runs are of {titles}: a table compares runs of one data set, metric, number of "
            "rounds and setting; sections_of puts those together."
        )
    end = runs[0].config["rounds"]
    start = tail_start(end)
    tails = [{row["round"] for row in run.rows if row["round"] >= start} for run in runs]
    ended = [rounds for rounds in tails if end in rounds]
    shared = frozenset(set.intersection(*ended)) if ended else frozenset()
    name = f"rounds {start:,} to {end:,}" if start < end else f"round {end:,}"
    return Tail(f"mean of {name}", shared, end)


def score_of(runs: Iterable[Run]) -> Score:
    """Return the score that compares runs: the user's, or the ``known_score`` of all rows."""
    runs = list(runs)
    names = set().union(*(run.names for run in runs))
    chosen = next((run.score for run in runs if run.score is not None), None)
    if chosen is not None:
        return chosen if chosen.name in names else UNKNOWN
    return known_score(names)


def known_score(names: Collection[str]) -> Score:
    """Return the first known score of rows; ``UNKNOWN`` if there is none.

    Where a run has scores of the clients' own models, all are compared by the models that the
    clients use.

    Args:
      names: of what the rows have, see ``runs.with_own``.
    """
    is_personal = any(name.startswith(_PERSONAL) for name in names)
    for metric, sign in ((ERROR, -1.0), (ACCURACY, 1.0)):
        own = f"{OWN}{metric}"
        name = own if own in names and (is_personal or metric not in names) else metric
        if name in names:
            is_text = metric == ACCURACY and PERPLEXITY in names
            return Score(PERPLEXITY if is_text else metric, name, sign)
    return Score(PERPLEXITY, PERPLEXITY, -1.0) if PERPLEXITY in names else UNKNOWN


def warn_of_unknown_scores(sections: Sequence[Section]) -> None:
    """Warn of sections whose runs have scores, but none by which they could be ranked."""
    for section in sections:
        runs = runs_of(section.groups)
        names = set().union(*(run.names for run in runs))
        names |= {name for run in runs for name in run.config.get("client_metrics") or ()}
        # ``load_runs`` adds copies of these scores.
        copies = {f"{OWN}{n.removeprefix(_PERSONAL)}" for n in names if n.startswith(_PERSONAL)}
        shown = sorted(n for n in names - OWN_METRICS - copies if not n.startswith("client_"))
        if shown and section.score == UNKNOWN:
            of = f" of {section.title}" if len(sections) > 1 else ""
            warn(
                f"no run{of} has {ERROR}, {PERPLEXITY}, {ACCURACY}, by which a report ranks. The "
                f"rows have {', '.join(shown)}: name one as metric (--metric), with mode 'min' "
                "(--mode min) if less is better."
            )


def sections_of(runs: Iterable[Run]) -> list[Section]:
    """Divide runs into comparable sections, and group each section by settings.

    Args:
      runs: from ``load_runs``.

    Raises:
      ValueError: as ``group_runs``.
    """
    parts = _divided(runs)
    return [
        Section(
            title,
            dataset_of(some[0]),
            some[0].config["rounds"],
            best_first(group_runs(some)),
            setting,
        )
        for some, (title, setting) in zip(parts, _titles(parts), strict=True)
    ]


def _divided(runs: Iterable[Run]) -> list[list[Run]]:
    """Divide runs into comparable ones; both are in the order of the runs."""
    about = [(run, _task(run), score_of([run]).metric) for run in runs]
    known: dict[Any, str] = {}
    for _, task, metric in about:
        if metric:
            known.setdefault(task, metric)
    parts: dict[Any, list[Run]] = {}
    for run, task, metric in about:
        # A run that diverged at once has no metric; it is judged by that of the others.
        parts.setdefault((task, metric or known.get(task)), []).append(run)
    return list(parts.values())


def _titles(parts: Sequence[Sequence[Run]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the title of each part, and its settings that differ from those of parts like it."""
    common, whole = [_title(some) for some in parts], [setting_of(some[0]) for some in parts]
    found = []
    for title, one in zip(common, whole, strict=True):
        alike = [other for other, of in zip(whole, common, strict=True) if of == title]
        setting = {name: one[name] for name in names_that_differ(alike) if name in one}
        shown = "".join(f", {printable(n)} {show(v)}" for n, v in setting.items())
        found.append((title + shown, setting))
    titles = [title for title, _ in found]
    data = [f", data {some[0].settings.get('data_hash', 'unknown')}" for some in parts]
    return [
        (title + hash * (titles.count(title) > 1), setting)
        for (title, setting), hash in zip(found, data, strict=True)
    ]


def _task(run: Run) -> tuple[Any, ...]:
    data = run.settings.get("data_hash") or dataset_of(run)
    return data, run.config["rounds"], json.dumps(setting_of(run), sort_keys=True)


def _title(runs: Sequence[Run]) -> str:
    rounds = runs[0].config["rounds"]
    metric = score_of(runs).metric.replace("_", " ")
    about = [dataset_of(runs[0]), printable(metric), f"{rounds:,} rounds"]
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
    (_, name, sign), tail = score_of(runs), tail_of(runs)

    def key(group: Group) -> list[float]:
        tails = mean([sign * tail.mean(run, name) for run in group.runs])
        bests = mean([best([sign * v for v in run.values(name)]) for run in group.runs])
        return [math.inf if math.isnan(value) else -value for value in (tails, bests)]

    return sorted(groups, key=key)


def runs_of(groups: Iterable[Group]) -> list[Run]:
    """Return the runs of all groups."""
    return [run for group in groups for run in group.runs]
