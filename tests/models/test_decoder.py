"""The decoder: against its twin in NumPy, on padded and packed sequences, and its mistakes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import data, models
from fedjax_lab.models.decoder import frequencies
from fedjax_lab.models.decoder_config import RotaryScaling, config_fields, parse_decoder_config
from tests.reference import decoder_numpy
from tests.tiers import few

SCALING = RotaryScaling(8.0, 1.0, 4.0, 16)
LLAMA = models.DecoderConfig(
    vocab_size=29, width=24, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=20, head_width=8,
    rope_theta=100.0, rope_scaling=SCALING, norm_epsilon=1e-3,
)  # fmt: skip
QWEN = dataclasses.replace(
    LLAMA, head_width=6, rope_scaling=None, qkv_bias=True, tie=True, rope_theta=10000.0
)
CONFIGS = {"llama": LLAMA, "qwen": QWEN}
KEY = jax.random.key(0)


def tokens(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 29, shape).astype(np.int32)


@functools.cache
def model_and_params(kind):
    """Params large enough that every part matters, biases too."""
    model = models.decoder(CONFIGS[kind])
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(model.init, KEY, tokens((1, 3)))
    draw = lambda path, s: (  # noqa: E731
        (1.0 if "scale" in str(path) else 0.0) + rng.normal(size=s.shape).astype(np.float32) / 3
    )
    return model, jax.tree_util.tree_map_with_path(draw, shapes)


def numpy_weights(params):
    """The names and orientations of the files, written out."""
    names = {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
        "out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }  # fmt: skip
    found = {"model.embed_tokens.weight": params["embedding"]}
    found["model.norm.weight"] = params["norm"]["scale"]
    if "head" in params:
        found["lm_head.weight"] = params["head"]["kernel"].T
    for name, leaves in params["layers"].items():
        for leaf, values in leaves.items():
            for layer, value in enumerate(values):
                end = "bias" if leaf == "bias" else "weight"
                value = value.T if leaf == "kernel" else value
                found[f"model.layers.{layer}.{names[name]}.{end}"] = value
    return {name: np.asarray(value, np.float64) for name, value in found.items()}


def twin(kind, sequence):
    config, (_, params) = CONFIGS[kind], model_and_params(kind)
    scaling = config.rope_scaling and {
        "factor": 8.0, "low": 1.0, "high": 4.0, "original": 16
    }  # fmt: skip
    return decoder_numpy.logits(
        numpy_weights(params), sequence, num_heads=4, num_kv_heads=2, layers=2,
        theta=config.rope_theta, epsilon=config.norm_epsilon, scaling=scaling,
    )  # fmt: skip


@functools.cache
def run(kind):
    return jax.jit(model_and_params(kind)[0].apply)


@pytest.mark.parametrize("kind", few(1, CONFIGS))
def test_logits_are_the_twins(kind):
    """Also of padded and of packed sequences, whose padding and neighbours nobody sees."""
    params = model_and_params(kind)[1]
    x = tokens((4, 12))
    segments = np.array(
        [
            [1] * 12,
            [0] * 5 + [1] * 7,  # padded on the left
            [1] * 7 + [0] * 5,  # on the right
            [1] * 3 + [2] * 6 + [4] * 2 + [0],  # three texts
        ]
    )
    found = run(kind)(params, data.Tokens(x, segments))
    assert found.dtype == jnp.float32
    pieces = [(0, 0, 12), (1, 5, 12), (2, 0, 7), (3, 0, 3), (3, 3, 9), (3, 9, 11)]
    for row, start, end in pieces:
        expected = twin(kind, x[row, start:end])
        np.testing.assert_allclose(found[row, start:end], expected, rtol=0, atol=2e-5)
    assert np.isfinite(found).all()
    plain = run(kind)(params, x[:1])
    np.testing.assert_allclose(plain, found[:1], rtol=0, atol=1e-5)


def test_wavelengths_are_those_of_the_twin():
    """Of a head wide enough that some stay, some are stretched, and some lie between."""
    config = dataclasses.replace(LLAMA, head_width=32, rope_scaling=RotaryScaling(8.0, 1, 4, 64))
    scaling = {"factor": 8.0, "low": 1, "high": 4, "original": 64}
    expected = [decoder_numpy.angle(i, 32, 100.0, scaling) for i in range(16)]
    found = frequencies(config)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    kinds = {round(ratio, 3) for ratio in found * 100.0 ** (np.arange(16) / 16)}
    assert {1.0, 0.125} < kinds


@pytest.mark.methods
def test_remat_and_the_number_of_layers_change_no_number_and_no_program():
    params = model_and_params("llama")[1]
    x = tokens((2, 6))

    def loss(model, params):
        return jnp.square(model.apply(params, x)).mean()

    plain, again = (
        jax.jit(jax.grad(functools.partial(loss, models.decoder(LLAMA, remat=remat))))(params)
        for remat in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, again)

    def program(layers):
        model = models.decoder(dataclasses.replace(LLAMA, num_layers=layers))
        shapes = jax.eval_shape(model.init, KEY, x)
        return len(jax.jit(model.apply).lower(shapes, x).as_text())

    assert program(30) < 1.01 * program(3)


def test_params_of_bfloat16_give_logits_of_float32():
    model = models.decoder(LLAMA, dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model_and_params("llama")[1])
    shapes = jax.eval_shape(model.init, KEY, tokens((1, 3)))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
    x = tokens((1, 12))
    found = jax.jit(model.apply)(params, x)
    assert found.dtype == jnp.float32
    expected = twin("llama", x[0])
    assert np.abs(np.asarray(found[0]) - expected).max() < 0.05 * np.abs(expected).max()


def test_adapters_beside_kernels_do_what_merged_ones_do():
    params = model_and_params("qwen")[1]
    targets = ("layers/query/kernel", "layers/down/kernel", "layers/*value*/kernel")
    adapters = models.init_adapters(KEY, params, targets, rank=3, stacked="layers/*")
    assert {path: a.down.shape for path, a in adapters.items()} == {
        "layers/query/kernel": (2, 24, 3),
        "layers/value/kernel": (2, 24, 3),
        "layers/down/kernel": (2, 20, 3),
    }
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32) / 4, adapters)
    x = tokens((2, 7))
    beside = run("qwen")(models.attach_adapters(params, adapters, 0.5), x)
    merged = models.merge_adapters(params, adapters, 0.5)
    np.testing.assert_allclose(beside, run("qwen")(merged, x), atol=2e-5)
    down, up = (np.asarray(part[1]) for part in adapters["layers/query/kernel"])
    change = merged["layers"]["query"]["kernel"][1] - params["layers"]["query"]["kernel"][1]
    np.testing.assert_allclose(change, 0.5 * down @ up, atol=1e-5)


@pytest.mark.methods
def test_an_adapter_is_not_rounded_with_its_kernel():
    """A change below half of bfloat16's last digit is lost in a merged kernel, not beside it."""
    model = models.decoder(LLAMA, dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model_and_params("llama")[1])
    adapters = models.init_adapters(KEY, params, "layers/*/kernel", 2, stacked="layers/*")
    adapters = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.01), adapters)

    def loss(adapters):
        return model.apply(models.attach_adapters(params, adapters), tokens((1, 5))).sum()

    grads = jax.jit(jax.grad(loss))(adapters)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) > 0


