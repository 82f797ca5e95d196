"""Accuracy against epsilon on Fashion-MNIST: FedAvg, FedAdam, CFedAvg and DP-FTRL.

1,000 clients with label shares of Dirichlet(1), a linear model, 60 rounds of Poisson cohorts of
100 expected, 3 local steps of 20 examples, clip norm 0.3. FedAvg also with cyclic cohorts, with
independent noise and with noise of 10 bands, as many as the rounds after which a client comes back.
Delta is 1e-5, a hundredth of 1 / N. For each method and epsilon, the server learning rate is the
best of five on 6,000 images held out of the training set, with a seed of its own; accuracy is that
of the test set, over the other seeds.
All runs of a method are one program. What is finished is kept in
``experiments/results/privacy.json`` and not run again; the table and the figure there are of all
that it holds.

    python -m experiments.privacy [--methods M ...] [--seeds 0 1 2 3 4]
    python -m experiments.privacy --smoke    # the smallest one, which keeps nothing
    python -m experiments.privacy --report
"""

import argparse
import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import algorithms, data, models, privacy, sweep, with_dp
from fedjax_lab.estimates import estimate, format_estimate
from fedjax_lab.simulation.evaluate import build_evaluation

RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "privacy.json"
EPSILONS = (1.0, 2.0, 4.0, 8.0, math.inf)
DELTA = 1e-5
CLIP_NORM = 0.3
TUNING_SEED = 100


class Method(NamedTuple):
    """A column of the table: a factory, the server learning rates of its grid, cohorts, noise."""

    factory: str
    rates: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0)
    sampling: str = "poisson"
    bands: int = 1


_LOWER = (0.1, 0.3, 1.0, 3.0, 10.0)  # more noise takes smaller steps
METHODS = {
    "FedAvg": Method("fedavg"),
    "FedAdam": Method("fedadam", (0.003, 0.01, 0.03, 0.1, 0.3)),
    "CFedAvg": Method("cfedavg"),
    "FedAvg, cyclic": Method("fedavg", _LOWER, "cyclic"),
    "FedAvg, cyclic, 10 bands": Method("fedavg", _LOWER, "cyclic", bands=10),
}

_CYCLIC = """

Cyclic: ten groups of 100 clients take turns, who comes when is no secret, and a client is replaced
by another; with 10 bands, the noise of a round takes back a part of that of the nine rounds before
it (DP-FTRL). Cyclic and Poisson columns are not of the same guarantee: replacing a client counts
twice, and a cohort that everybody knows hides nobody."""


class Scale(NamedTuple):
    """How much is run."""

    rounds: int
    clients: int
    cohort: int
    dataset: str
    held_out: int


MACHINE = Scale(60, 1000, 100, "fashion_mnist", 6000)
SMOKE = Scale(2, 40, 10, "digits", 200)


def build(method, loss_fn, server_lr, noise_multiplier):
    """The method of one run; the numbers may be traced."""
    extra = {"compressor": "top_k:0.9"} if method.factory == "cfedavg" else {}
    factory = getattr(algorithms, method.factory)
    plain = factory(loss_fn, client_lr=0.1, server_lr=server_lr, **extra)
    return with_dp(plain, CLIP_NORM, noise_multiplier, noise_bands=method.bands)


@functools.cache
def noise_for(sampling, bands, scale, epsilon):
    """The noise multiplier with which all rounds cost ``epsilon``."""
    if math.isinf(epsilon):
        return 0.0
    return privacy.noise_multiplier(
        epsilon,
        DELTA,
        scale.rounds,
        cohort_size=scale.cohort,
        num_clients=scale.clients,
        sampling=sampling,
        accountant="pld",
        noise_bands=bands,
    )


