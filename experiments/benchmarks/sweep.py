"""One sweep against the same runs one by one, in one process.

FedAvg with 3 seeds x 4 learning rates; the MLP of GradMA (784-200-100-10) on noise images of
Fashion-MNIST's shape, 1,000 clients of 60 images, cohort 100, 5 steps of batch 20. One by one means
12 calls of ``simulate`` with ``client_map="auto"``, each of which compiles its program, as 12
separate runs do; their time without compilation is given apart. Both take turns (A B A B ...);
medians, with the smallest and the largest.

    python -m experiments.benchmarks.sweep [--rounds 20] [--repeats 3]
"""

import argparse
import functools
import time

import jax
import numpy as np

from fedjax_lab import algorithms, data, models, simulate, sweep

CLIENT_LRS = (0.3, 0.1, 0.03, 0.01)
SEEDS = (0, 1, 2)


def measure(rounds, repeats):
    """{"sweep" or "one by one": [(seconds in all, compiling, in rounds)]}."""
    noise = data.synthetic.noise_images(60_000, (28, 28, 1), seed=0)
    clients = data.partition(noise, "iid", num_clients=1000, seed=0)
    model = models.build("mlp", num_classes=10)
    loss_fn = models.classification_loss(model.apply, data.preprocess())
    build = functools.partial(algorithms.fedavg, loss_fn)
    params = model.init(jax.random.key(0), noise.x[:1])
    options = {
        "rounds": rounds,
        "cohort_size": 100,
        "batch_size": 20,
        "local_steps": 5,
        "replace": True,
        "eval_every": rounds,
    }

    def all_at_once():
        return [
            sweep(build, params, clients, points={"client_lr": CLIENT_LRS}, seeds=SEEDS, **options)
        ]

    def one_by_one():
        return [
            simulate(build(client_lr=lr), params, clients, seed=seed, **options)
            for lr in CLIENT_LRS
            for seed in SEEDS
        ]

    times = {"sweep": [], "one by one": []}
    for _ in range(repeats):
        for name, runs in (("sweep", all_at_once), ("one by one", one_by_one)):
            began = time.perf_counter()
            results = runs()
            whole = time.perf_counter() - began
            compiling = sum(result.compile_seconds for result in results)
            times[name].append((whole, compiling, sum(result.seconds for result in results)))
    return times


def main():
    """Print one Markdown table, and the ratios of the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # a program from a cache costs nothing
    times = measure(arguments.rounds, arguments.repeats)
    print(f"12 runs of {arguments.rounds} rounds on {jax.device_count()} device(s)\n")
    print("| 12 runs | seconds in all | compiling | in rounds |")
    print("|---|---|---|---|")
    for name, samples in times.items():
        cells = [
            f"{np.median(column):.1f} ({min(column):.1f} to {max(column):.1f})"
            for column in zip(*samples, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    ratios = np.median(times["one by one"], axis=0) / np.median(times["sweep"], axis=0)
    print(
        f"\nOne by one takes {ratios[0]:.2f} times as long in all, {ratios[1]:.2f} times as long "
        f"to compile and {ratios[2]:.2f} times as long in rounds."
    )


if __name__ == "__main__":
    main()
