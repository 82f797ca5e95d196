"""A method of your own in one file: FedAvg whose server steps have a largest norm.

python -m fedjax_lab.recipes.own_method

Saved as own_method.py, it is also a method of the command line:
fedjax-lab run --algorithm own_method:limited --option limit=0.5
"""

from typing import Unpack

import jax
import jax.numpy as jnp

from fedjax_lab import algorithms, build_evaluation, data, models, simulate
from fedjax_lab.method import (
    Algorithm,
    Common,
    LocalTraining,
    LossFn,
    Phase,
    check_number,
    factory,
    tree,
)


@factory
def limited(loss_fn: LossFn, *, limit: float = 1.0, **common: Unpack[Common]) -> Algorithm:
    """FedAvg with x <- x - min(1, limit / |delta|) * delta.

    Args:
      limit: largest norm of a server step, above 0.
    """
    check_number("limit", limit, minimum=0.0, exclusive_minimum=True)
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        return params, ()  # the server's state, and a client's row

    def broadcast(x, round):
        return x

    def server_update(x, messages, cohort):
        norm = tree.norm(messages["delta"])  # of the mean of the clients' messages
        share = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
        return tree.descend(x, share, messages["delta"]), {"delta_norm": norm}

    phase = Phase(broadcast, training.client_update, server_update, reduce={"delta": "mean"})
    return Algorithm("limited", start, (phase,), lambda state: state.server)


def main():
    """Print the accuracy of FedAvg and of the method, for three seeds."""
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(32,))
    params = model.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(model.apply, prepare)
    evaluate = build_evaluation(models.accuracy_counts(model.apply, prepare), test)
    for algorithm in (
        algorithms.fedavg(loss_fn, client_lr=0.2),
        limited(loss_fn, client_lr=0.2, limit=0.5),
    ):
        accuracies = []
        for seed in range(3):
            result = simulate(
                algorithm,
                params,
                clients,
                rounds=20,
                cohort_size=5,
                local_steps=10,
                batch_size=16,
                seed=seed,
                evaluate=evaluate,
            )
            accuracies.append(result.history[-1]["accuracy"])
        shown = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)
        print(f"{algorithm.name}: {shown}")


if __name__ == "__main__":
    main()