def run(method, scale, seeds):
    """Tune a method for each epsilon, and run it: {epsilon: what became of it}."""
    noises = {e: noise_for(method.sampling, method.bands, scale, e) for e in EPSILONS}
    train, test = data.load(scale.dataset)
    rest = len(train.y) - scale.held_out
    # The files are not sorted by label.
    fitted, held = (data.Examples(train.x[s], train.y[s]) for s in (slice(rest), slice(rest, None)))
    mean, std, scale_of = data.normalization(fitted)
    prepare = data.preprocess(mean, std, scale=scale_of)
    model = models.linear(10)
    params = model.init(jax.random.key(0), jnp.zeros((1, *train.x.shape[1:])))
    loss_fn = models.classification_loss(model.apply, prepare)

    def sweep_over(points, seeds, examples):
        count = models.accuracy_counts(model.apply, prepare)
        result = sweep(
            lambda **point: build(method, loss_fn, **point),
            params,
            clients,
            points=points,
            seeds=seeds,
            rounds=scale.rounds,
            cohort_size=scale.cohort,
            local_steps=3,
            batch_size=20,
            sampling=method.sampling,
            evaluate=build_evaluation(count, examples, 1000),
            eval_every=scale.rounds,
        )
        return 100 * result.values("accuracy")

    clients = data.partition(fitted, "dirichlet:1", num_clients=scale.clients, seed=0)
    rates = method.rates
    points = [
        {"server_lr": rate, "noise_multiplier": noise}
        for noise in noises.values()
        for rate in rates
    ]
    tried = sweep_over(points, [TUNING_SEED], held).reshape(len(noises), len(rates))
    best = [points[row * len(rates) + np.nanargmax(scores)] for row, scores in enumerate(tried)]
    reached = sweep_over(best, seeds, test)
    return {
        f"{epsilon:g}": {**point, "accuracy": dict(zip(map(str, seeds), row.tolist(), strict=True))}
        for epsilon, point, row in zip(noises, best, reached, strict=True)
    }


def table(kept):
    """Epsilons down, methods across: test accuracy in percent, with 95 % intervals."""
    methods = [name for name in METHODS if name in kept]
    lines = [f"| epsilon | {' | '.join(methods)} |", "|---:|" + "---:|" * len(methods)]
    for epsilon in (f"{e:g}" for e in EPSILONS):
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.subplots()
    places = range(len(EPSILONS))
    for shift, name in enumerate(name for name in METHODS if name in kept):
        found = [estimate(list(kept[name][f"{e:g}"]["accuracy"].values())) for e in EPSILONS]
        axes.errorbar(
            [p + 0.06 * (shift - 2) for p in places],
            [e.mean for e in found],
            yerr=[0.0 if math.isnan(e.half_width) else e.half_width for e in found],
            marker="o",
            capsize=3,
            label=name,
        )
    axes.set_xticks(places, ["no noise" if math.isinf(e) else f"{e:g}" for e in EPSILONS])
    axes.set_xlabel(f"epsilon (delta {DELTA:g}, 1,000 clients)")
    axes.set_ylabel("test accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def page(kept):
    """The page of the kept results."""
    seeds = len(next(iter(next(iter(kept.values())).values()))["accuracy"])
    ends = [
        f"for {name} at {epsilon}"
        for name, runs in kept.items()
        for epsilon, run in runs.items()
        if run["server_lr"] in (METHODS[name].rates[0], METHODS[name].rates[-1])
    ]
    ends = ", ".join(ends) or "nowhere"
    return f"""# Accuracy against epsilon on Fashion-MNIST

Test accuracy in percent of a linear model after {MACHINE.rounds} rounds, {seeds} seeds, mean and
95 % interval. {MACHINE.clients:,} clients with label shares of Dirichlet(1); Poisson cohorts of
{MACHINE.cohort} expected; 3 local steps of 20 examples, client learning rate 0.1; clip norm
{CLIP_NORM:g}; client-level (epsilon, {DELTA:g})-differential privacy for a client added or removed.
CFedAvg sends a tenth of the numbers (top-k with error feedback), which are clipped after
compression. "No noise" is clipped, too.{_CYCLIC if "FedAvg, cyclic" in kept else ""}

{table(kept)}

![Accuracy against epsilon](privacy.svg)

With few clients the noise is large: the noise on a mean falls with the size of the cohort, at the
same share of the clients and the same epsilon. So this says what these methods reach in a
simulation of this scale, not what they would in a large federation. The server learning rate is
the best of five for each cell, on images held out of training: 0.3, 1, 3, 10 and 30, for FedAdam a
hundredth of it, for cyclic cohorts from 0.1 to 10. At an end of its grid it is {ends}.
What choosing it would cost in privacy is not counted.

{chosen(kept)}

Made by `make privacy-study`.
"""


def report(kept):
    """Write the page and the figure, and print the table."""
    RESULTS.mkdir(exist_ok=True)
    draw(kept, RESULTS / "privacy.svg")
    (RESULTS / "privacy.md").write_text(page(kept), encoding="utf-8")
    print(table(kept))


def main(arguments=None):
    """Run what is not there yet, and report what is."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.privacy", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    scale = SMOKE if given.smoke else MACHINE
    kept = {}
    if KEPT.exists() and not given.smoke:
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
    missing = [] if given.report else [name for name in given.methods if name not in kept]
    for name in missing:
        kept[name] = run(METHODS[name], scale, given.seeds)
        if not given.smoke:
            RESULTS.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if given.smoke:
        print(table(kept))
    else:
        report(kept)


if __name__ == "__main__":
    main()
