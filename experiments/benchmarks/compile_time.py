"""What the compiler makes of each method, relative to FedAvg in the same process.

The MLP 784-200-100-10 on noise images of Fashion-MNIST's shape: 100 clients, cohort 10, 5 steps of
batch 64, `vmap`, a chunk of 20 rounds, GradMA's memory 100 rows. Seconds are processor seconds of
lowering and compiling, all threads together, on which other processes weigh little; FedAvg is
compiled before and after, and the mean of the two is 1. Code and temporaries are what the compiler
says of its program, "bytes accessed" too (a loop's body counts once).

    python -m experiments.benchmarks.compile_time [--target cpu|v5e] [--methods M ...]

`--target v5e` compiles ahead of time for one TPU v5e chip on any machine on which `jax[tpu]` is
installed. A method with options is written `gradma,qp_scope=per_leaf`.
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from fedjax_lab import algorithms, compressors, data, models
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.simulation.run import Run

MEMORY = 100
METHODS = ("fedavg", "gradma", "gradma_s", "gradma_w", "cfedavg")


def build(text, loss_fn):
    """The method of a name with its options."""
    name, *options = text.split(",")
    arguments = dict(option.split("=") for option in options)
    if name in ("gradma", "gradma_s"):
        arguments["memory_size"] = MEMORY
    if name == "cfedavg":
        arguments = {"compressor": compressors.top_k(0.99, **arguments)}
    return getattr(algorithms, name)(loss_fn, client_lr=0.01, **arguments)


def place_of(target):
    """The device that programs are compiled for."""
    if target == "cpu":
        return SingleDeviceSharding(jax.devices("cpu")[0])
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    return SingleDeviceSharding(topology.devices[0])


def measure(text, place, rounds):
    """(seconds, code bytes, temporary bytes, bytes accessed, lines of HLO) of one program."""
    noise = data.synthetic.noise_images(20_000, (28, 28, 1), seed=0)
    clients = data.partition(noise, "iid", num_clients=100, seed=0)
    model = models.build("mlp", num_classes=10)
    algorithm = build(text, models.classification_loss(model.apply, data.preprocess()))
    params = model.init(jax.random.key(0), noise.x[:1])
    state = algorithm.init(params, 100)
    schedule = Schedule(cohort_size=10, batch_size=64, local_steps=5)
    chunk = build_chunk(Run(algorithm, schedule), Placement.of("vmap"))
    arguments = (state, clients, jax.random.key(0), jnp.int32(0))
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), arguments
    )
    began = time.process_time()
    program = chunk.lower(*shapes, length=rounds).compile()
    seconds = time.process_time() - began
    memory = program.memory_analysis()
    cost = program.cost_analysis() or {}
    sizes = memory.generated_code_size_in_bytes, memory.temp_size_in_bytes
    lines = sum(" = " in line for line in program.as_text().splitlines())
    return seconds, *sizes, cost.get("bytes accessed", float("nan")), lines


def main():
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="cpu", choices=("cpu", "v5e"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS[1:]))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.target != "cpu":  # else the library looks for a machine around it
        os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
        os.environ.update(TPU_ACCELERATOR_TYPE="v5litepod-4", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
        jax.config.update("jax_platforms", "cpu")
    place = place_of(arguments.target)
    measure("fedavg", place, arguments.rounds)  # warms up
    texts = ["fedavg", *arguments.methods, "fedavg"]
    results = []
    for text in texts:
        results.append(measure(text, place, arguments.rounds))
        print(f"{text}: {results[-1][0]:.1f} s", flush=True)
    base = (results[0][0] + results[-1][0]) / 2
    print(f"\n{arguments.target}: FedAvg {results[0][0]:.1f} and {results[-1][0]:.1f} s\n")
    print("| method | compile s | ratio | code MiB | temporaries MiB | accessed MB | lines |")
    print("|---|---|---|---|---|---|---|")
    for text, (seconds, code, temporary, accessed, count) in zip(texts[:-1], results, strict=False):
        print(
            f"| {text} | {seconds:.1f} | {seconds / base:.2f} | {code / 2**20:.1f} | "
            f"{temporary / 2**20:.1f} | {accessed / 1e6:.0f} | {count} |"
        )


if __name__ == "__main__":
    main()
