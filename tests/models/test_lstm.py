"""The language model: its size, and its words' logits against a loop in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data, models

SMALL = {"embedding": 3, "hidden": 5, "dropout": 0.0}
WORDS = np.random.default_rng(0).integers(0, 7, (2, 6)).astype(np.int32)


def draw(model, seed=1):
    """Parameters larger than the model's own, so that every gate matters."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0), WORDS)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


@pytest.mark.parametrize(("tie", "total"), [(False, 50_065_078), (True, 28_434_378)])
def test_number_of_parameters_on_wikitext2(tie, total):
    model = models.build("lstm", 33_278, tie=tie)
    words = jax.ShapeDtypeStruct((1, 35), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), words)
    layer = {
        "input_kernel": 650 * 2600,
        "hidden_kernel": 650 * 2600,
        "input_bias": 2600,
        "hidden_bias": 2600,
    }
    expected = {
        "embedding": 33_278 * 650,
        "layers_0": layer,
        "layers_1": layer,
        "decoder_bias": 33_278,
        **({} if tie else {"decoder": 650 * 33_278}),
    }
    assert jax.tree.map(lambda leaf: leaf.size, params) == expected
    assert models.count_params(params) == total
    assert jax.eval_shape(model.apply, params, words).shape == (1, 35, 33_278)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_layer(layer, inputs):
    """One sequence [L, E] -> [L, H] in float64, a word and a gate at a time."""
    size = layer["hidden_kernel"].shape[0]
    gates = {
        name: [layer[part][..., i * size : (i + 1) * size] for part in layer]
        for i, name in enumerate(["input", "forget", "cell", "output"])
    }
    h, c, outputs = np.zeros(size), np.zeros(size), []
    for x in inputs:
        value = {}
        for name, (wx, wh, bx, bh) in gates.items():
            value[name] = x @ wx + bx + h @ wh + bh
        c = sigmoid(value["forget"]) * c + sigmoid(value["input"]) * np.tanh(value["cell"])
        h = sigmoid(value["output"]) * np.tanh(c)
        outputs.append(h)
    return np.array(outputs)


def numpy_logits(params, options):
    """Of ``WORDS``, in float64: [B, L, V]."""
    order = ("input_kernel", "hidden_kernel", "input_bias", "hidden_bias")
    h = params["embedding"][WORDS]
    for i in range(options.get("layers", 2)):
        layer = {name: params[f"layers_{i}"][name] for name in order}
        h = np.array([numpy_layer(layer, inputs) for inputs in h])
    decoder = params["embedding"].T if "tie" in options else params["decoder"]
    return h @ decoder + params["decoder_bias"]


OPTIONS = [SMALL, {**SMALL, "embedding": 5, "layers": 1, "tie": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_logits_are_numpys(options):
    model = models.build("lstm", 7, **options)
    params = draw(model)
    logits = jax.jit(model.apply)(params, WORDS)
    assert logits.shape == (2, 6, 7)
    own = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    np.testing.assert_allclose(logits, numpy_logits(own, options), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_is_numpys_difference_quotient(options):
    model = models.build("lstm", 7, **options)
    params = draw(model)
    weights = np.random.default_rng(2).normal(size=(2, 6, 7)).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda p: (model.apply(p, WORDS) * weights).sum()))(params)
    own = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    leaves, structure = jax.tree.flatten(own)
    for place, found in enumerate(jax.tree.leaves(gradient)):
        for seed in range(3):
            direction = np.random.default_rng(seed).normal(size=found.shape)
            sums = []
            for step in (1e-5, -1e-5):
                changed = [*leaves]
                changed[place] = leaves[place] + step * direction
                logits = numpy_logits(jax.tree.unflatten(structure, changed), options)
                sums.append((logits * weights).sum())
            slope = np.asarray(found, np.float64) * direction
            error = 1e-5 * np.abs(slope).sum()
            np.testing.assert_allclose(slope.sum(), (sums[0] - sums[1]) / 2e-5, rtol=0, atol=error)


def test_a_word_is_foretold_from_those_before_it_only():
    model = models.build("lstm", 7, **SMALL)
    params = draw(model)
    later = WORDS.copy()
    later[0, 4:] = (WORDS[0, 4:] + 1) % 7
    apply = jax.jit(model.apply)
    before, after = (np.asarray(apply(params, words)) for words in (WORDS, later))
    np.testing.assert_array_equal(before[0, :4], after[0, :4])
    np.testing.assert_array_equal(before[1], after[1])
    assert (np.asarray(before[0, 4:]) != np.asarray(after[0, 4:])).any()


def test_initialisation_is_that_of_pytorchs_example():
    model = models.build("lstm", 400, embedding=50, hidden=100)
    params = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0), WORDS))
    layer = params["layers_1"]
    bounds = [(params["embedding"], 0.1), (params["decoder"], 0.1)]
    bounds += [(leaf, 100**-0.5) for leaf in jax.tree.leaves(layer)]
    for leaf, bound in bounds:
        assert 0.95 * bound < np.abs(leaf).max() <= bound
        np.testing.assert_allclose(np.std(leaf), bound / np.sqrt(3), rtol=0.1)
    assert (np.asarray(layer["input_bias"]) != np.asarray(layer["hidden_bias"])).all()
    np.testing.assert_array_equal(params["decoder_bias"], 0)


