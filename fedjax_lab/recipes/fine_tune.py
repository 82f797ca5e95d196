"""Fine-tune the common model on each client's own data before it is evaluated there.

python -m fedjax_lab.recipes.fine_tune
"""

import jax

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)


def main():
    """Print the clients' accuracy after increasing numbers of steps."""
    train, _ = data.load("digits")
    clients = data.partition(train, "classes_per_client:2", num_clients=20, seed=0)
    clients, tests = data.split_examples(clients, 0.25, seed=0)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(32,))
    params = model.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(model.apply, prepare)
    fedavg = algorithms.fedavg(loss_fn, client_lr=0.1)
    result = simulate(
        fedavg, params, clients, rounds=30, cohort_size=10, local_steps=10, batch_size=16
    )
    counts = models.accuracy_counts(model.apply, prepare)
    tuned = {
        steps: algorithms.with_fine_tuning(fedavg, loss_fn, steps=steps, client_lr=0.1)
        for steps in (5, 50)
    }
    for steps, algorithm in {0: fedavg, **tuned}.items():
        evaluate = build_personal_evaluation(counts, client_models(algorithm, clients), tests)
        found = personal_scores(evaluate(result.state), tests.sizes)
        print(f"{steps} steps: accuracy of the clients {found['personal_accuracy']:.3f}")


if __name__ == "__main__":
    main()
