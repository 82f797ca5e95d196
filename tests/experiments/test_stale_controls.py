"""The round with all controls fresh is the method's own where everybody moves the server."""

import numpy as np
import pytest

from experiments.catalogue.stale_controls import METHODS, a_tenth_moves_the_server
from fedjax_lab import algorithms
from tests.algorithms.problem import flat, initial_params, loss_fn, run_rounds
from tests.reference import problem as reference


@pytest.mark.parametrize(
    "name", ["scaffold", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fedavg", "fedmo"))]
)
@pytest.mark.methods
def test_if_all_of_them_move_it_is_the_method(name, x64):
    method = algorithms.ALGORITHMS[name](loss_fn, client_lr=0.2)
    drawn = reference.make_rounds(3, 4, cohort_size=4, max_steps=2, batch_size=4)

    def run(algorithm):
        state = algorithm.init(initial_params(), reference.NUM_CLIENTS)
        state, _ = run_rounds(algorithm.round_fn, state, drawn)
        return flat(algorithm.params(state))

    expected = run(method)
    everybody, half = (run(a_tenth_moves_the_server(method, share)) for share in (1.0, 0.5))
    np.testing.assert_allclose(everybody, expected, atol=1e-12)
    assert np.abs(half - expected).max() > 1e-3


def test_fresh_controls_are_those_of_all_clients():
    for name, method in METHODS.items():
        assert (method.wrap is not None) == (method.settings == {"cohort_size": 100})
        assert name.endswith("fresh controls") == (method.wrap is not None)
