"""Unequal local steps, time budgets and drop-outs: their laws, and what they cost."""

from decimal import Decimal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import FedState, algorithms, build_round, data, simulate
from fedjax_lab.data import Devices
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.data.local_work import Asked, LocalWork
from fedjax_lab.data.sampler import round_keys
from tests.algorithms.problem import initial_params, loss_fn
from tests.tiers import few

IDS = np.arange(2000, dtype=np.int32)
KEY = jax.random.key(3)


def steps(devices, planned=10, round=0, ids=IDS):
    local_steps = jax.jit(devices.local_steps)
    return np.asarray(local_steps(KEY, np.int32(round), ids, np.full(ids.shape, planned, np.int32)))


def finish(devices, keys, asked, num_clients, slots):
    """What ``LocalWork`` makes of these answers of clients without times."""
    clients = SimpleNamespace(num_clients=num_clients, times=None)
    work = LocalWork(clients, devices, replace=False, batch_size=1, num_steps=12, epochs=None)
    return work.first_to_finish(keys, asked, slots)


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
    devices, unlimited = Devices(time_budget=6.0, step_time=0.5), Devices(step_time=0.5)
    keys, ids = round_keys(KEY, 0), IDS[:3]

    @jax.jit
    def run(taken, num_clients):
        def wait(devices, n, taken=taken, num_clients=3):
            asked = Asked(ids[:n], ids[:n], jnp.full_like(taken, 12)[:n], taken[:n])
            *_, measured = finish(devices, keys, asked, num_clients, n)
            return measured["round_seconds"]

        padded = wait(devices, 3, taken.at[1:].set(0), num_clients)
        return [*(wait(devices, n) for n in (3, 2, 1)), wait(unlimited, 3), padded]

    # One never reports; one takes the whole budget; one is in time; without a budget, where the
    # last one takes six seconds; and two of three slots are padding.
    seconds = run(jnp.int32([4, 12, 0]), np.int32(1))
    assert [float(each) for each in seconds] == [6.0, 6.0, 2.0, 6.0, 2.0]


def test_the_server_waits_for_clients_that_fail_only_if_there_is_a_budget():
    """Otherwise it knows them, and the last client that reports ends the round."""
    ids, taken = IDS[:64], np.where(IDS[:64] % 2, 4, 12).astype(np.int32)
    keys, asked = round_keys(KEY, 0), Asked(ids, ids, taken, taken)
    for budget in (None, 60.0):
        devices = Devices(time_budget=budget, step_time=0.5, dropout=0.5)
        *_, reports, measured = finish(devices, keys, asked, 64, 64)
        came = np.asarray(devices.reports(keys.dropout, ids))
        np.testing.assert_array_equal(reports, came)
        assert 0 < came.sum() < 64
        expected = (taken[came] / 2).max() if budget is None else budget
        assert measured["round_seconds"] == expected


def test_a_budget_that_steps_meet_exactly_is_met():
    """All 891 products of a step of 0.01 to 0.99 seconds and 1 to 9 steps, in exact decimals."""
    pairs = [(Decimal(c) / 100, q) for c in range(1, 100) for q in range(1, 10)]
    step_time, wanted = np.array([float(s) for s, _ in pairs]), np.array([q for _, q in pairs])
    budget = np.array([float(s * q) for s, q in pairs])

    @jax.jit
    @jax.vmap
    def taken(step_time, budget):
        devices = Devices(step_time=step_time, time_budget=budget)
        return devices.local_steps(KEY, 0, IDS[:1], np.full(1, 20, np.int32))[0]

    np.testing.assert_array_equal(taken(step_time, budget), wanted)
    np.testing.assert_array_equal(taken(step_time, budget * (1 - 2e-6)), wanted - 1)
    np.testing.assert_array_equal(taken(step_time, budget * (1 + 2e-6)), wanted)
    long = Devices(step_time=0.07, time_budget=70.0), Devices(step_time=0.07, time_budget=69.9998)
    assert [steps(each, planned=2000, ids=IDS[:1])[0] for each in long] == [1000, 999]


@pytest.mark.parametrize("sampling", ["poisson", "cyclic"])
def test_a_padded_slot_is_no_client_that_never_reports(sampling):
    """Against NumPy's maximum over the clients that came."""
    x, owners = np.zeros((22, 1), np.float32), np.repeat(np.arange(11), 2)
    clients = data.partition((x, owners.astype(np.int32)), owners, num_clients=11)
    devices = Devices(time_budget=100.0, step_time=1.5, step_time_spread=0.5, dropout=0.1)
    schedule = Schedule(3, batch_size=2, local_steps=5, devices=devices, sampling=sampling)

    @jax.jit
    def draw(t):
        batch = schedule.draw(clients, KEY, t)
        return batch.client_ids, batch.participates, batch.measured["round_seconds"]

    speed = np.asarray(devices.step_seconds(KEY, np.arange(11)))
    whole = failures = 0
    for t in range(24):
        ids, participates, seconds = map(np.asarray, draw(np.int32(t)))
        came = ids < 11
        whole += came.all()
        failures += (failed := not participates[came].all())
        expected = 100.0 if failed else 5 * speed[ids[came]].max(initial=0.0)
        assert seconds == pytest.approx(expected, rel=1e-6)
    assert 0 < failures < 24
    assert whole < 24


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(0)
    examples = {
        "x": rng.normal(size=(120, 5)).astype(np.float32),
        "y": rng.integers(3, size=120).astype(np.int32),
    }
    return data.partition(data.Examples(**examples), "iid", num_clients=12, seed=0)


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
        return batch.num_steps, batch.measured["round_seconds"]

    num_steps, seconds = run(clients)
    np.testing.assert_array_equal(num_steps, 2 * 3)  # 10 examples: 3 mini-batches a pass
    assert seconds == 12.0


UNEQUAL = Devices(min_local_steps=1, time_budget=3.0, step_time=0.5, step_time_spread=0.1)
draw_unequal = jax.jit(Schedule(cohort_size=12, batch_size=2, local_steps=9, devices=UNEQUAL).draw)


@pytest.mark.parametrize(
    ("client_map", "most"),
    few(
        1,
        [
            ("scan", lambda k: k.sum()),
            ("vmap", lambda k: len(k) * k.max()),
            ("chunk:4", lambda k: 4 * np.sort(k)[::-1].reshape(-1, 4).max(1).sum()),
        ],
    ),
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
    time = jax.jit(lambda clients, t: schedule.draw(clients, key, t).measured["round_seconds"])
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
