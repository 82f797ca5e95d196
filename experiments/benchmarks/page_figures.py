"""Draw the figure of docs/speed.md as an SVG file.

Run ``python -m experiments.benchmarks.page_figures`` after the numbers have changed. It reads
``cpu.json``, measures nothing, and also writes the pages' table and sentences on speed.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from experiments.benchmarks.speed import Speedup, speedups, stored, write
from fedjax_lab.report.style import COLOURS, frame, new_figure

DOCS = Path(__file__).parents[2] / "docs"


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
    frame(axes, "times the fastest opponent", "")
    return figure


def main() -> None:
    """Write the figure and the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    parser.add_argument("--folder", type=Path, default=DOCS / "images")
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "fedjax_lab"  # equal figures, equal bytes
    measured = stored()
    if measured is not None:
        path = arguments.folder / f"speedups.{arguments.format}"
        metadata = {"Date": None} if arguments.format == "svg" else None
        speedup_figure(speedups(measured)).savefig(path, metadata=metadata, dpi=110)
        print(path)
    for path in write():
        print(path)


if __name__ == "__main__":
    main()
