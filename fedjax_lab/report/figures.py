"""A report's figures. Only this file, and ``FederatedArrays.plot``, import matplotlib."""

import math
import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_lab.report.runs import Group, Run

# Okabe and Ito's colours, which differ in lightness too, without the yellow; then dashes.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_DPI = 150


def write_figures(groups: Sequence[Group], folder: Path) -> list[tuple[str, str]]:
    """Write the PNG files and return (file name, caption) of each.

    Raises:
      ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a report's figures need matplotlib: `pip install 'fedjax-lab[report]'`."
        ) from error
    several = any(len(group.runs) > 1 for group in groups)
    seeds = " Thin lines are single seeds, thick ones their mean." if several else ""
    written = []

    def save(figure: Any, name: str, caption: str) -> None:
        scratch = folder / f".{name}.tmp"
        figure.savefig(scratch, dpi=_DPI, format="png")
        os.replace(scratch, folder / name)
        written.append((name, caption))

    def rounds(run: Run) -> list[float]:
        return run.values("round")

    if _has(groups, "accuracy"):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        _curves(axes, groups, rounds, _accuracy)
        _label(axes, "round", "test accuracy (%)")
        _legend(figure, groups)
        save(figure, "accuracy_rounds.png", f"Test accuracy against rounds.{seeds}")

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        _curves(axes, groups, lambda run: [b / 1e6 for b in run.values("bytes_up")], _accuracy)
        _label(axes, "uplink of all clients together (MB)", "test accuracy (%)")
        _legend(figure, groups)
        save(figure, "accuracy_uplink.png", f"Test accuracy against bytes sent.{seeds}")

    losses = {"loss": "training loss (in local steps)", "test_loss": "test loss"}
    shown = [name for name in losses if _has(groups, name)]
    if shown:
        figure = Figure(figsize=(1 + 4.2 * len(shown), 4.5), layout="constrained")
        figure.set_layout_engine("constrained", wspace=0.06)
        for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            _curves(axes, groups, rounds, operator.methodcaller("values", name))
            _label(axes, "round", losses[name])
            if _positive(groups, name):
                axes.set_yscale("log")
        _legend(figure, groups)
        save(figure, "loss.png", f"Loss against rounds.{seeds}")

    for number, run in enumerate(_distinct_partitions(groups)):
        name = f"partition{number or ''}.png"
        figure = _plot_partition(run.partition)
        spec, seed = run.partition["spec"], run.partition["seed"]
        save(figure, name, f"Partition `{spec}` drawn with seed {seed}: who holds which labels.")
    return written


def _accuracy(run: Run) -> list[float]:
    return [100 * accuracy for accuracy in run.values("accuracy")]


def _has(groups: Sequence[Group], name: str) -> bool:
    return any(math.isfinite(v) for group in groups for run in group.runs for v in run.values(name))


def _positive(groups: Sequence[Group], name: str) -> bool:
    values = [v for group in groups for run in group.runs for v in run.values(name)]
    return all(v > 0 for v in values if math.isfinite(v))


def _curves(
    axes: Any,
    groups: Sequence[Group],
    x: Callable[[Run], list[float]],
    y: Callable[[Run], list[float]],
) -> None:
    """One colour per group: each seed as a thin line, the mean as a thick one.

    The mean is over the rounds at which all seeds were evaluated.
    """
    for index, group in enumerate(groups):
        style = _style(index)
        if len(group.runs) > 1:
            for run in group.runs:
                axes.plot(x(run), y(run), linewidth=0.8, alpha=0.45, **style)
        common = set.intersection(*(set(run.values("round")) for run in group.runs))
        points = [
            [
                (a, b)
                for r, a, b in zip(run.values("round"), x(run), y(run), strict=True)
                if r in common
            ]
            for run in group.runs
        ]  # [runs, rounds, 2]
        mean = np.asarray(points).mean(0)
        marker = "o" if len(mean) == 1 else None
        axes.plot(mean[:, 0], mean[:, 1], linewidth=2, marker=marker, **style)


def _style(index: int) -> dict[str, Any]:
    dashes = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    return {"color": _COLOURS[index % len(_COLOURS)], "linestyle": dashes}


def _label(axes: Any, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)


def _legend(figure: Any, groups: Sequence[Group]) -> None:
    """Below the axes, where it covers nothing; the figure grows by the legend's rows."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linewidth=2, label=group.label, **_style(index))
        for index, group in enumerate(groups)
    ]
    longest = max(len(group.label) for group in groups)
    width = figure.get_figwidth() * 11  # characters that fit, roughly
    columns = max(1, min(len(groups), int(width // (longest + 8))))
    rows = -(-len(groups) // columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * (rows - 1))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def _distinct_partitions(groups: Sequence[Group]) -> list[Run]:
    """A run for each scheme and number of clients, at most four."""
    found: dict[Any, Run] = {}
    for group in groups:
        for run in group.runs:
            if run.partition.get("label_histogram"):
                settings = run.settings
                key = (
                    settings.get("dataset"),
                    settings.get("partition"),
                    run.config["num_clients"],
                )
                found.setdefault(key, run)
    return list(found.values())[:4]


def _plot_partition(partition: dict[str, Any]) -> Any:
    from fedjax_lab.data.federated import from_partition
    from fedjax_lab.data.partition import Partition
    from fedjax_lab.data.sources import Examples

    histogram = np.asarray(partition["label_histogram"], np.int64)  # [N, C]
    labels = np.repeat(np.tile(np.arange(histogram.shape[1]), len(histogram)), histogram.ravel())
    indices = np.arange(len(labels), dtype=np.int32)
    host = Partition(
        indices, histogram.sum(1).astype(np.int32), partition["spec"], partition["seed"]
    )
    return from_partition(Examples(indices, labels.astype(np.int32)), host).plot()
