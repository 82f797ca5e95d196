"""How scores spread over the clients, each of which is scored on its own test examples."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.report.curves import shows_single_runs
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.sections import runs_of, score_of
from fedjax_lab.report.statistics import OWN, Score, mean, number
from fedjax_lab.report.style import frame, legend, literal, new_figure, styles_of

_TENTH = 10


class ClientScore(NamedTuple):
    """A client's score on its own test examples.

    Attributes:
      client: name of the client, or its number.
      examples: number of its test examples; None if the run did not record it.
      score: accuracy or mean squared error of the model that the client uses; NaN if it is not
        finite.
    """

    client: str
    examples: int | None
    score: float


def client_scores(run: Run) -> list[ClientScore]:
    """Return the scores of the clients that have test examples; none if the run has none.

    They are those of the last model, in summary.json (``client_test_accuracy``) or in the last row
    (``personal_accuracy_each``, ``client_test_accuracy_each``).

    Args:
      run: from ``load_runs``.
    """
    name = score_of([run]).of_global_model
    scores = run.rows[-1].get(f"{OWN}{name}_each")
    if not isinstance(scores, list):
        scores = run.summary.get(f"client_test_{name}") or []
    sizes = run.summary.get("client_test_examples") or ()
    if len(sizes) != len(scores):  # unknown: a client without a score has no test examples then
        sizes = [0 if value is None else None for value in scores]
    names = run.partition.get("names") or ()
    names = names if len(names) == len(scores) else range(len(scores))
    return [
        ClientScore(str(name), size, number(value))
        for name, size, value in zip(names, sizes, scores, strict=True)
        if size != 0
    ]


def spread_measures(runs: Iterable[Run]) -> dict[str, Callable[[Run], float]]:
    """Return header -> value of a run: worst tenth, best tenth and variance over the clients.

    Each client counts once. A tenth is the mean of the ceil(n / 10) worst or best of n clients. The
    variance is the mean squared deviation from the mean. Accuracies are in percent. Where no run
    has the score of each client, the worst tenth alone is known, or nothing.

    Args:
      runs: of a section.
    """
    runs = list(runs)
    score = score_of(runs)
    in_row, squared = f"{OWN}{score.of_global_model}_worst", " (points²)" * score.is_accuracy

    def ordered(run: Run) -> np.ndarray:
        return _in_order([client.score for client in client_scores(run)], score)

    def tenth(scores: np.ndarray) -> float:
        return mean(scores[: -(-len(scores) // _TENTH)].tolist())

    def worst(run: Run) -> float:
        return tenth(ordered(run)) if client_scores(run) else score.scale * run.last(in_row)

    def variance(run: Run) -> float:
        return float(ordered(run).var()) if client_scores(run) else math.nan

    found: dict[str, Callable[[Run], float]] = {}
    if any(client_scores(run) or in_row in run.rows[-1] for run in runs):
        found[f"worst tenth{score.unit}"] = worst
    if any(map(client_scores, runs)):
        found[f"best tenth{score.unit}"] = lambda run: tenth(ordered(run)[::-1])
        found[f"variance over clients{squared}"] = variance
    return found


def _in_order(scores: Sequence[float], of: Score) -> np.ndarray:
    """Return scores in order, the worst first; accuracies in percent. NaN is the worst of all."""
    found = of.scale * np.sort(scores)
    return found[::-1] if of.sign < 0 else np.roll(found, np.isnan(found).sum())  # NaN was last


def clients_figure(groups: Sequence[Group]) -> Any:
    """Draw the scores of the clients in order, the worst first: a curve for each group.

    Thick lines pool the clients of all seeds; thin lines are single seeds, if there are few runs.

    Args:
      groups: of comparable runs; at least one must have the score of each client.

    Raises:
      ImportError: matplotlib is missing.
    """
    score = score_of(runs_of(groups))
    groups = [group for group in groups if any(map(client_scores, group.runs))]
    styles = styles_of(group.label for group in groups)
    figure = new_figure(5.6, 3.5)
    axes = figure.subplots()
    for group in groups:
        scored = filter(None, map(client_scores, group.runs))  # what ended has scores
        of_runs = [[client.score for client in clients] for clients in scored]
        if len(of_runs) > 1 and shows_single_runs(groups):
            for scores in of_runs:
                _draw(axes, scores, score, linewidth=0.7, alpha=0.4, **styles[group.label])
        pooled = [score for scores in of_runs for score in scores]
        _draw(axes, pooled, score, linewidth=1.8, **styles[group.label])
    shown = f"{'test ' * score.is_accuracy}{literal(score.words)} of a client{score.unit}"
    frame(axes, "share of the clients, the worst first (%)", shown)
    axes.set_xlim(0, 100)
    legend(figure, [group.label for group in groups], styles)
    return figure


def _draw(axes: Any, scores: Sequence[float], of: Score, **style: Any) -> None:
    """Draw a step of equal width for each client."""
    values = _in_order(scores, of)
    shares = np.linspace(0, 100, len(values) + 1)
    axes.step(shares, [*values, *values[-1:]], where="post", **style)
