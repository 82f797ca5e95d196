"""What computing in bfloat16 costs in accuracy and saves in time, against float32.

FedAvg with the MLP of GradMA and with LeNet-5 in LeCun's widths: 100 clients (20 of digits),
Dirichlet 0.3, cohort 10, 5 steps of batch 64. Both dtypes take turns (A B A B ...), every sample
waits for the device, and times are compared by the median of the ratios of neighbours. Accuracy is
that of the last round, mean over the seeds; the difference's standard error is that of the pairs.

    python -m experiments.benchmarks.precision [--dataset digits] [--models mlp lenet5]
        [--rounds 100] [--seeds 3]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.rounds import Rounds
from fedjax_lab import algorithms, data, models
from fedjax_lab.data.cohort import Schedule

CLASSIC = (6, 16, 120, 84)
CHUNKS = 5  # of a run; a sample is one of them


def build(name, shape):
    """The model for images of a shape."""
    if name == "lenet5":
        padding = "VALID" if min(shape[:2]) >= 16 else "SAME"
        return models.lenet5(10, widths=CLASSIC, padding=padding)
    return models.build(name, 10)


def measure(name, dataset, rounds, seeds):
    """(accuracy {dtype: [seeds]}, time ratios bfloat16 / float32 [seeds * CHUNKS])."""
    train, test = data.load(dataset)
    num_clients = 20 if dataset == "digits" else 100
    clients = data.partition(train, "dirichlet:0.3", num_clients=num_clients, seed=0)
    mean, std, scale = data.normalization(train)
    prepare = data.preprocess(mean, std, scale=scale)
    schedule = Schedule(cohort_size=10, batch_size=64, local_steps=5)
    model = build(name, train.x.shape[1:])
    length = max(1, rounds // CHUNKS)
    accuracy, ratios = {dtype: [] for dtype in models.COMPUTE_DTYPES}, []
    for seed in range(seeds):
        params = model.init(jax.random.key(seed), jnp.zeros((1, *train.x.shape[1:])))
        runs = {}
        for dtype in models.COMPUTE_DTYPES:
            low = models.mixed_precision(model, dtype)
            loss_fn = models.classification_loss(low.apply, prepare)
            algorithm = algorithms.fedavg(loss_fn, client_lr=0.05)
            chunk = Rounds(
                *(algorithm, params, clients, schedule, length), client_map="scan", seed=seed
            )
            chunk.sample()  # warms up
            chunk.restart()
            counts = jax.jit(models.accuracy_counts(low.apply, prepare))
            runs[dtype] = algorithm, chunk, counts
        for _ in range(CHUNKS):
            high, low = (chunk.sample() for _, chunk, _ in runs.values())
            ratios.append(low / high)
        for dtype, (algorithm, chunk, counts) in runs.items():
            correct, _ = counts(algorithm.params(chunk.state), test)
            accuracy[dtype].append(100 * float(correct.mean()))
    return accuracy, ratios


def main():
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--models", nargs="+", default=["mlp", "lenet5"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print("| model | float32 % | bfloat16 % | difference | time, times float32's |")
    print("|---|---|---|---|---|")
    for name in arguments.models:
        accuracy, ratios = measure(name, arguments.dataset, arguments.rounds, arguments.seeds)
        high, low = (np.asarray(accuracy[dtype]) for dtype in models.COMPUTE_DTYPES)
        error = (low - high).std(ddof=1) / np.sqrt(len(high)) if len(high) > 1 else np.nan
        first, middle, last = np.quantile(ratios, [0.25, 0.5, 0.75])
        print(
            f"| {name} | {high.mean():.2f} | {low.mean():.2f} | "
            f"{(low - high).mean():+.2f} ± {error:.2f} | "
            f"{middle:.2f} ({first:.2f} to {last:.2f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
