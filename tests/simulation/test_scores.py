"""What ``evaluate`` and ``diagnose`` are given, and what rows say where they are not called."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, plan
from tests.simulation.test_run import FEDAVG, first_params, loss_fn, make_clients, run

# Messages are finite, and in the second round the step of the server is not.
OVERFLOWS = algorithms.fedavg(
    loss_fn, client_lr=0.3, server_lr=lambda t: jnp.where(t == 1, jnp.inf, 1)
)
SCALARS = lambda params: {"norm": jnp.abs(params["w"]).sum(), "pair": params["w"][0, :2]}  # noqa: E731


def count_calls(calls):
    def evaluate(params):
        assert np.isfinite(params["w"]).all()
        calls.append(None)
        return SCALARS(params)

    return evaluate


@pytest.mark.parametrize("on_nonfinite", ["exclude", "stop"])
def test_a_model_that_is_not_finite_is_not_evaluated_and_its_row_has_all_names(on_nonfinite):
    calls = []
    evaluate = count_calls(calls)
    with pytest.warns(UserWarning, match="diverged: the global model is not finite after round 2"):
        result = run(OVERFLOWS, eval_every=1, on_nonfinite=on_nonfinite, evaluate=evaluate)
    assert result.stopped == "diverged"
    first, last = result.history
    assert len(calls) == 1
    assert last.keys() == first.keys()
    assert np.isnan(last["norm"])
    np.testing.assert_array_equal(last["pair"], [np.nan, np.nan])
    assert np.isfinite(first["norm"])


def test_names_of_a_run_whose_first_row_is_its_last():
    def diagnose(state):
        return {"largest": jnp.abs(state.server.params["w"]).max()}

    with pytest.warns(UserWarning, match="diverged"):
        result = run(OVERFLOWS, eval_every=2, evaluate=count_calls([]), diagnose=diagnose)
    (row,) = result.history
    assert np.isnan([row["norm"], row["largest"], *row["pair"]]).all()


def test_scores_cannot_reach_into_the_run():
    def vandal(params):
        params["w"] = params["w"] * 0
        return {"norm": 0.0}

    def burglar(state):
        state.server.params["w"] = state.server.params["w"] * 0
        return {"theft": 0.0}

    expected, actual = run(FEDAVG), run(FEDAVG, evaluate=vandal, diagnose=burglar)
    np.testing.assert_array_equal(actual.params["w"], expected.params["w"])
    actual.params["w"] = 0
    np.testing.assert_array_equal(actual.state.server.params["w"], expected.params["w"])


def test_a_plan_refuses_what_a_run_would():
    with pytest.raises(ValueError, match="on_nonfinite is 'typo'; it must be one of exclude, keep"):
        plan(
            FEDAVG,
            first_params(),
            make_clients(),
            cohort_size=2,
            batch_size=2,
            local_steps=1,
            on_nonfinite="typo",
        )
