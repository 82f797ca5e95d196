"""What the twins do not see of the sharpness-aware methods: leaf names, vanishing gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_lab import algorithms, tree
from tests.algorithms.cases import N
from tests.algorithms.problem import flat, initial_params, loss_fn, to_batch
from tests.reference import problem as reference
from tests.reference.sharpness_numpy import FedASAM

NAMES = {"W": "kernel", "b": "bias"}
OPTIONS = {"client_lr": 0.2, "perturbation_radius": 0.5}


def renamed(params):
    return {NAMES[name]: leaf for name, leaf in params.items()}


def loss_of_renamed(params, examples, key):
    return loss_fn({name: params[NAMES[name]] for name in NAMES}, examples, key)


@pytest.mark.parametrize("adaptive", ["weights", pytest.param("all", marks=pytest.mark.methods)])
def test_what_is_adaptive_goes_by_the_leafs_name(adaptive, x64):
    clients, padded = reference.make_rounds(5, 1, 4, 3, 4)[0]
    algorithm = algorithms.fedasam(loss_of_renamed, adaptive=adaptive, **OPTIONS)
    state = algorithm.init(renamed(initial_params()), N)
    state, _ = jax.jit(algorithm.round_fn)(state, to_batch(padded, 0))
    entries = np.ones(reference.DIMENSION, bool)
    entries[reference.LEAVES[1]] = adaptive == "all"
    ends = []
    for chosen in (entries, ~entries):
        x0 = flat(initial_params())
        twin = FedASAM(x0, N, reference.gradient, adaptive=chosen, **OPTIONS)
        twin.round(clients, 0)
        ends.append(twin.x)
    params = algorithm.params(state)
    ours = flat({name: params[NAMES[name]] for name in NAMES})
    np.testing.assert_allclose(ours, ends[0], rtol=0, atol=1e-12)
    assert np.abs(ends[0] - ends[1]).max() > 1e-4


def test_a_bias_in_a_box_of_flax_is_a_bias(x64):
    """The path of NNX's boxes ends in "value"; the same arrays in a dict have names alone."""
    boxed = nnx.State({name: nnx.Param(leaf) for name, leaf in renamed(initial_params()).items()})

    def loss_of_boxed(params, examples, key):
        return loss_of_renamed({name: params[name][...] for name in params}, examples, key)

    _, padded = reference.make_rounds(5, 1, 4, 3, 4)[0]
    ends = []
    for loss, params in ((loss_of_boxed, boxed), (loss_of_renamed, renamed(initial_params()))):
        algorithm = algorithms.fedasam(loss, **OPTIONS)
        state, _ = jax.jit(algorithm.round_fn)(algorithm.init(params, N), to_batch(padded, 0))
        ends.append(jax.tree.leaves(algorithm.params(state)))
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize(
    "dtype", [pytest.param(jnp.float16, marks=pytest.mark.methods), jnp.float32]
)
def test_unit_vectors(dtype):
    """Norm 1 over all leaves; 0 below 1e-12, with a derivative of 0 and not of NaN."""
    length = tree.unit({"a": jnp.array([3.0], dtype), "b": jnp.array([0.0, 4.0], dtype)})
    np.testing.assert_allclose(np.float32(length["a"]), 0.6, rtol=1e-2)
    np.testing.assert_allclose(np.float32(length["b"]), [0, 0.8], rtol=1e-2)
    assert length["a"].dtype == dtype
    for tiny in (0.0, 1e-13):
        v = jnp.array([tiny, 0.0], dtype)
        np.testing.assert_array_equal(tree.unit(v), 0)
        np.testing.assert_array_equal(jax.jacobian(tree.unit)(v), 0)


@pytest.mark.methods
def test_gradients_go_through_a_radius_of_zero_and_a_vanishing_gradient():
    """d/d radius of a run that begins where every gradient is 0 is finite; so is the run."""
    _, padded = reference.make_rounds(5, 1, 4, 3, 4)[0]
    batch = to_batch(padded, 0)
    zeros = jax.tree.map(jnp.zeros_like, initial_params())

    def flat_at_zero(params, examples, key):
        return jnp.square(examples["x"] @ params["W"] + params["b"][None, :]).sum(-1)

    def after(radius, start):
        options = {"client_lr": 0.1, "perturbation_radius": radius}
        algorithm = algorithms.fedsmoo(flat_at_zero, prox_weight=0.1, **options)
        state, _ = algorithm.round_fn(algorithm.init(start, N), batch)
        return tree.norm(algorithm.params(state), squared=True)

    run = jax.jit(jax.value_and_grad(after))
    value, slope = run(0.0, zeros)
    assert value == slope == 0
    assert np.isfinite(run(0.0, initial_params())).all()
