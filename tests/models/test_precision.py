"""Mixed precision: what is computed in bfloat16, what stays float32, and what that costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, models
from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk

KEY = jax.random.key(0)
LOW, FULL = jnp.bfloat16, jnp.float32
ROUNDING = 2.0**-8  # of bfloat16: half the distance from 1 to the next larger number
MODELS = {
    "mlp-batch": models.mlp(3, hidden=(8,), norm="batch"),
    "lenet5-group": models.lenet5(3, widths=(4, 4, 8, 8), norm="group", padding="SAME"),
    "vit": models.vit(3, width=8, depth=1, num_heads=2),
    "lstm": models.lstm(7, embedding=4, hidden=4, layers=1, dropout=0.0),
}


def problem(name):
    """(model, params, loss_fn of a model, examples)."""
    rng = np.random.default_rng(0)
    model = MODELS[name]
    if name == "lstm":
        words = rng.integers(0, 7, (6, 5)).astype(np.int32)
        examples, loss = data.Examples(words, words), models.language_model_loss
    else:
        x = rng.normal(size=(6, 8, 8, 1)).astype(FULL)
        examples = data.Examples(x, rng.integers(0, 3, 6).astype(np.int32))
        loss = models.classification_loss
    params = jax.jit(model.init)(KEY, examples.x[:1])
    return model, params, lambda m: loss(m.apply), examples


def equations(jaxpr):
    """All equations of a jaxpr, also those inside of others."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")
        ):
            if hasattr(parameter, "jaxpr"):
                yield from equations(parameter.jaxpr)
            elif hasattr(parameter, "eqns"):
                yield from equations(parameter)


@pytest.mark.parametrize(
    "name",
    [
        "mlp-batch",
        *(pytest.param(m, marks=pytest.mark.methods) for m in ("vit", "lstm")),
        pytest.param("lenet5-group", marks=pytest.mark.slow),
    ],
)
def test_products_are_bfloat16_and_everything_outside_float32(name):
    model, params, loss, examples = problem(name)
    low = models.mixed_precision(model)
    grad = jax.value_and_grad(lambda params, m: loss(m)(params, examples, KEY).mean())
    both = jax.jit(lambda params: (grad(params, low), grad(params, model)))
    traced = jax.make_jaxpr(lambda params: grad(params, low))(params)
    used = {"dot_general": set(), "rsqrt": set(), "reduce_max": set()}
    for equation in equations(traced.jaxpr):
        for name_, dtypes in used.items():
            if equation.primitive.name == name_:
                dtypes.update(v.aval.dtype for v in equation.invars)
    assert used["dot_general"] == {jnp.dtype(LOW)}
    assert used["rsqrt"] <= {jnp.dtype(FULL)}  # of norms
    assert used["reduce_max"] == {jnp.dtype(FULL)}  # of the softmax of attention and of the loss

    (value, gradient), (exact, exact_gradient) = both(params)
    assert value.dtype == exact.dtype == FULL
    assert jax.tree.map(jnp.result_type, gradient) == jax.tree.map(jnp.result_type, params)
    assert 0 < abs(value - exact) < 4 * ROUNDING * exact
    gradient, exact_gradient = jax.tree.map(np.asarray, (gradient, exact_gradient))
    squares = jax.tree.map(lambda a, b: np.square(a - b).sum(), gradient, exact_gradient)
    size = sum(np.square(g).sum() for g in jax.tree.leaves(exact_gradient))
    assert 0 < sum(jax.tree.leaves(squares)) < (20 * ROUNDING) ** 2 * size


@pytest.mark.parametrize(
    "name", ["mlp-batch", pytest.param("lenet5-group", marks=pytest.mark.methods)]
)
def test_the_parts_make_the_whole(name):
    model, params, _, examples = problem(name)
    low = models.mixed_precision(model)

    @jax.jit
    def run(params, x):
        h = x
        for block in low.blocks:
            h = block(params, h)
        return low.apply(params, x), low.head(params, low.features(params, x)), h

    logits = run(params, examples.x)
    assert all(part.dtype == FULL for part in logits)
    for part in logits[1:]:
        np.testing.assert_allclose(part, logits[0], atol=2 * ROUNDING)


