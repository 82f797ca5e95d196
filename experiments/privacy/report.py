"""RESULTS.md and its figure, from the kept results alone."""

import math
from pathlib import Path

from experiments.privacy import study
from experiments.privacy.study import CLIP_NORM, DELTA, MACHINE, METHODS
from fedjax_lab.estimates import estimate, format_estimate
from fedjax_lab.machine.atomic_files import write_text

HERE = Path(__file__).parent
FIGURE = "figures/privacy.svg"

_CYCLIC = """

Cyclic: ten groups of 100 clients take turns in a public order, and the guarantee replaces a client
by another. With 10 bands, the noise of a round cancels a part of that of the nine rounds before it
(DP-FTRL). Cyclic and Poisson columns have different guarantees: replacing a client changes a sum by
twice the clip norm, and a public order hides no participation."""


def table(kept):
    """Epsilons down, methods across: test accuracy in percent, with 95 % intervals."""
    methods = [name for name in METHODS if name in kept]
    lines = [f"| epsilon | {' | '.join(methods)} |", "|---:|" + "---:|" * len(methods)]
    for epsilon in (f"{e:g}" for e in study.EPSILONS):
        found = [kept[name][epsilon] for name in methods]
        cells = [format_estimate(estimate(list(run["accuracy"].values())), 2) for run in found]
        shown = "no noise" if epsilon == "inf" else epsilon
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chosen(kept):
    """The noise, and what the grid's best were, as a table."""
    lines = [
        "| method | epsilon | noise multiplier | server learning rate |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {epsilon} | {run['noise_multiplier']:.2f} | {run['server_lr']:g} |"
        for name in METHODS
        if name in kept
        for epsilon, run in kept[name].items()
    ]
    return "\n".join(lines)


def draw(kept, path):
    """Accuracy against epsilon, a line with intervals for each method."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.subplots()
    places = range(len(study.EPSILONS))
    for shift, name in enumerate(name for name in METHODS if name in kept):
        found = [estimate(list(kept[name][f"{e:g}"]["accuracy"].values())) for e in study.EPSILONS]
        axes.errorbar(
            [p + 0.06 * (shift - 2) for p in places],
            [e.mean for e in found],
            yerr=[e.half_width or 0.0 for e in found],  # one seed has no interval
            marker="o",
            capsize=3,
            label=name,
        )
    axes.set_xticks(places, ["no noise" if math.isinf(e) else f"{e:g}" for e in study.EPSILONS])
    axes.set_xlabel(f"epsilon (delta {DELTA:g}, 1,000 clients)")
    axes.set_ylabel("test accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    with rc_context({"svg.hashsalt": FIGURE}):  # equal figures, equal bytes
        figure.savefig(path, metadata={"Date": None})


def page(kept):
    """The page of the kept results."""
    seeds = len(next(iter(next(iter(kept.values())).values()))["accuracy"])
    ends = [
        f"{name} at {epsilon}"
        for name, runs in kept.items()
        for epsilon, run in runs.items()
        if run["server_lr"] in (METHODS[name].rates[0], METHODS[name].rates[-1])
    ]
    ends = ", ".join(ends) or "none"
    return f"""# Accuracy against epsilon on Fashion-MNIST

Test accuracy in percent of a linear model after {MACHINE.rounds} rounds, {seeds} seeds, mean and
95 % interval. {MACHINE.clients:,} clients with label shares of Dirichlet(1); Poisson cohorts of
{MACHINE.cohort} expected; 3 local steps of 20 examples, client learning rate 0.1; clip norm
{CLIP_NORM:g}; client-level (epsilon, {DELTA:g})-differential privacy for a client added or removed.
CFedAvg sends a tenth of the numbers (top-k with error feedback), which are clipped after
compression. "No noise" is clipped, too.{_CYCLIC if "FedAvg, cyclic" in kept else ""}

{table(kept)}

![Accuracy against epsilon]({FIGURE})

With few clients the noise is large: at the same share of the clients and the same epsilon, the
noise on a mean falls with the size of the cohort. So the table holds for this scale only.
The server learning rate is the best of five for each cell, on images held out of training: 0.3, 1,
3, 10 and 30, for FedAdam a hundredth of these, for cyclic cohorts from 0.1 to 10. Cells whose best
rate lies at an end of its grid: {ends}. The privacy cost of this choice is not counted.

{chosen(kept)}

Made by `make privacy-study`.
"""


def write(kept):
    """Write the page and the figure."""
    (HERE / FIGURE).parent.mkdir(exist_ok=True)
    draw(kept, HERE / FIGURE)
    write_text(HERE / "RESULTS.md", page(kept))
