"""BatchNorm with running statistics in the params, against NumPy and flax."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import CohortBatch, algorithms, models
from fedjax_lab.models.batch_norm import BatchNorm
from fedjax_lab.simulation.evaluate import build_evaluation, with_recomputed_statistics

KEY = jax.random.key(0)


class Examples(NamedTuple):
    x: jax.Array
    y: jax.Array


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def network(norm="batch"):
    """One hidden layer of 4 on 5 inputs; scales, biases and statistics are not at their start."""
    model = models.mlp(3, hidden=(4,), norm=norm)
    rng = np.random.default_rng(3)
    params = jax.tree.map(
        lambda leaf: rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32),
        jax.eval_shape(model.init, KEY, jnp.zeros((1, 5))),
    )
    return model, params


def statistics_of(params):
    return params["blocks_0"]["norm"]["batch"]


def before_norm(params, x):
    """What the hidden layer's norm sees, in float64."""
    layer = params["blocks_0"]["dense"]
    return np.asarray(x, np.float64) @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])


def numpy_forward(params, x, mean, var):
    norm, last = statistics_of(params), params["classifier"]
    h = (before_norm(params, x) - mean) / np.sqrt(var + 1e-5)
    h = np.maximum(h * np.asarray(norm["scale"]) + np.asarray(norm["bias"]), 0)
    return h @ np.asarray(last["kernel"]) + np.asarray(last["bias"])


def test_training_normalises_with_the_mini_batch_and_evaluation_with_the_running_statistics():
    model, params = network()
    x = 2 * normal((6, 5)) + 1
    h = before_norm(params, x)
    trained, evaluated = jax.jit(lambda x: (model.apply(params, x, KEY), model.apply(params, x)))(x)
    np.testing.assert_allclose(trained, numpy_forward(params, x, h.mean(0), h.var(0)), rtol=1e-4)
    running = statistics_of(params)
    mean, var = np.asarray(running["running_mean"]), np.asarray(running["running_var"])
    np.testing.assert_allclose(evaluated, numpy_forward(params, x, mean, var), rtol=1e-4)
    # Alone, among others, twice: the same.
    apply, evaluated = jax.jit(model.apply), np.asarray(evaluated)
    np.testing.assert_allclose(apply(params, x[:1]), evaluated[:1], rtol=1e-6)
    others = np.concatenate([x[:1], np.full_like(x[1:], 7)])
    expected = np.asarray(apply(params, x))[0]
    np.testing.assert_array_equal(np.asarray(apply(params, others))[0], expected)


def test_gradient_on_images_is_flaxs():
    x, weights = normal((3, 4, 5, 2)), normal((3, 4, 5, 2), seed=1)
    scale, bias = jnp.array([0.5, 2.0]), jnp.array([1.0, -1.0])
    running = {"running_mean": jnp.zeros(2), "running_var": jnp.ones(2)}

    def ours(x, scale, bias):
        params = {"scale": scale, "bias": bias, **running}
        return (BatchNorm().apply({"params": params}, x, rngs={"dropout": KEY}) * weights).sum()

    def flaxs(x, scale, bias):
        norm = nn.BatchNorm(use_running_average=False, epsilon=1e-5)
        collections = {"params": {"scale": scale, "bias": bias}, "batch_stats": {}}
        collections["batch_stats"] = {"mean": jnp.zeros(2), "var": jnp.ones(2)}
        return (norm.apply(collections, x, mutable=["batch_stats"])[0] * weights).sum()

    gradient = lambda f: jax.jit(jax.grad(f, (0, 1, 2)))(x, scale, bias)  # noqa: E731
    for mine, theirs in zip(gradient(ours), gradient(flaxs), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)


def test_running_statistics_are_moving_averages_over_the_steps_of_sgd():
    model, params = network()
    lr = 0.25
    loss_fn = models.classification_loss(model.apply)

    @jax.jit
    def step(params, x):
        examples = Examples(x, jnp.array([0, 1, 2, 0]))
        grads = jax.grad(lambda p: loss_fn(p, examples, KEY).mean())(params)
        return jax.tree.map(lambda p, g: p - lr * g, params, grads)

    running = statistics_of(params)
    mean, var = np.asarray(running["running_mean"]), np.asarray(running["running_var"])
    for seed in range(4):
        x = normal((4, 5), seed)
        h = before_norm(params, x)
        mean = (1 - lr) * mean + lr * h.mean(0)
        var = (1 - lr) * var + lr * h.var(0, ddof=1)
        params = step(params, x)
    np.testing.assert_allclose(statistics_of(params)["running_mean"], mean, rtol=1e-4)
    np.testing.assert_allclose(statistics_of(params)["running_var"], var, rtol=1e-4)


def test_server_averages_them_and_padding_counts():
    """A round of FedAvg: two clients, one step, weights 1 and 3; the last example is padding."""
    model, params = network()
    x = normal((2, 1, 4, 5))
    examples = Examples(x, jnp.zeros((2, 1, 4), jnp.int32))
    batch = CohortBatch(
        client_ids=jnp.arange(2),
        examples=examples,
        key=KEY,
        round=jnp.int32(0),
        example_mask=jnp.ones((2, 1, 4), bool).at[1, 0, 3].set(False),
        weights=jnp.array([1.0, 3.0]),
    )
    algorithm = algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.25)
    state, _ = jax.jit(algorithm.round_fn)(algorithm.init(params, 2), batch)
    after = statistics_of(algorithm.params(state))
    repeated = x.copy()
    repeated[1, 0, 3] = x[1, 0, 0]  # what stands in the place of padding
    first, second = (before_norm(params, client[0]) for client in repeated)
    for name, statistic in (
        ("running_mean", lambda h: h.mean(0)),
        ("running_var", lambda h: h.var(0, ddof=1)),
    ):
        mean = 0.25 * statistic(first) + 0.75 * statistic(second)
        expected = 0.75 * np.asarray(statistics_of(params)[name]) + 0.25 * mean
        np.testing.assert_allclose(after[name], expected, rtol=1e-4)


