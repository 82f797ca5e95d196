"""The decoder and its adapters against transformers and peft, with PyTorch on the CPU.

Configurations are tiny, weights random, and both are written by transformers itself. Skipped where
it is not installed: ``make test-pretrained`` has an environment for it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data, models
from tests.data.test_chats import KINDS as KINDS_OF_TOKENIZERS
from tests.data.test_chats import trained

# PyTorch's and transformers' own warnings at import and in generation are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # so that logits differ by more than their rounding
    "bos_token_id": None,
    "eos_token_id": None,  # so that generation does not end before its time
    "pad_token_id": None,
}
LONG = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS = {
    "llama": ("Llama", {}),
    "llama, tied, biases": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama 3, wide heads": ("Llama", {"rope_parameters": LONG, "head_dim": 16}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
}


@functools.cache
def theirs(kind):
    name, changes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # biases and scales begin at 0 and 1, where mistakes would not show
        for weights in model.parameters():
            if weights.ndim == 1:
                weights.add_(0.2 * torch.randn(weights.shape))
    return model


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    @functools.cache
    def load(kind, shard="1GB"):
        folder = tmp_path_factory.mktemp("model")
        theirs(kind).save_pretrained(folder, max_shard_size=shard)
        return models.load_pretrained(folder)

    return load


def tokens(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 97, shape)


def their_logits(kind, x, mask=None):
    with torch.no_grad():
        mask = None if mask is None else torch.tensor(mask)
        return theirs(kind)(torch.tensor(x), attention_mask=mask).logits.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind, ours):
    model, params = ours(kind)
    x = tokens((3, 100))
    expected = their_logits(kind, x)
    assert expected.std() > 0.5
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), expected, rtol=0, atol=1e-4)


def test_several_files_are_one_model(ours):
    whole, parts = ours("qwen2")[1], ours("qwen2", "20KB")[1]
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama 3, wide heads", "qwen2"])
def test_the_loss_of_padded_batches(kind, side, ours):
    model, params = ours(kind)
    x, lengths = tokens((3, 20), 1), np.array([20, 13, 6])
    places = np.arange(20)[None]
    mask = (places < lengths[:, None]) if side == "right" else (places >= 20 - lengths[:, None])
    before = np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    scored = mask & before  # a text's first token is foretold from nothing
    with torch.no_grad():
        expected = theirs(kind)(
            torch.tensor(x), attention_mask=torch.tensor(mask.astype(int)),
            labels=torch.tensor(np.where(scored, x, -100)),
        )  # fmt: skip
    targets = np.full(x.shape, -1)
    targets[:, :-1] = np.where(scored, x, -1)[:, 1:]
    examples = data.Examples(data.Tokens(x, mask.astype(np.int32)), jnp.asarray(targets))
    found = jax.jit(model.apply)(params, examples.x)
    np.testing.assert_allclose(
        np.asarray(found)[mask], expected.logits.numpy()[mask], rtol=0, atol=1e-4
    )
    counts = models.answer_counts(model.apply, data.scored_per_row(examples))
    assert float(counts(params, examples)[1].mean()) == pytest.approx(
        float(expected.loss), abs=1e-5
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_greedy_continuation(kind, ours):
    """32 tokens, one after the other; also of prompts padded on the left."""
    model, params = ours(kind)
    x, mask = tokens((2, 12), 2), np.ones((2, 12), np.int32)
    mask[1, :5] = 0
    expected = theirs(kind).generate(
        torch.tensor(x), attention_mask=torch.tensor(mask), max_new_tokens=32, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    found = models.generate(model.apply, params, data.Tokens(x, mask), 32)
    np.testing.assert_array_equal(found, expected.numpy()[:, 12:])
    assert len({*np.asarray(found).ravel()}) > 5


TARGETS = {"q_proj": "query", "v_proj": "value", "down_proj": "down"}
PLACES = {"q_proj": "self_attn", "v_proj": "self_attn", "down_proj": "mlp"}


def adapted(kind, begin=True):
    """A copy of their model with LoRA, whose B is not what it was at the beginning."""
    fresh = type(theirs(kind))(theirs(kind).config)
    fresh.load_state_dict(theirs(kind).state_dict())
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=list(TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM",
        init_lora_weights=begin,
    )  # fmt: skip
    return peft.get_peft_model(fresh, config).train()


def moved(model):
    """The model after a change of its B."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "lora_B" in name:
                weights.add_(0.1 * torch.randn(weights.shape))
    return model


