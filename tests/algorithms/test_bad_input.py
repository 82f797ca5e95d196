"""Wrong arguments of a round or a factory: the error names argument, value and what is allowed."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, build_round, models
from tests.algorithms.cases import MAIN, N
from tests.algorithms.problem import initial_params, loss_fn, to_batch
from tests.reference import problem as reference

BETAS = {"momentum": 0.5, "second_moment_decay": 0.5}


@pytest.fixture(scope="module")
def batch():
    drawn = reference.make_rounds(0, 1, cohort_size=3, max_steps=2, batch_size=2, equal_steps=True)
    return to_batch(drawn[0][1], 0)


def run(batch, loss=loss_fn, **changes):
    algorithm = algorithms.fedavg(loss, client_lr=0.1)
    state = algorithm.init(initial_params(), N)
    return build_round(algorithm, "vmap")(state, batch._replace(**changes))


@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.id)
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "fast"])
def test_learning_rates(case, value):
    names = {"client_lr", "server_lr"} & set(case.options)
    for name in names:
        with pytest.raises((ValueError, TypeError), match=rf"{name} is {value}|{name} is 'fast'"):
            case.build(loss_fn, **{name: value})


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (
            algorithms.fedavgm,
            {"momentum": 1.5},
            "momentum is 1.5; it must be finite and at least 0",
        ),
        (algorithms.fedadam, {"server_lr": 1.0, "tau": 0.0}, "tau is 0.0; .* greater than 0"),
        (algorithms.fedyogi, {"server_lr": 1.0, "beta2": 2}, "beta2 is 2"),
        (algorithms.scaffold, {"control_update": "III"}, "control_update is 'III'; .* I, II"),
        (
            algorithms.scaffold,
            {"control_update": "I", "mean_from": "displacement"},
            "mean_from is displacement, which control_update 'I' does not use",
        ),
        (
            algorithms.fedmoswa,
            {"control_update": "I", "control_divisor": "trapezoid"},
            "control_divisor is trapezoid, which control_update 'I' does not use",
        ),
        (algorithms.gradma_w, {"qp_scope": "per_leave"}, "Did you mean 'per_leaf'"),
        (
            algorithms.gradma_s,
            {"memory_size": 5, "qp_solver": "active"},
            "Did you mean 'active_set'",
        ),
        (algorithms.gradma_w, {"margin": -1}, "margin is -1"),
        (algorithms.gradma_s, {"memory_size": -1}, "memory_size is -1"),
        (algorithms.gradma_s, {"memory_size": 5, "memory_decay": 2}, "memory_decay is 2"),
        (algorithms.gradma, {"memory_size": 5, "server_momentum": -1}, "server_momentum is -1"),
        (algorithms.fedswa, {"final_lr_ratio": -0.1}, "final_lr_ratio is -0.1"),
        (algorithms.fedmoswa, {"momentum": 1.5}, "momentum is 1.5; .* at most 1"),
        (algorithms.fedmo, {"control_update": "i"}, "control_update is 'i'; .* I, II"),
        (algorithms.fedspeed, {"prox_weight": 0.0}, "prox_weight is 0.0; .* greater than 0"),
        (algorithms.fedspeed, {"perturbation_radius": -1}, "perturbation_radius is -1"),
        (algorithms.fedspeed, {"perturbation_weight": -1}, "perturbation_weight is -1"),
        (algorithms.fedspeed, {"server_dual": "al"}, "Did you mean 'all'"),
        (algorithms.fedspeed_ing, {"inertia": -0.5}, "inertia is -0.5"),
        (algorithms.fafed, BETAS | {"momentum": 2}, "momentum is 2; .* at most 1"),
        (algorithms.fafed, BETAS | {"second_moment_decay": 2}, "second_moment_decay is 2"),
        (algorithms.fafed, BETAS | {"stability": 0}, "stability is 0; .* greater than 0"),
        (
            algorithms.naive_adaptive_fedavg,
            {"second_moment_decay": 0.5, "initial_second_moment": -1},
            "initial_second_moment is -1",
        ),
    ],
)
def test_hyper_parameters(factory, options, message):
    with pytest.raises(ValueError, match=message):
        factory(loss_fn, client_lr=0.1, **options)


TRANSFORMS = ("gradient_transform", "step_transform")


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("value", [3, "adam", optax.adam, lambda g, state: (g, state)])
def test_transforms_that_are_none(name, value):
    with pytest.raises(TypeError, match=f"^{name} is .*; it must be an optax transformation"):
        algorithms.fedavg(loss_fn, client_lr=0.1, **{name: value})


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.sgd(optax.linear_schedule(0.0, 0.1, 10)),
        optax.scale(-1.0),
    ],
)
def test_optimizers_in_place_of_transforms(name, optimizer):
    with pytest.raises(ValueError, match=f"^{name} changes the sign .* without a learning rate"):
        algorithms.scaffold(loss_fn, client_lr=0.1, **{name: optimizer})


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    "transform",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1)),
        optax.scale_by_adam(),
        optax.trace(0.9),
        optax.set_to_zero(),
        optax.add_noise(3.0, 0.0, 1),
        optax.masked(optax.add_decayed_weights(0.1), {"W": True, "b": False}),
    ],
)
def test_transforms_that_keep_the_sign(name, transform):
    made = algorithms.fedavg(loss_fn, client_lr=0.1, **{name: transform})
    assert made.hyperparameters[name] is not None


def test_a_loss_that_returns_a_scalar(batch):
    with pytest.raises(ValueError, match=r"shape \(\); it must return one loss per example"):
        run(batch, loss=lambda *arguments: loss_fn(*arguments).mean())


def test_a_list_is_no_array(batch):
    with pytest.raises(TypeError, match=r"client_ids is \[0, 1, 2\]; it must be an array \[3\]"):
        run(batch, client_ids=[0, 1, 2])
    with pytest.raises(ValueError, match="examples must be a pytree of arrays"):
        run(batch, examples=[0.0, 1.0])


def test_duplicate_client_ids(batch):
    with pytest.raises(ValueError, match=r"client_ids is \[1, 4, 1\]; ids must be distinct"):
        run(batch, client_ids=jnp.array([1, 4, 1]))
    # Where ids are traced, they cannot be checked; padded slots may repeat.
    run(batch, client_ids=jnp.array([1, N, N]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client_ids": jnp.array([0, 1, N + 1])}, "ids must lie between 0 and 6"),
        ({"client_ids": jnp.array([0, -1, 2])}, "ids must lie between 0 and 6"),
        ({"client_ids": jnp.arange(4)}, r"client_ids has shape \(4,\); it must be \(3,\)"),
        ({"num_steps": jnp.array([1, 2, 3])}, "num_steps is .* between 0 and 2"),
        ({"weights": jnp.array([1.0, -1.0, 1.0])}, "weights is .* at least 0"),
        ({"weights": jnp.array([1.0, np.nan, 1.0])}, "weights is .* finite"),
        ({"example_mask": jnp.ones((3, 2), bool)}, r"example_mask has shape \(3, 2\)"),
        ({"examples": {"x": jnp.ones((3, 2)), "y": jnp.ones((3, 2, 2))}}, r"\[S, K, B, \.\.\.\]"),
        ({"examples": {"x": jnp.ones((3, 2, 2)), "y": jnp.ones((3, 1, 2))}}, "the same"),
        ({"source": {"x": jnp.ones((4, 5)), "y": jnp.zeros(4, int)}}, "integer indices"),
        ({"full_examples": jnp.ones((3, 5))}, "given together"),
    ],
)
def test_batches(batch, changes, message):
    with pytest.raises(ValueError, match=message):
        run(batch, **changes)


def test_params_and_client_counts():
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    with pytest.raises(TypeError, match=r"params\['n'\] has dtype int32"):
        algorithm.init({"n": jnp.arange(3)}, 2)
    with pytest.raises(ValueError, match="num_clients is 0; it must be at least 1"):
        algorithm.init(initial_params(), 0)
    with pytest.raises(ValueError, match="memory_size is 8; it must be between 0 and 7"):
        algorithms.gradma_s(loss_fn, client_lr=0.1, memory_size=8).init(initial_params(), N)


def test_unknown_client_maps():
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    with pytest.raises(ValueError, match=r"client_map is 'vmpa'.*Did you mean 'vmap'"):
        build_round(algorithm, "vmpa")
    with pytest.raises(ValueError, match="n in chunk:n must be at least 1"):
        build_round(algorithm, "chunk:x")


@pytest.mark.parametrize("name", ["fedavgm", "fedproxm", "moonm", "fedmlbm"])
def test_no_momentum_is_a_number(name):
    given = {"prox_weight": 0.1} if name == "fedproxm" else {}
    model = models.mlp(3, hidden=(4,))
    first = model if name in ("moonm", "fedmlbm") else lambda params, examples, key: examples
    with pytest.raises(TypeError, match="momentum is None; it must be a number"):
        getattr(algorithms, name)(first, client_lr=0.1, momentum=None, **given)
