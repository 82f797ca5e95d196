"""Draw the figures of docs/speed.md and docs/accelerators.md as SVG files.

Run ``python -m experiments.benchmarks.page_figures`` after the numbers have changed. It reads
``cpu.json`` and ``accelerators.jsonl``, measures nothing, and also writes the pages' table and
sentences on speed.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from experiments.benchmarks.speed import Speedup, speedups, stored, write
from fedjax_lab.report.style import COLOURS, frame, log_axis, new_figure

DOCS = Path(__file__).parents[2] / "docs"
ROWS = Path(__file__).parent / "accelerators.jsonl"
CHIPS = {"v5e": "TPU v5e", "h200": "H200"}
MEASURES = {
    "temporaries": ("temporary memory (MiB)", 2**20),
    "bytes_accessed": ("bytes accessed (GB)", 1e9),
}


def speedup_figure(rows: list[Speedup]) -> Any:
    """Draw the speed-up of each row with the range of its repeats.

    Args:
      rows: in the order of the table.
    """
    figure = new_figure(7.0, 0.4 * len(rows) + 1.0)
    axes = figure.subplots()
    places = list(range(len(rows), 0, -1))
    ratios = [row.ratio[0] for row in rows]
    around = [
        [row.ratio[0] - row.ratio[1] for row in rows],
        [row.ratio[2] - row.ratio[0] for row in rows],
    ]
    axes.errorbar(ratios, places, xerr=around, fmt="o", color=COLOURS[0], capsize=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(places, [row.label for row in rows])
    axes.set_xlim(0, math.ceil(max(row.ratio[2] for row in rows)))
    axes.set_ylim(0.4, len(rows) + 0.6)
    frame(axes, "times as fast as the fastest opponent", "")
    return figure


def read_models(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Select the rows of one-step rounds of ten clients: model -> chip -> row.

    Args:
      rows: all rows of ``accelerators.jsonl``.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["group"] == "models" and row["target"] in CHIPS:
            found.setdefault(row["name"].removesuffix(" vmap"), {})[row["target"]] = row
    return found


def accelerator_figure(models: dict[str, dict[str, dict[str, Any]]]) -> Any:
    """Draw temporary memory and bytes accessed of each model on both chips.

    Args:
      models: as ``read_models`` gives them.
    """
    figure = new_figure(8.0, 0.3 * len(models) + 1.3)
    panels = figure.subplots(1, 2, sharey=True)
    names = sorted(models, key=lambda name: models[name]["v5e"]["bytes_accessed"])
    for axes, (key, (label, unit)) in zip(panels, MEASURES.items(), strict=True):
        values = {chip: [models[name][chip][key] / unit for name in names] for chip in CHIPS}
        both = [value for chip in values.values() for value in chip]
        for place, pair in enumerate(zip(*values.values(), strict=True)):
            axes.plot(pair, [place, place], color="0.75", linewidth=1.5, zorder=1)
        for (chip, shown), colour, marker in zip(values.items(), COLOURS, "os", strict=False):
            axes.scatter(
                shown, range(len(names)), color=colour, marker=marker, label=CHIPS[chip], zorder=2
            )
        log_axis(axes, "x", min(both), max(both))
        frame(axes, label, "")
    panels[0].set_yticks(range(len(names)), names)
    panels[1].legend(loc="lower right")
    return figure


def main() -> None:
    """Write both figures, and the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    parser.add_argument("--folder", type=Path, default=DOCS / "images")
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "fedjax_lab"  # equal figures, equal bytes
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    figures = {"accelerators": accelerator_figure(read_models(rows))}
    measured = stored()
    if measured is not None:
        figures["speedups"] = speedup_figure(speedups(measured))
    for name, figure in figures.items():
        path = arguments.folder / f"{name}.{arguments.format}"
        metadata = {"Date": None} if arguments.format == "svg" else None
        figure.savefig(path, metadata=metadata, dpi=110)
        print(path)
    for path in write():
        print(path)


if __name__ == "__main__":
    main()
