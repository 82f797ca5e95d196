"""Every option of a method agrees with its NumPy twin; the defaults' turn is in test_contract."""

import numpy as np
import pytest

from tests.algorithms.cases import CASES, MAIN
from tests.algorithms.compiled import both
from tests.algorithms.problem import CLIENT_MAPS

OPTIONS = [case for case in CASES if not case.main]
# Every run has these; `make test-methods` has the rest.
AT_ONCE = ("cfedavg-drop", "fedavg-schedule-transform")


def marked():
    """The options' cases."""
    for case in OPTIONS:
        marks = () if case.id in AT_ONCE else pytest.mark.methods
        yield pytest.param(case, id=case.id, marks=marks)


@pytest.mark.parametrize("case", list(marked()))
def test_options(case, x64):
    ours, theirs = both(case, ("vmap", "scan")[OPTIONS.index(case) % 2])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


# A client map is a property of the round: tests/clients/test_client_maps.py has one method of
# each kind under each map. The whole product is left to the slow run.


@pytest.mark.slow
@pytest.mark.parametrize("client_map", CLIENT_MAPS)
@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.id)
def test_all_maps(case, client_map, x64):
    ours, theirs = both(case, client_map)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("client_map", CLIENT_MAPS)
@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.id)
def test_all_maps_in_float32(case, client_map):
    ours, theirs = both(case, client_map)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)
