"""Cohorts of one's own: by size, and by the hour at which clients are awake.

python -m fedjax_lab.recipes.own_cohorts
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import algorithms, data, models, simulate

N, COHORT = 20, 5


def main() -> None:
    """Train with each kind of client sampling, and print who participates."""
    train, _ = data.load("digits")
    clients = data.partition(train, "quantity:0.5", num_clients=N, seed=0)
    model = models.linear(10)
    params = model.init(jax.random.key(0), train.x[:1])
    loss_fn = models.classification_loss(model.apply, data.preprocess(scale=16))
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    log_sizes = jnp.log(clients.sizes)

    def by_size(key, round):
        """Draw without replacement by the Gumbel trick, with probabilities by size."""
        return jax.lax.top_k(log_sizes + jax.random.gumbel(key, (N,)), COHORT)[1]

    def by_hour(key, round):
        """Draw from the ten of twenty clients that are awake; in each round one falls asleep."""
        awake = (round + jnp.arange(10)) % N
        return jax.random.choice(key, awake, (COHORT,), replace=False)

    sizes = np.asarray(clients.sizes)
    for name, sampler in (("by size", by_size), ("by hour", by_hour)):
        ids = np.stack([sampler(jax.random.key(t), t) for t in range(4)])
        print(f"{name}: cohorts such as {ids[0]} and {ids[1]}")
        print(f"  {sizes[ids].mean():.0f} examples a client in four, {sizes.mean():.0f} in all")
        result = simulate(
            algorithm,
            params,
            clients,
            rounds=30,
            cohort_size=COHORT,
            local_steps=5,
            batch_size=16,
            sample_cohort=sampler,
        )
        print(f"  loss {result.history[-1]['loss']:.3f}")


if __name__ == "__main__":
    main()
