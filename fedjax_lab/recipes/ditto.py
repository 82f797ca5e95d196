"""Ditto: each client keeps a model of its own, drawn to the one that all train together.

python -m fedjax_lab.recipes.ditto
"""

import jax

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)


def main():
    """Print the accuracy of the global and the personal models, for a weak and a strong pull."""
    train, _ = data.load("digits")
    clients = data.partition(train, "classes_per_client:2", num_clients=20, seed=0)
    clients, tests = data.split_examples(clients, 0.25, seed=0)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(32,))
    params = model.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(model.apply, prepare)
    counts = models.accuracy_counts(model.apply, prepare)
    for weight in (0.1, 10.0):
        ditto = algorithms.ditto(loss_fn, client_lr=0.05, prox_weight=weight)
        result = simulate(
            ditto, params, clients, rounds=30, cohort_size=10, local_steps=10, batch_size=16
        )
        models_of = {
            "the common model": lambda state, client: state.server.params,
            "own models": client_models(ditto, clients),
        }
        for name, model_of in models_of.items():
            accuracy = build_personal_evaluation(counts, model_of, tests)(result.state)
            found = personal_scores(accuracy, tests.sizes)
            print(f"prox_weight {weight}, {name}: {found['personal_accuracy']:.3f}")


if __name__ == "__main__":
    main()
