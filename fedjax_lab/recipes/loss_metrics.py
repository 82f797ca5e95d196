"""What a loss knows besides its value: accuracy and confidence on the clients.

python -m fedjax_lab.recipes.loss_metrics
"""

import jax

from fedjax_lab import algorithms, data, models, simulate, tree

NAMES = ("train_accuracy", "confidence", "weight_norm")


def main() -> None:
    """Train with a loss that returns metrics, and print them."""
    train, _ = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    model = models.linear(10)
    params = model.init(jax.random.key(0), train.x[:1])
    prepare = data.preprocess(scale=16)
    cross_entropy = models.classification_loss(model.apply, prepare)

    def loss_fn(params, examples, key):
        logits = model.apply(params, prepare(examples, None).x, None)
        metrics = {
            "train_accuracy": logits.argmax(-1) == examples.y,  # of each example
            "confidence": jax.nn.softmax(logits).max(-1),
            "weight_norm": tree.norm(params),  # of the step
        }
        return cross_entropy(params, examples, key), metrics

    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    result = simulate(
        algorithm, params, clients, rounds=30, cohort_size=5, local_steps=5, batch_size=16
    )
    for row in result.history:
        values = (f"{name} {row[name]:.3f}" for name in NAMES)
        print(f"round {row['round']}:", *values)


if __name__ == "__main__":
    main()
