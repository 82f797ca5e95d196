"""What a round of each method costs, relative to FedAvg in the same run, and what it should cost.

The catalogue's methods with the MLP of GradMA on noise images of Fashion-MNIST's shape: 100
clients, cohort 10, 5 steps of batch 64, 20 rounds as one program on one device. Each method takes
turns with FedAvg (A B A B ...), every sample waits for the device, and medians are compared; the
range is that of the samples' quartiles. "Gradients" is the number of mini-batch gradients in a
round by the catalogue, relative to FedAvg's; a full local gradient, over the round's examples, is
counted as the 5 mini-batches that it is made of.

    python -m experiments.benchmarks.methods [--methods M ...] [--rounds 20] [--repeats 5]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.catalogue_rows import METHODS
from experiments.studies.study import Column
from fedjax_lab import data, models
from fedjax_lab.command.build import build_algorithm
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.simulation.run import Run

STEPS = 5
FULL_GRADIENTS = {"mime": 1, "mimelite": 1}  # each of them is STEPS mini-batches of work


def start(name, rounds):
    """(compiled chunk, its arguments, seconds of compilation, gradients relative to FedAvg)."""
    noise = data.synthetic.noise_images(20_000, (28, 28, 1), seed=0)
    clients = data.partition(noise, "iid", num_clients=100, seed=0)
    model, preprocess = models.build("mlp", num_classes=10), data.preprocess()
    method = METHODS[name]
    chosen = {**method.grid, **method.then}
    column = Column({"num_clients": 100, "cohort_size": 10}, tuning_rounds=0)
    config = method.config(column, {key: values[0] for key, values in chosen.items()})
    loss_fn = models.classification_loss(model.apply, preprocess)
    algorithm = build_algorithm(config.resolve(), loss_fn, model, preprocess)
    schedule = Schedule(cohort_size=10, batch_size=64, local_steps=STEPS)
    params = model.init(jax.random.key(0), noise.x[:1])
    key, first = jax.random.key(0), jnp.zeros((), jnp.int32)
    state = jax.jit(Run(algorithm, schedule).start)(params, clients, key, ())
    began = time.perf_counter()
    chunk = build_chunk(Run(algorithm, schedule), Placement.of("scan"))
    compiled = chunk.lower(state, clients, key, first, length=rounds).compile()
    gradients = algorithm.gradients_per_step + FULL_GRADIENTS.get(name, 0)
    return [compiled, state, clients, key, first], time.perf_counter() - began, gradients


def take(run):
    """Seconds of one chunk; ``run`` then holds the new state."""
    compiled, *arguments = run
    began = time.perf_counter()
    run[1], _ = jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - began


def main():
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    base, _, _ = start("fedavg", arguments.rounds)
    take(base)
    print("| method | gradients, times FedAvg's | time, times FedAvg's | compile s |")
    print("|---|---|---|---|")
    for name in arguments.methods:
        run, compile_seconds, gradients = start(name, arguments.rounds)
        take(run)  # warms up
        ratios = [take(run) / take(base) for _ in range(arguments.repeats)]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        print(
            f"| {name} | {gradients} | {middle:.2f} ({low:.2f} to {high:.2f}) | "
            f"{compile_seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