def test_frozen_statistics_normalise_in_training_and_stay():
    model, params = network("frozen_batch")
    x = normal((4, 5))
    trained = network("batch")[0]

    @jax.jit
    def run(params):
        grads = jax.grad(lambda params: (model.apply(params, x, KEY) ** 2).sum())(params)
        out = model.apply(params, x, KEY), model.apply(params, x), trained.apply(params, x)
        return out, jax.tree.map(lambda g: (g == 0).all(), grads)

    (training, evaluation, running), none = run(params)
    np.testing.assert_array_equal(training, evaluation)
    np.testing.assert_allclose(evaluation, running, rtol=1e-6)
    for is_statistic, is_zero in zip(
        jax.tree.leaves(models.running_statistics(params)), jax.tree.leaves(none), strict=True
    ):
        assert bool(is_zero) == is_statistic


def test_held_statistics_have_no_gradient_and_are_recomputed():
    model, params = network()
    x = normal((6, 5))
    held = models.hold_statistics(model.apply)
    gradient = lambda apply: jax.grad(lambda p: (apply(p, x, KEY) ** 2).sum())  # noqa: E731
    both = jax.jit(lambda params: [gradient(apply)(params) for apply in (held, model.apply)])
    which = models.running_statistics(params)
    assert sum(jax.tree.leaves(which)) == 2
    for is_statistic, ours, full in zip(*map(jax.tree.leaves, (which, *both(params))), strict=True):
        np.testing.assert_array_equal(ours, np.zeros_like(full) if is_statistic else full)

    h = before_norm(params, x)
    new = jax.jit(lambda params: models.recompute_statistics(model.apply, params, x, KEY))(params)
    np.testing.assert_allclose(statistics_of(new)["running_mean"], h.mean(0), rtol=1e-4)
    np.testing.assert_allclose(statistics_of(new)["running_var"], h.var(0, ddof=1), rtol=1e-4)
    for is_statistic, before, after in zip(
        *map(jax.tree.leaves, (which, params, new)), strict=True
    ):
        if not is_statistic:
            np.testing.assert_array_equal(before, after)


def test_statistics_are_a_mask_for_gradient_transforms():
    _, params = network()
    transform = optax.masked(optax.scale(4.0), models.running_statistics)
    grads, _ = transform.update(jax.tree.map(jnp.ones_like, params), transform.init(params), params)
    assert float(statistics_of(grads)["running_var"][0]) == 4.0
    assert float(statistics_of(grads)["scale"][0]) == 1.0


def test_negative_variances_count_as_zero():
    model, params = network()
    norm = statistics_of(params)
    norm["running_var"] = np.full(4, -0.3, np.float32)
    x = normal((2, 5))
    mean = np.asarray(norm["running_mean"])
    np.testing.assert_allclose(
        model.apply(params, x), numpy_forward(params, x, mean, np.zeros(4)), rtol=1e-3
    )


@pytest.mark.parametrize(
    ("name", "options", "shape", "weights", "statistics"),
    [
        ("mlp", {}, (28, 28, 1), 178_710, 600),
        ("lenet5_gradma", {}, (32, 32, 3), 941_834, 1_472),
        ("resnet18", {}, (32, 32, 3), 11_173_962, 9_600),
        ("resnet20", {}, (32, 32, 3), 269_722, 2 * (16 + 6 * (16 + 32 + 64))),
    ],
)
def test_batch_norm_has_the_papers_counts(name, options, shape, weights, statistics):
    model = models.build(name, 10, norm="batch", **options)
    params = jax.eval_shape(model.init, KEY, jax.ShapeDtypeStruct((1, *shape), jnp.uint8))
    which = jax.tree.leaves(models.running_statistics(params))
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    assert sum(s for s, yes in zip(sizes, which, strict=True) if yes) == statistics
    assert sum(s for s, yes in zip(sizes, which, strict=True) if not yes) == weights


def test_what_has_no_statistics_is_refused():
    model, params = network()
    with pytest.raises(ValueError, match=r"x has shape \(1, 4\): BatchNorm has no variance"):
        jax.eval_shape(model.apply, params, jnp.ones((1, 5)), KEY)
    linear = models.linear(3)
    params = jax.eval_shape(linear.init, KEY, jnp.ones((1, 5)))
    with pytest.raises(ValueError, match="params have no running statistics"):
        models.recompute_statistics(linear.apply, params, jnp.ones((2, 5)), KEY)


def test_evaluation_with_recomputed_statistics():
    model, params = network()
    x, test = normal((20, 5)), 3 * normal((200, 5), seed=1) + 1
    running = statistics_of(params)
    h = before_norm(params, x)
    answers = [
        numpy_forward(params, test, mean, var).argmax(1)
        for mean, var in (
            (np.asarray(running["running_mean"]), np.asarray(running["running_var"])),
            (h.mean(0), h.var(0, ddof=1)),
        )
    ]
    labels = np.random.default_rng(2).integers(0, 3, 200)
    counts = models.accuracy_counts(model.apply)
    evaluate = build_evaluation(counts, Examples(test, labels.astype(np.int32)))
    scores = with_recomputed_statistics(evaluate, model.apply, x)(params)
    found = [float(scores[name]) for name in ("accuracy", "accuracy_recomputed")]
    expected = [(answer == labels).mean() for answer in answers]
    assert abs(expected[0] - expected[1]) > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-6)
