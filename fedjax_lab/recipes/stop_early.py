"""A run ends when it is good enough, and its last state starts another one.

python -m fedjax_lab.recipes.stop_early
"""

import jax

from fedjax_lab import algorithms, build_evaluation, data, models, simulate


def main() -> None:
    """Stop at 60 percent accuracy, then continue from that state with a smaller learning rate."""
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.1", num_clients=20, seed=0)
    model = models.linear(10)
    params = model.init(jax.random.key(0), train.x[:1])
    prepare = data.preprocess(scale=16)
    loss_fn = models.classification_loss(model.apply, prepare)
    settings = {
        "cohort_size": 5,
        "local_steps": 5,
        "batch_size": 16,
        "eval_every": 5,
        "evaluate": build_evaluation(models.accuracy_counts(model.apply, prepare), test),
    }

    first = simulate(
        algorithms.scaffold(loss_fn, client_lr=0.1),
        params,
        clients,
        rounds=200,
        stop_when=lambda row: row["accuracy"] > 0.6,
        **settings,
    )
    last = first.history[-1]
    print(f"stopped by {first.stopped} after round {last['round']} of 200:")
    print(f"  accuracy {last['accuracy']:.3f}")

    slower = algorithms.scaffold(loss_fn, client_lr=0.02)
    second = simulate(slower, None, clients, state=first.state, rounds=20, **settings)
    print("20 rounds more from its model and control variates, at a fifth of the learning rate:")
    print(f"  accuracy {second.history[-1]['accuracy']:.3f}")


if __name__ == "__main__":
    main()
