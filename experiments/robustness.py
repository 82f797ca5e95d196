"""Six rules and the mean under five attacks, with none to 30 % of attackers, on Fashion-MNIST.

FedAvg on 100 clients with label shares of Dirichlet(1), 20 of them in a round, 50 rounds of 5 local
steps of 32 examples, a linear model. Krum is told of 6 attackers, the 30 % of a cohort. What is
finished is kept in ``--runs`` and not run again, and the table is of all that there is. The last
accuracies of scale machine are also kept in ``experiments/results/robustness.json``, with the table
beside it.

    python -m experiments.robustness [--scale machine|smoke] [--rules R ...] [--attacks A ...]
        [--shares 0 0.1 0.2 0.3] [--seeds 0 1 2] [--runs runs]
    python -m experiments.robustness --report
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import (
    algorithms,
    data,
    load_run,
    models,
    simulate,
    with_attack,
    with_robust_aggregation,
)
from fedjax_lab.simulation.evaluate import build_evaluation

KEPT = Path(__file__).parent / "results" / "robustness.json"
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
SHARES = (0.0, 0.1, 0.2, 0.3)


class Scale(NamedTuple):
    """How much is run."""

    rounds: int
    clients: int
    cohort: int
    dataset: str


SCALES = {
    "machine": Scale(50, 100, 20, "fashion_mnist"),
    "smoke": Scale(2, 40, 20, "digits"),
}


def build(rule, attack, share, loss_fn):
    """The method of one run."""
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    if rule != "mean":
        algorithm = with_robust_aggregation(algorithm, rule)
    if share:
        algorithm = with_attack(algorithm, attack, share=share, **ATTACKS[attack])
    return algorithm


def place_of(runs, scale, rule, attack, share, seed):
    """The directory of one run; without attackers, all attacks are one."""
    name = f"{attack}-{share:g}" if share else "none"
    return runs / "robustness" / scale / f"{rule.replace(':', '_')}-{name}-seed{seed}"


def run(given):
    """Run all that is asked for and not there yet."""
    scale = SCALES[given.scale]
    train, test = data.load(scale.dataset)
    clients = data.partition(train, "dirichlet:1", num_clients=scale.clients, seed=0)
    mean, std, scale_of = data.normalization(train)
    prepare = data.preprocess(mean, std, scale=scale_of)
    model = models.linear(10)
    params = model.init(jax.random.key(0), jnp.zeros((1, *train.x.shape[1:])))
    loss_fn = models.classification_loss(model.apply, prepare)
    evaluate = build_evaluation(models.accuracy_counts(model.apply, prepare), test, batch_size=1000)
    done = set()
    for seed in given.seeds:
        for share in given.shares:
            for attack in given.attacks:
                for rule in given.rules:
                    where = place_of(given.runs, given.scale, rule, attack, share, seed)
                    if where in done:
                        continue
                    done.add(where)
                    result = simulate(
                        build(rule, attack, share, loss_fn),
                        params,
                        clients,
                        rounds=scale.rounds,
                        cohort_size=scale.cohort,
                        local_steps=5,
                        batch_size=32,
                        seed=seed,
                        evaluate=evaluate,
                        eval_every=scale.rounds // min(scale.rounds, 10),
                        run_dir=where,
                    )
                    said = result.history[-1].get("accuracy", float("nan"))
                    print(f"{where.name}: {result.stopped or f'accuracy {said:.3f}'}", flush=True)


def accuracy(where):
    """The last accuracy of a run, in percent; NaN of one that diverged, None of none."""
    if not (where / "metrics.jsonl").exists():
        return None
    return 100 * load_run(where).history[-1].get("accuracy", float("nan"))


def table(given, value=accuracy):
    """One Markdown table: rules down, attacks across; the mean over the seeds that there are."""
    columns = [(None, 0.0)] if 0 in given.shares else []
    columns += [(a, s) for a in given.attacks for s in given.shares if s]
    heads = [f"{a} {100 * s:g} %" if s else "no attack" for a, s in columns]
    lines = [f"| rule | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for rule in given.rules:
        cells = []
        for attack, share in columns:
            places = (
                place_of(given.runs, given.scale, rule, attack, share, s) for s in given.seeds
            )
            found = [score for score in map(value, places) if score is not None]
            cells.append(f"{np.mean(found):.1f}" if found else "")
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def keep(given):
    """Add the accuracies that there are to those that are kept, and write their page."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for where in sorted((given.runs / "robustness" / "machine").glob("*")):
        kept[where.name] = accuracy(where)
    if not kept:
        return
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    intro = f"""# Rules under attacks on Fashion-MNIST

Test accuracy in percent after {SCALES["machine"].rounds} rounds of FedAvg, the mean over the seeds;
a share of the 100 clients attacks, and the number of attackers in a cohort of 20 varies. NaN: the
run diverged.

"""
    text = f"{intro}{table(given, lambda where: kept.get(where.name))}\n\nMade by `make"
    KEPT.with_suffix(".md").write_text(f"{text} robustness-study`.\n", encoding="utf-8")


def main(arguments=None):
    """Run, and print the table of what there is."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.robustness", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--scale", choices=list(SCALES), default="machine")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--report", action="store_true", help="print the table; run nothing")
    given = parser.parse_args(arguments)
    if not given.report:
        run(given)
    if given.scale == "machine":
        keep(given)
    print(table(given))


if __name__ == "__main__":
    main()
