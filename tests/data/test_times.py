"""Who is there, who finishes first, and how long it takes: against NumPy's sorts and sums."""

import collections
import dataclasses
import functools
import math
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab.data import ClientTimes, Devices, diurnal_availability
from fedjax_lab.data.cohort import Schedule
from tests.federations import of_sizes

N, S, K = 12, 4, 6
UP, DOWN = 600, 900  # bytes
KEY = jax.random.key(3)
SCHEDULE = Schedule(cohort_size=S, batch_size=2, local_steps=K, replace=True)  # soonest compiled


@functools.cache
def make_clients(sizes=(8,) * N):
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return of_sizes(sizes, np.arange(len(owners), dtype=np.float32)[:, None], owners)


def draw(times, rounds, schedule=SCHEDULE, clients=None):
    """The batches of some rounds, stacked, without what they are drawn from."""
    clients = make_clients() if clients is None else clients
    if times is not None:
        clients = dataclasses.replace(clients, times=times.resolve(N, UP, DOWN))

    @jax.jit
    def all_of_them(clients):
        def one(t):
            return schedule.draw(clients, KEY, t)._replace(key=None, source=None)

        return jax.lax.map(one, jnp.arange(rounds, dtype=jnp.int32))

    return jax.tree.map(np.asarray, all_of_them(clients))


def speeds(**others):
    return ClientTimes.log_normal(
        N, 7, step_seconds=2.0, step_spread=1.0, download=50.0, upload=20.0, latency=0.5, **others
    )


def by_hand(times, ids, steps=K):
    """Seconds of each client, in float64."""
    there = np.minimum(ids, N - 1)
    step, down, up = (np.asarray(getattr(times, n)) for n in ("step_seconds", "download", "upload"))
    return 0.5 + DOWN / down[there] + steps * step[there] + UP / up[there]


def test_the_cohort_is_drawn_uniformly_among_those_who_are_there():
    there = np.zeros((2, N), bool)
    there[0, [1, 2, 5, 6, 7, 11]] = True
    there[1, [0, 3]] = True
    rounds = 3000
    batch = draw(ClientTimes(availability=there, rounds_per_period=2), rounds)
    period = np.arange(rounds) // 2 % 2
    ids = batch.client_ids
    assert ids.dtype == np.int32
    for many in ids[period == 0]:
        assert there[0, many].all()
        assert len(set(many.tolist())) == S
    # All 15 pairs of the two places that come first are equally likely, in either order.
    first = ids[period == 0][:, :2]
    counts = collections.Counter(map(tuple, first.tolist()))
    assert len(counts) == 6 * 5
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3
    # Two are there where four are wanted: both come, and two places are left over.
    few = ids[period == 1]
    np.testing.assert_array_equal(np.sort(few, 1), np.tile([0, 3, N, N], (len(few), 1)))
    np.testing.assert_array_equal(batch.participates[period == 1], few < N)
    np.testing.assert_array_equal(batch.measured["available_clients"], np.where(period, 2, 6))
    assert (batch.measured["dropped_clients"] == 0).all()


@pytest.mark.slow
def test_probabilities_are_drawn_anew_for_each_round_and_client():
    chance = np.linspace(0, 1, N)
    rounds = 2000
    schedule = SCHEDULE._replace(cohort_size=N)
    ids = draw(ClientTimes(availability=chance), rounds, schedule).client_ids
    came = np.stack([(ids == i).any(1) for i in range(N)])
    assert not came[0].any()
    assert came[-1].all()
    for i in range(1, N - 1):
        assert stats.binomtest(int(came[i].sum()), rounds, chance[i]).pvalue > 1e-4
    between = np.corrcoef(came[4], came[5])[0, 1], np.corrcoef(came[4][1:], came[4][:-1])[0, 1]
    assert np.abs(between).max() < 0.08


def test_clients_without_data_are_not_there():
    sizes = (8, 0, 8, 0) + (8,) * (N - 4)
    clients = make_clients(sizes)
    schedule = SCHEDULE._replace(cohort_size=10)
    ids = draw(ClientTimes(availability=np.ones(N, bool)), 3, schedule, clients).client_ids
    np.testing.assert_array_equal(np.sort(ids, 1), np.tile(np.flatnonzero(sizes), (3, 1)))


def test_over_selection_keeps_those_who_finish_first():
    """Against NumPy's sort of all who are drawn, which are the cohorts of a larger S."""
    rounds, times = 200, speeds(over_selection=1.7)
    batch = draw(times, rounds)
    drawn = draw(None, rounds, SCHEDULE._replace(cohort_size=7)).client_ids
    seconds = by_hand(times, drawn)
    for t in range(rounds):
        kept = np.sort(np.argsort(seconds[t], kind="stable")[:S])
        np.testing.assert_array_equal(batch.client_ids[t], drawn[t][kept])
        np.testing.assert_allclose(batch.seconds[t], seconds[t][kept], rtol=1e-5)
        waited = batch.measured["round_seconds"][t]
        assert waited == pytest.approx(np.sort(seconds[t])[S - 1], rel=1e-5)
    assert batch.participates.all()
    assert (batch.measured["dropped_clients"] == 3).all()


