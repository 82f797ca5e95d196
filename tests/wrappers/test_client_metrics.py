"""Metrics of local steps against NumPy, for methods of several kinds and ragged mini-batches."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, simulate, tree, with_client_metrics, with_compression
from tests.federations import of_sizes

LR, STEPS, SIZES = 0.3, 3, (2, 3, 4)


def loss_fn(params, examples, key):
    return 0.5 * jnp.square(params["w"][None] - examples.x).sum(-1)


def points():
    return np.random.default_rng(0).normal(size=(sum(SIZES), 5)).astype(np.float32)


def run(algorithm, **settings):
    # A mini-batch of 4 is all that a client has, and some of it is masked.
    return simulate(
        algorithm, {"w": jnp.zeros(5)}, of_sizes(SIZES, points()), cohort_size=3, batch_size=4,
        client_map="scan", **{"local_steps": STEPS, "rounds": 2, "eval_every": 1, **settings},
    )  # fmt: skip


def norm_of_gradient(params, gradient):
    return tree.norm(gradient)


def norm_of_weights(params, gradient):
    return jnp.linalg.norm(params["w"])


def by_hand(proximal=0.0):
    """Rows of (mean norm of the raw gradients, mean norm of the local params before a step)."""
    centres = [part.mean(0) for part in np.split(points(), np.cumsum(SIZES)[:-1])]
    x, rows = np.zeros(5), []
    for _ in range(2):
        gradients, weights, ends = [], [], []
        for centre in centres:
            y = x
            for _ in range(STEPS):
                gradients.append(np.linalg.norm(y - centre))
                weights.append(np.linalg.norm(y))
                y = y - LR * (y - centre + proximal * (y - x))
            ends.append(y)
        x = np.mean(ends, 0)
        rows.append((np.mean(gradients), np.mean(weights)))
    return np.array(rows)


@pytest.mark.parametrize(
    ("build", "proximal"),
    [
        pytest.param(
            lambda loss: algorithms.fedavg(loss, client_lr=LR), 0.0, marks=pytest.mark.methods
        ),
        (lambda loss: algorithms.fedprox(loss, client_lr=LR, prox_weight=0.5), 0.5),
    ],
    ids=["fedavg", "fedprox"],
)
def test_they_are_numpys_means_over_all_steps(build, proximal):
    measured = with_client_metrics(build(loss_fn), g=norm_of_gradient, w=norm_of_weights)
    result, plain = run(measured), run(build(loss_fn))
    found = [(row["g"], row["w"]) for row in result.history]
    np.testing.assert_allclose(found, by_hand(proximal), rtol=1e-5)
    np.testing.assert_allclose(result.params["w"], plain.params["w"], atol=1e-6)
    assert set(result.history[0]) - set(plain.history[0]) == {"g", "w"}


@pytest.mark.slow
def test_around_other_wrappers_twice_and_with_two_gradients_a_step():
    sam = algorithms.fedsam(loss_fn, client_lr=LR, perturbation_radius=0.1)
    inner = with_client_metrics(sam, g=norm_of_gradient)
    outer = with_client_metrics(with_compression(inner, "top_k:0.5"), w=norm_of_weights)
    (row,) = run(outer, rounds=1).history
    # The first gradient of a step is that at the local params; the steps go on from the second.
    first = np.mean([np.linalg.norm(part.mean(0)) for part in np.split(points(), [2, 5])])
    (alone,) = run(inner, rounds=1, local_steps=1).history
    assert alone["g"] == pytest.approx(first, rel=1e-5)
    assert row["w"] > 0
    again = with_client_metrics(inner, g=norm_of_weights)  # of one name, the outer one
    (row,) = run(again, rounds=1, local_steps=1).history
    (expected,) = run(with_client_metrics(sam, g=norm_of_weights), rounds=1, local_steps=1).history
    assert row["g"] == expected["g"] != alone["g"]


def test_it_is_refused():
    method = algorithms.fedavg(loss_fn, client_lr=LR)
    with pytest.raises(ValueError, match="measures is empty"):
        with_client_metrics(method)
    with pytest.raises(TypeError, match=r"norm is 3; it must be a function \(params, gradient\)"):
        with_client_metrics(method, norm=3)
    for name in ("loss", "local_params"):
        with pytest.raises(ValueError, match=f"{name} is a reserved name"):
            with_client_metrics(method, **{name: norm_of_gradient})
    with pytest.raises(ValueError, match=r"'g' returned an array of shape \(5,\); .* a scalar"):
        run(with_client_metrics(method, g=lambda params, gradient: gradient["w"]))
    for wrong, kind in ((None, "NoneType"), ("x", "str"), (1j, "complex of complex64")):
        with pytest.raises(TypeError, match=f"the measure 'g' returned a {kind}; it must return"):
            run(with_client_metrics(method, g=lambda params, gradient, wrong=wrong: wrong))

    def with_the_same(params, examples, key):
        return loss_fn(params, examples, key), {"g": 1.0}

    twice = with_client_metrics(algorithms.fedavg(with_the_same, client_lr=LR), g=norm_of_gradient)
    with pytest.raises(ValueError, match="both have a metric called 'g'"):
        run(twice)
