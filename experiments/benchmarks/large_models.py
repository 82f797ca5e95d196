"""A round on a transformer of a billion parameters, by the compiler of 64 TPU chips.

A decoder in the manner of GPT: 2,048 features, 16 heads, 24 layers, 32,768 tokens; 1.3 G numbers
in float32. Each of 8 shares of the cohort has 8 chips; heads and hidden units are divided over
them. FedAvg and SCAFFOLD train all of it; with ``lora`` clients train adapters of rank 16 beside
the attention's queries and values, and the model itself is frozen. Nothing is run or allocated.

    python -m experiments.benchmarks.large_models [--target v5e:8x8] [--layers 24 160]

It needs ``jax[tpu]`` and no TPU.
"""

import argparse
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import fedjax_lab
from fedjax_lab import algorithms, data, with_frozen

FEATURES, HEADS, HIDDEN, VOCABULARY, RANK = 2048, 16, 8192, 32_768, 16
HEAD = FEATURES // HEADS
METHODS = ("lora", "fedavg", "scaffold")


def shapes_of(layers):
    """(the model's shapes, the adapters'); those of all layers are one array."""

    def shape(*axes):
        return jax.ShapeDtypeStruct(axes, jnp.float32)

    model = {
        "embedding": shape(VOCABULARY, FEATURES),
        "layers": {
            **{name: shape(layers, FEATURES, HEADS, HEAD) for name in ("query", "key", "value")},
            "output": shape(layers, HEADS, HEAD, FEATURES),
            "up": shape(layers, FEATURES, HIDDEN),
            "down": shape(layers, HIDDEN, FEATURES),
        },
    }
    pair = {"down": shape(layers, FEATURES, RANK), "up": shape(layers, RANK, HEADS, HEAD)}
    return model, {"query": pair, "value": pair}


def divided(path, leaf):
    """Heads and hidden units over the chips of a share, of the embedding the tokens."""
    name = path.rpartition("/")[2]
    if name == "embedding":
        return PartitionSpec("model")
    if path in ("layers/output", "layers/down"):
        return PartitionSpec(None, "model")
    if path in ("query/down", "value/down"):  # of an adapter
        return PartitionSpec()
    return PartitionSpec(None, None, "model")


def normalised(x):
    """Each token's features with mean square 1."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def next_token_losses(model, texts, adapters=None):
    """Of each text [B, T], the mean loss of its tokens."""
    x = model["embedding"][texts.x]
    length = x.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]

    def layer(x, parts):
        kernels, beside = parts
        y = normalised(x)

        def heads(name):
            found = jnp.einsum("btf,fhd->bthd", y, kernels[name])
            if beside is None or name not in beside:
                return found
            low = jnp.einsum("btf,fr->btr", y, beside[name]["down"])
            return found + jnp.einsum("btr,rhd->bthd", low, beside[name]["up"])

        scores = jnp.einsum("bqhd,bkhd->bhqk", heads("query"), heads("key")) / math.sqrt(HEAD)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads("value"))
        x = x + jnp.einsum("bqhd,hdf->bqf", mixed, kernels["output"])
        hidden = jax.nn.gelu(jnp.einsum("btf,fg->btg", normalised(x), kernels["up"]))
        return x + jnp.einsum("btg,gf->btf", hidden, kernels["down"]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, (model["layers"], adapters))
    logits = jnp.einsum("btf,vf->btv", normalised(x), model["embedding"])
    right = jnp.take_along_axis(logits, texts.y[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - right).mean(-1)


def method_of(name, layers):
    """(method, the shapes of what it trains)."""
    model, adapters = shapes_of(layers)
    if name != "lora":
        build = getattr(algorithms, name)
        return build(lambda p, texts, key: next_token_losses(p, texts), client_lr=0.1), model

    def adapted(adapters, texts, key, model):
        return next_token_losses(model, texts, adapters)

    build = functools.partial(algorithms.scaffold, client_lr=0.1)
    return with_frozen(build, adapted, model), adapters


def main(arguments=None):
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="v5e:8x8")
    parser.add_argument("--client-map", default="shard_map:8x8")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--layers", type=int, nargs="+", default=[24])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of a text")
    given = parser.parse_args(arguments)
    texts = np.zeros((2 * given.clients, given.length), np.int32)
    clients = data.partition(data.Examples(texts, texts), np.arange(len(texts)) % given.clients)
    print(
        "| method | parameters | trained | arguments | temporaries | of a chip | "
        "collectives of a round, GB on a chip | compile s |"
    )
    print("|---|---:|---:|---:|---:|---:|---|---:|", flush=True)
    for name in given.methods:
        for layers in given.layers:
            method, trained = method_of(name, layers)
            found = fedjax_lab.plan(
                method,
                trained,
                clients,
                cohort_size=8,
                local_steps=2,
                batch_size=2,
                target=given.target,
                client_map=given.client_map,
                params_sharding=divided,
            )
            if found.figures is None:
                raise SystemExit(found.note)
            cells = row(name, layers, trained, found)
            print(f"| {' | '.join(cells)} |", flush=True)


def row(name, layers, trained, found):
    """The cells of a plan."""
    figures, room = found.figures, found.target.memory_bytes
    numbers = [
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        for tree in (shapes_of(layers)[0], trained)
    ]
    exchanged = ", ".join(f"{c.kind} {c.bytes / 1e9:.2f}" for c in figures.collectives)
    return [
        name,
        *(f"{n / 1e6:,.1f} M" for n in numbers),
        *(f"{n / 2**30:.2f} GiB" for n in (figures.arguments, figures.temporaries)),
        f"{figures.memory / room:.0%}" if room else "",
        exchanged,
        f"{figures.seconds:.0f}",
    ]


if __name__ == "__main__":
    main()
