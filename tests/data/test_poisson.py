"""Poisson cohorts: binomial sizes, independent clients, a function of seed, round and client."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import data
from fedjax_lab.data.client_sampling import SAMPLINGS
from fedjax_lab.data.poisson import poisson_slots, sample_poisson
from fedjax_lab.data.sampler import RoundKeys
from tests.federations import of_sizes

N, EXPECTED, ROUNDS = 60, 12, 4000


def federation(sizes):
    """Clients of these sizes, with examples that are their own numbers."""
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return of_sizes(sizes, np.arange(len(owners))[:, None].astype(np.float32), owners)


def same(key):
    """A round's keys that are all the same one."""
    return RoundKeys(*[key] * 5)


def cohorts(clients, rounds=ROUNDS, seed=0, expected=EXPECTED):
    """(ids [rounds, S], how many came [rounds])."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rounds))
    draw = jax.jit(jax.vmap(lambda k: sample_poisson(same(k), clients, expected, 0)))
    return jax.tree.map(np.asarray, draw(keys))


def present(ids, count=N):
    """bool [rounds, N]."""
    found = np.zeros((len(ids), count + 1), bool)
    np.put_along_axis(found, ids, True, axis=1)
    return found[:, :count]


@pytest.mark.parametrize(("expected", "available"), [(1, 5), (12, 60), (100, 1000), (50, 10**6)])
def test_slots_are_the_binomials_quantile(expected, available):
    slots = poisson_slots(expected, available)
    tail = stats.binom(available, expected / available).sf
    assert tail(slots) <= 1e-9
    assert slots == available or tail(slots - 1) > 1e-9
    assert poisson_slots(7, 7) == 7


def test_sizes_are_binomial_and_clients_independent():
    ids, came = cohorts(federation(np.full(N, 2)))
    here, q = present(ids), EXPECTED / N
    np.testing.assert_array_equal(here.sum(1), came)
    sizes = np.clip(came, 5, 19)
    expected = stats.binom(N, q).pmf(np.arange(N + 1)) * ROUNDS
    expected = np.concatenate([[expected[:6].sum()], expected[6:19], [expected[19:].sum()]])
    assert stats.chisquare(np.bincount(sizes, minlength=20)[5:], expected).pvalue > 1e-4
    assert stats.chisquare(here.sum(0)).pvalue > 1e-4  # conditionally on the total
    between = np.corrcoef(here.T.astype(float))[np.triu_indices(N, 1)]
    assert np.abs(between).max() < 5.5 / np.sqrt(ROUNDS)
    assert stats.kstest(between * np.sqrt(ROUNDS), "norm").pvalue > 1e-4
    rounds = np.mean((here[1:] - q) * (here[:-1] - q)) / (q * (1 - q))
    assert abs(rounds) < 5 / np.sqrt(here.size)


def test_a_coin_depends_on_seed_round_and_client_alone():
    """Not on how many clients there are, nor on who else has data."""
    few = present(cohorts(federation(np.full(N, 2)), 200)[0])
    many = present(cohorts(federation(np.full(2 * N, 2)), 200, expected=2 * EXPECTED)[0], 2 * N)
    np.testing.assert_array_equal(few, many[:, :N])
    sizes = np.where(np.arange(N) % 2, 2, 0)
    half = present(cohorts(federation(sizes), 200, expected=EXPECTED // 2)[0])
    np.testing.assert_array_equal(half, few & (sizes > 0))
    assert (present(cohorts(federation(np.full(N, 2)), 200, seed=1)[0]) != few).any()


@pytest.mark.methods
def test_batches_have_padded_slots():
    """They take no part; the others' mini-batches are those of any other cohort."""
    clients = federation(np.full(N, 4))
    key = jax.random.key(3)
    settings = {"batch_size": 2, "local_steps": 3}
    batch = data.draw_batch(clients, key, 0, cohort_size=EXPECTED, sampling="poisson", **settings)
    everybody = data.draw_batch(clients, key, 0, cohort_size=N, **settings)
    ids = np.asarray(batch.client_ids)
    assert len(ids) == poisson_slots(EXPECTED, N)
    np.testing.assert_array_equal(batch.participates, ids < N)
    assert 0 < np.asarray(batch.participates).sum() < len(ids)
    real = ids < N
    np.testing.assert_array_equal(
        np.asarray(batch.examples)[real], np.asarray(everybody.examples)[ids[real]]
    )
    assert batch.expected_size == EXPECTED
    assert everybody.expected_size is None


