"""FedPer, LG-FedAvg and FedRep: some layers of the model stay with their client.

python -m experiments.recipes.fedper
"""

import functools

import jax
import numpy as np

from fedjax_lab import algorithms, data, models, simulate, with_personal
from fedjax_lab.simulation.evaluate_personal import build_personal_evaluation
from fedjax_lab.wrappers import client_params, personal_first


def is_head(path):
    """Whether a leaf belongs to the last layer."""
    return path.startswith("classifier")


def main():
    """Accuracy of the clients, and bytes, of each."""
    train, _ = data.load("digits")
    clients = data.partition(train, "classes_per_client:2", num_clients=20, seed=0)
    clients, tests = data.split_examples(clients, 0.25, seed=0)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(32,))
    params = model.init(jax.random.key(0), prepare(train, None).x[:1])
    loss_fn = models.classification_loss(model.apply, prepare)
    fedavg = functools.partial(algorithms.fedavg, loss_fn, client_lr=0.1)
    methods = {
        "FedAvg": fedavg(),
        "FedPer": with_personal(fedavg(), is_head),
        "LG-FedAvg": with_personal(fedavg(), lambda path: not is_head(path)),
        "FedRep": with_personal(fedavg(step_transform=personal_first(is_head, 5)), is_head),
    }
    for name, algorithm in methods.items():
        result = simulate(
            algorithm, params, clients, rounds=30, cohort_size=10, local_steps=10, batch_size=16
        )
        evaluate = build_personal_evaluation(
            models.accuracy_counts(model.apply, prepare),
            functools.partial(client_params, algorithm),
            tests,
        )
        accuracy = np.asarray(evaluate(result.state))
        sent = algorithm.uplink(params)
        print(f"{name}: accuracy of the clients {np.nanmean(accuracy):.3f}, {sent:,} bytes up")


if __name__ == "__main__":
    main()
