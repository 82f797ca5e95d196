"""Rounds so small that one CPU core computes them sooner than several do.

FedAvg on the digits of scikit-learn, one round in one program of many. Two client maps take turns
(A B A B ...): ``scan``, one core, and ``shard_map``, all of them. "products" is what the planner's
rule compares with its limit, examples x numbers of an example x weights; "planned" is what "auto"
means in a loop of one's own.

    python -m experiments.benchmarks.small_rounds [--rounds 400] [--repeats 9]
"""

import argparse

import jax
import numpy as np

from experiments.benchmarks.rounds import Rounds
from fedjax_lab import algorithms, data, models
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.round import plan_round

# hidden widths of the model, clients of the cohort, local steps, examples of a mini-batch
CASES = (
    ((), 2, 1, 16),
    ((), 5, 5, 16),
    ((), 10, 5, 16),
    ((), 10, 10, 16),
    ((), 20, 20, 16),
    ((16,), 5, 5, 4),
    ((16,), 5, 5, 16),
    ((32,), 5, 5, 16),
    ((32,), 10, 10, 16),
    ((200,), 2, 1, 16),
    ((200,), 5, 5, 16),
)


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400, help="of a sample")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args(arguments)
    print("| hidden | S, K, B | products | planned | one core (ms) | all, times | middle half |")
    print("|---|---|---:|---|---:|---:|---:|")
    train, _ = data.load("digits")
    clients = data.partition(train, "dirichlet:1", num_clients=50, seed=0)
    for hidden, slots, steps, size in CASES:
        model = models.mlp(10, hidden=hidden) if hidden else models.linear(10)
        params = model.init(jax.random.key(0), train.x[:1])
        loss_fn = models.classification_loss(model.apply, data.preprocess(scale=16))
        fedavg = algorithms.fedavg(loss_fn, client_lr=0.01)
        schedule = Schedule(slots, size, local_steps=steps)
        both = [
            Rounds(fedavg, params, clients, schedule, given.rounds, client_map=name)
            for name in ("scan", "shard_map")
        ]
        for rounds in both:
            rounds.sample()  # the first one warms up
        taken = np.array([[rounds.sample() for rounds in both] for _ in range(given.repeats)])
        low, middle, high = np.quantile(taken[:, 1] / taken[:, 0], (0.25, 0.5, 0.75))
        batch = jax.eval_shape(lambda s=schedule: s.draw(clients, jax.random.key(0), np.int32(0)))
        planned = plan_round(fedavg, fedavg.init(params, 50), batch).client_map
        numbers = train.x[0].size + 1  # of an example, with its label
        products = slots * steps * size * numbers * models.count_params(params)
        print(
            f"| {hidden or 'none'} | {slots}, {steps}, {size} | {products / 1e6:.1f}M | {planned} "
            f"| {1e3 * np.median(taken[:, 0]) / given.rounds:.2f} "
            f"| {middle:.2f} | {low:.2f} to {high:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
