"""Figure of a search for hyperparameters."""

import math
from typing import Any

from fedjax_lab.report.style import COLOURS, frame, legend_of, literal, log_axis, new_figure
from fedjax_lab.tuning.search_result import SearchResult, Trial


def search_figure(found: SearchResult) -> Any:
    """Draw the score of every trial over each hyperparameter, one row of panels for each method.

    Colours are the rungs: later ones have more rounds. A cross marks the chosen point.
    Points that diverged are ticks at the lower edge.

    Raises:
      ImportError: matplotlib is missing.
    """
    across = max(map(len, found.best.values()))
    figure = new_figure(max(3.4 * across, 5), 2.5 * len(found.best))
    figure.set_layout_engine("constrained")
    grid = figure.subplots(len(found.best), across, squeeze=False)
    ends = sorted({trial.rounds for trial in found.trials})
    for (method, best), row in zip(found.best.items(), grid, strict=True):
        trials = [trial for trial in found.trials if trial.method == method]
        for empty in row[len(best) :]:
            empty.set_axis_off()
        for name, axes in zip(best, row, strict=False):
            ticks = ["validation score", literal(method)] if axes is row[0] else [""]
            frame(axes, literal(name), *ticks)
            mean = sum(found.scores[method]) / len(found.scores[method])
            lines = _draw(axes, trials, name, ends, (best[name], mean))
    legend_of(figure, lines)
    return figure


def _draw(
    axes: Any, trials: list[Trial], name: str, ends: list[int], best: tuple[float, float]
) -> list[Any]:
    """Draw a panel; returns the lines of the legend."""
    values = [trial.point[name] for trial in trials]
    scores = [trial.score for trial in trials if not math.isnan(trial.score)]
    for which, numbers, ratio in (("x", values, 5), ("y", scores, 20)):
        if min(numbers) > 0 and max(numbers) > ratio * min(numbers):
            log_axis(axes, which, min(numbers), max(numbers))
    lines = []
    for place, rounds in enumerate(ends):
        shown = [t for t in trials if t.rounds == rounds and not math.isnan(t.score)]
        lines += axes.plot(
            [trial.point[name] for trial in shown],
            [trial.score for trial in shown],
            "o",
            markersize=4,
            color=COLOURS[place % len(COLOURS)],
            label=f"{rounds:,} rounds",
        )
    lost = [trial.point[name] for trial in trials if math.isnan(trial.score)]
    lower = axes.get_xaxis_transform()
    ticks = axes.plot(lost, [0.02] * len(lost), "|k", transform=lower, label="diverged")
    return [*lines, *axes.plot(*best, "xk", markersize=8, label="chosen"), *ticks]
