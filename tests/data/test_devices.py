"""Unequal local steps, time budgets and drop-outs: their laws, and what they cost."""

import collections

import jax
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import FedState, algorithms, build_round, data, simulate
from fedjax_lab.data import Devices
from fedjax_lab.data.cohort import Schedule
from tests.algorithms.problem import initial_params, loss_fn

IDS = np.arange(2000, dtype=np.int32)
KEY = jax.random.key(3)


def steps(devices, planned=10, round=0, ids=IDS):
    local_steps = jax.jit(devices.local_steps)
    return np.asarray(local_steps(KEY, np.int32(round), ids, np.full(ids.shape, planned, np.int32)))


def test_step_numbers_are_uniform_and_drawn_anew():
    first, second = (steps(Devices(min_local_steps=3), round=t) for t in (0, 1))
    counts = np.bincount(first, minlength=11)
    assert counts[:3].sum() == 0
    assert stats.chisquare(counts[3:]).pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    fixed = Devices(min_local_steps=3, redraw="run")
    np.testing.assert_array_equal(steps(fixed, round=0), steps(fixed, round=1))
    # A client whose data are few plans fewer steps than the minimum, and takes them all.
    np.testing.assert_array_equal(steps(Devices(min_local_steps=3), planned=2), 2)


def test_a_time_budget_leaves_the_steps_that_are_finished_in_time():
    devices = Devices(time_budget=6.0, step_time=0.5, step_time_spread=1.0)
    seconds = np.asarray(jax.jit(devices.step_seconds)(KEY, IDS))
    assert stats.kstest(np.log(seconds / 0.5), "norm").pvalue > 1e-3
    taken = steps(devices, planned=40)
    expected = np.minimum(np.floor(6.0 / seconds.astype(np.float32)), 40)
    np.testing.assert_array_equal(taken, expected)
    assert (taken == 0).any()
    assert (taken == 40).any()
    np.testing.assert_array_equal(taken, steps(devices, planned=40, round=7))
    np.testing.assert_array_equal(taken[5:9], steps(devices, planned=40, ids=IDS[5:9]))


def test_round_seconds():
    devices = Devices(time_budget=6.0, step_time=0.5)
    ids, taken, present = IDS[:3], np.array([4, 12, 0], np.int32), np.ones(3, bool)
    unlimited = Devices(step_time=0.5)

    @jax.jit
    def run(ids, taken, present, some):
        first = [devices.round_seconds(KEY, ids[:n], taken[:n], present[:n]) for n in (3, 2, 1)]
        return [*first, unlimited.round_seconds(KEY, ids, taken, some)]

    # One never reports; one takes too long; all are in time; and without a budget.
    seconds = run(ids, taken, present, np.array([True, False, True]))
    assert [float(each) for each in seconds] == [6.0, 6.0, 2.0, 2.0]


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(0)
    examples = {
        "x": rng.normal(size=(120, 5)).astype(np.float32),
        "y": rng.integers(3, size=120).astype(np.int32),
    }
    Labelled = collections.namedtuple("Labelled", ("x", "y"))
    return data.partition(Labelled(**examples), "iid", num_clients=12, seed=0)


def test_a_drawn_round(clients):
    devices = Devices(min_local_steps=1, dropout=0.3)
    schedule = Schedule(cohort_size=12, batch_size=2, local_steps=6, devices=devices)
    plain = schedule._replace(devices=None)

    @jax.jit
    def draw(clients, t):
        drawn = [s.draw(clients, KEY, t) for s in (schedule, plain)]
        return [batch._replace(key=None, source=None) for batch in drawn]

    failed = taken = 0
    for t in range(40):
        batch, without = jax.tree.map(np.asarray, draw(clients, np.int32(t)))
        np.testing.assert_array_equal(batch.client_ids, without.client_ids)
        np.testing.assert_array_equal(batch.examples, without.examples)
        failed += (~batch.participates).sum()
        taken += batch.num_steps.sum()
    assert stats.binomtest(int(failed), 480, 0.3).pvalue > 1e-3
    assert abs(float(taken) / 480 - 3.5) < 0.35
    epochs = Schedule(cohort_size=12, batch_size=4, local_epochs=2, devices=Devices(step_time=2.0))

    @jax.jit
    def run(clients):
        batch = epochs.draw(clients, KEY, 0)
        return batch.num_steps, epochs.round_seconds(KEY, batch)

    num_steps, seconds = run(clients)
    np.testing.assert_array_equal(num_steps, 2 * 3)  # 10 examples: 3 mini-batches a pass
    assert seconds == 12.0


UNEQUAL = Devices(min_local_steps=1, time_budget=3.0, step_time=0.5, step_time_spread=0.1)
draw_unequal = jax.jit(Schedule(cohort_size=12, batch_size=2, local_steps=9, devices=UNEQUAL).draw)


@pytest.mark.parametrize(
    ("client_map", "most"),
    [
        ("scan", lambda k: k.sum()),
        ("vmap", lambda k: len(k) * k.max()),
        ("chunk:4", lambda k: 4 * np.sort(k)[::-1].reshape(-1, 4).max(1).sum()),
    ],
)
def test_steps_that_nobody_takes_are_not_computed(clients, client_map, most):
    """Counts the mini-batches that reach the loss, on the host."""
    calls = []

    def counted(params, examples, key):
        jax.debug.callback(lambda y: calls.append(1), examples.y)
        return loss_fn(params, examples._asdict(), key)

    algorithm = algorithms.fedavg(counted, client_lr=0.1)

    @jax.jit
    def run(batch):
        state = algorithm.init(initial_params(), clients.num_clients)
        return build_round(algorithm, client_map)(state, batch)[1]

    batch = draw_unequal(clients, KEY, 0)
    metrics = run(batch)
    jax.effects_barrier()
    taken = np.asarray(batch.num_steps)
    assert metrics["local_steps"] == pytest.approx(taken.mean())
    assert taken.max() < 9
    assert len(calls) == most(taken)


@pytest.mark.slow
def test_simulated_seconds_are_in_the_history(clients):
    def loss(params, examples, key):
        return loss_fn(params, examples._asdict(), key)

    devices = Devices(time_budget=3.0, step_time=1.0, step_time_spread=0.5, dropout=0.2)
    drawn = {"cohort_size": 4, "batch_size": 2, "local_steps": 5, "replace": True}
    algorithm = algorithms.fedavg(loss, client_lr=0.1)
    result = simulate(
        algorithm, initial_params(), clients, devices=devices, rounds=6, eval_every=2, **drawn
    )
    schedule = Schedule(devices=devices, **drawn)
    key = jax.random.key(0)
    time = jax.jit(lambda clients, t: schedule.round_seconds(key, schedule.draw(clients, key, t)))
    expected = np.cumsum([float(time(clients, np.int32(t))) for t in range(6)])
    seconds = [row["simulated_seconds"] for row in result.history]
    np.testing.assert_allclose(seconds, expected[1::2], rtol=1e-6)
    assert isinstance(result.state, FedState)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_local_steps": 0}, "min_local_steps is 0; it must be at least 1"),
        ({"redraw": "rounds"}, "Did you mean 'round'"),
        ({"time_budget": 0.0}, "time_budget is 0.0; .* greater than 0"),
        ({"step_time": -1}, "step_time is -1"),
        ({"step_time_spread": float("nan")}, "step_time_spread is nan"),
        ({"dropout": 1.0}, "dropout is 1.0; .* less than 1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Devices(**settings)
