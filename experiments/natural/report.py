"""RESULTS.md and its figure, from the stored cells alone."""

import json
from pathlib import Path

import numpy as np
from matplotlib import rc_context

from experiments.natural.methods import ADAPTIVE_SERVERS, SYSTEMS, against, decide, ends, spread
from experiments.natural.published import EXPECTED
from experiments.natural.runs import DIVISIONS, TARGETS, Scale, rounds_to, verdict
from experiments.studies.verdicts import CONTRADICTED, SHOWS
from fedjax_lab.estimates import estimate, format_estimate
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import markdown_table
from fedjax_lab.report.style import COLOURS, DASHES, frame, new_figure

HERE = Path(__file__).parent
FILES = {
    "divisions": HERE / "results.json",
    "methods": HERE / "methods.json",
    "published": HERE / "published.json",
}
ROLES = "roles, E = 1"  # the cell whose row FedAvg has among the methods
RIVALS = ("fedavg", "scaffold", "fedadam")


def stored():
    """Return {part: {name: cell}} of what has been run."""
    return {
        part: json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for part, file in FILES.items()
    }


def method_rows(divisions, methods):
    """Return {name: cell} of all methods on the roles; FedAvg's is that of the divisions."""
    return {"fedavg": divisions[ROLES], **methods}


def table(kept):
    """Return the table of all cells: rates, accuracies, and rounds to each target."""
    head = ["division", "client_lr", "seeds", "accuracy % at the end"]
    rows = [[*head, *(f"rounds to {target} %" for target in TARGETS)]]
    for name, cell in kept.items():
        ends = estimate([values[-1] for values in cell["accuracy"].values()])
        reached = [list(rounds_to(cell, target).values()) for target in TARGETS]
        shown = [format_estimate(estimate(r), 0) if np.isfinite(r).all() else "-" for r in reached]
        chosen_lr, seeds = f"{cell['client_lr']:.3g}", str(len(cell["accuracy"]))
        rows.append([name, chosen_lr, seeds, format_estimate(ends, 1), *shown])
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


def chosen(cell):
    """Return the learning rates of a cell as text."""
    server = f", server_lr {cell['server_lr']:.3g}" if "server_lr" in cell else ""
    return f"client_lr {cell['client_lr']:.3g}{server}"


def methods_table(rows):
    """Return the table of the methods: what was chosen, the end, and differences.

    Args:
      rows: {method: cell}, FedAvg's among them.
    """
    means = {name: np.mean(list(ends(cell).values())) for name, cell in rows.items()}
    head = ["method", "chosen", "seeds", "accuracy % at the end"]
    shown = [[*head, "against fedavg", "rounds to 40 %"]]
    for name in sorted(means, key=means.__getitem__, reverse=True):
        cell = rows[name]
        found = against(cell, rows["fedavg"])
        difference = "" if name == "fedavg" else f"{found.mean:+.1f} ({decide(found)})"
        reached = list(rounds_to(cell, 40).values())
        took = format_estimate(estimate(reached), 0) if np.isfinite(reached).all() else "-"
        end = format_estimate(estimate(list(ends(cell).values())), 1)
        seeds = str(len(cell["accuracy"]))
        shown.append([name, chosen(cell), seeds, end, difference, took])
    return shown


def methods_sentences(rows):
    """Return the verdicts on the two claims about methods, as far as their runs are there."""
    lines = []
    if all(name in rows for name in ADAPTIVE_SERVERS):
        best, worst, difference, decided = spread(rows)
        shown = format_estimate(difference, 1)
        lines.append(f"- **Reddi et al.: {decided}**; {best} ends {shown} points above {worst}.")
    if not all(name in rows for name in RIVALS):
        return "\n".join(lines)
    rival = max(RIVALS, key=lambda name: np.mean(list(ends(rows[name]).values())))
    for system, members in SYSTEMS.items():
        parts = []
        for name in (name for name in members if name in rows):
            of_rivals = [
                f"against {other} {format_estimate(found, 1)} points ({decide(found)})"
                for other in dict.fromkeys(("fedavg", rival))
                for found in [against(rows[name], rows[other])]
            ]
            parts.append(f"{name} {', '.join(of_rivals)}")
        if parts:
            lines.append(f"- **{system}**: {'; '.join(parts)}.")
    return "\n".join(lines)


