"""Time of a round under each client map, relative to vmap, in one run.

FedAvg and GradMA with the MLP of GradMA on noise images of Fashion-MNIST's shape: 100 clients,
cohort 10, 5 steps of batch 64. The maps take turns (A B C A B C ...), every sample waits for the
device, and the medians are compared; the ratio's range is that of the samples' quartiles.

    python -m experiments.benchmarks.client_maps [--rounds 20] [--repeats 5] [--devices 2]
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

METHODS = {"fedavg": {}, "gradma": {"memory_size": 20}}


def measure(method, client_maps, rounds, repeats):
    """{client map: (compile seconds, seconds per round [repeats])}."""
    noise = data.synthetic.noise_images(20_000, (28, 28, 1), seed=0)
    clients = data.partition(noise, "iid", num_clients=100, seed=0)
    model = models.build("mlp", num_classes=10)
    loss_fn = models.classification_loss(model.apply, data.preprocess())
    algorithm = algorithms.ALGORITHMS[method](loss_fn, client_lr=0.01, **METHODS[method])
    schedule = Schedule(cohort_size=10, batch_size=64, local_steps=5)
    params = model.init(jax.random.key(0), noise.x[:1])
    first = jnp.zeros((), jnp.int32)
    runs, times = {}, {}
    for client_map in client_maps:
        state = algorithm.init(params, 100)
        arguments = Placement.of(client_map).copies((state, clients, jax.random.key(0)))
        began = time.perf_counter()
        chunk = build_chunk(Run(algorithm, schedule), Placement.of(client_map))
        compiled = chunk.lower(*arguments, first, length=rounds).compile()
        times[client_map] = (time.perf_counter() - began, [])
        runs[client_map] = [compiled, *arguments]
    for repeat in range(repeats + 1):
        for client_map, (compiled, state, resident, key) in runs.items():
            began = time.perf_counter()
            state, _ = jax.block_until_ready(compiled(state, resident, key, first))
            runs[client_map][1] = state
            if repeat:  # the first pass warms up
                times[client_map][1].append((time.perf_counter() - began) / rounds)
    return times


def main():
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2, help="host devices on CPU")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    client_maps = ("vmap", "chunk:5", "scan", "pmap", "shard_map")
    print("| method | client map | rounds/s relative to vmap | ms a round | compile s |")
    print("|---|---|---|---|---|")
    for method in METHODS:
        times = measure(method, client_maps, arguments.rounds, arguments.repeats)
        base = np.median(times["vmap"][1])
        for client_map, (compiled, samples) in times.items():
            low, middle, high = base / np.quantile(samples, [0.75, 0.5, 0.25])
            print(
                f"| {method} | {client_map} | {middle:.2f} ({low:.2f} to {high:.2f}) | "
                f"{1e3 * np.median(samples):.1f} | {compiled:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
