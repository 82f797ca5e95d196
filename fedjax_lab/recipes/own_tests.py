"""A test set that came apart from the training data, divided so that clients know its labels.

python -m fedjax_lab.recipes.own_tests
"""

import jax
import numpy as np

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.simulation.evaluate import build_client_evaluation


def main():
    """Print how well the global model serves each client's own mix of labels."""
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    tests = data.divide_like(clients, test, seed=0)
    mixes = [
        h / h.sum(1, keepdims=True)
        for h in map(data.FederatedArrays.label_histogram, (clients, tests))
    ]
    print(f"largest difference of a share of labels: {np.nanmax(np.abs(mixes[0] - mixes[1])):.2f}")

    model = models.linear(10)
    params = model.init(jax.random.key(0), train.x[:1])
    prepare = data.preprocess(scale=16)
    result = simulate(
        algorithms.fedavg(models.classification_loss(model.apply, prepare), client_lr=0.1),
        params, clients, rounds=60, cohort_size=5, local_steps=5, batch_size=16,
    )  # fmt: skip
    counts = models.accuracy_counts(model.apply, prepare)
    each = np.asarray(build_client_evaluation(counts, tests)(result.params))
    lowest = np.sort(each[np.isfinite(each)])[:2]  # a client without test examples has NaN
    print(f"mean over the clients {np.nanmean(each):.3f}, worst two {lowest.round(3).tolist()}")


if __name__ == "__main__":
    main()
