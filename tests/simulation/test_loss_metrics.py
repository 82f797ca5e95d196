"""A loss that returns metrics beside its losses: in runs, sweeps and wherever losses are taken.

That they are the right means, for every method and under every mask, is in
``tests/algorithms/test_contract.py``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, build_round, data, report, simulate, sweep, with_dp
from fedjax_lab.clients.metrics import OWN_METRICS
from fedjax_lab.clients.resident import gather
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.recipes.control_error import build_control_error
from fedjax_lab.recipes.flatness import loss_surface
from tests.federations import of_sizes, reporting
from tests.simulation.test_run import (
    N,
    assert_same_bits,
    first_params,
    loss_fn,
    make_clients,
    run,
)


def with_metrics(params, examples, key):
    losses = loss_fn(params, examples, key)
    return losses, {"label": examples.y, "size": examples.y.size, "squared": jnp.square(losses)}


def drawn_labels(rounds, **changes):
    """Labels of all valid examples of each of the rounds, from the batches themselves."""
    settings = {"cohort_size": 3, "batch_size": 4, "local_steps": 2, "replace": True} | changes
    clients, schedule, labels = make_clients(), Schedule(**settings), []
    for t in range(rounds):
        batch = schedule.draw(clients, jax.random.key(5), jnp.int32(t))
        of_round = np.asarray(clients.examples.y)[np.asarray(batch.examples)]
        mask = np.ones(of_round.shape, bool) if batch.example_mask is None else batch.example_mask
        labels.append(of_round[np.asarray(mask)])
    return labels


EPOCHS = {"local_steps": None, "local_epochs": 1, "replace": False}


@pytest.mark.methods
@pytest.mark.parametrize(
    ("client_map", "drawing"),
    [
        ("scan", {}),
        pytest.param("scan", EPOCHS, marks=pytest.mark.slow),
        pytest.param("chunk:2", EPOCHS, marks=pytest.mark.slow),
        pytest.param("shard_map", EPOCHS, marks=pytest.mark.slow),
    ],
)
def test_rows_have_them(client_map, drawing):
    algorithm = algorithms.scaffold(with_metrics, client_lr=0.3)
    result = run(algorithm, rounds=4, client_map=client_map, **drawing)
    labels = [of_round.mean() for of_round in drawn_labels(4, **drawing)]
    for row, rounds in zip(result.history, (labels[:2], labels[2:]), strict=True):
        assert row["label"] == pytest.approx(np.mean(rounds), rel=1e-5)
        assert row["size"] == 4.0
        assert row["squared"] >= row["loss"] ** 2
    plain = run(
        algorithms.scaffold(loss_fn, client_lr=0.3), rounds=4, client_map=client_map, **drawing
    )
    np.testing.assert_allclose(result.params["w"], plain.params["w"], atol=1e-6)
    assert set(result.history[0]) - set(plain.history[0]) == {"label", "size", "squared"}


@pytest.mark.slow
def test_a_sweep_has_them():
    def build(client_lr):
        return algorithms.fedavg(with_metrics, client_lr=client_lr)

    swept = sweep(
        build, first_params(), make_clients(), points={"client_lr": [0.1, 0.3]}, seeds=[5],
        rounds=4, eval_every=2, cohort_size=3, local_steps=2, batch_size=4, replace=True,
        run_map="scan",
    )  # fmt: skip
    labels = [of_round.mean() for of_round in drawn_labels(4)]
    expected = [np.mean(labels[:2]), np.mean(labels[2:])]
    for point in (0, 1):
        np.testing.assert_allclose(swept.history["label"][point, 0], expected, rtol=1e-5)


@pytest.mark.methods
def test_a_run_with_them_is_resumed(tmp_path):
    algorithm = algorithms.fedavg(with_metrics, client_lr=0.3)
    whole = run(algorithm, rounds=4)
    for rounds in (2, 4):
        grown = run(algorithm, rounds=rounds, run_dir=tmp_path)
    assert_same_bits(whole.state, grown.state)
    assert whole.history == grown.history


@pytest.mark.methods
def test_a_report_does_not_rank_by_them(tmp_path):
    """``accuracy`` of a loss is that of training examples, as ``run.history`` still has it."""

    def loss(params, examples, key):
        losses = loss_fn(params, examples, key)
        return losses, {"accuracy": losses < 1, "test_loss": losses}

    result = run(algorithms.fedavg(loss, client_lr=0.3), rounds=4, run_dir=tmp_path)
    assert 0 < result.history[-1]["accuracy"] <= 1
    with pytest.warns(UserWarning, match="no run has .* The rows have accuracy, norm, test_loss: "):
        path = report.write_report([tmp_path], tmp_path / "report")
    assert not (path.parent / "accuracy.png").exists()
    assert "test loss" not in path.read_text()


@pytest.mark.methods
def test_the_norm_of_the_gradient_is_a_metric_like_any_other():
    """Of the quadratics |w - x|^2 / 2 it is the distance from the mean of the mini-batch."""

    def quadratic(params, examples, key):
        return 0.5 * jnp.square(params["w"][None] - examples.x).sum(-1)

    def measured(params, examples, key):
        here = jax.lax.stop_gradient(params)
        gradient = jax.grad(lambda p: quadratic(p, examples, key).mean())(here)
        return quadratic(params, examples, key), {"gradient_norm": jnp.linalg.norm(gradient["w"])}

    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    clients = of_sizes([2] * 3, x)
    result = simulate(
        algorithms.fedavg(measured, client_lr=0.1), {"w": jnp.zeros(3)}, clients, rounds=1,
        cohort_size=3, local_epochs=1, batch_size=2, client_map="scan",
    )  # fmt: skip
    norms = np.linalg.norm(x.reshape(3, 2, 3).mean(1), axis=-1)
    assert result.history[0]["gradient_norm"] == pytest.approx(norms.mean(), rel=1e-5)


@pytest.mark.methods
def test_diagnostics_and_landscapes_take_such_a_loss():
    state = run(rounds=1).state
    for build in (
        lambda loss: build_control_error(loss, make_clients())(state),
        lambda loss: loss_surface(loss, first_params(), make_clients().examples, points=3),
    ):
        both = build(loss_fn), build(with_metrics)
        assert jax.tree.leaves(both[0])
        jax.tree.map(np.testing.assert_array_equal, *both)


def test_no_metric_of_a_private_round_can_be_that_of_a_loss():
    """``finite_clients`` of a loss was taken for the share of the clients that are finite."""
    algorithm = with_dp(algorithms.fedavg(loss_fn, client_lr=0.1), 1.0, 1.0, adaptive_quantile=0.5)
    batch = data.draw_batch(
        make_clients(), jax.random.key(0), 0, cohort_size=3, local_steps=1, batch_size=2
    )
    state = algorithm.init(first_params(), N)
    _, metrics = jax.eval_shape(build_round(algorithm, "vmap"), state, batch)
    assert metrics.keys() <= OWN_METRICS


@pytest.mark.parametrize("name", sorted(OWN_METRICS))
def test_the_librarys_own_names_are_refused(name):
    def loss(params, examples, key):
        return loss_fn(params, examples, key), {name: 1.0}

    algorithm = algorithms.fedavg(loss, client_lr=0.1)
    with pytest.raises(ValueError, match=rf"metric called '{name}'; this name is reserved"):
        run(algorithm)


def test_clients_that_report_no_steps_are_told_of():
    own = reporting(algorithms.fedavg(loss_fn, client_lr=0.1), "loss")
    with pytest.raises(ValueError, match="algorithm is fedavg, whose clients report no local_step"):
        run(own)


def test_clients_may_have_no_loss():
    """Each sends the mean of its inputs, and the model is the mean of all inputs."""
    plain = algorithms.fedavg(loss_fn, client_lr=0.1)

    def client_update(params, row, batch):
        inputs = gather(batch.full_examples, batch.source).x
        mean = (inputs * batch.full_mask[:, None]).sum(0) / batch.full_mask.sum()
        delta = {"w": params["w"] - mean[:, None]}
        return {"delta": delta}, row, {"local_steps": (batch.num_steps, 1.0)}

    phase = plain.phases[0]._replace(client_update=client_update)
    algorithm = dataclasses.replace(plain, phases=(phase,))
    settings = {"full_examples": True, "weights": "examples", "cohort_size": N, "rounds": 2}
    result = run(algorithm, **settings)
    mean = np.asarray(make_clients().examples.x, np.float64).mean(0)
    np.testing.assert_allclose(result.params["w"], np.tile(mean, (3, 1)).T, atol=1e-6)
    assert "loss" not in result.history[-1]
    assert result.history[-1]["norm"] == pytest.approx(3 * np.abs(mean).sum(), rel=1e-5)
    swept = sweep(
        lambda: algorithm,
        first_params(),
        make_clients(),
        points={},
        seeds=(0,),
        local_steps=2,
        batch_size=4,
        **settings,
    )
    np.testing.assert_allclose(np.squeeze(swept.params["w"]), result.params["w"], atol=1e-6)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"wide": jnp.ones((4, 2))}, r"the metric 'wide' of shape \(4, 2\); it must be a scalar"),
        ({"short": jnp.ones(3)}, r"the metric 'short' of shape \(3,\); .* shape \(4,\)"),
        ({7: 1.0}, "a metric called 7; a name must be a string"),
        ({"none": None}, "the metric 'none', a NoneType; it must be a real number, or an array"),
        ({"text": "x"}, "the metric 'text', a str; it must be a real number"),
        ({"more": {"b": 1.0}}, "the metric 'more', a dict; it must be a real number"),
        ({"complex": 1j}, "the metric 'complex', a complex of complex64; it must be a real"),
        ([1.0], "loss_fn returned tuple; it must return one loss per example, an array of shape"),
    ],
)
def test_other_metrics_are_refused(returned, message):
    algorithm = algorithms.fedavg(
        lambda params, examples, key: (loss_fn(params, examples, key), returned), client_lr=0.1
    )
    with pytest.raises((ValueError, TypeError), match=message):
        run(algorithm)


@pytest.mark.methods
def test_an_evaluation_of_the_same_name_is_refused():
    algorithm = algorithms.fedavg(with_metrics, client_lr=0.1)
    with pytest.raises(ValueError, match="evaluate returned 'label', a name that rows"):
        run(algorithm, evaluate=lambda params: {"label": 1.0})


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda lr: algorithms.fedavg(loss_fn, client_lr=lr, server_lr=0.5), [0.15, 0.0375]),
        pytest.param(  # whose schedule is one of the local step, two in a round
            lambda lr: algorithms.stem(loss_fn, client_lr=lr, momentum=0.1),
            [0.2 * (1 + 0.25) / 2, 0.2 * (0.0625 + 0.015625) / 2],
            marks=pytest.mark.methods,
        ),
    ],
)
def test_rows_have_the_mean_learning_rate_of_their_rounds(build, expected):
    """A rate of 0.2 that is halved in each round, in rows of two rounds."""
    result = run(build(lambda count: 0.2 * 0.5**count), rounds=4)
    found = [row["client_lr"] for row in result.history]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert [row.get("server_lr", 0.5) for row in result.history] == [0.5, 0.5]


@pytest.mark.parametrize("argument", ["gradient_transform", "step_transform"])
def test_rows_have_the_share_of_clipped_steps(argument):
    """One client, of one example: its gradient is y - centre, and its steps go half the way."""
    clients = of_sizes([1], np.array([[8.0]], np.float32))
    clip = optax.chain(optax.clip_by_global_norm(3.0), optax.add_decayed_weights(0.0))
    algorithm = algorithms.fedavg(
        lambda params, examples, key: 0.5 * jnp.square(params[None] - examples.x).sum(-1),
        client_lr=0.5, **{argument: clip},
    )  # fmt: skip
    result = simulate(
        algorithm, jnp.zeros(1), clients, rounds=2, eval_every=1, cohort_size=1, local_steps=5,
        batch_size=1, client_map="scan",
    )  # fmt: skip
    # Distances 8, 6.5, 5, 3.5, 2 before the five steps of round 0, and below 3 in round 1.
    assert [row["clipped_steps"] for row in result.history] == pytest.approx([0.8, 0.0])
