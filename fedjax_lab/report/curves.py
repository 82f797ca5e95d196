"""Figures of metrics over the rounds, with a line for each group of runs; and their ranking, where
the lines are too many.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.estimates import estimate
from fedjax_lab.report.runs import Group, Run
from fedjax_lab.report.sections import runs_of, score_of
from fedjax_lab.report.statistics import ACCURACY as TEST
from fedjax_lab.report.statistics import ERROR, OWN, Score, best
from fedjax_lab.report.style import (
    COLOURS,
    Styles,
    frame,
    legend,
    literal,
    log_axis,
    new_figure,
    panels,
    plain_numbers,
    styles_of,
)

_MANY_RUNS = 12  # more single lines hide the means
_WIDE = 10.0  # ratio of costs beyond which the axis is logarithmic
_STEEP = 5.0  # and of a measure's values
_SPAN = 30.0  # points below the best that a ranking shows


class Measure(NamedTuple):
    """The quantity of an axis: the name of a column of runs' rows, its label, and a factor."""

    name: str
    label: str
    scale: float = 1.0

    def values(self, run: Run) -> list[float]:
        """Return a run's values, one for each evaluation."""
        return [self.scale * value for value in run.values(self.name)]


def measure_of(score: Score) -> Measure:
    """Return the measure of a score, such as "test accuracy of the own models (%)"."""
    of = " of the own models" if score.is_own else ""
    label = f"{'test ' * score.is_accuracy}{literal(score.words)}{of}{score.unit}"
    return Measure(score.name, label, score.scale)


ROUNDS = Measure("round", "round")
ACCURACY = measure_of(Score(TEST, TEST))
GLOBAL_MODEL = Measure(TEST, "test accuracy of the global model (%)", 100)
COSTS = (
    ROUNDS,
    Measure("bytes_up", "uplink of all clients together (MB)", 1e-6),
    Measure("gradients", "mini-batch gradients of all clients (thousands)", 1e-3),
)
ERRORS, OWN_ERRORS = (measure_of(Score(ERROR, name)) for name in (ERROR, f"{OWN}{ERROR}"))
PERPLEXITIES = Measure("perplexity", "perplexity")
LOSSES = (Measure("loss", "training loss (in local steps)"), Measure("test_loss", "test loss"))
DRIFT = Measure("client_drift", "client drift, mean ‖y - x‖²")
UPDATES = (
    Measure("update_norm", "norm of an update"),
    Measure("update_cosine", "cosine to the mean update"),
    Measure("cosine_to_last", "cosine to the client's last update"),
    Measure("gradient_diversity", "gradient diversity"),
)
ERROR_MEMORY = (
    Measure("error_sq", "error memory, mean ‖e‖²"),
    Measure("change_sq", "uncompressed change, mean ‖u‖²"),
    Measure("message_sq", "message sent, mean ‖Δ‖²"),
)


class Panel(NamedTuple):
    """One of a figure's axes: ``y`` against rounds."""

    groups: Sequence[Group]
    y: Measure
    title: str = ""


def has(groups: Sequence[Group], measure: Measure) -> bool:
    """Return True if a run has a finite value of the measure that is not 0."""
    values = [value for run in runs_of(groups) for value in measure.values(run)]
    return any(math.isfinite(value) and value != 0 for value in values)


def panels_of(groups: Sequence[Group], measures: Sequence[Measure], title: str = "") -> list[Panel]:
    """Return a panel for each measure that some groups have, with these groups."""
    panels = [Panel([group for group in groups if has([group], y)], y, title) for y in measures]
    return [panel for panel in panels if panel.groups]


def accuracy_figure(groups: Sequence[Group], styles: Styles | None = None) -> Any:
    """Draw accuracy against rounds, uplink and gradients, side by side; unknown costs are omitted.

    The accuracy is the one that compares the groups.

    A cost axis is logarithmic if the groups' totals differ more than tenfold.

    Args:
      groups: groups of runs; at least one run must have an accuracy.
      styles: label -> style; None: by the groups' order.
    """
    styles = styles or styles_of(group.label for group in groups)
    costs = [cost for cost in COSTS if has(groups, cost)]
    figure, all_axes = panels(len(costs), 5.0 if len(costs) < 3 else 4.2, 3.7)
    accuracy = measure_of(score_of(runs_of(groups)))
    limits = _accuracy_limits(groups, accuracy)
    for axes, cost in zip(all_axes, costs, strict=True):
        draw_curves(axes, groups, cost, accuracy, styles, shows_single_runs(groups))
        frame(axes, cost.label, accuracy.label if axes is all_axes[0] else "")
        axes.set_ylim(*limits)
        _cost_axis(axes, groups, cost)
    legend(figure, [group.label for group in groups], styles)
    return figure


