"""``tune`` compared with running all 200 points of a grid to the end.

    python -m experiments.benchmarks.tuning

Task: FedAvg with a client and a server learning rate, a linear model, 6,000 images of
Fashion-MNIST (without it, digits), 50 clients, Dirichlet 1, 10 of them a round. The quality of a
point is its mean test accuracy at the end of the run, over seeds that no search uses. The best of
the grid is chosen on two seeds, by test accuracy, and then measured with the points of ten searches
on three others, so that its luck on the first two does not count.
"""

import functools
import itertools

import jax
import numpy as np

import fedjax_lab
from fedjax_lab import algorithms, data, models
from fedjax_lab.estimates import markdown_table
from fedjax_lab.simulation.evaluate import build_evaluation

ROUNDS, BUDGET, FINALISTS, SEARCHES = 90, 100, 4, 10
CHOOSING, MEASURING = (1001, 1002), (1003, 1004, 1005)
SPACE = {"client_lr": (1e-3, 10.0), "server_lr": (0.1, 10.0)}
GRID = [
    {"client_lr": float(client), "server_lr": float(server)}
    for client, server in itertools.product(np.geomspace(1e-3, 10, 20), np.geomspace(0.1, 10, 10))
]
SCHEDULE = {"rounds": ROUNDS, "cohort_size": 10, "local_steps": 5, "batch_size": 20}


def main() -> None:
    """Print what each search finds, how far it is behind, and its share of the grid's rounds."""
    try:
        train, test = data.load("fashion_mnist")
        scale = 255.0
    except (FileNotFoundError, ImportError):
        train, test = data.load("digits")
        scale = 16.0
    train = jax.tree.map(lambda leaf: leaf[:6000], train)
    clients = data.partition(train, "dirichlet:1", num_clients=50, seed=0)
    model = models.build("linear", num_classes=10)
    scaled = data.preprocess(scale=scale)
    fedavg = functools.partial(algorithms.fedavg, models.classification_loss(model.apply, scaled))
    params = model.init(jax.random.key(0), train.x[:1])
    counts = models.accuracy_counts(model.apply, scaled)
    evaluate = build_evaluation(counts, test)

    def quality(points, seeds):
        run = fedjax_lab.sweep(
            fedavg,
            params,
            clients,
            points=points,
            seeds=seeds,
            evaluate=evaluate,
            eval_every=ROUNDS,
            **SCHEDULE,
        )
        return 100 * run.history["accuracy"][:, :, -1].mean(1)

    grid = quality(GRID, CHOOSING)
    best_of_grid = GRID[int(np.nanargmax(grid))]
    found = [
        fedjax_lab.tune(
            {"fedavg": fedavg},
            SPACE,
            params,
            clients,
            budget=BUDGET,
            finalists=FINALISTS,
            seeds=(2 * i, 2 * i + 1),
            score=lambda params, examples: counts(params, examples)[0],
            mode="max",
            **SCHEDULE,
        )
        for i in range(SEARCHES)
    ]
    best, *reached = quality([best_of_grid, *(each.best["fedavg"] for each in found)], MEASURING)
    behind = best - np.array(reached)
    rows = [["tuning seeds", "client_lr", "server_lr", "behind the grid's best", "rounds"]]
    for i, (each, points) in enumerate(zip(found, behind, strict=True)):
        point, share = each.best["fedavg"], each.gradients["fedavg"] / (len(GRID) * ROUNDS)
        rates = [f"{point[name]:.3g}" for name in SPACE]
        rows.append([f"{2 * i}, {2 * i + 1}", *rates, f"{points:.2f}", f"{share:.1%}"])
    print(f"Best of {len(GRID)} points: {best:.2f} %. Rounds are shares of the grid's.")
    print(markdown_table(rows))
    print(f"Behind by at most 0.3 points: {int((behind <= 0.3).sum())} of {SEARCHES} searches.")


if __name__ == "__main__":
    main()
