"""The table of degenerate limits: at the edge of its parameters a method becomes another."""

import jax
import numpy as np
import pytest

from fedjax_lab import algorithms as a
from fedjax_lab import build_round
from tests.algorithms.cases import N
from tests.algorithms.limits import TABLE
from tests.algorithms.limits.base import COHORT, LR
from tests.algorithms.problem import flat, initial_params, loss_fn, run_rounds, to_batch
from tests.reference import problem as reference

ENDS = {}  # of the runs so far; the limits hold the methods, so that their ids stay theirs


def run(algorithm, *rounds):
    """The params after the rounds; a method to which many limits lead runs once."""
    key = (id(algorithm), *rounds)
    if key not in ENDS:
        count, cohort_size, max_steps, even = rounds
        drawn = reference.make_rounds(
            7,
            count,
            cohort_size=cohort_size,
            max_steps=max_steps,
            batch_size=4,
            equal_steps=even,
            weighted=not even,
        )
        state = algorithm.init(initial_params(), N)
        state, _ = run_rounds(build_round(algorithm, "vmap"), state, drawn)
        ENDS[key] = flat(algorithm.params(state))
    return ENDS[key]


# Every run has one limit of each of these; `make test-methods` has the rest.
AT_ONCE = {"fedmoswa", "gradma_s", "scaffold"}


def one_of_each():
    """The table's rows, marked."""
    left = set(AT_ONCE)
    for limit in TABLE:
        now = limit.left.name in left
        left.discard(limit.left.name)
        yield pytest.param(limit, id=limit.name, marks=() if now else pytest.mark.methods)


@pytest.mark.filterwarnings("ignore:.*more than without compression")
@pytest.mark.parametrize("limit", list(one_of_each()))
def test_limit(limit, x64):
    rounds = (
        limit.rounds,
        N if limit.full_cohort else COHORT,
        limit.max_steps,
        limit.full_cohort or limit.even,
    )
    left, right = run(limit.left, *rounds), run(limit.right, *rounds)
    assert np.abs(left - flat(initial_params())).max() > 1e-2
    np.testing.assert_allclose(left, right, rtol=0, atol=1e-10)


def test_the_mean_of_scaffolds_controls_is_the_servers(x64):
    drawn = reference.make_rounds(2, 8, cohort_size=4, max_steps=3, batch_size=4)
    for option in ("I", "II"):
        algorithm = a.scaffold(loss_fn, control_update=option, **LR)
        state = algorithm.init(initial_params(), N)
        state, _ = run_rounds(build_round(algorithm, "vmap"), state, drawn)
        mean = jax.tree.map(lambda rows: rows.mean(0), state.clients)
        np.testing.assert_allclose(flat(mean), flat(state.server.control), atol=1e-12)


@pytest.mark.parametrize(
    ("gamma", "agreeing"), [(0.2, 1), pytest.param(4 / N, 2, marks=pytest.mark.methods)]
)
def test_fedmo_parts_from_scaffold_in_the_stated_round(gamma, agreeing, x64):
    drawn = reference.make_rounds(
        15, 3, cohort_size=4, max_steps=3, batch_size=4, equal_steps=True, weighted=False
    )
    paths = []
    for algorithm in (a.fedmo(loss_fn, momentum=gamma, **LR), a.scaffold(loss_fn, **LR)):
        state, path = algorithm.init(initial_params(), N), []
        for t, (_, padded) in enumerate(drawn):
            state, _ = jax.jit(algorithm.round_fn)(state, to_batch(padded, t))
            path.append(flat(algorithm.params(state)))
        paths.append(path)
    difference = np.abs(np.subtract(*paths)).max(axis=1)
    assert (difference[:agreeing] < 1e-12).all()
    assert (difference[agreeing:] > 1e-5).all()


@pytest.mark.methods
def test_a_kept_local_model_is_used(x64):
    """With conflicting gradients, x_{-1} = the client's last model is not x_{-1} = x_t."""
    drawn = reference.make_rounds(0, 8, cohort_size=5, max_steps=3, batch_size=8)
    ends = []
    for keep in (False, True):
        algorithm = a.gradma_w(loss_fn, client_lr=2.0, keep_local_model=keep)
        state = algorithm.init(initial_params(), N)
        state, _ = run_rounds(build_round(algorithm, "scan"), state, drawn)
        ends.append(flat(algorithm.params(state)))
    assert np.abs(ends[0] - ends[1]).max() > 1e-3