def test_dropout_needs_a_key():
    model = models.build("lstm", 7, **{**SMALL, "dropout": 0.5})
    params = draw(model)
    without = models.build("lstm", 7, **SMALL)
    evaluations = jax.jit(lambda p: [each.apply(p, WORDS) for each in (model, without)])(params)
    np.testing.assert_array_equal(*evaluations)
    apply, key = jax.jit(model.apply), jax.random.key(0)
    once, again, other = (apply(params, WORDS, k) for k in (key, key, jax.random.key(1)))
    np.testing.assert_array_equal(once, again)
    assert (np.asarray(once) != np.asarray(other)).any()


def test_gradient_reaches_every_leaf_and_the_biases_act_by_their_sum():
    model = models.build("lstm", 7, **SMALL)
    examples = type("Examples", (), {"x": WORDS, "y": np.roll(WORDS, -1, axis=1)})
    loss_fn = models.language_model_loss(model.apply)
    gradient = jax.jit(jax.grad(lambda p: loss_fn(p, examples, jax.random.key(0)).mean()))(
        draw(model)
    )
    assert all((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(gradient))
    for name in ("layers_0", "layers_1"):
        np.testing.assert_array_equal(gradient[name]["input_bias"], gradient[name]["hidden_bias"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": 0}, ValueError, "layers is 0; it must be at least 1"),
        ({"hidden": 2.5}, TypeError, "hidden is 2.5"),
        ({"dropout": 1}, ValueError, "dropout is 1; it must be .* less than 1"),
        ({"tie": True, "hidden": 4}, ValueError, "embedding is 650 and hidden 4; with tie"),
    ],
)
def test_options_out_of_range(options, error, message):
    with pytest.raises(error, match=message):
        models.build("lstm", 7, **options)


def test_params_may_be_of_numpy():
    model = models.lstm(5, embedding=4, hidden=4, layers=1, dropout=0.0)
    params = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    x = jnp.array([[1, 4, 2]])
    found = model.apply(jax.tree.map(np.asarray, params), x)
    np.testing.assert_allclose(found, model.apply(params, x), rtol=1e-6)
    packed = data.Tokens(x, jnp.ones_like(x))
    with pytest.raises(TypeError, match="x is Tokens, whose segments an LSTM does not keep apart"):
        model.apply(params, packed)
    with pytest.raises(TypeError, match="x is Tokens"):
        models.generate(model.apply, params, packed, 2)


def test_inputs_that_are_no_sequences_of_words():
    model = models.build("lstm", 7, **SMALL)
    with pytest.raises(ValueError, match=r"shape \(3, 8, 8, 1\) and dtype uint8; it must be words"):
        model.init(jax.random.key(0), jnp.zeros((3, 8, 8, 1), jnp.uint8))
    with pytest.raises(ValueError, match="dtype float32; it must be words"):
        model.init(jax.random.key(0), jnp.zeros((3, 4)))


def test_the_precision_around_the_model_holds_in_its_gradient():
    """In the program for a TPU, where the default is bfloat16."""
    model = models.build("lstm", 7, **SMALL)
    x = jnp.zeros((3, 8), jnp.int32)

    @jax.jit
    def loss(params):
        with jax.default_matmul_precision("float32"):
            return model.apply(params, x).sum()

    params = jax.eval_shape(model.init, jax.random.key(0), x)
    program = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("tpu",)).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
