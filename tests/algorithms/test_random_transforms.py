"""Optimisers and transforms that draw random numbers, and ``optax.MultiSteps``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, build_round, data, simulate, sweep
from tests.algorithms.problem import toy_loss, toy_round
from tests.reference import problem as reference

SEEDED = jax.random.key(3)
X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
CLIENTS = data.partition(X, np.arange(12) % 4, 4)
HOW = {"cohort_size": 2, "local_steps": 2, "batch_size": 2}
PARAMS = {"w": jnp.zeros(2)}


def loss_fn(params, x, key):
    return 0.5 * ((params["w"][None] - x) ** 2).sum(1)


def noisy():
    return optax.noisy_sgd(0.5, eta=0.1, key=SEEDED)


def by_hand(optimizer, rounds, seed=0):
    """FedAvg's pseudo-gradients in NumPy, and the optimiser's own update outside the library."""
    params, state = PARAMS, optimizer.init(PARAMS)
    update = jax.jit(optimizer.update)
    for t in range(rounds):
        batch = data.draw_batch(CLIENTS, jax.random.key(seed), t, **HOW)
        deltas = []
        for steps, masks in zip(batch.examples, batch.example_mask, strict=True):
            y = x0 = np.asarray(params["w"], np.float64)
            for places, real in zip(np.asarray(steps), np.asarray(masks), strict=True):
                if real.any():
                    y = y - 0.1 * (y - X[places[real]].mean(0))
            deltas.append(x0 - y)
        delta = {"w": jnp.asarray(np.mean(deltas, axis=0), jnp.float32)}
        updates, state = update(delta, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"])


OPTIMIZERS = {
    "noisy_sgd": noisy,
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.55, SEEDED), optax.sgd(0.5)),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.5, momentum=0.9), 2),
    "MultiSteps of noise": lambda: optax.MultiSteps(noisy(), 2),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "noisy_sgd" else pytest.mark.methods)
        for name in OPTIMIZERS
    ],
)
def test_a_run_is_the_optimisers_own_update(name):
    algorithm = algorithms.fedopt(loss_fn, OPTIMIZERS[name](), client_lr=0.1)
    found = simulate(algorithm, PARAMS, CLIENTS, rounds=4, eval_every=2, client_map="scan", **HOW)
    expected = by_hand(OPTIMIZERS[name](), 4)
    np.testing.assert_allclose(found.params["w"], expected, rtol=1e-5, atol=1e-6)
    recorded = str(algorithm.hyperparameters["server_optimizer"])
    assert "optax" in recorded
    assert " at 0x" not in recorded


@pytest.mark.methods
def test_keys_survive_a_checkpoint(tmp_path):
    algorithm = algorithms.fedopt(loss_fn, noisy(), client_lr=0.1)
    whole = simulate(algorithm, PARAMS, CLIENTS, rounds=4, eval_every=2, **HOW)
    for rounds in (2, 4):
        resumed = simulate(
            algorithm, PARAMS, CLIENTS, rounds=rounds, eval_every=2, run_dir=tmp_path / "run", **HOW
        )
    np.testing.assert_array_equal(whole.params["w"], resumed.params["w"])


@pytest.mark.methods
@pytest.mark.parametrize("client_map", ["scan", "chunk:2", "shard_map:2"])
def test_client_maps_and_sweeps_draw_the_same_noise(client_map):
    build = lambda client_lr: algorithms.fedopt(loss_fn, noisy(), client_lr=client_lr)  # noqa: E731
    alone = simulate(build(0.1), PARAMS, CLIENTS, rounds=2, client_map=client_map, **HOW)
    np.testing.assert_allclose(alone.params["w"], by_hand(noisy(), 2), rtol=1e-5, atol=1e-6)
    points = [{"client_lr": 0.1}, {"client_lr": 0.2}]
    swept = sweep(build, PARAMS, CLIENTS, points=points, seeds=[0], rounds=2, **HOW)
    first = jax.tree.map(lambda leaf: leaf[0, 0], swept.params)
    np.testing.assert_allclose(first["w"], alone.params["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("argument", ["step_transform", "gradient_transform"])
@pytest.mark.methods
def test_clients_and_rounds_draw_different_noise(argument):
    """Without a gradient, a client's displacement is its noise: normal, and of its own."""
    noise = optax.add_noise(1.0, 0.0, SEEDED)
    still = lambda y, examples, key: 0 * toy_loss(y, examples, key)  # noqa: E731
    algorithm = algorithms.mifa(still, client_lr=1.0, **{argument: noise})  # rows: displacements
    state, rows = algorithm.init(jnp.zeros(2), 4), []
    batch = toy_round(0, (0, 1, 2, 3), steps=50)
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    for t in range(3):
        now = batch._replace(key=jax.random.key(t), round=jnp.int32(t))
        state, _ = round_fn(state, now)
        rows.append(np.asarray(state.clients))
    found = np.concatenate(rows).ravel()
    assert np.unique(found).size == found.size == 24
    assert 0.6 < found.std() / np.sqrt(50) < 1.5  # 50 independent steps of variance 1
    again, _ = round_fn(algorithm.init(jnp.zeros(2), 4), batch._replace(key=jax.random.key(0)))
    np.testing.assert_array_equal(again.clients, rows[0])  # a function of round and client
    scanned, _ = jax.jit(build_round(algorithm, "scan"))(
        algorithm.init(jnp.zeros(2), 4), batch._replace(key=jax.random.key(0))
    )
    np.testing.assert_allclose(scanned.clients, rows[0], rtol=1e-6)


@pytest.mark.parametrize("argument", ["step_transform", "gradient_transform"])
def test_several_steps_at_once_in_the_clients(argument):
    """MultiSteps of a rule without a learning rate: every second step moves, by the mean."""
    every_second = optax.MultiSteps(optax.identity(), 2)
    algorithm = algorithms.fedavg(toy_loss, client_lr=0.1, **{argument: every_second})
    state = algorithm.init(jnp.asarray(reference.TOY_X0), 4)
    state, _ = jax.jit(build_round(algorithm, "vmap"))(state, toy_round(0, (1,), steps=4))
    y = reference.TOY_X0
    for _ in range(2):  # both gradients of a pair are at the same point
        y = y - 0.1 * reference.TOY_A[1] * (y - reference.TOY_B[1])
    np.testing.assert_allclose(state.server.params, y, rtol=1e-6)


def test_what_the_server_cannot_do_is_said():
    with pytest.raises(TypeError, match="server_optimizer is <function sgd"):
        algorithms.fedopt(loss_fn, optax.sgd, client_lr=0.1)
    with pytest.raises(TypeError, match=r"server_optimizer is <class .*MultiSteps"):
        algorithms.fedopt(loss_fn, optax.MultiSteps, client_lr=0.1)
    needs_loss = algorithms.fedopt(loss_fn, optax.contrib.momo(), client_lr=0.1)
    with pytest.raises(TypeError, match=r"server_optimizer cannot be used by fedopt, .* no loss"):
        jax.eval_shape(
            needs_loss.round_fn,
            needs_loss.init(PARAMS, 4),
            data.draw_batch(CLIENTS, jax.random.key(0), 0, **HOW),
        )
