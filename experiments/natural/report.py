"""RESULTS.md and its figure, from the stored cells alone."""

from pathlib import Path

import numpy as np

from experiments.natural.runs import DIVISIONS, TARGETS, Scale, rounds_to, verdict
from fedjax_lab.estimates import estimate, format_estimate
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import markdown_table
from fedjax_lab.report.style import COLOURS, DASHES, frame, new_figure

HERE = Path(__file__).parent


def table(kept):
    """Return the table of all cells: rates, accuracies, and rounds to each target."""
    head = ["division", "client_lr", "accuracy % at the end"]
    rows = [[*head, *(f"rounds to {target} %" for target in TARGETS)]]
    for name, cell in kept.items():
        ends = estimate([values[-1] for values in cell["accuracy"].values()])
        reached = [list(rounds_to(cell, target).values()) for target in TARGETS]
        shown = [format_estimate(estimate(r), 0) if np.isfinite(r).all() else "-" for r in reached]
        rows.append([name, f"{cell['client_lr']:.3g}", format_estimate(ends, 1), *shown])
    return rows


def sentences(kept):
    """Return a line for each E and random division: the verdict, and what it follows from."""
    lines = []
    for local_epochs in Scale().local_epochs:
        for other in DIVISIONS[1:]:
            if any(f"{division}, E = {local_epochs}" not in kept for division in ("roles", other)):
                continue
            decided, target, difference = verdict(kept, local_epochs, other)
            why = "no target is reached by all runs"
            if difference is not None:
                shown = format_estimate(difference, 0)
                why = f"to {target} % it needs {shown} rounds more than the roles"
            lines.append(f"- **E = {local_epochs}, {other}: {decided}**; {why}.")
    return "\n".join(lines)


def draw(kept, path):
    """Draw accuracy over the rounds, the mean over the seeds with its interval."""
    figure = new_figure(6.4, 3.8)
    axes = figure.subplots()
    for name, cell in kept.items():
        division, _, epochs = name.rpartition(", ")
        colour = COLOURS[DIVISIONS.index(division)]
        dash = DASHES[[f"E = {e}" for e in Scale().local_epochs].index(epochs)]
        each = [estimate(values) for values in zip(*cell["accuracy"].values(), strict=True)]
        means = np.array([e.mean for e in each])
        widths = np.array([e.half_width or 0.0 for e in each])
        axes.plot(cell["rounds"], means, color=colour, linestyle=dash, label=name)
        axes.fill_between(
            cell["rounds"], means - widths, means + widths, color=colour, alpha=0.15, lw=0
        )
    frame(axes, "round", "accuracy, %")
    axes.legend(fontsize=9)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def page(kept):
    """Return RESULTS.md.

    Args:
      kept: {name: cell}.
    """
    parts = [(HERE / "introduction.md").read_text(encoding="utf-8").rstrip()]
    if not kept:
        return parts[0] + "\n\nNo run is stored yet.\n"
    seconds = sum(cell["seconds"] for cell in kept.values())
    parts.append(
        f"`make natural-study`; a final run took {seconds / len(kept):.0f} s of two cores."
    )
    parts.append("## Roles against random divisions")
    parts.append(sentences(kept))
    parts.append("![Accuracy over the rounds](figures/accuracy.svg)")
    parts.append(markdown_table(table(kept)))
    parts.append((HERE / "findings.md").read_text(encoding="utf-8").rstrip())
    return "\n\n".join(parts) + "\n"


def write(kept):
    """Write RESULTS.md and the figure."""
    if kept:
        draw(kept, HERE / "figures" / "accuracy.svg")
    write_text(HERE / "RESULTS.md", page(kept))
