"""The figure of the top accuracy of each group of runs."""

import math
from collections.abc import Sequence
from typing import Any

from fedjax_lab.estimates import estimate
from fedjax_lab.report.curves import measure_of
from fedjax_lab.report.runs import Group
from fedjax_lab.report.sections import runs_of, score_of
from fedjax_lab.report.statistics import best
from fedjax_lab.report.style import COLOURS, frame, literal, new_figure

_SPAN = 30.0  # points below the best that a ranking shows


def ranking_figure(groups: Sequence[Group]) -> Any:
    """Draw the top accuracy of every group, best first: mean, 95 % interval, single seeds.

    A value far below the best is a number at the edge.
    """
    score = score_of(runs_of(groups))
    found = {
        group.label: [100 * best(run.values(score.name)) for run in group.runs] for group in groups
    }
    means = {label: estimate(values).mean for label, values in found.items()}
    labels = sorted(
        (label for label in found if math.isfinite(means[label])), key=means.__getitem__
    )
    highest = max((max(found[label]) for label in labels), default=100.0)
    near = [min(found[label]) for label in labels if means[label] >= highest - _SPAN]
    edge = max(highest - _SPAN, min(near, default=0.0) - 3)
    figure = new_figure(7.5, 1 + 0.21 * max(3, len(labels)))
    axes = figure.subplots()
    for height, label in enumerate(labels):
        shown = estimate(found[label])
        if shown.mean < edge:
            axes.text(edge + 0.2, height, f"← {shown.mean:.1f}", va="center", fontsize=8)
            continue
        axes.errorbar(shown.mean, height, xerr=shown.half_width, fmt="o", color=COLOURS[0], ms=4)
        axes.plot(found[label], [height] * len(found[label]), "|", color=COLOURS[1], ms=7)
    if labels:
        axes.set_xlim(edge, highest + 2)
    frame(axes, f"top {measure_of(score).label}", "")
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(labels)), list(map(literal, labels)), fontsize=9)
    axes.set_ylim(-0.7, len(labels) - 0.3)
    return figure
