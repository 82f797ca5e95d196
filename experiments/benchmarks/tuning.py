"""``tune`` compared with running all 200 points of a grid to the end.

    python -m experiments.benchmarks.tuning [steady] [noisy] [validation]

Method: FedAvg with a client and a server learning rate. Model and data: linear, 6,000 images of
Fashion-MNIST (without it, digits), Dirichlet 0.3. Task "steady": all of 20 clients participate in
every round. Task "noisy": 5 of 50 do, and the accuracy of the last model varies by points with the
seed. Task "validation" is "steady" with 20,000 other images for validation, in place of a fifth of
the clients' 6,000.

The quality of a point is its mean test accuracy at the end of the run, over seeds that no search
uses. The best of the grid is chosen on four seeds, and then measured with the points of ten
searches on four others, so that its luck on the first four does not count. A control says how far
behind an exhaustive search is that has as many seeds as ``tune``: the best of all 200 points on
three of the first four seeds, by test accuracy.
"""

import functools
import itertools
import sys
from typing import Any

import jax
import numpy as np

import fedjax_lab
from fedjax_lab import algorithms, data, models
from fedjax_lab.markdown import markdown_table
from fedjax_lab.simulation.evaluate import build_evaluation

ROUNDS, SEARCHES, MARGIN = 45, 10, 0.3
SEEDS = 3  # of a search
SETTINGS = {"budget": 100, "finalists": 8, "average": 3}
CHOOSING, MEASURING = (1001, 1002, 1003, 1004), (1005, 1006, 1007, 1008)
# number of clients, cohort size, number of separate validation images
TASKS = {"steady": (20, 20, 0), "noisy": (50, 5, 0), "validation": (20, 20, 20_000)}
SPACE = {"client_lr": (1e-3, 10.0), "server_lr": (0.1, 10.0)}
GRID = [
    {"client_lr": float(client), "server_lr": float(server)}
    for client, server in itertools.product(np.geomspace(1e-3, 10, 20), np.geomspace(0.1, 10, 10))
]


def compare(task: str) -> None:
    """Print what each search finds, how far it is behind, and its share of the grid's rounds.

    Args:
      task: a name of ``TASKS``.
    """
    try:
        train, test = data.load("fashion_mnist")
        scale = 255.0
    except (FileNotFoundError, ImportError):
        train, test = data.load("digits")
        scale = 16.0
    num_clients, cohort_size, separate = TASKS[task]
    others = jax.tree.map(lambda leaf: leaf[6000 : 6000 + separate], train)
    train = jax.tree.map(lambda leaf: leaf[:6000], train)
    clients = data.partition(train, "dirichlet:0.3", num_clients=num_clients, seed=0)
    model = models.build("linear", num_classes=10)
    scaled = data.preprocess(scale=scale)
    fedavg = functools.partial(algorithms.fedavg, models.classification_loss(model.apply, scaled))
    params = model.init(jax.random.key(0), train.x[:1])
    counts = models.accuracy_counts(model.apply, scaled)
    evaluate = build_evaluation(counts, test)
    schedule = {"rounds": ROUNDS, "cohort_size": cohort_size, "local_steps": 5, "batch_size": 20}

    def quality(points, seeds):
        run = fedjax_lab.sweep(
            fedavg,
            params,
            clients,
            points=points,
            seeds=seeds,
            evaluate=evaluate,
            eval_every=ROUNDS,
            **schedule,
        )
        return 100 * run.history["accuracy"][:, :, -1]

    held: dict[str, Any] = {}
    if separate:
        held["validation"] = data.partition(others, "iid", num_clients=num_clients, seed=0)
    found = [
        fedjax_lab.tune(
            {"fedavg": fedavg},
            SPACE,
            params,
            clients,
            seeds=range(SEEDS * i, SEEDS * (i + 1)),
            score=lambda params, examples: counts(params, examples)[0],
            mode="max",
            **held,
            **SETTINGS,
            **schedule,
        )
        for i in range(SEARCHES)
    ]
    grid = quality(GRID, CHOOSING)
    subsets = list(itertools.combinations(range(len(CHOOSING)), SEEDS))
    chosen = [int(np.nanargmax(grid.mean(1)))]
    chosen += [int(np.nanargmax(grid[:, list(some)].mean(1))) for some in subsets]
    points = [GRID[place] for place in chosen] + [each.best["fedavg"] for each in found]
    measured = quality(points, MEASURING)
    best, behind = measured[0].mean(), measured[0].mean() - measured.mean(1)
    rows = [["tuning seeds", "client_lr", "server_lr", "behind the grid's best", "rounds"]]
    searches = behind[1 + len(subsets) :]
    for i, (each, points_behind) in enumerate(zip(found, searches, strict=True)):
        point, share = each.best["fedavg"], each.gradients["fedavg"] / (len(GRID) * ROUNDS)
        rates = [f"{point[name]:.3g}" for name in SPACE]
        seeds = ", ".join(str(SEEDS * i + seed) for seed in range(SEEDS))
        rows.append([seeds, *rates, f"{points_behind:.2f}", f"{share:.1%}"])
    print(f"{task}: best of {len(GRID)} points {best:.2f} %; rounds are shares of the grid's.")
    print(markdown_table(rows))
    print(f"Standard deviation over seeds at the grid's best: {measured[0].std(ddof=1):.2f}.")
    control = behind[1 : 1 + len(subsets)]
    for name, values in ((f"exhaustive, {SEEDS} seeds", control), ("tune", searches)):
        close = int((values <= MARGIN).sum())
        print(
            f"{name}: within {MARGIN} points {close} of {len(values)}, on average "
            f"{values.mean():.2f} behind, at most {values.max():.2f}."
        )
    print(flush=True)


def main() -> None:
    """Compare on the tasks that the command line names, or on all."""
    for task in sys.argv[1:] or TASKS:
        compare(task)


if __name__ == "__main__":
    main()
