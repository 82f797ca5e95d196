"""Milliseconds a round of clients of very unequal sizes, next to equal ones with as many examples.

Both federations take turns, each with the default client map: 10 of 40 clients, one pass in
mini-batches of 8 over 28 x 28 images of noise, FedAvg, the library's CNN. Sizes are log-normal.

    python -m experiments.benchmarks.unequal [--spread 1.2] [--repeats 3]
"""

import argparse
import time

import jax
import numpy as np

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.markdown import markdown_table

NUM_CLIENTS, MEAN_SIZE = 40, 64
ROUNDS = 20


def sizes_of(spread):
    """Sizes of the clients, from 1, with the mean ``MEAN_SIZE``.

    Args:
      spread: standard deviation of their logarithms; 0: all are equal.
    """
    total = NUM_CLIENTS * MEAN_SIZE
    shares = np.exp(np.random.default_rng(0).normal(0, spread, NUM_CLIENTS))
    sizes = np.maximum(1, np.round(shares / shares.sum() * total)).astype(int)
    sizes[sizes.argmax()] += total - sizes.sum()
    return sizes


def federation(sizes):
    """Clients with so many images of noise."""
    images = data.synthetic.noise_images(int(sizes.sum()), (28, 28, 1))
    ends = np.cumsum(sizes)
    parts = {
        str(i): data.Examples(images.x[end - size : end], images.y[end - size : end])
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    }
    return data.from_clients(parts)


def run(clients, params, algorithm):
    """(milliseconds of each round after the first chunk, local steps of a client)."""
    clock = []

    def evaluate(params):
        jax.block_until_ready(params)
        clock.append(time.perf_counter())
        return {}

    result = simulate(
        algorithm,
        params,
        clients,
        rounds=2 * ROUNDS,
        eval_every=ROUNDS,
        evaluate=evaluate,
        cohort_size=10,
        local_epochs=1,
        batch_size=8,
    )
    return 1e3 * (clock[1] - clock[0]) / ROUNDS, result.history[-1]["local_steps"]


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spread", type=float, default=1.2, help="of the logarithms of the sizes")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    sizes = {"equal": sizes_of(0.0), "unequal": sizes_of(given.spread)}
    clients = {name: federation(of) for name, of in sizes.items()}
    model = models.cnn(num_classes=10)
    params = model.init(jax.random.key(0), np.zeros((1, 28, 28, 1), np.float32))
    loss_fn = models.classification_loss(model.apply, data.preprocess())
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.05)
    times = {name: [] for name in clients}
    for _ in range(given.repeats):
        for name, of_kind in clients.items():
            times[name].append(run(of_kind, params, algorithm))
    rows = [["sizes", "smallest", "median", "largest", "steps of a client", "ms a round"]]
    for name, found in times.items():
        of, (each, steps) = sizes[name], zip(*found, strict=True)
        shown = f"{np.median(each):.0f} ({min(each):.0f} to {max(each):.0f})"
        middle = f"{np.median(of):.0f}"
        rows.append([name, str(of.min()), middle, str(of.max()), f"{steps[0]:.1f}", shown])
    print(markdown_table(rows))
    ratios = [a[0] / b[0] for a, b in zip(times["unequal"], times["equal"], strict=True)]
    print(f"\nunequal / equal: {np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
