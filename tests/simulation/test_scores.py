"""What ``evaluate`` and ``diagnose`` are given, and what rows say where they are not called."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_evaluation, data, plan, sweep, tune
from fedjax_lab.simulation.evaluate import build_client_evaluation
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


@pytest.mark.parametrize("client_map", ["vmap", "shard_map"])
def test_the_model_that_evaluate_keeps_is_that_of_its_round(client_map):
    kept = []

    def evaluate(params):
        kept.append(params)
        return {}

    run(FEDAVG, rounds=4, eval_every=1, evaluate=evaluate, client_map=client_map)
    for rounds, params in enumerate(kept, start=1):
        shorter = run(FEDAVG, rounds=rounds, eval_every=1, client_map=client_map)
        np.testing.assert_array_equal(params["w"], shorter.params["w"])


@pytest.mark.parametrize("client_map", ["vmap", "shard_map"])
def test_the_server_that_diagnose_keeps_is_that_of_its_round(client_map):
    kept = []
    algorithm = algorithms.scaffold(loss_fn, client_lr=0.1)
    options = {"eval_every": 1, "client_map": client_map}
    run(algorithm, rounds=4, diagnose=lambda state: kept.append(state.server) or {}, **options)
    for rounds, server in enumerate(kept, start=1):
        state = run(algorithm, rounds=rounds, **options).state
        jax.tree.map(np.testing.assert_array_equal, server, state.server)


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


@pytest.mark.parametrize("dtype", [bool, jnp.uint8, jnp.int8, jnp.bfloat16, jnp.float16])
def test_counts_of_narrow_dtypes_are_summed_exactly(dtype):
    labels = (np.arange(6000) % 3).astype(np.int32)
    clients = data.partition((np.zeros((6000, 1), np.float32), labels), np.arange(6000) % 2)

    def counts(params, examples):
        return (examples.y > 0).astype(dtype), examples.y.astype(jnp.float32)

    each = build_client_evaluation(counts, clients)(jnp.zeros(1))
    np.testing.assert_allclose(each, [2 / 3, 2 / 3], rtol=1e-6)
    whole = build_evaluation(counts, clients)(jnp.zeros(1))
    np.testing.assert_allclose(whole["accuracy"], 2 / 3, rtol=1e-6)


def test_rates_below_zero_and_runs_without_a_step_are_told():
    falling = algorithms.fedavg(loss_fn, client_lr=lambda t: 0.1 * (1 - t))
    with pytest.warns(UserWarning, match=r"client_lr is -0.1 in some round"):
        run(falling, rounds=3)
    slow = data.Devices(step_time=1.0, time_budget=0.5)
    with pytest.warns(UserWarning, match="no client took a local step"):
        run(FEDAVG, rounds=1, devices=slow)


def test_a_loss_that_does_not_use_its_params_is_told():
    others = first_params()

    def deaf(params, examples, key):
        return loss_fn(others, examples, key)

    build = functools.partial(algorithms.fedavg, deaf)
    told = "^the losses of fedavg do not depend on its params"
    with pytest.warns(UserWarning, match=told):
        run(build(client_lr=0.1), rounds=2)
    clients, params = make_clients(), first_params()
    options = {"rounds": 2, "batch_size": 2, "cohort_size": 2, "local_steps": 1}
    with pytest.warns(UserWarning, match=told):
        sweep(build, params, clients, points=[{"client_lr": 0.1}], seeds=[0], **options)
    options |= {"budget": 2, "seeds": [0], "score": lambda params, e: jnp.ones(e.y.shape[0])}
    with pytest.warns(UserWarning, match=told):
        tune({"a": build}, {"client_lr": [0.1, 0.2]}, params, clients, **options)


def test_a_sweep_without_a_step_is_told():
    slow = data.Devices(step_time=1.0, time_budget=0.5)
    with pytest.warns(UserWarning, match="no client took a local step in 2 of 2 runs"):
        sweep(
            functools.partial(algorithms.fedavg, loss_fn),
            first_params(),
            make_clients(),
            points=[{"client_lr": 0.1}],
            seeds=[0, 1],
            rounds=2,
            batch_size=2,
            cohort_size=2,
            local_steps=1,
            devices=slow,
        )
