"""What GradMA's server costs at m = 100 rows of d = 1,000,000: its share of a round.

The workload: 100 clients, cohort 10, 5 local steps of batch 64, noise images 28 x 28, a multilayer
perceptron 784-1248-10 (d = 992,170), uniform weights, one round as one program. GradMA-S and
FedAvg, whose clients do the same, take turns (A B A B ...) and every sample waits for the device;
the server's share is 1 - FedAvg / GradMA-S of neighbouring samples, the median and quartiles.
"QP iterations" are ``info.iterations`` of the server's QP, rows that enter or leave.

    python -m experiments.benchmarks.gradma_server [--rows 100] [--units 1248] [--repeats 20]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import algorithms, data, models
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.simulation.run import Run

CLIENTS, FILL = 100, 25  # rounds until nearly every client has a row


def start(algorithm, params, clients, schedule):
    """[program of one round, state, clients, key]."""
    key, first = jax.random.key(0), jnp.zeros((), jnp.int32)
    state = jax.tree.map(jnp.copy, algorithm.init(params, CLIENTS))
    chunk = build_chunk(Run(algorithm, schedule), Placement.of("scan"))
    program = chunk.lower(state, clients, key, first, length=1).compile()
    return [program, state, clients, key]


def take(run, round):
    """(seconds of one round, its metrics); ``run`` then holds the new state."""
    program, state, clients, key = run
    began = time.perf_counter()
    run[1], metrics = jax.block_until_ready(program(state, clients, key, jnp.int32(round)))
    return time.perf_counter() - began, metrics


def main():
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--units", type=int, default=1248, help="of the hidden layer")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    noise = data.synthetic.noise_images(20_000, (28, 28, 1), seed=0)
    clients = data.partition(noise, "iid", num_clients=CLIENTS, seed=0)
    model = models.build("mlp", num_classes=10, hidden=(arguments.units,))
    params = model.init(jax.random.key(0), noise.x[:1])
    d = sum(leaf.size for leaf in jax.tree.leaves(params))
    loss_fn = models.classification_loss(model.apply, data.preprocess())
    schedule = Schedule(cohort_size=10, batch_size=64, local_steps=5)
    methods = (
        algorithms.gradma_s(loss_fn, client_lr=0.01, memory_size=arguments.rows),
        algorithms.fedavg(loss_fn, client_lr=0.01),
    )
    runs = [start(method, params, clients, schedule) for method in methods]
    samples, iterations, active = [], [], []
    for round in range(FILL + arguments.repeats):
        (seconds, metrics), (base, _) = take(runs[0], round), take(runs[1], round)
        if round >= FILL:
            samples.append((seconds, base))
            iterations.append(float(metrics["server_qp_iterations"][0]))
            active.append(float(metrics["server_qp_active"][0]))
    gradma, fedavg = np.transpose(samples)
    low, middle, high = np.quantile(1 - fedavg / gradma, [0.25, 0.5, 0.75])
    print("| rows | d | GradMA-S ms | FedAvg ms | server's share | QP iterations | active rows |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {arguments.rows} | {d:,} | {1e3 * np.median(gradma):.0f} | "
        f"{1e3 * np.median(fedavg):.0f} | {middle:.0%} ({low:.0%} to {high:.0%}) | "
        f"{np.median(iterations):g} (at most {max(iterations):g}) | {np.median(active):g} |"
    )


if __name__ == "__main__":
    main()
