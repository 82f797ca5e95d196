"""Users of your own: a dict with their ids, a regression, and users that training never sees.

    python -m fedjax_lab.recipes.own_clients

Each of 40 users has points on its own line, which is close to a common line. Some users are held
out; the others keep a quarter of their points for testing.
"""

import jax
import numpy as np

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.simulation.evaluate import build_client_evaluation, build_evaluation


def make_users(num_users=40, seed=0):
    """Make {id: (x [n_i, 3], y [n_i])}; replace this by your own data."""
    rng = np.random.default_rng(seed)
    common, users = np.array([1.0, -2.0, 0.5]), {}
    for i in range(num_users):
        x = rng.normal(size=(rng.integers(1, 30), 3))
        own = common + 0.3 * rng.normal(size=3)
        users[f"user-{i:02d}"] = (x, x @ own + 0.1 * rng.normal(size=len(x)))
    return users


def main():
    """Train on some users, and evaluate the model on these and on the held-out users."""
    clients = data.from_clients(make_users())
    seen, unseen = data.split_clients(clients, 0.2, seed=0)
    train, test = data.split_examples(seen, 0.25, seed=0)
    print(train.summary())

    model = models.linear(1)
    params = model.init(jax.random.key(0), train.examples.x[:1])
    counts = models.squared_error_counts(model.apply)
    on_test, on_unseen = build_evaluation(counts, test), build_evaluation(counts, unseen)

    result = simulate(
        algorithms.fedavg(models.regression_loss(model.apply), client_lr=0.05),
        params,
        train,
        rounds=150,
        cohort_size=8,
        local_steps=5,
        batch_size=8,
        evaluate=on_test,
        eval_every=50,
    )
    for row in result.history:
        print(f"round {row['round']}: mean squared error {row['mean_squared_error']:.3f}")
    before, after = (on_unseen(p)["mean_squared_error"] for p in (params, result.params))
    print(f"unseen users: {before:.3f} before, {after:.3f} after")
    each = np.asarray(build_client_evaluation(counts, unseen)(result.params))
    worst = int(each.argmax())
    print(f"the worst of them is {unseen.names[worst]}: {each[worst]:.3f}")


if __name__ == "__main__":
    main()