def test_a_deadline_drops_exactly_those_who_are_later():
    rounds, plain = 100, speeds()
    plainly = draw(None, rounds)
    ids = plainly.client_ids
    seconds = by_hand(plain, ids)
    deadline = float(np.median(seconds)) + 1e-3
    batch = draw(speeds(deadline=deadline), rounds)
    np.testing.assert_array_equal(batch.client_ids, ids)
    np.testing.assert_array_equal(batch.participates, seconds <= deadline)
    late = (seconds > deadline).sum(1)
    np.testing.assert_array_equal(batch.measured["dropped_clients"], late)
    waited = np.where(late > 0, deadline, seconds.max(1))
    np.testing.assert_allclose(batch.measured["round_seconds"], waited, rtol=1e-5)
    assert 0 < (late == 0).sum() < rounds
    without = draw(plain, rounds)
    np.testing.assert_allclose(without.measured["round_seconds"], seconds.max(1), rtol=1e-5)
    # Time changes nothing else: the same mini-batches as without it.
    np.testing.assert_array_equal(batch.examples, plainly.examples)


def test_a_deadline_that_steps_meet_exactly_is_met():
    """In exact decimals: 891 products, then latency and messages with the steps."""
    for cents in range(1, 100):
        step = Decimal(cents) / 100
        pair = np.array([step, np.float32(step)], np.float64)  # a file may hold float32
        for q in range(1, 10):
            times = ClientTimes(pair, deadline=float(step * q)).resolve(2, UP, DOWN)
            assert np.asarray(times.most_steps).tolist() == [q, q], (step, q)
    rng = np.random.default_rng(0)
    for _ in range(50):
        step, latency, deadline = (Decimal(int(n)) / 1000 for n in rng.integers(1, 3000, 3))
        up, down = (Decimal(int(n)) for n in rng.integers(200, 9000, 2))
        left = Fraction(deadline) - Fraction(latency) - UP / Fraction(up) - DOWN / Fraction(down)
        named = {"upload": float(up), "download": float(down), "latency": float(latency)}
        times = ClientTimes(float(step), deadline=float(deadline), **named)
        most = int(np.asarray(times.resolve(N, UP, DOWN).most_steps)[0])
        assert most == max(math.floor(left / Fraction(step)), 0)
    # A round: ten steps of 0.09 seconds are in time, and those of 0.0901 are not.
    speeds = np.where(np.arange(N) % 2, 0.0901, 0.09)
    schedule = SCHEDULE._replace(local_steps=10, cohort_size=N)
    batch = draw(ClientTimes(speeds, deadline=0.9), 2, schedule)
    np.testing.assert_array_equal(batch.participates, batch.client_ids % 2 == 0)
    np.testing.assert_array_equal(batch.measured["round_seconds"], np.float32(0.9))


def test_unequal_steps_failures_and_over_selection_together():
    """Clients that fail are not among the first; if all of the drawn report, that is enough."""
    devices = Devices(min_local_steps=1, dropout=0.4)
    schedule, rounds = SCHEDULE._replace(devices=devices), 200
    times = speeds(over_selection=1.5, deadline=40.0)
    batch = draw(times, rounds, schedule)
    drawn = draw(None, rounds, schedule._replace(cohort_size=6))
    seconds = by_hand(times, drawn.client_ids, drawn.num_steps)
    reported = drawn.participates & (seconds <= 40.0)
    for t in range(rounds):
        finish = np.where(reported[t], seconds[t], np.inf)
        kept = np.sort(np.argsort(finish, kind="stable")[:S])
        np.testing.assert_array_equal(batch.client_ids[t], drawn.client_ids[t][kept])
        np.testing.assert_array_equal(batch.num_steps[t], drawn.num_steps[t][kept])
        np.testing.assert_array_equal(batch.participates[t], reported[t][kept])
        enough = reported[t].sum() >= S
        waited = np.sort(finish)[S - 1] if enough else 40.0
        assert batch.measured["round_seconds"][t] == pytest.approx(waited, rel=1e-5)
        assert batch.measured["dropped_clients"][t] == 6 - reported[t][kept].sum()


def test_log_normal_clients():
    times = ClientTimes.log_normal(
        4000, 1, step_seconds=0.2, step_spread=0.7, download=1e6, upload=1e5, network_spread=0.3
    )
    for name, median, spread in (("step_seconds", 0.2, 0.7), ("download", 1e6, 0.3)):
        scaled = np.log(getattr(times, name) / median) / spread
        assert stats.kstest(scaled, "norm").pvalue > 1e-3
    np.testing.assert_allclose(times.download / times.upload, 10)
    assert abs(np.corrcoef(np.log(times.step_seconds), np.log(times.upload))[0, 1]) < 0.06
    again = ClientTimes.log_normal(4000, 1, step_seconds=0.2, step_spread=0.7)
    np.testing.assert_array_equal(again.step_seconds, times.step_seconds)
    assert (again.download == math.inf).all()


