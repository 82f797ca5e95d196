"""Rounds that wait, rounds that wait for the first to finish, and FedBuff: by the clients' clock.

python -m fedjax_lab.recipes.fedbuff
"""

import jax

from fedjax_lab import algorithms, data, models, simulate, with_buffered_aggregation
from fedjax_lab.simulation.evaluate import build_evaluation

N, COHORT, TARGET = 100, 10, 0.88


def main() -> None:
    """Print the rounds, messages and simulated seconds that each takes to 88 percent accuracy."""
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.5", num_clients=N, seed=0)
    model = models.linear(10)
    params = model.init(jax.random.key(0), train.x[:1])
    prepare = data.preprocess(scale=16)
    fedavg = algorithms.fedavg(models.classification_loss(model.apply, prepare), client_lr=0.05)
    evaluate = build_evaluation(models.accuracy_counts(model.apply, prepare), test)
    # The median time of a step is one second; for one client in a hundred it is 12 seconds or more.
    speeds = {"step_seconds": 1.0, "step_spread": 1.1, "upload": 2e3, "download": 1e4}

    def run(name, algorithm, **policy):
        times = data.ClientTimes.log_normal(N, seed=0, **speeds, **policy)
        result = simulate(
            algorithm,
            params,
            clients,
            times=times,
            rounds=200,
            cohort_size=COHORT,
            local_steps=5,
            batch_size=8,
            replace=True,
            eval_every=5,
            evaluate=evaluate,
            stop_when=lambda row: row["accuracy"] >= TARGET,
        )
        row = result.history[-1]
        print(
            f"{name:31} {row['round']:4} rounds, {row['bytes_up'] / 1e6:4.1f} MB up, "
            f"{row['simulated_seconds']:6,.0f} simulated seconds to {row['accuracy']:.3f}"
        )

    run("FedAvg", fedavg)
    run("FedAvg, 13 for 10, at most 15 s", fedavg, over_selection=1.3, deadline=15.0)
    run("FedBuff, 30 in flight", with_buffered_aggregation(fedavg, COHORT, concurrency=30))


if __name__ == "__main__":
    main()