def metric_figure(shown: Sequence[Panel], styles: Styles | None = None, columns: int = 3) -> Any:
    """Draw a panel for each measure, against rounds.

    An axis is logarithmic if all values are positive and differ fivefold, except of accuracies.
    """
    labels = list(dict.fromkeys(group.label for panel in shown for group in panel.groups))
    styles = styles or styles_of(labels)
    columns = min(columns, len(shown))
    single = all(shows_single_runs(panel.groups) for panel in shown)
    figure, all_axes = panels(len(shown), 5.6 if columns == 1 else 4.4, 3.5, columns)
    for axes, panel in zip(all_axes, shown, strict=True):
        draw_curves(axes, panel.groups, ROUNDS, panel.y, styles, single)
        frame(axes, ROUNDS.label, panel.y.label, panel.title)
        axes.set_xlim(left=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        values = [value for run in runs_of(panel.groups) for value in panel.y.values(run)]
        finite = [v for v in values if math.isfinite(v)]
        if panel.y is not GLOBAL_MODEL and finite and 0 < _STEEP * min(finite) < max(finite):
            log_axis(axes, "y", min(finite), max(finite))
    legend(figure, labels, styles)
    return figure


def ranking_figure(groups: Sequence[Group]) -> Any:
    """Draw the top accuracy of every group, best first: mean, 95 % interval, single seeds.

    A value far below the best is a number at the edge.
    """
    score = score_of(runs_of(groups))
    found = {
        group.label: [100 * best(run.values(score.name)) for run in group.runs] for group in groups
    }
    estimates = {label: estimate(values) for label, values in found.items()}
    means = {label: of.mean for label, of in estimates.items() if math.isfinite(of.mean)}
    labels = sorted(means, key=means.__getitem__)
    highest = max((max(found[label]) for label in labels), default=100.0)
    near = [min(found[label]) for label in labels if means[label] >= highest - _SPAN]
    edge = max(highest - _SPAN, min(near, default=0.0) - 3)
    figure = new_figure(7.5, 1 + 0.21 * max(3, len(labels)))
    axes = figure.subplots()
    for height, label in enumerate(labels):
        shown = estimates[label]
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


def draw_curves(
    axes: Any, groups: Sequence[Group], x: Measure, y: Measure, styles: Styles, single: bool
) -> None:
    """Draw each group's mean as a thick line, at the rounds at which all its runs were evaluated.

    With ``single``, single runs are thin lines; otherwise their range is a shade.
    """
    for group in groups:
        style = styles[group.label]
        if len(group.runs) > 1 and single:
            for run in group.runs:
                axes.plot(x.values(run), y.values(run), linewidth=0.7, alpha=0.4, **style)
        across, values = common_curves(group, x, y)
        if len(group.runs) > 1 and not single:
            low, high = values.min(0), values.max(0)
            axes.fill_between(across, low, high, color=style["color"], alpha=0.12, linewidth=0)
        marker = "o" if len(across) == 1 else None
        axes.plot(across, values.mean(0), linewidth=1.8, marker=marker, **style)


def shows_single_runs(groups: Sequence[Group]) -> bool:
    """Return True if there are few enough runs to draw a line for each."""
    return len(runs_of(groups)) <= _MANY_RUNS


def spread_note(groups: Sequence[Group]) -> str:
    """Return the caption's explanation of several seeds; empty for a single seed."""
    if all(len(group.runs) == 1 for group in groups):
        return ""
    if shows_single_runs(groups):
        return " Thin lines are single seeds, thick ones their mean."
    return " Lines are means over the seeds, shades their range."


def panels_note(shown: Sequence[Panel]) -> str:
    """Return the ``spread_note`` for a figure of several panels."""
    return spread_note(max((panel.groups for panel in shown), key=lambda of: len(runs_of(of))))


def common_curves(group: Group, x: Measure, y: Measure) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean x [T], y [runs, T]) at the T rounds at which all runs were evaluated."""
    curves = []
    for run in group.runs:
        points = zip(x.values(run), y.values(run), strict=True)
        curves.append(dict(zip(run.values("round"), points, strict=True)))
    return mean_curve(curves)


def mean_curve(
    curves: Sequence[Mapping[Any, tuple[float, float]]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean x [T], y [curves, T]) at the T rounds that all curves have, in their order.

    Args:
      curves: (x, y) by the round.
    """
    shared = sorted(set.intersection(*map(set, curves)))
    points = [[curve[round] for round in shared] for curve in curves]
    values = np.asarray(points, float).reshape(len(curves), len(shared), 2)
    return values[..., 0].mean(0), values[..., 1]


def _accuracy_limits(groups: Sequence[Group], accuracy: Measure) -> tuple[float, float]:
    """Compute axis limits for all but the first fifth of each curve."""
    settled = []
    for group in groups:
        values = common_curves(group, ROUNDS, accuracy)[1]
        settled += values[:, values.shape[1] // 5 :].ravel().tolist()
    settled = [value for value in settled if math.isfinite(value)] or [0.0, 100.0]
    low, high = min(settled), max(settled)
    room = max(0.5, 0.06 * (high - low))
    return max(0.0, low - room), min(100.0, high) + room


def _cost_axis(axes: Any, groups: Sequence[Group], cost: Measure) -> None:
    runs = [[value for value in cost.values(run) if value > 0] for run in runs_of(groups)]
    totals = [max(values) for values in runs if values]  # NaN is not above 0
    if max(totals) > _WIDE * min(totals):
        log_axis(axes, "x", min(min(values) for values in runs if values), max(totals))
        return
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=cost is ROUNDS))
    axes.xaxis.set_major_formatter(plain_numbers())
