"""Seconds a round and peak memory as the number of clients grows, on each store of client rows.

Each cell is a process of its own. The model is a linear one of d parameters, with mini-batches of
one example, so that the rows of SCAFFOLD's controls are most of what there is to do. Times are of
all rounds after the first chunk; "ratio" is to the smallest number of clients.

    python -m experiments.benchmarks.clients [--clients 100 10000] [--parameters 1000]
"""

import argparse
import json
import subprocess
import sys
import time

import numpy as np

from experiments.benchmarks.compare import ROOT

_EXAMPLES = 1000


def federation(num_clients):
    """Clients with two examples each, which they share with others."""
    import jax.numpy as jnp

    from fedjax_lab.data import FederatedArrays
    from fedjax_lab.data.federated import PartitionInfo

    rng = np.random.default_rng(0)
    x = rng.normal(size=(_EXAMPLES, 8)).astype(np.float32)
    y = rng.normal(size=_EXAMPLES).astype(np.float32)
    return FederatedArrays(
        examples=(jnp.asarray(x), jnp.asarray(y)),
        indices=jnp.arange(2 * num_clients, dtype=jnp.int32) % _EXAMPLES,
        starts=2 * jnp.arange(num_clients, dtype=jnp.int32),
        sizes=jnp.full(num_clients, 2, jnp.int32),
        nonempty=None,
        num_clients=num_clients,
        min_size=2,
        max_size=2,
        partition=PartitionInfo("two each", 0, "0" * 16),
    )


def measure(method, store, num_clients, parameters, cohort_size, rounds):
    """Seconds a round, and the process's peak memory in bytes."""
    import jax.numpy as jnp

    from experiments.benchmarks import ours
    from fedjax_lab import algorithms, simulate

    def loss_fn(params, examples, key):
        x, y = examples
        return (x @ params["w"][:8] - y) ** 2 + 1e-4 * params["w"].mean()

    algorithm = getattr(algorithms, method)(loss_fn, client_lr=0.01)
    times = []
    simulate(
        algorithm,
        {"w": jnp.zeros(parameters)},
        federation(num_clients),
        rounds=3 * rounds,
        eval_every=rounds,
        cohort_size=cohort_size,
        local_steps=1,
        batch_size=1,
        client_store=store,
        on_row=lambda row: times.append(time.perf_counter()),
    )
    return {
        "seconds": (times[-1] - times[0]) / (2 * rounds),
        "peak": ours.about_device()["peak_bytes"],
    }


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10**2, 10**4, 10**6])
    parser.add_argument("--methods", nargs="+", default=["fedavg", "scaffold"])
    parser.add_argument("--stores", nargs="+", default=["device", "sharded", "host"])
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--cohort-size", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20, help="of a chunk")
    parser.add_argument("--here", action="store_true", help="measure one cell in this process")
    given = parser.parse_args(arguments)
    if given.here:
        found = measure(
            given.methods[0],
            given.stores[0],
            given.clients[0],
            given.parameters,
            given.cohort_size,
            given.rounds,
        )
        print(json.dumps(found))
        return
    print("| method | store | clients | table, GB | ms a round | ratio | peak, MB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    shared = ["--parameters", given.parameters, "--cohort-size", given.cohort_size]
    shared += ["--rounds", given.rounds]
    for method in given.methods:
        for store in given.stores:
            first = None
            for clients in given.clients:
                command = [sys.executable, "-m", "experiments.benchmarks.clients", "--here"]
                command += ["--methods", method, "--stores", store, "--clients", clients, *shared]
                run = subprocess.run(
                    [str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, text=True
                )
                table = clients * given.parameters * 4e-9 * (method == "scaffold")
                cells = [method, store, f"{clients:,}", f"{table:,.1f}"]
                if run.returncode:
                    cells += ["refused", "", ""]
                else:
                    found = json.loads(run.stdout.splitlines()[-1])
                    first = first or found["seconds"]
                    cells += [f"{found['seconds'] * 1e3:,.2f}", f"{found['seconds'] / first:.2f}"]
                    cells += [f"{found['peak'] / 1e6:,.0f}"]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