@pytest.mark.methods
def test_dropout_of_adapters_is_on_in_training_alone():
    model = models.decoder(LLAMA, adapter_dropout=0.5)
    params = model_and_params("llama")[1]
    x = tokens((1, 5))
    adapters = models.init_adapters(KEY, params, "layers/*/kernel", 2, stacked="layers/*")
    adapters = jax.tree.map(lambda leaf: leaf + 0.1, adapters)
    whole = models.attach_adapters(params, adapters)
    trained = jax.jit(model.apply)
    first, second = (np.asarray(trained(whole, x, jax.random.key(i))) for i in range(2))
    assert np.abs(first - second).max() > 0.01
    plain = run("llama")(params, x)
    np.testing.assert_allclose(trained(params, x, KEY), plain, atol=1e-5)
    np.testing.assert_allclose(run("llama")(whole, x), jax.jit(model.apply)(whole, x), atol=1e-5)


def test_a_token_that_is_none_is_no_other():
    params = model_and_params("llama")[1]
    found = run("llama")(params, np.array([[1, 29, 2], [1, -1, 2], [1, 28, 2]], np.int32))
    assert np.isnan(found).any((1, 2)).tolist() == [True, True, False]


@pytest.mark.parametrize("segments", [None, np.array([[1, 1, 2, 2, 2], [0, 1, 1, 1, 1]])])
def test_params_of_float16_are_near_float32(segments):
    params, x = model_and_params("llama")[1], tokens((2, 5))
    x = x if segments is None else data.Tokens(x, segments)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    found = run("llama")(half, x)
    assert found.dtype == jnp.float32
    expected = run("llama")(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half), x)
    np.testing.assert_allclose(found, expected, atol=0.01 * float(abs(expected).max()))


