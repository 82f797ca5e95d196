"""The measurements of the theorems: problems, runs and slopes against closed forms."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.theory import __main__ as command
from experiments.theory import theorems
from experiments.theory.measure import batch_of, rounds_until, slope, trace
from experiments.theory.problems import Logistic, logistic, separable
from experiments.theory.report import page, rows
from experiments.theory.theorems import MEASUREMENTS
from fedjax_lab import algorithms


def mean_loss(problem, params):
    """The clients' losses without noise, by the losses that they minimize."""
    if hasattr(problem, "x"):
        each = jax.vmap(lambda x, y: problem.loss(params, (x, y), None))(problem.x, problem.y)
        return each.mean()
    zeros = jnp.zeros_like(problem.curvature)
    return problem.loss(params, (problem.curvature, problem.centre, zeros), None).mean()


@pytest.mark.parametrize(
    "problem",
    [separable(4, 0.5), separable(4, 0.5, is_convex=True), logistic(3, 5, 1.0)],
    ids=["not convex", "least squares", "logistic"],
)
def test_the_gradient_is_that_of_the_clients_losses(problem):
    params = jax.tree.map(lambda leaf: leaf + 0.3, problem.params())
    (expected,) = jax.grad(lambda params: mean_loss(problem, params))(params).values()
    np.testing.assert_allclose(problem.gradient(params), expected, rtol=1e-5, atol=1e-6)


def test_smoothness_is_at_most_1():
    problem = separable(4, 0.5)
    at = jnp.linspace(-3, 3, 41)
    params = [{"x": jnp.full(20, x)} for x in at]
    slopes = np.stack([problem.gradient(each) for each in params])
    assert np.abs(np.diff(slopes, axis=0)).max() <= float(at[1] - at[0]) * (1 + 1e-4)


def test_a_run_without_noise_is_gradient_descent():
    problem = separable(4, 0.5, noise=0.0, is_convex=True)
    seen = trace(
        algorithms.fedavg,
        problem,
        jnp.arange(2),
        rounds=5,
        cohort_size=4,
        steps=1,
        client_lr=0.3,
    )
    a, b = np.asarray(problem.curvature), np.asarray(problem.centre)
    x, expected = np.ones(20), []
    for _ in range(5):
        gradient = (a * (x - b)).mean(0)
        expected.append(np.square(gradient).sum())
        x = x - 0.3 * gradient
    np.testing.assert_allclose(seen, np.tile(expected, (2, 1)), rtol=1e-5)


@pytest.mark.methods
def test_the_distance_is_that_of_two_runs_in_numpy():
    found = theorems.stability(1.0, 3, [5], {"FedAvg": algorithms.fedavg})["FedAvg"]
    all_x, all_y = theorems.data_sets(1.0, 5)
    key, models = jax.random.key(5), []
    for x, y in zip(all_x, all_y, strict=True):
        w, problem = np.zeros(x.shape[-1]), Logistic(jnp.asarray(x), jnp.asarray(y))
        for t in range(3):
            batch = batch_of(problem, key, jnp.int32(t), cohort_size=10, steps=5)
            ends = []
            for xs, ys in zip(*map(np.float64, batch.examples), strict=True):
                own = w
                for (example,), (label,) in zip(xs, ys, strict=True):
                    slope = -label / (1 + np.exp(label * (example @ own)))
                    own = own - 0.5 * (slope * example + 0.01 * own)
                ends.append(own)
            w = np.mean(ends, axis=0)
        models.append(w)
    assert len(models) == 25
    distances = np.linalg.norm(np.subtract(models[1:], models[0]), axis=1)
    assert distances.max() > 1e-2
    np.testing.assert_allclose(found, [distances.mean()], rtol=1e-4)


@pytest.mark.methods
def test_the_error_is_that_of_error_feedback_in_numpy():
    found = theorems.cfedavg_error(3, [7])["top-k 0.9"]
    problem, key = separable(8, 0.5), jax.random.key(7)
    x, errors, seen = np.ones(20), np.zeros((8, 20)), []
    for t in range(3):
        batch = batch_of(problem, key, jnp.int32(t), cohort_size=8, steps=20, most=20)
        messages, squares = [], []
        for slot, client in enumerate(np.asarray(batch.client_ids)):
            y, steps = x, int(batch.num_steps[slot])
            a, b, noise = (np.float64(field[slot, :, 0]) for field in batch.examples)
            for k in range(steps):
                u = y - b[k]
                y = y - (a[k] * u / (1 + u**2) ** 2 + noise[k]) / np.sqrt(3)
            change = (x - y) / steps
            wanted = change + errors[client]
            kept = np.argsort(-np.abs(wanted))[:2]  # a tenth of 20
            sent = np.zeros(20)
            sent[kept] = wanted[kept]
            errors[client] = wanted - sent
            messages.append(sent)
            squares.append((np.square(errors[client]).sum(), np.square(change).sum()))
        x = x - np.sqrt(8) * np.mean(messages, axis=0)
        seen.append(np.mean(squares, axis=0))
    error, change = np.max(seen, axis=0)
    np.testing.assert_allclose(found, [error / change], rtol=1e-3)


@pytest.mark.methods
def test_residuals_of_gradmas_programs_are_small():
    residuals = trace(
        theorems.gradma,
        separable(32, 0.5, noise=0.0),
        jnp.asarray([1]),
        rounds=64,
        cohort_size=8,
        steps=4,
        client_lr=1 / 128,
        server_lr=np.sqrt(2),
        look=lambda problem, algorithm, state, metrics: jnp.stack(
            [metrics[name] for name in ("client_qp_residual", "server_qp_residual")]
        ),
    )
    assert np.asarray(residuals).max() < 1e-5


def test_slopes_are_those_of_powers():
    x = np.array([2.0, 4.0, 16.0])
    found = slope(x, np.stack([3 * x**-0.5, 5 * x**-0.7], axis=1))
    assert found.mean == pytest.approx(-0.6)
    assert found.half_width == pytest.approx(12.706 * 0.1, rel=1e-3)  # t(1) of -0.5 and -0.7


def test_rounds_until_a_target_is_kept():
    assert rounds_until([3.0, 0.5, 2.0, 0.5, 0.4], 1.0) == 3
    assert rounds_until([0.5, 0.4], 1.0) == 0
    assert rounds_until([0.5, 2.0], 1.0) == np.inf
    assert rounds_until([0.5, np.nan], 1.0) == np.inf


def test_the_page_is_that_of_the_stored_measurements():
    kept = json.loads(command.STORED.read_text())
    assert kept.keys() == MEASUREMENTS.keys()
    for name, found in kept.items():
        assert tuple(found["x"]) == tuple(map(float, MEASUREMENTS[name].values))
        for series, values in found["y"].items():
            if np.isfinite(values).all():
                each = np.polyfit(np.log(found["x"]), np.log(values), 1)[0]
                (row,) = (row for row in rows(found, name) if row[0] == series)
                assert row[-1].startswith(f"{each.mean():.2f} ")
    folder = command.STORED.parent
    assert (folder / "RESULTS.md").read_text(encoding="utf-8") == page(kept)


@pytest.mark.methods
def test_the_smallest_form(capsys):
    command.main(["--smoke", "--only", "cfedavg_rounds"])
    assert "top-k 0.9" in capsys.readouterr().out
