"""What each local step does, around any method: norms of gradients and of weights, in one line.

python -m fedjax_lab.recipes.client_metrics
"""

import jax

from fedjax_lab import algorithms, data, models, simulate, tree, with_client_metrics


def main():
    """Train with the metrics, and print the means over the clients' local steps."""
    train, _ = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    model = models.linear(10)
    params = model.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(model.apply, data.preprocess(scale=16))
    algorithm = with_client_metrics(
        algorithms.scaffold(loss_fn, client_lr=0.1),
        gradient_norm=lambda params, gradient: tree.norm(gradient),
        weight_norm=lambda params, gradient: tree.norm(params),
    )
    result = simulate(
        algorithm, params, clients, rounds=30, cohort_size=5, local_steps=5, batch_size=16
    )
    for row in result.history:
        values = (f"{name} {row[name]:.3f}" for name in ("gradient_norm", "weight_norm"))
        print(f"round {row['round']}:", *values)


if __name__ == "__main__":
    main()
