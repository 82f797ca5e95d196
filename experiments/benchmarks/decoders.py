"""Fine-tuning rounds of decoders of 0.5, 1 and 8 billion parameters, by accelerators' compilers.

    python -m experiments.benchmarks.decoders --target v5e [v5e:2x2 v5e:8x8] [--models 0.5B 1B 8B]

The sizes are those of Qwen2-0.5B, Llama-3.2-1B and Llama-3.1-8B: weights of bfloat16, frozen, and
LoRA adapters of rank 16 in float32 beside all kernels of the layers. A round of FedAvg has two
clients for each share of the cohort; each takes two local steps on 4 rows of 512 tokens. Layers are
computed again in the backward pass. Nothing is run or allocated: it needs ``jax[tpu]``, or
``jax-cuda12-plugin jax-cuda12-pjrt``, and no accelerator.
"""

import argparse
import functools
import resource

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_lab import algorithms, data, models, with_frozen
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.machine.compiler import compile_for, figures, with_devices
from fedjax_lab.machine.target import named
from fedjax_lab.simulation.chunk_planner import ChunkPlanner
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Request

QWEN2_05B = models.DecoderConfig(
    vocab_size=151_936, width=896, num_layers=24, num_heads=14, num_kv_heads=2, mlp_width=4864,
    qkv_bias=True, tie=True, rope_theta=1e6,
)  # fmt: skip
LLAMA_1B = models.DecoderConfig(
    vocab_size=128_256, width=2048, num_layers=16, num_heads=32, num_kv_heads=8, mlp_width=8192,
    tie=True, rope_theta=5e5,
)  # fmt: skip
LLAMA_8B = models.DecoderConfig(
    vocab_size=128_256, width=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_width=14_336,
    rope_theta=5e5,
)  # fmt: skip
MODELS = {"0.5B": QWEN2_05B, "1B": LLAMA_1B, "8B": LLAMA_8B}
RANK, CLIENTS, STEPS, ROWS, LENGTH = 16, 2, 2, 4, 512


def client_map_of(target, name):
    """Devices share the cohort; four TPU chips share a model that one does not hold."""
    if target.num_devices == 1:
        return "scan"
    if name == "8B" and target.platform == "tpu":
        return f"shard_map:{target.num_devices // 4}x4"
    return "shard_map"


def divided(path, leaf):
    """Heads, hidden units and tokens over the chips that share a model."""
    if path == "embedding":
        return PartitionSpec("model")
    columns = PartitionSpec(*[None] * (len(leaf.shape) - 1), "model")
    rows = PartitionSpec(None, "model")
    *_, layer, name = path.removesuffix("/up").removesuffix("/down").split("/")
    if layer in ("query", "key", "value", "gate", "up", "head"):
        return PartitionSpec() if path.endswith("/down") else columns
    if layer in ("out", "down"):
        return PartitionSpec() if path.endswith("/up") or name == "bias" else rows
    return PartitionSpec()


def method_of(config):
    """(FedAvg of adapters, their shapes, those of the frozen weights)."""
    model = models.decoder(config, dtype="bfloat16", remat=True)
    frozen = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))

    def init(key):
        return models.init_adapters(key, frozen, "layers/*/kernel", RANK, stacked="layers/*")

    def loss_fn(adapters, examples, key, frozen):
        whole = models.attach_adapters(frozen, adapters, 2.0)
        return models.answer_loss(model.apply)(whole, examples, key)

    adapters = jax.eval_shape(init, jax.random.key(0))
    build = functools.partial(algorithms.fedavg, client_lr=0.1)
    return with_frozen(build, loss_fn, frozen), adapters, frozen


def row_of(target, name):
    """The cells of a row of the table."""
    target = with_devices(named(target))
    algorithm, adapters, frozen = method_of(MODELS[name])
    client_map = client_map_of(target, name)
    is_divided = ":" in client_map
    shares = int(client_map.partition(":")[2].partition("x")[0]) if is_divided else None
    cohort = CLIENTS * (shares or target.num_devices)
    texts = np.zeros((ROWS * cohort, LENGTH), np.int32)
    examples = data.Examples(data.Tokens(texts, texts), texts)
    clients = data.partition(examples, np.arange(len(texts)) % cohort)
    schedule = Schedule(cohort_size=cohort, batch_size=ROWS, local_steps=STEPS)
    asked = Request.of(client_map, "auto", divided if is_divided else None, target)
    run = Computation(algorithm, schedule, key=jax.random.key(0), params=adapters)
    planner = ChunkPlanner(run, asked, run.shapes(clients), clients)
    arguments, static = planner.program(client_map, 1)
    size, trained = (sum(leaf.size for leaf in jax.tree.leaves(t)) for t in (frozen, adapters))
    cells = [name, target.name, client_map, f"{size / 1e6:,.0f} + {trained / 1e6:.1f}"]
    try:
        program, _ = compile_for(target, *arguments, **static)
    except jax.errors.JaxRuntimeError as error:
        return [*cells, " ".join(str(error).split())[:200]]
    found = figures(program)
    links = ", ".join(f"{c.kind} {c.bytes / 1e9:.2f}" for c in found.collectives)
    return [
        *cells,
        *(f"{n / 2**30:.2f}" for n in (found.arguments, found.temporaries)),
        f"{found.memory / target.memory_bytes:.0%}",
        links or "none",
    ]


COLUMNS = (
    "model", "target", "client map", "parameters + adapters, M", "arguments GiB",
    "temporaries GiB", "of the memory", "collectives, GB",
)  # fmt: skip


def main(arguments=None):
    """Print one Markdown table; the figures are those of one device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    given = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---|---|---|" + "---:|" * (len(COLUMNS) - 3), flush=True)
    for name in given.models:
        for target in given.target:
            print(f"| {' | '.join(row_of(target, name))} |", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\nPeak of this process: {peak:.1f} GiB.")


if __name__ == "__main__":
    main()