def test_a_day():
    chance = diurnal_availability(500, 24, seed=2, low=0.2, high=0.8)
    assert chance.shape == (24, 500)
    assert chance.dtype == np.float32
    np.testing.assert_allclose(chance.mean(0), 0.5, atol=1e-6)  # a whole wave
    assert chance.min() >= 0.2 - 1e-6
    assert chance.max() <= 0.8 + 1e-6
    peaks = chance.argmax(0)
    assert stats.chisquare(np.bincount(peaks, minlength=24)).pvalue > 1e-3


def test_a_file(tmp_path):
    there = np.random.default_rng(0).random((3, N)) < 0.5
    path = tmp_path / "times.npz"
    np.savez(path, availability=there, step_seconds=np.arange(1.0, N + 1), latency=0.25)
    times = ClientTimes.load(path, deadline=60.0)
    np.testing.assert_array_equal(times.availability, there)
    np.testing.assert_array_equal(times.step_seconds, np.arange(1.0, N + 1))
    assert (times.latency, times.deadline, times.upload) == (0.25, 60.0, math.inf)
    np.savez(path, speed=np.ones(N))
    with pytest.raises(ValueError, match=r"has the arrays speed; .* step_seconds, download"):
        ClientTimes.load(path)
    with pytest.raises(FileNotFoundError, match="times: there is no file"):
        ClientTimes.load(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_seconds": 0.0}, "step_seconds has the value 0.0; each must be above 0 and finite"),
        ({"step_seconds": [1.0, math.inf]}, "step_seconds has the value inf"),
        ({"download": -1.0}, "download has the value -1.0; each must be above 0"),
        ({"upload": [1.0, math.nan]}, "upload has the value nan"),
        ({"latency": -0.1}, "latency has the value -0.1; each must be at least 0 and finite"),
        ({"step_seconds": np.ones((2, 2))}, r"step_seconds has shape \(2, 2\)"),
        ({"step_seconds": [1.0, 2.0], "latency": [1.0] * 3}, "step_seconds of 2, latency of 3"),
        ({"availability": [0.5, 1.5]}, r"outside \[0, 1\]"),
        ({"availability": np.ones((1, 1, 2), bool)}, "availability has shape"),
        ({"rounds_per_period": 0}, "rounds_per_period is 0"),
        ({"over_selection": 0.9}, "over_selection is 0.9; it must be finite and at least 1"),
        ({"deadline": 0.0}, "deadline is 0.0; .* greater than 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ClientTimes(**settings)


def test_bad_combinations():
    with pytest.raises(TypeError, match="availability has dtype int64; it must be bool"):
        ClientTimes(availability=np.ones(N, np.int64))
    with pytest.raises(TypeError, match="step_seconds is 'fast'"):
        ClientTimes(step_seconds="fast")
    for times in (ClientTimes(np.ones(N + 1)), ClientTimes(availability=np.ones(N + 1, bool))):
        with pytest.raises(ValueError, match=f"has {N + 1} clients; N is {N}"):
            times.resolve(N, UP, DOWN)
    for devices, name in ((Devices(time_budget=3.0), "time_budget"), (Devices(step_time=2.0), "")):
        with pytest.raises(ValueError, match=rf"devices\.{name or 'step_time'} is .* omit it"):
            draw(speeds(), 1, SCHEDULE._replace(devices=devices))
    own = SCHEDULE._replace(sample_cohort=lambda key, round: jnp.arange(S))
    with pytest.raises(ValueError, match="both determine the cohort"):
        draw(speeds(over_selection=2.0), 1, own)
    np.testing.assert_array_equal(draw(speeds(), 1, own).client_ids[0], np.arange(S))
    with pytest.raises(ValueError, match="cohort_size is 13; it must be between 1 and 12"):
        draw(ClientTimes(availability=0.5), 1, SCHEDULE._replace(cohort_size=13))
    with pytest.raises(ValueError, match=r"high is 0\.1; it must be finite and at least 0\.9"):
        diurnal_availability(3, low=0.9, high=0.1)


def test_availability_of_one_column_is_not_that_of_all_clients():
    column = np.array([[0.2], [0.5], [0.9]])
    message = (
        r"times\.availability has 1 clients; N is 12\. Its shape is \(3, 1\); it must be \[P, N\], "
        r"\[N\] or one number"
    )
    times = ClientTimes(availability=column)
    with pytest.raises(ValueError, match=message):
        times.resolve(N, UP, DOWN)
    with pytest.raises(ValueError, match=message):
        times.take(np.arange(2), N)
    with pytest.raises(ValueError, match="step_seconds of 12, availability of 1"):
        ClientTimes(np.ones(N), availability=column)
    np.testing.assert_array_equal(times.resolve(1, UP, DOWN).availability, np.float32(column))
    of_all = ClientTimes(availability=0.5).resolve(N, UP, DOWN).availability
    np.testing.assert_array_equal(of_all, np.full((1, N), 0.5))
