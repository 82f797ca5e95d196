"""Tune two methods with equal budgets, then compare them on test data with seeds of their own.

    python -m fedjax_lab.recipes.tune_two_methods

The search holds out a fifth of each client's examples and never sees the test set. With
``run_dir="search"`` the same call resumes after an interruption.
"""

import functools

import jax

import fedjax_lab
from fedjax_lab import algorithms, build_evaluation, data, models
from fedjax_lab.estimates import estimate, format_estimate

SCHEDULE = {"rounds": 36, "cohort_size": 5, "local_steps": 5, "batch_size": 16}


def main():
    """Print the chosen points, and the test accuracy of each method at its own point."""
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    model = models.linear(10)
    prepare = data.preprocess(scale=16)
    loss_fn = models.classification_loss(model.apply, prepare)
    counts = models.accuracy_counts(model.apply, prepare)
    params = model.init(jax.random.key(0), train.x[:1])
    methods = {
        "FedAvg": functools.partial(algorithms.fedavg, loss_fn),
        "FedAvgM": functools.partial(algorithms.fedavgm, loss_fn),
    }
    found = fedjax_lab.tune(
        methods,
        {"client_lr": (1e-3, 1.0), "FedAvgM": {"momentum": [0.5, 0.9]}},
        params,
        clients,
        budget=8,
        seeds=(0, 1),
        score=lambda params, examples: counts(params, examples)[0],
        mode="max",
        average=3,
        **SCHEDULE,
    )
    print(found.table())
    for name, method in methods.items():
        result = fedjax_lab.sweep(
            method,
            params,
            clients,
            points=[found.best[name]],
            seeds=(11, 12, 13),  # which the search has not used
            evaluate=build_evaluation(counts, test),
            eval_every=SCHEDULE["rounds"],
            **SCHEDULE,
        )
        accuracy = 100 * result.history["accuracy"][0, :, -1]
        print(f"{name}: test accuracy {format_estimate(estimate(accuracy), 1)} %")


if __name__ == "__main__":
    main()
