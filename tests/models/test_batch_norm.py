"""BatchNorm with running statistics in the params, against NumPy and flax."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, build_round, data, models, with_frozen
from fedjax_lab.models.batch_norm import BatchNorm
from fedjax_lab.simulation.evaluate import build_evaluation, with_recomputed_statistics
from tests.federations import batch_of
from tests.tiers import few

KEY = jax.random.key(0)


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
        examples = data.Examples(x, jnp.array([0, 1, 2, 0]))
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


def padded_round(mask):
    """Two clients with one mini-batch of four places and weights 1 and 3; returns (x, batch)."""
    x = normal((2, 1, 4, 5))
    x[~mask] = np.inf  # what stands in the place of padding does not matter
    examples = data.Examples(x, jnp.zeros((2, 1, 4), jnp.int32))
    weights = jnp.array([1.0, 3.0])
    return x, batch_of(examples, example_mask=jnp.asarray(mask), weights=weights)


def test_server_averages_the_statistics_of_the_real_examples():
    """A round of FedAvg, one step; the second client has two examples, the last places padding."""
    model, params = network()
    mask = np.ones((2, 1, 4), bool)
    mask[1, 0, 2:] = False
    x, batch = padded_round(mask)
    algorithm = algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.25)
    state, _ = jax.jit(algorithm.round_fn)(algorithm.init(params, 2), batch)
    after = statistics_of(algorithm.params(state))
    first, second = before_norm(params, x[0, 0]), before_norm(params, x[1, 0, :2])
    for name, statistic in (
        ("running_mean", lambda h: h.mean(0)),
        ("running_var", lambda h: h.var(0, ddof=1)),
    ):
        mean = 0.25 * statistic(first) + 0.75 * statistic(second)
        expected = 0.75 * np.asarray(statistics_of(params)[name]) + 0.25 * mean
        np.testing.assert_allclose(after[name], expected, rtol=1e-4)


@pytest.mark.parametrize("real", few(1, [[1, 1, 0, 1, 0], [0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]))
def test_masked_images_do_not_count(real):
    """Values and gradients are flax's on the real images alone; one image has 20 numbers."""
    real = np.array(real, bool)
    x, weights = normal((5, 4, 5, 2)), normal((5, 4, 5, 2), seed=1)
    weights[~real] = 0
    running = {"running_mean": jnp.zeros(2), "running_var": jnp.ones(2)}

    def ours(x, scale, bias, running):
        params = {"scale": scale, "bias": bias, **running}
        y = BatchNorm().apply({"params": params}, x, jnp.asarray(real), rngs={"dropout": KEY})
        return (y * weights).sum(), y

    def flaxs(x, scale, bias, running):
        norm = nn.BatchNorm(use_running_average=False, epsilon=1e-5)
        stats = {"mean": jnp.zeros(2), "var": jnp.ones(2)}
        collections = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
        y = norm.apply(collections, x, mutable=["batch_stats"])[0]
        return (y * weights[real]).sum(), y

    given = jnp.array([0.5, 2.0]), jnp.array([1.0, -1.0]), running
    gradient = lambda f, x: jax.jit(jax.grad(f, (0, 1, 2, 3), has_aux=True))(x, *given)  # noqa: E731
    (mine, y), (theirs, y_alone) = gradient(ours, x), gradient(flaxs, x[real])
    np.testing.assert_allclose(y[real], y_alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mine[0][real], theirs[0], rtol=1e-3, atol=1e-4)
    assert (np.asarray(mine[0])[~real] == 0).all()
    for a, b in zip(mine[1:3], theirs[1:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    numbers = x[real].reshape(-1, 2).astype(np.float64)
    pull = mine[3]  # r - s
    np.testing.assert_allclose(pull["running_mean"], -numbers.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(pull["running_var"], 1 - numbers.var(0, ddof=1), rtol=1e-3)


@pytest.mark.parametrize("number", [0, 1])
def test_fewer_than_two_real_numbers_of_a_channel_leave_the_statistics(number):
    """The running ones normalise: there is no variance of one number."""
    model, params = network()
    x, mask = normal((4, 5)), np.arange(4) < number

    @jax.jit
    def run(params):
        logits = lambda p: model.apply(p, x, KEY, mask=jnp.asarray(mask))  # noqa: E731
        return logits(params), jax.grad(lambda p: (logits(p)[0] ** 2).sum())(params)

    logits, grads = run(params)
    running = statistics_of(params)
    mean, var = np.asarray(running["running_mean"]), np.asarray(running["running_var"])
    np.testing.assert_allclose(logits, numpy_forward(params, x, mean, var), rtol=1e-4)
    for name in ("running_mean", "running_var"):
        np.testing.assert_array_equal(statistics_of(grads)[name], 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@functools.partial(jax.jit, static_argnames="lr")
def of_pytorch(params, x, y, lr):
    """A step of SGD and of running statistics on the real examples, in plain JAX."""

    def loss(params):
        h = x @ params["blocks_0"]["dense"]["kernel"] + params["blocks_0"]["dense"]["bias"][None]
        norm, last = statistics_of(params), params["classifier"]
        unit = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-5)
        z = jax.nn.relu(unit * norm["scale"][None] + norm["bias"][None])
        log = jax.nn.log_softmax(z @ last["kernel"] + last["bias"][None])
        return -log[jnp.arange(len(y)), y].mean(), h

    grads, h = jax.grad(loss, has_aux=True)(params)
    new = jax.tree.map(lambda p, g: p - lr * g, params, grads)
    running = {"running_mean": h.mean(0), "running_var": h.var(0, ddof=1)}
    for name, value in running.items():
        statistics_of(new)[name] = (1 - lr) * statistics_of(params)[name] + lr * value
    return new


@pytest.mark.methods
def test_a_run_with_a_small_last_mini_batch_is_pytorchs():
    """Six examples in mini-batches of four and two, for three passes."""
    model, params = network()
    x, y = normal((6, 5)), np.arange(6, dtype=np.int32) % 3
    clients = data.partition((x, y), np.zeros(6, int), 1)
    algorithm = algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.1)
    batch = data.draw_batch(clients, KEY, 0, cohort_size=1, local_epochs=3, batch_size=4)
    state, _ = jax.jit(algorithm.round_fn)(algorithm.init(params, 1), batch)
    expected, sizes = jax.tree.map(jnp.asarray, params), []
    for places, real in zip(batch.examples[0], batch.example_mask[0], strict=True):
        own = np.asarray(places)[np.asarray(real)]
        sizes.append(len(own))
        expected = of_pytorch(expected, x[own], y[own], 0.1)
    assert sizes == [4, 2] * 3
    for ours, theirs in zip(
        jax.tree.leaves(algorithm.params(state)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def with_model(factory):
    return lambda model: factory(model, client_lr=0.1)


def with_loss(factory, change=lambda apply: apply, **options):
    return lambda model: factory(
        models.classification_loss(change(model.apply)), client_lr=0.1, **options
    )


def low(apply):
    return models.mixed_precision(models.Model(None, apply)).apply


PASS_IT_ON = {
    "moon": with_model(algorithms.moon),
    "fedmlb": with_model(algorithms.fedmlb),
    "scaffold-I": with_loss(algorithms.scaffold, control_update="I"),
    "mime": with_loss(algorithms.mime, momentum=0.5),
    "held": with_loss(algorithms.fedavg, models.hold_statistics),
    "bfloat16": with_loss(algorithms.fedavg, low),
    "frozen": lambda model: with_frozen(
        lambda loss: algorithms.fedavg(loss, client_lr=0.1),
        lambda p, e, key, w, mask=None: (
            w * models.classification_loss(model.apply)(p, e, key, mask=mask)
        ),
        jnp.float32(1),
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "moon" else pytest.mark.methods) for n in PASS_IT_ON],
)
@pytest.mark.methods
def test_every_way_passes_the_mask_on(name):
    """A round with two real examples of four places is the round with the two."""
    model, params = network()
    mask = np.ones((2, 1, 4), bool)
    mask[..., 2:] = False
    _, padded = padded_round(mask)
    alone = padded._replace(
        examples=jax.tree.map(lambda leaf: leaf[:, :, :2], padded.examples), example_mask=None
    )
    algorithm = PASS_IT_ON[name](model)
    first = algorithm.init(params, 2)
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (padded, alone):
            state, _ = jax.jit(algorithm.round_fn)(first, batch)
            state, _ = jax.jit(algorithm.round_fn)(state, batch._replace(round=jnp.int32(1)))
            ends.append(algorithm.params(state))
    moved = 0
    for ours, expected, start in zip(*map(jax.tree.leaves, (*ends, params)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-3, atol=1e-4)
        moved = max(moved, np.abs(ours - start).max())
    assert moved > 0.01


@pytest.mark.parametrize(
    "name",
    [
        "lenet5",
        pytest.param("vgg11", marks=pytest.mark.methods),
        pytest.param("resnet20", marks=pytest.mark.methods),
    ],
)
@pytest.mark.methods
def test_models_of_images_leave_padding_out(name):
    model = models.build(name, 10, norm="batch")
    x, mask = normal((4, 32, 32, 3)), jnp.arange(4) < 2
    params = model.init(KEY, x[:1])
    logits = jax.jit(model.apply)(params, x, KEY, mask=mask)
    alone = jax.jit(model.apply)(params, x[:2], KEY)
    np.testing.assert_allclose(logits[:2], alone, rtol=1e-2, atol=1e-3)


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


def test_statistics_do_not_count_as_drift():
    """One client takes a step of SGD on features of a large mean and variance."""
    model, params = network()
    clients = data.partition((100 * normal((6, 5)) + 50, np.arange(6) % 3), np.zeros(6, int), 1)
    batch = data.draw_batch(clients, KEY, 0, cohort_size=1, local_steps=1, batch_size=6)
    algorithm = algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.1)
    state, metrics = build_round(algorithm, "scan")(algorithm.init(params, 1), batch)
    moved = jax.tree.map(lambda new, old: np.asarray(new - old), algorithm.params(state), params)
    squares = jax.tree.map(lambda leaf: np.square(leaf, dtype=np.float64).sum(), moved)
    of_statistics = [statistics_of(squares)[name] for name in ("running_mean", "running_var")]
    rest = sum(jax.tree.leaves(squares)) - sum(of_statistics)
    assert sum(of_statistics) > 100 * rest
    assert metrics["client_drift"] == pytest.approx(rest, rel=1e-3)


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


def test_without_a_key_there_are_no_statistics_to_recompute():
    model, params = network()
    with pytest.raises(TypeError, match="key is None; the statistics are those of training"):
        models.recompute_statistics(model.apply, params, normal((4, 5)), None)


class WithAMaskOfItsOwn(nn.Module):
    """All examples of the mini-batch are in the statistics, also the padded ones."""

    @nn.compact
    def __call__(self, x):
        return BatchNorm(name="norm")(x, None)


def test_a_mask_that_the_module_gives_stays():
    model, x = models.from_linen(WithAMaskOfItsOwn()), normal((4, 5))
    params = model.init(KEY, x)
    found = model.apply(params, x, KEY, mask=jnp.array([True, True, False, True]))
    expected = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-5)


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
    evaluate = build_evaluation(counts, data.Examples(test, labels.astype(np.int32)))
    scores = with_recomputed_statistics(evaluate, model.apply, x)(params)
    found = [float(scores[name]) for name in ("accuracy", "accuracy_recomputed")]
    expected = [(answer == labels).mean() for answer in answers]
    assert abs(expected[0] - expected[1]) > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-6)
