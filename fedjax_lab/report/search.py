"""Figure of a search for hyperparameters."""

import math
from typing import Any

from fedjax_lab.report.style import COLOURS, frame, literal, panels
from fedjax_lab.tuning.found import Found


def search_figure(found: Found) -> Any:
    """Draw the score of every trial over each hyperparameter, one row of panels for each method.

    Colours are the rungs: later ones have more rounds. A cross marks the chosen point.
    Points that diverged are ticks at the lower edge.

    Args:
      found: result of ``tune``.

    Raises:
      ImportError: matplotlib is missing.
    """
    pairs = [(method, name) for method, best in found.best.items() for name in best]
    figure, axes = panels(len(pairs), 3.4, 2.6)
    ends = sorted({trial.rounds for trial in found.trials})
    for (method, name), ax in zip(pairs, axes, strict=True):
        trials = [trial for trial in found.trials if trial.method == method]
        for place, rounds in enumerate(ends):
            shown = [t for t in trials if t.rounds == rounds and not math.isnan(t.score)]
            ax.plot(
                [trial.point[name] for trial in shown],
                [trial.score for trial in shown],
                "o",
                markersize=4,
                color=COLOURS[place % len(COLOURS)],
                label=f"{rounds:,} rounds",
            )
        lost = [trial.point[name] for trial in trials if math.isnan(trial.score)]
        ax.plot(lost, [0] * len(lost), "|k", transform=ax.get_xaxis_transform(), clip_on=False)
        best = found.best[method][name]
        ax.plot([best], [sum(found.scores[method]) / len(found.scores[method])], "xk")
        values = [trial.point[name] for trial in trials]
        if min(values) > 0 and max(values) > 5 * min(values):
            ax.set_xscale("log")
        frame(ax, name, "validation score", literal(method))
    axes[0].legend(fontsize="small", frameon=False)
    return figure
