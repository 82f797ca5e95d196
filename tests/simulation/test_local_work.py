"""Local steps and epochs of each client's own, against a loop over rounds with ``num_steps``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, data, simulate, sweep, tune
from fedjax_lab.tuning.tune import Schedule
from tests.federations import of_sizes

SIZES, EPOCHS = np.array([5, 9, 0, 3, 8]), np.array([2, 1, 4, 0, 3])
STEPS = EPOCHS * -(-SIZES // 4)
CALL = {"rounds": 3, "eval_every": 1, "cohort_size": 3, "batch_size": 4, "client_map": "scan"}
X = np.random.default_rng(0).normal(size=(SIZES.sum(), 2)).astype(np.float32)
OWNERS = np.repeat(np.arange(5), SIZES)


def loss_fn(params, examples, key):
    return jnp.square(examples.x @ params - 1)


ALGORITHM = algorithms.fedavg(loss_fn, client_lr=0.1)
PARAMS = jnp.zeros(2)


@pytest.fixture(scope="module")
def clients():
    return of_sizes(SIZES, X)


@pytest.fixture(scope="module")
def by_hand(clients):
    """Params and local steps of a loop in which all clients plan the largest number of steps."""
    round_fn, state, taken = jax.jit(build_round(ALGORITHM, "scan")), ALGORITHM.init(PARAMS, 5), []
    for t in range(3):
        batch = data.draw_batch(
            clients, jax.random.key(0), t, cohort_size=3, batch_size=4, local_steps=STEPS.max()
        )
        ids = np.asarray(batch.client_ids)
        taken.append(STEPS[ids][STEPS[ids] > 0].mean())
        state, _ = round_fn(state, batch._replace(num_steps=jnp.int32(STEPS[ids])))
    return ALGORITHM.params(state), taken


@pytest.mark.parametrize(
    "work",
    [
        {"local_epochs": EPOCHS},
        pytest.param({"local_steps": STEPS.tolist()}, marks=pytest.mark.methods),
        pytest.param({"local_epochs": jnp.asarray(EPOCHS)}, marks=pytest.mark.methods),
    ],
)
def test_a_run_equals_the_loop(clients, by_hand, work):
    params, taken = by_hand
    result = simulate(ALGORITHM, PARAMS, clients, **CALL, **work)
    np.testing.assert_array_equal(result.params, params)
    np.testing.assert_allclose([row["local_steps"] for row in result.history], taken)


@pytest.mark.methods
def test_a_stream_equals_the_loop(by_hand):
    stream = data.stream((X, np.zeros(len(X), np.int32)), OWNERS, 5, min_size=0)
    result = simulate(ALGORITHM, PARAMS, stream, **CALL, local_epochs=EPOCHS)
    np.testing.assert_array_equal(result.params, by_hand[0])
    assert stream.index.local_steps is None


@pytest.mark.methods
def test_a_subclass_of_devices_equals_the_loop(clients, by_hand):
    class Own(data.Devices):
        def local_steps(self, key, round, client_ids, planned):
            return jnp.int32(STEPS)[client_ids]

    result = simulate(ALGORITHM, PARAMS, clients, **CALL, local_steps=6, devices=Own())
    np.testing.assert_array_equal(result.params, by_hand[0])


@pytest.mark.methods
def test_a_sweep_equals_the_loop(clients, by_hand):
    swept = sweep(
        lambda client_lr: algorithms.fedavg(loss_fn, client_lr=client_lr),
        PARAMS,
        clients,
        points=[{"client_lr": 0.1}],
        seeds=[0],
        local_epochs=EPOCHS,
        **CALL,
    )
    np.testing.assert_allclose(swept.params[0, 0], by_hand[0], rtol=1e-6)
    np.testing.assert_allclose(swept.history["local_steps"][0, 0], by_hand[1], rtol=1e-6)


def test_a_run_directory_is_bound_to_the_array(clients, tmp_path):
    simulate(ALGORITHM, PARAMS, clients, **CALL, local_steps=STEPS, run_dir=tmp_path / "a")
    other = STEPS + (SIZES == 5)
    with pytest.raises(FileExistsError):
        simulate(ALGORITHM, PARAMS, clients, **CALL, local_steps=other, run_dir=tmp_path / "a")


@pytest.mark.parametrize("hold_out", ["clients", "examples"])
def test_a_search_takes_the_steps_of_its_training_clients(hold_out, clients, monkeypatch):
    """It holds out clients and numbers the others anew, or holds out examples of each client."""
    bound = []
    bind = Schedule.bind

    def noted(self, clients):
        bound.append((bind(self, clients)[1].local_steps, clients.sizes))
        raise InterruptedError

    monkeypatch.setattr(Schedule, "bind", noted)
    with pytest.raises(InterruptedError):
        tune(
            {"fedavg": lambda client_lr: algorithms.fedavg(loss_fn, client_lr=client_lr)},
            {"client_lr": [0.1, 0.2]},
            PARAMS,
            clients,
            rounds=2,
            budget=2,
            validation=0.4,
            hold_out=hold_out,
            cohort_size=2,
            batch_size=4,
            local_epochs=EPOCHS,
        )
    ((steps, sizes),) = bound
    sizes = np.asarray(sizes)
    assert sizes.sum() < SIZES.sum()
    left = range(5)
    if hold_out == "clients":  # all sizes are different, so they tell who is left
        left = [SIZES.tolist().index(size) for size in sizes]
        assert len(left) == 3
    np.testing.assert_array_equal(steps, EPOCHS[left] * -(-sizes // 4))


def test_wrong_arrays_are_refused(clients):
    with pytest.raises(ValueError, match=r"local_epochs has shape \(4,\); it must have 5 integers"):
        simulate(ALGORITHM, PARAMS, clients, **CALL, local_epochs=EPOCHS[:-1])
    with pytest.raises(ValueError, match=r"local_steps\[0\] is -4"):
        simulate(ALGORITHM, PARAMS, clients, **CALL, local_steps=-STEPS)
