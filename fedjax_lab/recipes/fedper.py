"""FedPer, LG-FedAvg and FedRep: some layers of the model stay with their client.

python -m fedjax_lab.recipes.fedper
"""

import jax

from fedjax_lab import algorithms, data, models, simulate, with_personal
from fedjax_lab.simulation.evaluate_personal import (
    build_personal_evaluation,
    client_models,
    personal_scores,
)


def main():
    """Print the clients' accuracy and the bytes of each method."""
    train, _ = data.load("digits")
    clients = data.partition(train, "classes_per_client:2", num_clients=20, seed=0)
    clients, tests = data.split_examples(clients, 0.25, seed=0)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(32,))
    params = model.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(model.apply, prepare)
    common = {"loss_fn": loss_fn, "client_lr": 0.1}
    methods = {
        "FedAvg": algorithms.fedavg(**common),
        "FedPer": algorithms.fedper(**common),
        "FedPer, own first layer": algorithms.fedper(**common, personal="blocks_0/"),
        "LG-FedAvg": algorithms.lg_fedavg(**common),
        "FedRep": algorithms.fedrep(**common, head_steps=5),
        # Any other method, with leaves that stay with their clients:
        "SCAFFOLD, own biases": with_personal(
            algorithms.scaffold(**common), lambda path: path.endswith("bias")
        ),
    }
    counts = models.accuracy_counts(model.apply, prepare)
    for name, algorithm in methods.items():
        result = simulate(
            algorithm, params, clients, rounds=30, cohort_size=10, local_steps=10, batch_size=16
        )
        evaluate = build_personal_evaluation(counts, client_models(algorithm, clients), tests)
        found = personal_scores(evaluate(result.state), tests.sizes)
        accuracy, sent = float(found["personal_accuracy"]), algorithm.uplink(params)
        print(f"{name}: accuracy of the clients {accuracy:.3f}, {sent:,} bytes up")


if __name__ == "__main__":
    main()
