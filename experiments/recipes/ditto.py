"""Ditto: each client keeps a model of its own, drawn to the one that all train together.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization.
ICML 2021, Algorithm 1.

    python -m experiments.recipes.ditto
"""

from typing import NamedTuple, Unpack

import jax
import numpy as np

from fedjax_lab import data, models, simulate
from fedjax_lab.method import (
    Algorithm,
    Common,
    LocalTraining,
    LossFn,
    Params,
    Phase,
    check_number,
    factory,
    one_row_per_client,
    tree,
)
from fedjax_lab.simulation.evaluate_personal import build_personal_evaluation


class DittoServer(NamedTuple):
    """Server state."""

    params: Params  # w


@factory
def ditto(loss_fn: LossFn, *, prox_weight: float, **common: Unpack[Common]) -> Algorithm:
    """FedAvg, beside which client i trains v_i by g(v_i) + prox_weight (v_i - w).

    Args:
      prox_weight: λ, at least 0; 0 is training alone.
    """
    check_number("prox_weight", prox_weight, minimum=0.0)
    training = LocalTraining(loss_fn, **common)

    def start(params, num_clients, batch):
        return DittoServer(params), one_row_per_client(params, num_clients)

    def client_update(w, v, batch):
        def towards_w(v, step):
            g, report = training.gradient(v, step)
            return tree.add_scaled(g, prox_weight, tree.subtract(v, w)), report

        shared, own = training.steps(w, batch), training.steps(v, batch, towards_w)
        return {"delta": tree.subtract(w, shared.params)}, own.params, shared.report

    def server_update(server, messages, cohort):
        delta = messages["delta"]
        return DittoServer(tree.subtract(server.params, delta)), {"delta_norm": tree.norm(delta)}

    phase = Phase(lambda s, round: s.params, client_update, server_update, reduce={"delta": "mean"})
    return Algorithm("ditto", start, (phase,), lambda state: state.server.params, 2)


def main():
    """Accuracy of the common model and of the clients' own ones."""
    train, _ = data.load("digits")
    clients = data.partition(train, "classes_per_client:2", num_clients=20, seed=0)
    clients, tests = data.split_examples(clients, 0.25, seed=0)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(32,))
    params = model.init(jax.random.key(0), prepare(train, None).x[:1])
    loss_fn = models.classification_loss(model.apply, prepare)
    counts = models.accuracy_counts(model.apply, prepare)
    result = simulate(
        ditto(loss_fn, client_lr=0.1, prox_weight=0.1),
        params, clients, rounds=30, cohort_size=10, local_steps=10, batch_size=16,
    )  # fmt: skip
    models_of = {
        "the common model": lambda state, i: state.server.params,
        "own models": lambda state, i: jax.tree.map(lambda table: table[i], state.clients),
    }
    for name, model_of in models_of.items():
        accuracy = np.asarray(build_personal_evaluation(counts, model_of, tests)(result.state))
        print(f"{name}: accuracy of the clients {np.nanmean(accuracy):.3f}")


if __name__ == "__main__":
    main()