@pytest.mark.methods
def test_running_statistics_keep_float32():
    model, params, loss, examples = problem("mlp-batch")
    norm = params["blocks_0"]["norm"]["batch"]
    norm["running_mean"] = norm["running_mean"] + 1000.3  # bfloat16 has 1000 and 1004
    norm["running_var"] = norm["running_var"] + 1000.3

    def gradient(m):
        return jax.jit(jax.grad(lambda params: loss(m)(params, examples, KEY).mean()))(params)

    low, exact = (
        gradient(m)["blocks_0"]["norm"]["batch"] for m in (models.mixed_precision(model), model)
    )
    for name in ("running_mean", "running_var"):
        np.testing.assert_allclose(low[name], exact[name], atol=0.05)


def test_an_lstm_adds_up_in_float32():
    """Saturated gates: the cell state gains 1/512 a word, which bfloat16 adds up to 1/2 at most."""
    model = models.lstm(2, embedding=1, hidden=1, layers=1, dropout=0.0)
    words = np.zeros((1, 600), np.int32)
    shapes = jax.eval_shape(model.init, KEY, words)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    params["layers_0"]["input_bias"] = np.array([30.0, 30.0, 1 / 512, 30.0], FULL)
    params["decoder"] = np.array([[1.0, 0.0]], FULL)
    logits = np.asarray(jax.jit(models.mixed_precision(model).apply)(params, words))
    np.testing.assert_allclose(logits[0, -1, 0], np.tanh(600 / 512), rtol=2 * ROUNDING)


@pytest.mark.slow
def test_digits_are_learnt_as_well():
    """Mean accuracy over three seeds is within 0.02 of float32's."""
    train, test = data.load("digits")
    clients = data.partition(train, "iid", num_clients=10, seed=0)
    mean, std, scale = data.normalization(train)
    prepare = data.preprocess(mean, std, scale=scale)
    schedule = Schedule(cohort_size=5, batch_size=32, local_steps=5)
    model = models.mlp(10, hidden=(32,))
    accuracy, last = {}, {}
    for dtype in ("float32", "bfloat16"):
        trained = models.mixed_precision(model, dtype)
        algorithm = algorithms.fedavg(
            models.classification_loss(trained.apply, prepare), client_lr=0.1
        )
        chunk = build_chunk(Computation(algorithm, schedule), Placement(parse_client_map("scan")))
        counts = jax.jit(models.accuracy_counts(trained.apply, prepare))
        for seed in range(3):
            params = model.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)))
            state = algorithm.init(params, 10)
            state, _ = chunk(state, clients, jax.random.key(seed), jnp.int32(0), length=40)
            params = algorithm.params(state)
            assert all(leaf.dtype == FULL for leaf in jax.tree.leaves((params, state.server)))
            last[dtype] = jax.tree.leaves(params)[-1]
            correct, _ = counts(params, test)
            accuracy.setdefault(dtype, []).append(correct.mean())
    means = {dtype: np.mean(values) for dtype, values in accuracy.items()}
    assert means["float32"] > 0.9
    assert abs(means["bfloat16"] - means["float32"]) < 0.02
    assert not np.array_equal(*last.values())


def test_dtypes():
    model = MODELS["lstm"]
    assert models.mixed_precision(model, "float32") is model
    assert models.mixed_precision(model, jnp.float32) is model
    for wrong, name in ((jnp.float16, "float16"), ("half", "float16"), ("bf", "bf")):
        with pytest.raises(ValueError, match=f"dtype is {name}; it must be float32 or bfloat16"):
            models.mixed_precision(model, wrong)
    bare = models.mixed_precision(models.Model(model.init, model.apply))
    assert (bare.features, bare.head, bare.blocks) == (None, None, None)