def draw_methods(rows, path):
    """Draw the accuracy of all methods over the rounds, means over the seeds."""
    figure = new_figure(6.4, 5.0)
    axes = figure.subplots()
    for place, (name, cell) in enumerate(rows.items()):
        means = np.mean(list(cell["accuracy"].values()), axis=0)
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
        axes.plot(cell["rounds"], means, color=colour, linestyle=dash, label=name)
    frame(axes, "round", "accuracy, %")
    axes.legend(fontsize=8, ncols=2)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def published_table(rows):
    """Return the table of the runs at the published size.

    Args:
      rows: {method: cell}.
    """
    shown = [["method", "chosen", "accuracy % after 200 rounds", "at the end", "hours"]]
    for name, cell in rows.items():
        (curve,) = cell["accuracy"].values()
        early = curve[cell["rounds"].index(200)]
        (end,) = ends(cell).values()
        values = (f"{value:.1f}" for value in (early, end, cell["seconds"] / 3600))
        shown.append([name, chosen(cell), *values])
    return shown


def published_sentence(rows):
    """Return what the runs at the published size say.

    Args:
      rows: {method: cell}.
    """
    (end,) = ends(rows["fedavg"]).values()
    verdict = SHOWS if EXPECTED[0] <= end <= EXPECTED[1] else CONTRADICTED
    line = f"- **FedAvg ends where it should: {verdict}**; at {end:.1f} %."
    if "fedadam" in rows:
        (other,) = ends(rows["fedadam"]).values()
        line += (
            f" FedAdam ends {abs(other - end):.1f} points {'above' if other > end else 'below'} it."
        )
    return line


def page(divisions, methods, published):
    """Return RESULTS.md.

    Args:
      divisions: {name: cell} of the divisions.
      methods: {name: cell} of the methods but FedAvg.
      published: {name: cell} of the runs at the published size.
    """
    parts = [(HERE / "introduction.md").read_text(encoding="utf-8").rstrip()]
    if not divisions:
        return parts[0] + "\n\nNo run is stored yet.\n"
    seconds = [cell["seconds"] for cell in divisions.values()]
    parts.append(
        f"`make natural-study`; a final run took {min(seconds):.0f} to {max(seconds):.0f} s."
    )
    parts.append("## Roles against random divisions")
    parts.append(sentences(divisions))
    parts.append("![Accuracy over the rounds](figures/accuracy.svg)")
    parts.append(markdown_table(table(divisions)))
    if methods:
        rows = method_rows(divisions, methods)
        parts.append("## Methods on the roles")
        parts.append(methods_sentences(rows))
        parts.append("![Accuracy of the methods](figures/methods.svg)")
        parts.append(markdown_table(methods_table(rows)))
    if published:
        parts.append("## At the published size")
        parts.append(published_sentence(published))
        parts.append(markdown_table(published_table(published)))
    parts.append((HERE / "findings.md").read_text(encoding="utf-8").rstrip())
    return "\n\n".join(parts) + "\n"


def write(divisions, methods, published):
    """Write RESULTS.md and the figures."""
    with rc_context({"svg.hashsalt": "fedjax_lab"}):  # equal figures, equal bytes
        if divisions:
            draw(divisions, HERE / "figures" / "accuracy.svg")
        if methods:
            draw_methods(method_rows(divisions, methods), HERE / "figures" / "methods.svg")
    write_text(HERE / "RESULTS.md", page(divisions, methods, published))
