"""Every method agrees with its NumPy twin after 12 rounds of ragged, partial participation."""

import jax
import numpy as np
import pytest

from fedjax_lab import build_round
from tests.algorithms.cases import CASES, MAIN, N
from tests.algorithms.problem import CLIENT_MAPS, run_rounds
from tests.reference import problem as reference

ROUNDS = 12


def both(case, client_map, seed=3):
    drawn = reference.make_rounds(
        seed,
        ROUNDS,
        cohort_size=4,
        max_steps=3,
        batch_size=4,
        empty_round=5,
        full=case.full or case.options.get("control_update") == "I",
    )
    problem = case.problem
    algorithm, params, flat = case.build(problem.loss), problem.initial_params(), problem.flat
    state = algorithm.init(params, N)
    state, _ = run_rounds(build_round(algorithm, client_map), state, drawn)
    twin = case.build_twin(flat(params))
    for t, (clients, _) in enumerate(drawn):
        twin.round(clients, t)
    assert np.abs(twin.x - flat(params)).max() > 0.05  # the run went somewhere
    return flat(algorithm.params(state)), twin.x


# Under all maps: the five systems, and methods with several phases or stacked messages. The other
# maps of the rest, whose rounds are built alike, are left to the slow run.
ALL_MAPS = ("fedavg", "gradma", "fedmoswa", "cfedavg", "fafed", "fedspeed", "mime", "fedpd")
PAIRS = [
    pytest.param(
        case,
        client_map,
        id=f"{case.id}-{client_map}",
        marks=()
        if case.id in ALL_MAPS or client_map in ("vmap", "shard_map")
        else pytest.mark.slow,
    )
    for case in MAIN
    for client_map in CLIENT_MAPS
]


@pytest.mark.parametrize(("case", "client_map"), PAIRS)
def test_float64_all_maps(case, client_map, x64):
    ours, theirs = both(case, client_map)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


# Float32 differs from float64 in rounding only: the contract test compares three rounds of all
# methods but GradMA's halves under vmap.
@pytest.mark.slow
@pytest.mark.parametrize("client_map", CLIENT_MAPS)
@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.id)
def test_float32_all_maps(case, client_map):
    ours, theirs = both(case, client_map)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)


OPTIONS = [case for case in CASES if not case.main]


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: case.id)
def test_float64_options(case, x64):
    ours, theirs = both(case, ("vmap", "scan")[OPTIONS.index(case) % 2])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_the_device_count_is_what_the_maps_need():
    assert jax.device_count() == 8
