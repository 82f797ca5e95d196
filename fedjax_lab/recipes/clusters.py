"""Clients in groups that want different models: IFCA, a method of its own, against FedAvg.

The server keeps several models. A client trains the one whose loss on its first mini-batch is the
smallest, and that model is then its own (Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for
Clustered Federated Learning. NeurIPS 2020; HypCluster in Mansour et al., 2020).

python -m fedjax_lab.recipes.clusters
"""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.clients.resident import gather
from fedjax_lab.method import (
    Algorithm,
    Common,
    Costs,
    LocalTraining,
    LossFn,
    Personal,
    Phase,
    factory,
    tree,
)
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)

GROUPS = 2


@factory
def ifca(loss_fn: LossFn, **common: Unpack[Common]) -> Algorithm:
    """IFCA with averaged models; the params are several models, [GROUPS, ...] in each leaf."""
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        return params, jnp.zeros(num_clients, jnp.int32)  # a client's row: the number of its model

    def client_update(candidates, row, batch):
        first = gather(jax.tree.map(lambda leaf: leaf[0], batch.examples), batch.source)
        mask = True if batch.example_mask is None else batch.example_mask[0]

        def total(params):
            return jnp.where(mask, loss_fn(params, first, batch.key), 0).sum()

        best = jax.vmap(total)(candidates).argmin().astype(row.dtype)
        params = jax.tree.map(lambda leaf: leaf[best], candidates)
        local = training.steps(params, batch)
        chosen = jnp.arange(GROUPS) == best
        delta = tree.subtract(params, local.params)
        message = {
            "delta": jax.tree.map(lambda d: jnp.multiply.outer(chosen.astype(d.dtype), d), delta),
            "chosen": chosen.astype(jnp.float32),
        }
        return message, best, local.report

    def server_update(candidates, messages, cohort):
        share = jnp.maximum(messages["chosen"], 1e-12)  # of the cohort, for each model
        step = jax.tree.map(lambda d: jax.vmap(jnp.divide)(d, share), messages["delta"])
        return tree.subtract(candidates, step), {"delta_norm": tree.norm(step)}

    phase = Phase(
        lambda candidates, round: candidates,
        client_update,
        server_update,
        reduce={"delta": "mean", "chosen": "mean"},
        message=lambda params: {"delta": params, "chosen": jnp.zeros(GROUPS)},
        costs=Costs(up=lambda message: tree.nbytes(message["delta"]) // GROUPS + 4),
    )
    own = Personal(
        lambda state, client: jax.tree.map(lambda m: m[state.clients[client]], state.server)
    )
    return Algorithm("ifca", start, (phase,), lambda state: state.server, personal=own)


def main():
    """Print the clients' accuracy; for half of them, the digit d is called 9 - d."""
    train, _ = data.load("digits")
    parts = np.array_split(np.random.default_rng(0).permutation(len(train.y)), 20)
    named = {
        i: (train.x[rows], train.y[rows] if i < 10 else 9 - train.y[rows])
        for i, rows in enumerate(parts)
    }
    clients, tests = data.split_examples(data.from_clients(named), 0.25, seed=0)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(32,))
    x = train.x[:1]
    loss_fn = models.classification_loss(model.apply, prepare)
    counts = models.accuracy_counts(model.apply, prepare)
    starts = jax.vmap(lambda key: model.init(key, x))(jax.random.split(jax.random.key(0), GROUPS))
    one = jax.tree.map(lambda leaf: leaf[0], starts)
    schedule = {"rounds": 30, "cohort_size": 10, "local_steps": 10, "batch_size": 16}
    for method, params in (
        (algorithms.fedavg(loss_fn, client_lr=0.2), one),
        (ifca(loss_fn, client_lr=0.2), starts),
    ):
        state = simulate(method, params, clients, **schedule).state
        accuracy = build_personal_evaluation(counts, client_models(method), tests)(state)
        found = personal_scores(accuracy, tests.sizes)
        print(f"{method.name}: {found['personal_accuracy']:.3f}")
    print(f"the clients' models: {state.clients}")


if __name__ == "__main__":
    main()
