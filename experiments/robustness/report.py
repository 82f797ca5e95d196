"""RESULTS.md and its figure, from the kept results alone."""

import math
from pathlib import Path

from experiments.robustness.study import ATTACKS, LAST, MACHINE, NONE, RULES, SHARES, place
from fedjax_lab.estimates import estimate, format_estimate
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.markdown import markdown_table

HERE = Path(__file__).parent
FIGURE = "figures/robustness.svg"


def found(kept, rule, attack, share):
    """The mean over the seeds, NaN where one diverged; None where there is nothing."""
    runs = kept.get(place(rule, attack if share else NONE), {}).get(f"{share:g}")
    if runs is None:
        return None
    return estimate([math.nan if value is None else value for value in runs.values()])


def table(kept, attack):
    """Rules down, shares of attackers across: accuracy in percent with 95 % intervals."""
    shares = (0.0, *SHARES)
    rows = [["rule", *(f"{100 * share:g} %" for share in shares)]]
    for rule in RULES:
        cells = [found(kept, rule, attack, share) for share in shares]
        if any(cells):
            rows.append([rule, *("" if c is None else format_estimate(c, 1) for c in cells)])
    return markdown_table(rows)


def attacks_of(kept):
    """The attacks of which something is kept, in order."""
    return [attack for attack in ATTACKS if any(place(rule, attack) in kept for rule in RULES)]


def draw(kept, path):
    """Accuracy against the share of attackers: an axis for each attack, a line for each rule."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    shares = (0.0, *SHARES)
    for ax, attack in zip(axes, attacks_of(kept), strict=False):
        for index, rule in enumerate(RULES):
            line = [(s, found(kept, rule, attack, s)) for s in shares]
            line = [(s, value) for s, value in line if value and not math.isnan(value.mean)]
            ax.errorbar(
                [100 * s + 0.35 * (index - 3) for s, _ in line],
                [value.mean for _, value in line],
                yerr=[value.half_width or 0.0 for _, value in line],
                marker="o",
                markersize=3,
                capsize=2,
                linewidth=1,
                label=rule,
            )
        ax.set_title(attack, fontsize=10)
        ax.set_xticks([100 * s for s in shares])
        ax.set_ylim(0, 90)
        ax.grid(alpha=0.3)
    figure.supxlabel("clients that attack (%)")
    figure.supylabel("test accuracy (%)")
    axes[-1].axis("off")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="center", frameon=False)
    with rc_context({"svg.hashsalt": FIGURE}):  # equal figures, equal bytes
        figure.savefig(path, metadata={"Date": None})


def page(kept):
    """The page of the kept results."""
    seeds = len(kept[place("mean", NONE)]["0"])
    parts = [
        f"""# Rules under attacks on Fashion-MNIST

Test accuracy in percent of a linear model after {MACHINE.rounds} rounds of FedAvg, the mean of the
last {LAST} evaluations of ten, over {seeds} seeds with its 95 % interval; a dash: a seed diverged.
A share of the {MACHINE.clients} clients attacks, the same ones for all rules and seeds. A cohort
of {MACHINE.cohort} is drawn each round, so that the number of attackers in it varies: at 30 %, two
rounds of five have more than the 6 that `krum:6`, `multi_krum:6:8` and `trimmed_mean:0.3` tolerate.

![Accuracy against the share of attackers]({FIGURE})
"""
    ]
    for attack in attacks_of(kept):
        options = ", ".join(f"{name} {value:g}" for name, value in ATTACKS[attack].items())
        head = f"{attack} ({options})" if options else attack
        parts.append(f"## {head}\n\n{table(kept, attack)}\n")
    parts.append("Made by `make robustness-study`.\n")
    return "\n".join(parts)


def write(kept):
    """Write the page and the figure."""
    (HERE / FIGURE).parent.mkdir(exist_ok=True)
    draw(kept, HERE / FIGURE)
    write_text(HERE / "RESULTS.md", page(kept))
