"""Fine-tune the common model on each client's own data before it is evaluated there.

python -m experiments.recipes.fine_tune
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.simulation.evaluate_personal import build_personal_evaluation


def main():
    """Accuracy of the clients after more and more steps."""
    train, _ = data.load("digits")
    clients = data.partition(train, "classes_per_client:2", num_clients=20, seed=0)
    clients, tests = data.split_examples(clients, 0.25, seed=0)
    prepare = data.preprocess(scale=16)
    model = models.mlp(10, hidden=(32,))
    params = model.init(jax.random.key(0), prepare(train, None).x[:1])
    loss_fn = models.classification_loss(model.apply, prepare)
    result = simulate(
        algorithms.fedavg(loss_fn, client_lr=0.1),
        params, clients, rounds=30, cohort_size=10, local_steps=10, batch_size=16,
    )  # fmt: skip
    longest = jnp.arange(clients.max_size)

    def fine_tuned(steps, lr=0.1):
        def model_of(state, client):
            size = clients.sizes[client]
            rows = clients.indices[clients.starts[client] + jnp.minimum(longest, size - 1)]
            own = jax.tree.map(lambda leaf: leaf[rows], clients.examples)

            def loss(params):  # of the client's own examples, each once
                losses = loss_fn(params, own, jax.random.key(0))
                return jnp.where(longest < size, losses, 0).sum() / size

            def step(params, _):
                return jax.tree.map(lambda p, g: p - lr * g, params, jax.grad(loss)(params)), None

            return jax.lax.scan(step, state.server.params, length=steps)[0]

        return model_of

    counts = models.accuracy_counts(model.apply, prepare)
    for steps in (0, 5, 50):
        evaluate = build_personal_evaluation(counts, fine_tuned(steps), tests)
        accuracy = np.asarray(evaluate(result.state))
        print(f"{steps} steps: accuracy of the clients {np.nanmean(accuracy):.3f}")


if __name__ == "__main__":
    main()
