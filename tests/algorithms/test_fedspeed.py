"""FedSpeed's identities: its closed form, its gradients per step, its duals, its zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, tree
from fedjax_lab.clients.local import Gradient, Step
from tests.algorithms.cases import N
from tests.algorithms.problem import initial_params, loss_fn, to_batch, toy_loss, toy_path
from tests.federations import batch_of
from tests.reference import problem as reference
from tests.tiers import few

LR = {"client_lr": 0.2}


def linear_loss(y, examples, key):
    """<g, y>: its gradient is g, whatever the perturbation."""
    del key
    return examples @ y


def test_local_steps_satisfy_the_closed_form(x64):
    prox, eta, steps = 0.4, 0.2, 5
    algorithm = algorithms.fedspeed(linear_loss, client_lr=eta, prox_weight=prox)
    state = algorithm.init(jnp.ones(3), 2)
    rng = np.random.default_rng(0)
    gammas = eta * prox * (1 - eta * prox) ** np.arange(steps)[::-1]
    total = gammas.sum()
    for t in range(3):
        g = rng.normal(size=(steps, 3))
        batch = batch_of(jnp.asarray(g)[None, :, None], t, ids=[1])
        x, c = np.asarray(algorithm.params(state)), np.asarray(state.clients[1])
        state, _ = jax.jit(algorithm.round_fn)(state, batch)
        mixed = gammas @ g / total
        move = (-total * mixed + total * c) / prox  # x_K - x_t
        new_c = (1 - total) * c + total * mixed
        np.testing.assert_allclose(state.clients[1], new_c, atol=1e-12)
        np.testing.assert_allclose(new_c, c - prox * move, atol=1e-12)
        np.testing.assert_allclose(algorithm.params(state), x + move - new_c / prox, atol=1e-12)
        np.testing.assert_array_equal(state.clients[0], 0)


@pytest.mark.parametrize(
    ("options", "gradients"),
    few(
        2,
        [
            ({}, 2),
            ({"perturbation_weight": 0}, 1),
            ({"perturbation_radius": 0.0}, 1),
            ({"perturbation_radius": lambda t: 0.0}, 2),
        ],
    ),
)
def test_gradients_per_step(options, gradients):
    calls = []

    def counted(*arguments):
        calls.append(None)
        return loss_fn(*arguments)

    drawn = reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4, equal_steps=True)
    batch = to_batch(drawn[0][1], 0)

    def evaluations(algorithm):
        calls.clear()
        jax.make_jaxpr(algorithm.round_fn)(algorithm.init(initial_params(), N), batch)
        return len(calls)

    evaluations(algorithms.fedavg(counted, **LR))  # looks for statistics over the mini-batch, once
    once = evaluations(algorithms.fedavg(counted, **LR))
    algorithm = algorithms.fedspeed(counted, **options, **LR)
    assert algorithm.gradients_per_step == gradients
    assert evaluations(algorithm) == gradients * once


def test_prox_alone_is_fedprox(x64):
    """Against the golden trajectory of FedProx with mu = 0.5."""
    algorithm = algorithms.fedspeed(
        toy_loss, client_lr=0.1, prox_weight=0.5, correction=False, perturbation_weight=0.0
    )
    golden = "0.4486875000 -0.1914375000 0.6344291094 0.1548154531 0.5707180930 0.4566831517"
    path = toy_path(algorithm, reference.TOY_COHORTS)
    np.testing.assert_allclose(path.ravel(), np.array(golden.split(), float), atol=1e-9)


@pytest.mark.slow
def test_traced_zeros_give_no_nan_and_the_same_run():
    """A swept 0 computes what a plain 0 drops; a vanishing gradient has no direction."""
    drawn = reference.make_rounds(1, 1, cohort_size=4, max_steps=3, batch_size=4)
    batch = to_batch(drawn[0][1], 0)

    def after(loss, **options):
        algorithm = algorithms.fedspeed(loss, **options, **LR)
        state, _ = jax.jit(algorithm.round_fn)(algorithm.init(initial_params(), N), batch)
        return algorithm.params(state)

    for name in ("perturbation_radius", "perturbation_weight"):
        traced = jax.jit(lambda zero, name=name: after(loss_fn, **{name: zero}))(0.0)
        plain = after(loss_fn, **{name: 0.0})
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), traced, plain)

    def flat_loss(params, examples, key):
        return 0 * loss_fn(params, examples, key)

    swept = jax.jit(lambda zero: after(flat_loss, prox_weight=zero, perturbation_radius=zero))(0.0)
    jax.tree.map(np.testing.assert_array_equal, swept, initial_params())
    jax.tree.map(np.testing.assert_array_equal, after(flat_loss), initial_params())


@pytest.mark.parametrize("weight", [pytest.param(1.0, marks=pytest.mark.methods), 0.6])
def test_the_transform_sees_the_unperturbed_point(weight):
    """Linear losses: all that depends on the point is the decay."""
    decay = 0.3
    algorithm = algorithms.fedspeed(
        linear_loss,
        client_lr=0.1,
        perturbation_radius=5.0,
        perturbation_weight=weight,
        gradient_transform=optax.add_decayed_weights(decay),
        correction=False,
    )
    x, g = jnp.array([1.0, -2.0]), jnp.array([3.0, 4.0])
    state, _ = algorithm.round_fn(algorithm.init(x, 1), batch_of(g[None, None, None]))
    np.testing.assert_allclose(algorithm.params(state), x - 0.1 * (g + decay * x), rtol=1e-6)


def test_raw_then_transformed_is_the_gradient():
    gradient = Gradient(linear_loss, optax.chain(optax.trace(0.5), optax.add_decayed_weights(0.1)))
    y, g = jnp.array([1.0, 2.0]), jnp.array([[0.5, -1.0]])
    step = Step(g, None, jax.random.key(0), (), gradient.init(y, jax.random.key(0)))
    raw, report = gradient.raw(y, step)
    np.testing.assert_array_equal(raw, g[0])
    assert report.transform_state is step.transform_state
    for left, right in zip(
        jax.tree.leaves(gradient.transformed(raw, y, report)),
        jax.tree.leaves(gradient(y, step)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("server_dual", ["cohort", pytest.param("all", marks=pytest.mark.methods)])
def test_duals_and_bytes(server_dual, x64):
    """The running mean is that of all rows, and costs nothing to send."""
    drawn = reference.make_rounds(2, 6, cohort_size=4, max_steps=3, batch_size=4)
    algorithm = algorithms.fedspeed(loss_fn, server_dual=server_dual, **LR)
    state = algorithm.init(initial_params(), N)
    for t, (_, padded) in enumerate(drawn):
        state, _ = jax.jit(algorithm.round_fn)(state, to_batch(padded, t))
    if server_dual == "all":
        mean = jax.tree.map(lambda rows: rows.mean(0), state.clients)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-14), state.server.mean_dual, mean
        )
    else:
        assert state.server.mean_dual == ()
    assert algorithm.uplink(initial_params()) == tree.nbytes(initial_params())
    uncorrected = algorithms.fedspeed(loss_fn, correction=False, server_dual=server_dual, **LR)
    assert uncorrected.init(initial_params(), N).clients == ()
