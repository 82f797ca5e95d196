"""Figures of the top accuracy of each group of runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_lab.estimates import estimate
from fedjax_lab.report.runs import Group
from fedjax_lab.report.sections import accuracy_of, runs_of
from fedjax_lab.report.statistics import ACCURACY, best
from fedjax_lab.report.style import (
    COLOURS,
    Styles,
    frame,
    legend,
    literal,
    new_figure,
    panels,
    styles_of,
)

_SPAN = 30.0  # points below the best that a ranking shows


def tops(group: Group, metric: str = ACCURACY) -> list[float]:
    """Return the highest accuracy of each run, in percent.

    Args:
      group: of runs.
      metric: name of the accuracy in rows.
    """
    return [100 * best(run.values(metric)) for run in group.runs]


def ranking_figure(groups: Sequence[Group]) -> Any:
    """Draw the top accuracy of every group, best first: mean, 95 % interval, single seeds.

    A value far below the best is a number at the edge.
    """
    metric = accuracy_of(runs_of(groups))
    found = {group.label: tops(group, metric) for group in groups}
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
    of_what = "" if metric == ACCURACY else " of the own models"
    frame(axes, f"top test accuracy{of_what} (%)", "")
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(labels)), list(map(literal, labels)), fontsize=9)
    axes.set_ylim(-0.7, len(labels) - 0.3)
    return figure


def ablation_figure(
    columns: Mapping[str, Sequence[Group]],
    place: Callable[[str], float | None],
    family: Callable[[str], str],
    xlabel: str,
    styles: Styles | None = None,
) -> Any:
    """Draw top accuracy against a hyperparameter, with a panel for each column of a table.

    Points are means with 95 % intervals; ticks are single seeds. Groups without the hyperparameter
    are horizontal lines.

    Args:
      columns: the column's name -> its groups.
      place: label of a group -> value of the hyperparameter, or None.
      family: label of a group -> name of its line.
      xlabel: name of the hyperparameter.
      styles: name of a line -> style; None: by their order.
    """
    lines = list(dict.fromkeys(family(g.label) for groups in columns.values() for g in groups))
    styles = styles or styles_of(lines)
    figure, all_axes = panels(len(columns), 5.6 if len(columns) == 1 else 4.4, 3.5)
    for axes, (name, groups) in zip(all_axes, columns.items(), strict=True):
        values = sorted({at for group in groups if (at := place(group.label)) is not None})
        for line in lines:
            _draw_line(axes, [g for g in groups if family(g.label) == line], place, styles[line])
        frame(axes, xlabel, "top test accuracy (%)", name)
        _value_axis(axes, values)
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    legend(figure, lines, styles)
    return figure


def _value_axis(axes: Any, values: Sequence[float]) -> None:
    """Use a logarithmic axis if positive values differ tenfold, with 0 to their left."""
    positive = [value for value in values if value > 0]
    if len(positive) < 2 or values[0] < 0 or positive[-1] < 10 * positive[0]:
        return
    if values[0] > 0:
        axes.set_xscale("log")
    elif positive[-1] > 10 * positive[0]:
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)


def _draw_line(
    axes: Any,
    groups: Sequence[Group],
    place: Callable[[str], float | None],
    style: dict[str, Any],
) -> None:
    points = []
    for group in groups:
        at, found = place(group.label), tops(group)
        if at is None:
            axes.axhline(estimate(found).mean, linewidth=1.2, **style)
        else:
            points.append((at, estimate(found)))
            axes.plot([at] * len(found), found, "_", color=style["color"], ms=7, alpha=0.6)
    if points:
        points.sort(key=lambda point: point[0])
        across = [at for at, _ in points]
        means = [found.mean for _, found in points]
        axes.plot(across, means, marker="o", ms=4, linewidth=1.5, **style)
        halves = [found.half_width or 0.0 for _, found in points]
        axes.errorbar(across, means, yerr=halves, fmt="none", ecolor=style["color"], capsize=3)