class OddRoundsOnly(data.Devices):
    """Clients with odd numbers take no step in even rounds."""

    def local_steps(self, key, round, client_ids, planned):
        return jnp.where((client_ids + round) % 2, planned, 0)


BUDGET = data.Devices(step_time_spread=1.0, time_budget=1.0)
UNABLE = {  # devices, seconds of a step, the clients of a round that can finish a local step
    "local_steps": (None, None, lambda t: np.arange(N) < 40),
    "budget": (BUDGET, None, lambda t: SECONDS <= 1),
    "dropout": (dataclasses.replace(BUDGET, dropout=0.5), None, lambda t: SECONDS <= 1),
    "own_class": (OddRoundsOnly(), None, lambda t: (np.arange(N) + t) % 2 == 1),
    "deadline": (None, np.linspace(0.5, 2, N), lambda t: np.linspace(0.5, 2, N) * 2 <= 3),
}
SECONDS = np.asarray(BUDGET.step_seconds(jax.random.key(0), jnp.arange(N)))


@pytest.mark.parametrize("case", UNABLE)
def test_clients_that_can_finish_no_step_are_not_expected(case):
    devices, seconds, able = UNABLE[case]
    clients, key = federation(np.where(np.arange(N) < 10, 0, 4)), jax.random.key(0)
    if seconds is not None:
        times = data.ClientTimes(step_seconds=seconds, deadline=3.0)
        clients = dataclasses.replace(clients, times=times.resolve(N, 0, 0))
    steps = np.where(np.arange(N) < 40, 2, 0) if case == "local_steps" else 2
    settings = {"cohort_size": EXPECTED, "batch_size": 2, "sampling": "poisson"}
    rounds, fails = np.arange(200), 0.5 * (case == "dropout")

    @jax.jit
    @jax.vmap
    def draw(t):
        batch = data.draw_batch(clients, key, t, local_steps=steps, devices=devices, **settings)
        took = batch.participates & (True if batch.num_steps is None else batch.num_steps > 0)
        return took.sum(), batch.expected_size

    came, found = draw(rounds)
    expected = [able(t)[10:].sum() * EXPECTED / 50 * (1 - fails) for t in rounds]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert 1 < np.mean(expected) < EXPECTED - 1
    assert abs(np.mean(came) - np.mean(expected)) < 0.7  # four standard errors


def test_all_clients_when_all_are_expected():
    ids, came = cohorts(federation(np.full(N, 2)), 3, expected=N)
    np.testing.assert_array_equal(ids, np.tile(np.arange(N), (3, 1)))
    assert (came == N).all()


def with_slots(monkeypatch, slots):
    """Let Poisson cohorts have too few slots."""
    monkeypatch.setattr("fedjax_lab.data.poisson.poisson_slots", lambda expected, available: slots)
    few = SAMPLINGS["poisson"]._replace(slots=lambda expected, available: slots)
    monkeypatch.setitem(SAMPLINGS, "poisson", few)


def test_more_clients_than_slots_are_not_overlooked(monkeypatch):
    with_slots(monkeypatch, 8)
    clients = federation(np.full(N, 4))
    batch = data.draw_batch(
        clients,
        jax.random.key(0),
        0,
        cohort_size=EXPECTED,
        batch_size=2,
        local_steps=1,
        sampling="poisson",
    )
    assert np.isnan(batch.expected_size)


def test_bad_input():
    clients = federation(np.full(N, 4))
    settings = {"cohort_size": 3, "batch_size": 2, "local_steps": 1}
    key = jax.random.key(0)
    with pytest.raises(
        ValueError, match="sampling is 'bernoulli'; it must be one of cyclic, poisson"
    ):
        data.draw_batch(clients, key, 0, sampling="bernoulli", **settings)
    with pytest.raises(ValueError, match="sampling is 'poisson' and sample_cohort is set"):
        data.draw_batch(
            clients, key, 0, sampling="poisson", sample_cohort=lambda k, t: k, **settings
        )
    with pytest.raises(ValueError, match="cohort_size is 61"):
        data.draw_batch(clients, key, 0, sampling="poisson", **settings | {"cohort_size": N + 1})
