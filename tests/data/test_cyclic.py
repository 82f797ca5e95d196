"""Cyclic cohorts: who is in which group, when it comes back, and what a batch holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import data
from fedjax_lab.data.cyclic import cyclic_slots, sample_cyclic, turns
from tests.data.test_poisson import federation, present, same
from tests.tiers import few

N = 23


def cohorts(clients, cohort_size, rounds, seed=0):
    """ids [rounds, S]."""
    draw = jax.jit(
        jax.vmap(lambda t: sample_cyclic(same(jax.random.key(seed)), clients, cohort_size, t)[0])
    )
    return np.asarray(draw(jnp.arange(rounds, dtype=jnp.int32)))


@pytest.mark.parametrize(
    ("cohort_size", "groups"), few(2, [(1, 23), (5, 5), (6, 4), (12, 2), (23, 1)])
)
def test_everybody_comes_back_after_all_others(cohort_size, groups):
    """Each client once in every so many rounds, always in the same place of the cycle."""
    assert turns(cohort_size, N) == groups
    ids = cohorts(federation(np.full(N, 2)), cohort_size, 3 * groups)
    assert ids.shape[1] == cyclic_slots(cohort_size, N) <= cohort_size
    here = present(ids, N)
    np.testing.assert_array_equal(here[:groups].sum(0), np.ones(N))
    np.testing.assert_array_equal(here, np.tile(here[:groups], (3, 1)))
    assert np.ptp(here.sum(1)) <= 1
    for row, who in zip(ids, here, strict=True):
        np.testing.assert_array_equal(np.sort(row[row < N]), np.flatnonzero(who))


def test_the_seed_deals_evenly():
    """Over 2,000 seeds all clients are in the first group equally often; the empty ones never."""
    sizes = np.where(np.arange(N) % 3, 2, 0)
    clients = federation(sizes)
    draw = jax.jit(
        jax.vmap(
            lambda s: sample_cyclic(same(jax.random.key(s)), clients, 5, jnp.zeros((), jnp.int32))[
                0
            ]
        )
    )
    ids = np.asarray(draw(jnp.arange(2000)))
    counts = np.bincount(ids.ravel(), minlength=N + 1)[:N]
    assert (counts[sizes == 0] == 0).all()
    assert counts.sum() == 2000 * 5  # 15 clients in 3 groups
    assert stats.chisquare(counts[sizes > 0]).pvalue > 1e-4


def test_batches_have_padded_slots():
    """They take no part; the others' mini-batches are those of any other cohort."""
    clients, key = federation(np.full(N, 4)), jax.random.key(3)
    settings = {"batch_size": 2, "local_steps": 3}

    @jax.jit
    def both(t):
        batch = data.draw_batch(clients, key, t, cohort_size=5, sampling="cyclic", **settings)
        return batch, data.draw_batch(clients, key, t, cohort_size=N, **settings)

    for t in range(5):
        batch, everybody = both(t)
        ids = np.asarray(batch.client_ids)
        real = ids < N
        np.testing.assert_array_equal(batch.participates, real)
        np.testing.assert_array_equal(
            np.asarray(batch.examples)[real], np.asarray(everybody.examples)[ids[real]]
        )
        assert batch.expected_size is None
        assert real.sum() == (5 if t < 3 else 4)


def test_bad_input():
    clients, key = federation(np.full(N, 4)), jax.random.key(0)
    settings = {"batch_size": 2, "local_steps": 1, "sampling": "cyclic"}
    with pytest.raises(ValueError, match="cohort_size is 24; it must be between 1 and 23"):
        data.draw_batch(clients, key, 0, cohort_size=24, **settings)
    with pytest.raises(ValueError, match="sampling is 'cyclic' and sample_cohort is set"):
        data.draw_batch(clients, key, 0, cohort_size=3, sample_cohort=lambda k, t: k, **settings)