def as_ours(model, part):
    """Their A and B, or the gradients of them, as ``Adapter``s of stacked layers."""
    found = {}
    named = dict(model.named_parameters())
    for theirs_name, ours_name in TARGETS.items():
        sides = []
        for side in ("A", "B"):
            stem = f"{PLACES[theirs_name]}.{theirs_name}.lora_{side}.default.weight"
            layers = [part(named[f"base_model.model.model.layers.{i}.{stem}"]) for i in range(3)]
            sides.append(np.stack([layer.detach().numpy().T for layer in layers]))
        found[f"layers/{ours_name}/kernel"] = models.lora.Adapter(*sides)
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2, tied"])
def test_gradients_of_adapters_are_pefts(kind, ours):
    model, params = ours(kind)
    peer = moved(adapted(kind))
    x = tokens((2, 16), 3)
    loss = peer(torch.tensor(x), labels=torch.tensor(x)).loss
    loss.backward()

    def our_loss(adapters):
        logits = model.apply(models.attach_adapters(params, adapters, scale=12 / 4), x)
        scores = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(scores, jnp.asarray(x)[:, 1:, None], 2).mean()

    adapters = as_ours(peer, lambda weights: weights)
    found, grads = jax.jit(jax.value_and_grad(our_loss))(adapters)
    assert float(found) == pytest.approx(float(loss), abs=1e-5)
    expected = as_ours(peer, lambda weights: weights.grad)
    for path, adapter in expected.items():
        for ours_side, theirs_side in zip(grads[path], adapter, strict=True):
            assert np.abs(theirs_side).max() > 1e-3
            np.testing.assert_allclose(ours_side, theirs_side, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_they_read_what_we_write(kind, ours, tmp_path):
    folder = tmp_path / "model"
    source = tmp_path / "source"
    theirs(kind).save_pretrained(source)
    config = models.read_decoder_config(source)
    models.save_pretrained(folder, config, ours(kind)[1], max_shard_bytes=20_000)
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    state = theirs(kind).state_dict()
    assert read.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
    x = tokens((1, 40), 4)
    with torch.no_grad():
        found = read.eval()(torch.tensor(x)).logits.numpy()
    np.testing.assert_allclose(found, their_logits(kind, x), atol=1e-5)


def test_bfloat16(tmp_path):
    """Numbers of eight bits agree to a few of their last digits."""
    model = type(theirs("llama"))(theirs("llama").config)
    model.load_state_dict(theirs("llama").state_dict())
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    found, params = models.load_pretrained(tmp_path)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    for leaf, expected in (
        (params["embedding"], model.model.embed_tokens.weight),
        (params["layers"]["up"]["kernel"][1].T, model.model.layers[1].mlp.up_proj.weight),
    ):
        np.testing.assert_array_equal(
            np.asarray(leaf, np.float32), expected.detach().float().numpy()
        )
    x = tokens((1, 30))
    logits = np.asarray(found.apply(params, x))
    with torch.no_grad():
        expected = model(torch.tensor(x)).logits.float().numpy()
    assert np.abs(logits - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["llama", "qwen2, tied"])
def test_adapters_go_there_and_back(kind, ours, tmp_path):
    """peft reads what we write, and we read what peft writes."""
    model, params = ours(kind)
    peer = moved(adapted(kind)).eval()
    x = tokens((2, 16), 5)
    with torch.no_grad():
        expected = peer(torch.tensor(x)).logits.numpy()
    theirs(kind).save_pretrained(tmp_path / "model")
    config = models.read_decoder_config(tmp_path / "model")
    peer.save_pretrained(tmp_path / "peft")
    adapters, scale = models.load_adapters(tmp_path / "peft", config)
    assert scale == 3.0
    jax.tree.map(np.testing.assert_array_equal, adapters, as_ours(peer, lambda weights: weights))
    found = jax.jit(model.apply)(models.attach_adapters(params, adapters, scale), x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    merged = jax.jit(model.apply)(models.merge_adapters(params, adapters, scale), x)
    np.testing.assert_allclose(merged, expected, rtol=0, atol=1e-4)

    models.save_adapters(tmp_path / "ours", config, adapters, scale)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    read = peft.PeftModel.from_pretrained(base, str(tmp_path / "ours")).eval()
    with torch.no_grad():
        again = read(torch.tensor(x)).logits.numpy()
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-5)
    assert np.abs(again - their_logits(kind, x)).max() > 0.1


@pytest.mark.parametrize("begin", ["pissa", "olora", "gaussian", "orthogonal"])
def test_adapters_that_moved_the_kernels_are_read_once_converted(begin, ours, tmp_path):
    """Refused as peft saves them, if it then subtracts from the kernels; right once converted."""
    model, params = ours("llama")
    peer = adapted("llama", begin)
    peer.peft_config["default"].init_lora_weights = True
    peer.save_pretrained(tmp_path / "begin")
    peer.peft_config["default"].init_lora_weights = begin
    moved(peer).eval()
    x = tokens((2, 16), 6)
    with torch.no_grad():
        expected = peer(torch.tensor(x)).logits.numpy()
    theirs("llama").save_pretrained(tmp_path / "model")
    config = models.read_decoder_config(tmp_path / "model")
    folder = tmp_path / "peft"
    peer.save_pretrained(folder)
    if begin in ("pissa", "olora"):
        with pytest.raises(ValueError, match=f"init_lora_weights is '{begin}'; it must be true"):
            models.load_adapters(folder, config)
        folder = tmp_path / "converted"
        peer.save_pretrained(folder, path_initial_model_for_weight_conversion=tmp_path / "begin")
    found = models.attach_adapters(params, *models.load_adapters(folder, config))
    np.testing.assert_allclose(jax.jit(model.apply)(found, x), expected, rtol=0, atol=1e-4)


def test_a_tied_model_with_a_head_in_its_file(tmp_path):
    """Equal to the embedding, it is left out, as transformers does; another one is refused."""
    from safetensors.torch import load_file, save_file

    theirs("qwen2, tied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    arrays = load_file(file)
    assert "lm_head.weight" not in arrays
    head = arrays["model.embed_tokens.weight"].clone()
    save_file(arrays | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    model, params = models.load_pretrained(tmp_path)
    x = tokens((2, 30), 7)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    with torch.no_grad():
        expected = read.eval()(torch.tensor(x)).logits.numpy()
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), expected, rtol=0, atol=1e-4)
    save_file(arrays | {"lm_head.weight": head + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="tie_word_embeddings is true: versions of transformers"):
        models.load_pretrained(tmp_path)


CHATML = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", KINDS_OF_TOKENIZERS)
def test_chats_are_those_of_their_templates(kind):
    """Tokens and the mask of the assistant's tokens, of random chats."""
    tokenizer = trained(kind)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML)
    rng = np.random.default_rng(1)
    words = ["add", "two", " ", "\n", "the sum", "é", "numbers", "?", "<", "北京", "  ", "\t"]
    for _ in range(50):
        chat = [
            {"role": role, "content": "x" + "".join(rng.choice(words, rng.integers(6))) + "x"}
            for role in ["system"] * rng.integers(2) + ["user", "assistant"] * rng.integers(1, 4)
        ]
        expected = fast.apply_chat_template(
            chat, return_assistant_tokens_mask=True, return_dict=True, padding=False,
            truncation=False,
        )  # fmt: skip
        ids, mask = expected["input_ids"], np.array(expected["assistant_masks"], bool)
        for given in (tokenizer, fast):
            packed = data.pack_chats([{"messages": chat}], given, length=len(ids) - 1)
            assert packed.x.tokens[0].tolist() == ids[:-1]
            assert packed.y[0].tolist() == np.where(mask, ids, -1)[1:].tolist()
