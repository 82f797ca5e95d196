"""The recipe of clustered clients against a loop over clients in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import CohortBatch, build_round
from fedjax_lab.recipes.clusters import ifca


def loss_fn(params, examples, key):
    x, y = examples
    return 0.5 * (x @ params["w"] - y) ** 2


def test_two_rounds_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    lr, models = 0.1, rng.normal(size=(2, 3))
    x, truth = rng.normal(size=(2, 4, 2, 5, 3)), rng.normal(size=(4, 3))  # rounds, S, K, B
    truth[1:] = np.where(np.arange(3)[:, None] < 2, models[0], models[1]) * 1.5  # both are wanted
    y = np.einsum("rskbd,sd->rskb", x, truth)
    algorithm = ifca(loss_fn, client_lr=lr)
    state = algorithm.init({"w": jnp.asarray(models, jnp.float32)}, num_clients=4)
    round_fn = build_round(algorithm, "vmap")
    for t in range(2):
        examples = jnp.asarray(x[t], jnp.float32), jnp.asarray(y[t], jnp.float32)
        key = jax.random.key(t)
        batch = CohortBatch(jnp.arange(4), examples, key, jnp.asarray(t, jnp.int32))
        state, _ = round_fn(state, batch)
        deltas = [[], []]
        for client in range(4):
            errors = np.einsum("bd,md->mb", x[t, client, 0], models) - y[t, client, 0]
            best = int((errors**2).sum(1).argmin())
            w = models[best].copy()
            for step in range(2):
                error = x[t, client, step] @ w - y[t, client, step]
                w -= lr * error @ x[t, client, step] / 5
            deltas[best].append(models[best] - w)
            assert state.clients[client] == best
        assert all(deltas)
        models = np.array([m - np.mean(d, 0) for m, d in zip(models, deltas, strict=True)])
        np.testing.assert_allclose(state.server["w"], models, rtol=1e-5, atol=1e-6)
