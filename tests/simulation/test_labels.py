"""Labels without a logit: refused before the first round; of unknown losses, said as they come."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, models, simulate, sweep, with_frozen
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.models.losses import cross_entropy
from fedjax_lab.simulation.arguments import check_model
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.evaluate import build_client_evaluation
from fedjax_lab.simulation.evaluate_personal import build_personal_evaluation, client_models
from tests.tiers import few

X = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
PARAMS = {"w": jnp.zeros((4, 3))}
RUN = {"rounds": 2, "cohort_size": 2, "batch_size": 4, "local_steps": 1}


def apply(params, x, key=None):
    return x @ params["w"]


def labels(wrong=2):
    y = np.arange(20) % 3
    y[7] = wrong
    return y.astype(np.int32)


def clients(wrong=2, held=range(20)):
    owners = np.arange(20) % 4
    held = np.asarray(held)
    whole = data.partition((X, labels(wrong)), owners, num_clients=4)
    if len(held) == 20:
        return whole
    order = held[np.argsort(owners[held], kind="stable")]
    sizes = np.bincount(owners[held], minlength=4)
    return whole.share(type(whole.host_partition())(order, sizes, "own", 0), None)


loss_fn = models.classification_loss(apply)
fedavg = functools.partial(algorithms.fedavg, client_lr=0.1)
SHIFTED = models.classification_loss(apply, lambda e, key: e._replace(y=e.y - 1))
MODEL = models.Model(None, apply, features=lambda p, x, key=None: x, head=apply, blocks=None)
METHODS = {
    "plain": fedavg(loss_fn),
    "jitted": fedavg(jax.jit(loss_fn)),
    "wrapped": fedavg(lambda params, examples, key: 2 * loss_fn(params, examples, key)),
    "frozen": with_frozen(
        fedavg, lambda p, e, key, frozen: loss_fn({"w": p["w"] + frozen}, e, key), jnp.ones((4, 3))
    ),
    "shifted": fedavg(SHIFTED),
    "each": fedavg(
        lambda params, examples, key: jax.vmap(
            lambda x, y: loss_fn(params, data.Examples(x[None], y[None]), key)[0]
        )(examples.x, examples.y)
    ),
    "moon": algorithms.moon(MODEL, client_lr=0.1),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("wrong", [-1, 3])
def test_refused_before_the_first_round(monkeypatch, name, wrong):
    monkeypatch.setattr("fedjax_lab.simulation.chunks.build_chunk", None)
    shift = name == "shifted"
    low, high = min(wrong, 0) - shift, max(wrong, 2) - shift
    low, high = (-1, 2) if shift and wrong == 3 else (low, high)
    message = f"labels from {low} to {high}; the model has 3 logits, for 0 to 2"
    with pytest.raises(ValueError, match=message):
        simulate(METHODS[name], PARAMS, clients(wrong), **RUN)


def test_the_check_of_labels_as_they_are_compiles_nothing():
    compiled = []

    def listen(event, seconds, **_):
        compiled.append(event == "/jax/core/compile/backend_compile_duration")

    on_device = clients()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run = Computation(METHODS["plain"], Schedule(2, 4, 1), params=PARAMS)
        check_model(run, on_device)
        assert not any(compiled)
        jax.jit(lambda x: x + 1)(0)
        assert any(compiled)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_stream_and_a_sweep_refuse_them(tmp_path):
    on_host = data.stream((X, labels(3)), np.arange(20) % 4, num_clients=4, memory=10**6)
    with pytest.raises(ValueError, match="labels from 0 to 3; the model has 3 logits"):
        simulate(METHODS["plain"], PARAMS, on_host, **RUN)
    with pytest.raises(ValueError, match="labels from -1 to 2; the model has 3 logits"):
        sweep(
            functools.partial(algorithms.fedavg, loss_fn),
            PARAMS,
            clients(-1),
            points={"client_lr": [0.1]},
            **RUN,
        )


@pytest.mark.methods
def test_what_nobody_holds_is_not_looked_at():
    held = [i for i in range(20) if i != 7]
    result = simulate(METHODS["plain"], PARAMS, clients(3, held), **RUN, client_map="scan")
    assert np.isfinite(result.history[-1]["loss"])


@pytest.mark.parametrize("wrong", few(1, [-1, 3]))
def test_an_unknown_loss_that_is_nan_is_said(wrong):
    def hidden(params, examples, key):  # its labels cannot leave the inner function
        return jax.jit(loss_fn)(params, examples, key)

    everybody = {**RUN, "cohort_size": 4, "local_steps": 2}
    with pytest.warns(UserWarning, match="in round 0 of fedavg the loss is nan, although"):
        result = simulate(fedavg(hidden), PARAMS, clients(wrong), **everybody, client_map="scan")
    assert result.stopped is None
    assert np.isfinite(result.params["w"]).all()


@pytest.mark.parametrize(("wrong", "low", "high"), [(-1, -1, 2), (3, 0, 3)])
def test_of_clients_with_their_own_models_too(wrong, low, high):
    method, counts = METHODS["plain"], models.accuracy_counts(apply)
    evaluate = build_personal_evaluation(counts, client_models(method), clients(wrong))
    with pytest.raises(ValueError, match=f"labels from {low} to {high}; the model has 3 logits"):
        evaluate(method.init(PARAMS, 4))


@pytest.mark.methods
def test_each_client_evaluated_alone_and_small_integers():
    counts = models.accuracy_counts(apply)
    with pytest.raises(ValueError, match="labels from 0 to 3; the model has 3 logits"):
        build_client_evaluation(counts, clients(3))(PARAMS)
    losses = cross_entropy(jnp.zeros((3, 300)), jnp.array([-1, 0, 100], jnp.int8))
    np.testing.assert_allclose(losses, [np.nan, np.log(300), np.log(300)], rtol=1e-6)
