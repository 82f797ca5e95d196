"""GradMA's memory: rows with lazy decay, and inner products that are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms
from fedjax_lab.algorithms.gradma_correction import Correction
from fedjax_lab.algorithms.gradma_memory import admit_cohort, empty_memory
from tests.federations import batch_of
from tests.reference.gradma_numpy import mem_red
from tests.tiers import few


def linear_loss(y, examples, key):
    """<g, y>: a client's delta is client_lr times the sum of its g."""
    del key
    return examples @ y


def run(decay, cohorts, deltas, dtype=jnp.float32):
    """State after rounds of one step, in which client i moves by deltas[t][i]."""
    algorithm = algorithms.gradma_s(
        linear_loss, client_lr=1.0, memory_size=3, memory_decay=decay, server_lr=0.1
    )
    state, round_fn = algorithm.init(jnp.ones(4, dtype), 4), jax.jit(algorithm.round_fn)
    for t, cohort in enumerate(cohorts):
        examples = jnp.asarray(deltas[t][cohort], dtype)[:, None, None]
        state, metrics = round_fn(state, batch_of(examples, t, cohort))
    return state.server, metrics


@pytest.mark.parametrize(
    ("num_clients", "slots", "cohort"),
    few(1, [(9, 3, 3), (20, 8, 5), (10, 10, 4), (40, 15, 12)]),
)
def test_a_cohort_is_admitted_as_by_algorithm_4_client_by_client(num_clients, slots, cohort):
    rng, admit = np.random.default_rng(0), jax.jit(admit_cohort)
    held = empty_memory(jnp.ones(1), slots, Correction(0.0, "global", "auto")).slots
    memory, counter, most = {}, [0] * num_clients, 0
    for _ in range(60):
        ids = rng.choice(num_clients, cohort, replace=False).astype(np.int32)
        takes_part = rng.random(cohort) < rng.choice([0, 0.5, 1])
        new = mem_red(memory, counter, ids[takes_part].tolist(), slots)
        held, slot, is_new = admit(held, ids, takes_part)
        owned = held.owner >= 0
        by_entry = np.argsort(np.where(owned, held.order, np.iinfo(np.int32).max))[: owned.sum()]
        assert held.owner[by_entry].tolist() == list(memory)
        assert held.seen[by_entry].tolist() == [counter[i] for i in memory]
        assert held.owner[slot[takes_part]].tolist() == ids[takes_part].tolist()
        assert (slot[~takes_part] == slots).all()
        assert set(ids[is_new].tolist()) == new
        most = max(most, *counter)
    assert most > 1


def test_rows_and_products_follow_the_recursion():
    deltas = (
        np.random.default_rng(0).normal(size=(9, 4, 4)) * 10.0 ** np.arange(-4, 5)[:, None, None]
    )
    cohorts = [[0, 1], [1, 2], [0, 2], [2, 1], [0, 1], [1, 0], [2, 0], [1, 2], [0, 1]]
    memory = run(0.5, cohorts, deltas)[0].memory
    expected = np.zeros((3, 4))
    for delta, cohort in zip(deltas, cohorts, strict=True):
        expected *= 0.5
        expected[cohort] += delta[cohort]
    rows = np.asarray(memory.rows, np.float64)
    found = rows * np.asarray(memory.scale)[:, None]
    np.testing.assert_allclose(found[np.argsort(memory.slots.owner)], expected, rtol=1e-5)
    np.testing.assert_allclose(memory.products[0], rows @ rows.T, atol=1e-6)
    assert ((abs(rows).max(1) >= 1) & (abs(rows).max(1) < 2)).all()


@pytest.mark.parametrize("decay", few(1, [0.5, 0.0]))
def test_a_row_that_has_decayed_is_a_constraint_unless_it_is_zero(decay):
    cohorts = [[0, 1]] + [[1, 2]] * 160  # 0.5 ** 160 is no float32
    deltas = np.zeros((len(cohorts), 4, 4))
    deltas[0, 0] = [1, 0, 0, 0]
    deltas[:, 1:] = [-1, 1, 0, 0]
    server, metrics = run(decay, cohorts, deltas)
    along = float(server.momentum[0])
    assert metrics["server_qp_active"] == (1 if decay else 0)
    assert abs(along) < 1e-5 if decay else along < -1


def test_rows_of_zeros_are_no_constraints():
    cohorts = [[0, 1], [1, 2]]
    deltas = np.zeros((2, 4, 4))
    deltas[:, 2] = [0, 1, 0, 0]
    server, metrics = run(0.5, cohorts, deltas)
    np.testing.assert_allclose(server.momentum, [0, 0.5, 0, 0], atol=1e-7)
    assert np.isfinite(float(metrics["server_qp_residual"]))
    assert server.memory.scale[:2].sum() == 0
