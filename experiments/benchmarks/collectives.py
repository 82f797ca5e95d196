"""Bytes that devices exchange in a round, in models (d), by the text of its compiled program.

The MLP 784-256-256-10 on noise, 64 clients, a cohort of 16, 2 steps of batch 8. First with the
table of client rows whole on each device, and with its rows on their owners; then with a model that
two or four devices divide. Nothing is run; a collective's bytes are those of its results on one
device, and "gathered" are those of all-gathers alone.

    python -m experiments.benchmarks.collectives [--devices 4 8] [--methods fedavg scaffold]

With ``--target v5e`` a TPU's compiler is asked (see ``fedjax_lab.machine.compiler``).
"""

import argparse

import jax

import fedjax_lab
from fedjax_lab import algorithms, data, models

METHODS = {
    "fedavg": {},
    "scaffold": {},
    "fedmoswa": {},
    "fedspeed": {"server_dual": "all"},
    "gradma": {"memory_size": 16, "server_momentum": 0.9, "memory_decay": 0.5},
    "gradma_w": {"keep_local_model": True},
    "gradma_s": {"memory_size": 16, "server_momentum": 0.9, "memory_decay": 0.5},
    "cfedavg": {"compressor": "top_k:0.1"},
}
TOPOLOGIES = {4: "2x2", 8: "2x4"}
HIDDEN, SLOTS = (256, 256), 16


def compiled(method, target, client_map, client_store):
    """What the target's compiler says of a round."""
    noise = data.synthetic.noise_images(640, (784,), seed=0)
    clients = data.partition(noise, "iid", num_clients=64, seed=0)
    model = models.mlp(10, hidden=HIDDEN)
    loss_fn = models.classification_loss(model.apply, data.preprocess())
    found = fedjax_lab.plan(
        algorithms.ALGORITHMS[method](loss_fn, client_lr=0.1, **METHODS[method]),
        model.init(jax.random.key(0), noise.x[:1]),
        clients,
        cohort_size=SLOTS,
        local_steps=2,
        batch_size=8,
        target=target,
        client_map=client_map,
        client_store=client_store,
    )
    if found.figures is None:
        raise SystemExit(found.note)
    return found


def measure(method, target, client_map, client_store):
    """(all, gathered, temporaries), in models: what one device has of a round."""
    found = compiled(method, target, client_map, client_store)
    exchanged = found.figures.collectives
    gathered = sum(c.bytes for c in exchanged if c.kind == "all-gather")
    every = sum(c.bytes for c in exchanged)
    return [n / found.model_bytes for n in (every, gathered, found.figures.temporaries)]


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8], choices=TOPOLOGIES)
    parser.add_argument("--parts", type=int, nargs="+", default=[2], help="of a divided model")
    parser.add_argument("--target", default="cpu", help="cpu, or a TPU of two axes such as v5e")
    given = parser.parse_args(arguments)
    if given.target == "cpu":
        jax.config.update("jax_num_cpu_devices", max(given.devices))
    print("| method | devices | client map | rows | exchanged, d | gathered, d | temporaries, d |")
    print("|---|---:|---|---|---:|---:|---:|", flush=True)
    for method in given.methods:
        for devices in given.devices:
            size = devices if given.target == "cpu" else TOPOLOGIES[devices]
            cases = [("shard_map", "device"), ("shard_map", "sharded")]
            cases += [(f"shard_map:{devices // n}x{n}", "sharded") for n in given.parts]
            for client_map, store in cases:
                found = measure(method, f"{given.target}:{size}", client_map, store)
                cells = [method, str(devices), client_map, store, *(f"{x:.3g}" for x in found)]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
