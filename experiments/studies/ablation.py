"""The figure of top accuracy against a hyperparameter."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_lab.estimates import estimate
from fedjax_lab.report.runs import Group
from fedjax_lab.report.style import Styles, frame, legend, panels, styles_of
from fedjax_lab.report.tables import top


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
        at, found = place(group.label), [100 * top(run) for run in group.runs]
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