def test_rows_with_segments_make_params():
    model, x = models.decoder(LLAMA), tokens((2, 3))
    expected = model.init(KEY, x)
    found = model.init(KEY, data.Tokens(x, np.ones_like(x)))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_mistakes_are_named():
    model, params = model_and_params("llama")
    for x, message in (
        (np.zeros(3, np.int32), r"tokens of shape \(3,\) and dtype int32; they must be integers"),
        (np.zeros((1, 3), np.float32), "dtype float32"),
        (np.zeros((1, 2049), np.int32), r"2049 tokens in a sequence; config\.max_length is 2048"),
        (data.Tokens(tokens((1, 3)), np.zeros((1, 2), int)), r"segments of shape \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model.apply(params, x)
    with pytest.raises(TypeError, match="config is a dict; it must be a DecoderConfig"):
        models.decoder({})
    for dtype in ("int8", None):
        with pytest.raises(ValueError, match=f"dtype is {dtype}; it must be one of float32"):
            models.decoder(LLAMA, dtype=dtype)
    with pytest.raises(TypeError, match="remat is 'no'; it must be True or False"):
        models.decoder(LLAMA, remat="no")
    with pytest.raises(ValueError, match="adapter_dropout is 1"):
        models.decoder(LLAMA, adapter_dropout=1.0)
    one = models.lora.Adapter(np.ones((2, 4, 1)), np.ones((2, 1, 5)))
    for path, message in (
        ("norm/scale", "'norm/scale'; only a kernel can have neighbours"),
        (
            "layers/up/kernel",
            r"is for 4 x 5 numbers in 2 layers; the leaf has .* \(2, 24, 20",
        ),
        ("layers/none/kernel", "adapters has layers/none/kernel; params have no such leaf"),
    ):
        with pytest.raises(ValueError, match=message):
            models.attach_adapters(params, {path: one})


# --- configurations


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_is_written_and_read(kind):
    config = dataclasses.replace(CONFIGS[kind])
    assert parse_decoder_config(config_fields(config)) == config


PLAIN = config_fields(LLAMA)
WITHOUT_ROPE = {k: v for k, v in PLAIN.items() if not k.startswith("rope")}
NEW_ROPE = {"rope_theta": 100.0, **PLAIN["rope_scaling"]}


def test_both_spellings_of_rotary_parameters():
    assert parse_decoder_config(WITHOUT_ROPE | {"rope_parameters": NEW_ROPE}) == LLAMA
    plain = parse_decoder_config(WITHOUT_ROPE | {"rope_scaling": None})
    assert plain == dataclasses.replace(LLAMA, rope_scaling=None, rope_theta=10000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'; it must be 'llama' or 'qwen2'"),
        ({"logit_softcap": 30.0}, r"the field 'logit_softcap' \(here 30.0\) is not known"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this decoder computes 'silu' only"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"quantization": {"bits": 4}}, r"the field 'quantization' \(here"),
        ({"use_mrope": True}, "use_mrope is True"),
        ({"sliding_window": 64}, "sliding_window is 64; it must be null"),
        ({"layer_types": ["sliding_attention"]}, "layer_types is"),
        ({"layer_types": ["full_attention"] * 99}, "layer_types names 99 layers, and num_hidden"),
        ({"layer_types": 3}, "layer_types is 3; this decoder has 'full_attention' only"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]; it must be 'llama' or 'qwen2'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, r"it needs \['factor', 'high_freq"),
        ({"rope_scaling": 3}, "the rotary parameters are 3"),
        ({"rope_scaling": {"type": "default", "factor": 2}}, r"\['factor'\] are no parameters"),
        ({"rope_parameters": NEW_ROPE | {"factor": 2.0}}, "rope_parameters and rope_scaling"),
        ({"rope_scaling": NEW_ROPE | {"rope_theta": 7.0}}, "contradict each other"),
        ({"rope_scaling": NEW_ROPE | {"partial_rotary_factor": 0.5}}, "contradict each other"),
        ({"rope_theta": "many"}, "rope_theta is 'many'"),
        ({"rope_theta": [1]}, "contradict|rope_theta"),
        ({"rms_norm_eps": "1e-6"}, "norm_epsilon is '1e-6'; it must be a number"),
        ({"hidden_size": 2.5}, "width is 2.5; it must be an integer"),
        ({"num_key_value_heads": 3}, "num_heads is 4; it must be a multiple of num_kv_heads"),
        ({"head_dim": 5}, "head_width is 5; it must be even"),
        ({"tie_word_embeddings": "no"}, "tie is 'no'; it must be True or False"),
        ({"model_type": "qwen2"}, "are no fields of qwen2"),
    ],
)
def test_what_would_change_the_numbers_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_decoder_config(PLAIN | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"unsloth_fixed": True, "unsloth_version": "2024.9", "neftune_noise_alpha": 5},
        {"transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"fp16": "float16"}}},
        {"max_sequence_length": 64, "max_length": 20, "model_max_length": 10**30},
        {"use_mrope": False, "max_window_layers": 1, "rope_interleaved": False, "auto_map": {}},
        {"_attn_implementation_autoset": True, "_flash_attn_2_enabled": True, "dtype": "bfloat16"},
        {"temperature": 0.7, "top_k": 50, "do_sample": True, "eos_token_id": [1, 2]},
    ],
)
def test_what_has_no_effect_on_the_numbers_is_read(changes):
    assert parse_decoder_config(PLAIN | changes) == LLAMA


def test_qwen_with_the_width_of_a_head_that_follows():
    fields = config_fields(CONFIGS["qwen"])
    for width in (6, None):
        assert parse_decoder_config(fields | {"head_dim": width}) == CONFIGS["qwen"]
    with pytest.raises(ValueError, match=r"another head_dim than .* are no fields of qwen2"):
        parse_decoder_config(fields | {"head_dim": 8})


def test_qwen_with_a_width_that_no_head_divides():
    """transformers derives its heads' width, which would be another one."""
    config = dataclasses.replace(QWEN, width=25)  # 4 heads of 6
    with pytest.raises(ValueError, match="head_width=6; neither llama nor qwen2 has that"):
        config_fields(config)


def test_numbers_of_numpy_become_those_of_json():
    sizes = {
        field.name: np.int64(getattr(LLAMA, field.name))
        for field in dataclasses.fields(LLAMA)
        if type(getattr(LLAMA, field.name)) is int
    }
    scaling = dataclasses.replace(SCALING, original_length=np.int32(16))
    config = dataclasses.replace(LLAMA, rope_scaling=scaling, tie=np.bool_(LLAMA.tie), **sizes)
    assert config == LLAMA
    assert json.loads(json.dumps(config_fields(config))) == config_fields(LLAMA)


def test_files_of_configurations(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        models.read_decoder_config(tmp_path)
    for text, message in (
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "model_type is None"),
        ('{"model_type": "llama"}', "has no vocab_size, hidden_size"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            models.read_decoder_config(tmp_path)


# --- generation


def test_a_continuation_is_the_likeliest_token_each_time():
    """Against the twin, which begins anew for each token; also of a prompt padded on the left."""
    params = model_and_params("llama")[1]
    x = tokens((2, 5), 6)
    segments = np.array([[1] * 5, [0, 0, 1, 1, 1]])
    apply = model_and_params("llama")[0].apply
    found = np.asarray(models.generate(apply, params, data.Tokens(x, segments), 4))
    for row, start in ((0, 0), (1, 2)):
        text = list(x[row, start:])
        for token in found[row]:
            assert token == twin("llama", text)[-1].argmax()
            text.append(token)


def test_tokens_are_drawn_as_the_logits_say():
    def apply(params, x, key=None):
        return jnp.broadcast_to(params, (*x.shape, 3))

    prompts = np.zeros((2000, 1), np.int32)
    key = jax.random.key(0)
    found = models.generate(apply, jnp.log(jnp.array([1.0, 4, 4])), prompts, 1, key=key)
    assert (np.asarray(found) == 1).all()
    drawn = models.generate(
        apply, jnp.log(jnp.array([1.0, 4, 4])), prompts, 1, key=key, temperature=2.0
    )
    shares = np.bincount(np.asarray(drawn).ravel(), minlength=3) / 2000
    np.testing.assert_allclose(shares, [0.2, 0.4, 0.4], atol=0.04)
    with pytest.raises(ValueError, match=r"key is None; temperature=2\.0 draws tokens"):
        models.generate(apply, jnp.zeros(3), prompts, 1, temperature=2.0)
    with pytest.raises(ValueError, match="num_tokens is 0"):
        models.generate(apply, jnp.zeros(3), prompts, 0)
    with pytest.raises(TypeError, match="key is 0; it must be a typed PRNG key"):
        models.generate(apply, jnp.zeros(3), prompts, 1, key=0, temperature=2.0)
    with pytest.raises(ValueError, match=r"temperature is 1e-38; it must be 0, or at least 1e-30"):
        models.generate(apply, jnp.zeros(3), prompts, 1, key=key, temperature=1e-38)
    cold = models.generate(apply, jnp.arange(3) * 100.0, prompts, 1, key=key, temperature=1e-30)
    assert (np.asarray(cold) == 2).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tokens_of_narrow_logits_are_drawn_in_float32(dtype):
    """Of 512 equal logits; noise of 8 bits has ties, of which the first token would be taken."""

    def apply(params, x, key=None):
        return jnp.broadcast_to(params, (*x.shape, 512))

    prompts, how = np.zeros((4000, 1), np.int32), {"key": KEY, "temperature": 1.0}
    drawn = models.generate(apply, jnp.zeros(512, dtype), prompts, 1, **how)
    counts = np.bincount(np.asarray(drawn).ravel() // 64, minlength=8)
    assert stats.chisquare(counts).pvalue > 1e-5


def test_a_text_may_fill_the_context():
    """Nothing follows the last token, so that it needs no place in the model's input."""
    config = dataclasses.replace(LLAMA, max_length=5)
    apply, (_, params) = models.decoder(config).apply, model_and_params("llama")
    x = tokens((1, 5), 6)
    found = models.generate(apply, params, x, 1)
    assert found.tolist() == [[twin("llama", x[0])[-1].argmax()]]
    longer = models.generate(model_and_params("llama")[0].apply, params, x[:, :3], 3)
    np.testing.assert_array_equal(models.generate(apply, params, x[:, :3], 3), longer)
    segments = data.Tokens(x[:, :3], np.array([[0, 1, 1]]))
    assert models.generate(apply, params, segments, 3).shape == (1, 3)
    with pytest.raises(ValueError, match=r"x has 6 tokens in a sequence; config\.max_length is 5"):
        models.generate(apply, params, x, 2)


def test_logits_that_are_nan_have_no_token():
    model, params = model_and_params("llama")
    x = tokens((2, 5), 6)
    x[1, 2] = 10**6
    message = r"the logits of prompt\[1\] are NaN: it has a token beyond the vocabulary, or params"
    for how in ({}, {"key": KEY, "temperature": 1.0}):
        with pytest.raises(ValueError, match=message):
            models.generate(model.apply, params, x, 2, **how)
    traced = jax.jit(lambda x: models.generate(model.apply, params, x, 2))(x)
    np.testing.assert_array_equal(traced[:1], models.generate(model.apply, params, x[:1], 2))
    np.testing.assert_array_equal(traced[1:], [[-1, -1]])


def test_a_prompt_of_any_language_model():
    model = models.lstm(9, embedding=4, hidden=4, layers=1, dropout=0.0)
    params = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    prompt = np.array([[3, 7, 5], [1, 1, 2]])
    text = prompt
    for _ in range(4):
        scores = np.asarray(model.apply(params, jnp.asarray(text)))[:, -1]
        text = np.concatenate([text, scores.argmax(-1)[:, None]], 1)
    found = models.generate(model.apply, params, prompt, 4)
    np.testing.assert_array_equal(found, text[:, 3:])
    for wrong in (prompt.astype(float), prompt[0], prompt[:, :0]):
        with pytest.raises(ValueError, match=r"prompt has shape .* integers \[B, T\]"):
            models.generate(model.apply, params, wrong, 4)
    padded = data.Tokens(prompt, np.array([[1, 1, 1], [1, 1, 0]]))
    with pytest.raises(ValueError, match="prompt ends with padding"):
        models.generate(model.apply, params, padded, 4)


def test_a_word_beyond_the_vocabulary_is_no_other_word():
    model = models.lstm(9, embedding=4, hidden=4, layers=1, dropout=0.0)
    params = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    x = jnp.array([[3, 8, 5], [3, 9, 5], [3, -1, 5]])
    is_nan = np.isnan(np.asarray(model.apply(params, x))).any((1, 2))
    assert is_nan.tolist() == [False, True, True]
