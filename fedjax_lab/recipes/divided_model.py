"""Adapters for a transformer that no device holds: four devices have a part of it each.

FEDJAX_LAB_CPU_DEVICES=8 python -m fedjax_lab.recipes.divided_model
"""

import functools

import jax

from fedjax_lab import algorithms, data, model_shardings, models, simulate, with_frozen
from fedjax_lab.models.lora import init_adapters, merge_adapters
from fedjax_lab.simulation.evaluate import build_evaluation

CLIENT_MAP = "shard_map:2x4"  # two parts of the cohort, each on four devices


def main():
    """Print each device's part of the model, and the results of training adapters."""
    train, test = data.load("digits")
    clients = data.partition(train, "iid", num_clients=8, seed=0)
    model = models.vit(10, patch_size=4, width=32, depth=1, num_heads=2)
    # Each device creates its own part; jax.device_put places a model from a file.
    shapes = jax.eval_shape(model.init, jax.random.key(0), train.x[:1])
    init = jax.jit(model.init, out_shardings=model_shardings(shapes, CLIENT_MAP))
    body = init(jax.random.key(0), train.x[:1])
    held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(body))
    print(f"a device holds {held:,} of {models.count_params(body):,} numbers")

    prepare = data.preprocess(scale=16)
    loss_fn = models.classification_loss(model.apply, prepare)
    counts = models.accuracy_counts(model.apply, prepare)
    adapters = init_adapters(jax.random.key(1), shapes, lambda path: "kernel" in path, rank=4)

    def adapted_loss(adapters, examples, key, body):
        return loss_fn(merge_adapters(body, adapters), examples, key)

    def adapted_counts(adapters, examples, body):
        return counts(merge_adapters(body, adapters), examples)

    build = functools.partial(algorithms.scaffold, client_lr=0.2)
    result = simulate(
        with_frozen(build, adapted_loss, body), adapters, clients,
        rounds=20, cohort_size=4, local_steps=10, batch_size=16, client_map=CLIENT_MAP,
        evaluate=build_evaluation(adapted_counts, test, frozen=body), eval_every=10,
    )  # fmt: skip
    for row in result.history:
        print(f"round {row['round']}: accuracy {row['accuracy']:.3f}")


if __name__ == "__main__":
    main()
