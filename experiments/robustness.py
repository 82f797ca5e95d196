"""Six rules and the mean under five attacks, with none to 30 % of attackers, on Fashion-MNIST.

FedAvg on 100 clients with label shares of Dirichlet(1), 20 of them in a round, 50 rounds of 5 local
steps of 32 examples, a linear model. Krum is told of 6 attackers, the 30 % of a cohort. Accuracy is
that of the test set, the mean of the last five evaluations of ten; who attacks is the same for all
rules and seeds. All shares and seeds of a rule and an attack are one program. What is finished is
kept in ``experiments/results/robustness.json`` and not run again; the tables and the figure there
are of all that it holds.

    python -m experiments.robustness [--rules R ...] [--attacks A ...] [--seeds 0 1 2 3 4]
    python -m experiments.robustness --smoke    # the smallest one, which keeps nothing
    python -m experiments.robustness --report
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab import algorithms, data, models, sweep, with_attack, with_robust_aggregation
from fedjax_lab.estimates import estimate, format_estimate, markdown_table
from fedjax_lab.simulation.evaluate import build_evaluation

RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "robustness.json"
RULES = (
    *("mean", "median", "trimmed_mean:0.3", "krum:6", "multi_krum:6:8", "geometric_median"),
    "norm_clip:1",
)
# Attack -> its options.
ATTACKS = {
    "sign_flip": {"strength": 5.0},
    "label_flip": {"num_classes": 10},
    "gaussian": {"strength": 1.0},
    "alie": {},
    "inner_product": {"strength": 2.0},
}
SHARES = (0.1, 0.2, 0.3)
NONE = "none"  # beside the attacks, with a share of 0
LAST = 5  # evaluations that an accuracy is the mean of


class Scale(NamedTuple):
    """How much is run."""

    rounds: int
    clients: int
    cohort: int
    dataset: str


MACHINE = Scale(50, 100, 20, "fashion_mnist")
SMOKE = Scale(10, 40, 20, "digits")


def build(rule, attack, loss_fn, share=0.0):
    """The method of one run; the share may be traced."""
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    if rule != "mean":
        algorithm = with_robust_aggregation(algorithm, rule)
    if attack != NONE:
        algorithm = with_attack(algorithm, attack, share=share, **ATTACKS[attack])
    return algorithm


def problem(scale):
    """(the clients, the first model, its loss, its evaluation)."""
    train, test = data.load(scale.dataset)
    clients = data.partition(train, "dirichlet:1", num_clients=scale.clients, seed=0)
    mean, std, scale_of = data.normalization(train)
    prepare = data.preprocess(mean, std, scale=scale_of)
    model = models.linear(10)
    params = model.init(jax.random.key(0), jnp.zeros((1, *train.x.shape[1:])))
    evaluate = build_evaluation(models.accuracy_counts(model.apply, prepare), test, 1000)
    return clients, params, models.classification_loss(model.apply, prepare), evaluate


def run(rule, attack, scale, seeds, clients, params, loss_fn, evaluate):
    """All runs of a rule under an attack: {share: {seed: accuracy in percent, None of NaN}}."""
    result = sweep(
        lambda **point: build(rule, attack, loss_fn, **point),
        params,
        clients,
        points={} if attack == NONE else {"share": SHARES},
        seeds=seeds,
        rounds=scale.rounds,
        cohort_size=scale.cohort,
        local_steps=5,
        batch_size=32,
        evaluate=evaluate,
        eval_every=scale.rounds // 10,
    )
    reached = 100 * result.history["accuracy"][..., -LAST:].mean(-1)
    return {
        f"{point.get('share', 0.0):g}": {
            str(seed): value if math.isfinite(value) else None
            for seed, value in zip(seeds, row.tolist(), strict=True)
        }
        for point, row in zip(result.points, reached, strict=True)
    }


def place(rule, attack):
    """Where the runs of a rule under an attack are kept."""
    return f"{rule} {attack}"


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
rounds of five have more than the 6 that `krum:6`, `multi_krum:6:8` and `trimmed_mean:0.3` bear.

![Accuracy against the share of attackers](robustness.svg)
"""
    ]
    for attack in attacks_of(kept):
        options = ", ".join(f"{name} {value:g}" for name, value in ATTACKS[attack].items())
        head = f"{attack} ({options})" if options else attack
        parts.append(f"## {head}\n\n{table(kept, attack)}\n")
    parts.append("Made by `make robustness-study`.\n")
    return "\n".join(parts)


def report(kept):
    """Write the page and the figure."""
    RESULTS.mkdir(exist_ok=True)
    draw(kept, RESULTS / "robustness.svg")
    (RESULTS / "robustness.md").write_text(page(kept), encoding="utf-8")


def main(arguments=None):
    """Run what is not there yet, and report what is."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.robustness", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    scale = SMOKE if given.smoke else MACHINE
    kept = {}
    if KEPT.exists() and not given.smoke:
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
    asked = [(rule, attack) for attack in (NONE, *given.attacks) for rule in given.rules]
    missing = [] if given.report else [pair for pair in asked if place(*pair) not in kept]
    setting = problem(scale) if missing else ()
    for pair in missing:
        kept[place(*pair)] = run(*pair, scale, given.seeds, *setting)
        print(f"{place(*pair)}: {kept[place(*pair)]}", flush=True)
        if not given.smoke:
            RESULTS.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for attack in attacks_of(kept):
        print(f"{attack}\n{table(kept, attack)}")
    if not given.smoke:
        report(kept)


if __name__ == "__main__":
    main()
