"""RESULTS.md and its figures, from the stored measurements alone."""

from pathlib import Path

import numpy as np

from experiments.theory.measure import slope
from experiments.theory.theorems import MEASUREMENTS
from fedjax_lab.estimates import estimate
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import markdown_table
from fedjax_lab.report.style import COLOURS, frame, new_figure

HERE = Path(__file__).parent


def rows(found, name):
    """Return the table of a measurement: series down, points across, the slope at the end.

    Args:
      found: {"x", "y"} of the measurement.
      name: its name.
    """
    about = MEASUREMENTS[name]
    head = [about.axis, *(f"{x:,.6g}" for x in found["x"]), "slope"]
    table = [head]
    for series, values in found["y"].items():
        cells = [_short(estimate(each).mean) for each in values]
        table.append([series, *cells, _slope_text(found["x"], values)])
    return table


def _short(value):
    return f"{value:.3g}" if np.isfinite(value) else "-"


def _slope_text(x, values):
    if not np.isfinite(values).all():
        return "-"
    found = slope(x, values)
    return f"{found.mean:.2f} ± {found.half_width or 0.0:.2f}"


def draw(found, name, path):
    """Draw a measurement: means over the seeds with 95 % intervals, and the predicted slope."""
    about = MEASUREMENTS[name]
    figure = new_figure(5.2, 3.6)
    axes = figure.subplots()
    x = np.asarray(found["x"])
    for colour, (series, values) in zip(COLOURS, found["y"].items(), strict=False):
        each = [estimate(value) for value in values]
        means = np.array([e.mean for e in each])
        widths = np.array([e.half_width or 0.0 for e in each])
        below = np.minimum(widths, 0.9 * means)  # a logarithmic axis has no 0
        label = f"{series} ({_slope_text(found['x'], values)})"
        axes.errorbar(
            x, means, yerr=[below, widths], marker="o", ms=4, capsize=2, color=colour, label=label
        )
    if about.predicted is not None:
        first = max(estimate(values[0]).mean for values in found["y"].values())
        line = 1.3 * first * (x / x[0]) ** about.predicted
        axes.plot(x, line, "k--", lw=1, label=f"slope {about.predicted:.2f}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(x, [f"{value:,.6g}" for value in x])
    axes.minorticks_off()
    frame(axes, about.axis, "", about.title)
    axes.legend(fontsize=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def page(kept):
    """Return RESULTS.md.

    Args:
      kept: {measurement: {"x", "y", "seconds"}}.
    """
    seconds = sum(found["seconds"] for found in kept.values())
    parts = [(HERE / "introduction.md").read_text(encoding="utf-8").rstrip()]
    parts.append(
        f"All of it: `python -m experiments.theory`, {seconds / 60:.0f} minutes on two cores with "
        "other work beside it."
    )
    parts.append(markdown_table(summary(kept)))
    for name, about in MEASUREMENTS.items():
        if name not in kept:
            continue
        predicted = "none" if about.predicted is None else f"{about.predicted:.2f}"
        parts += [
            f"## {about.theorem}: {about.title[0].lower()}{about.title[1:]}",
            f"Measured: {about.measured}. Setting: {about.setting}. Slope of the bound: "
            f"{predicted}.",
            f"![{about.title}](figures/{name}.svg)",
            markdown_table(rows(kept[name], name)),
        ]
        note = HERE / "notes" / f"{name}.md"
        if note.exists():
            parts.append(note.read_text(encoding="utf-8").strip())
    return "\n\n".join(parts) + "\n"


def summary(kept):
    """Return a table with a line for each measurement: what is predicted, what was found."""
    table = [["theorem", "over", "slope of the bound", "slopes found"]]
    for name, about in MEASUREMENTS.items():
        if name in kept:
            found = kept[name]
            texts = [f"{s} {_slope_text(found['x'], values)}" for s, values in found["y"].items()]
            predicted = "-" if about.predicted is None else f"{about.predicted:.2f}"
            table.append([about.theorem, about.axis, predicted, ", ".join(texts)])
    return table


def write(kept):
    """Write the page and the figures."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "fedjax_lab"  # equal figures, equal bytes
    for name, found in kept.items():
        draw(found, name, HERE / "figures" / f"{name}.svg")
    write_text(HERE / "RESULTS.md", page(kept))
