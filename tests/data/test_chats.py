"""Chats become rows: what is scored, what is packed with what, and whose it is."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data, models

MARKS = ["<|im_start|>", "<|im_end|>"]


class Letters:
    """A tokenizer for which every character is a token, and every mark one, unless it is text."""

    encode_special_tokens = False

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        ids = []
        while text:
            mark = next((m for m in MARKS if text.startswith(m)), None)
            if mark and not self.encode_special_tokens:
                ids.append(1 + MARKS.index(mark))
                text = text[len(mark) :]
            else:
                ids.append(ord(text[0]))
                text = text[1:]
        return type("Encoding", (), {"ids": ids})


def shown(ids):
    return "".join(MARKS[i - 1] if i in (1, 2) else chr(i) for i in ids)


def scored_text(examples):
    """Of each row, what is scored."""
    return [shown(row[row >= 0]) for row in examples.y]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "<|im_end|>?"},
    {"role": "assistant", "content": "5."},
]


def test_answers_are_scored_and_marks_are_no_text():
    packed = data.pack_chats([{"messages": CHAT}], Letters(), length=300)
    assert scored_text(packed) == ["4<|im_end|>5.<|im_end|>"]
    tokens = packed.x.tokens[0][packed.x.segments[0] == 1]
    assert shown(tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n<|im_end|>?<|im_end|>\n"
        "<|im_start|>assistant\n5."
    )
    assert (tokens == 2).sum() == 4  # what a user writes ends no message
    assert not (packed.x.segments[0] == 1)[len(tokens) :].any()


@pytest.mark.parametrize(
    ("record", "asked", "answer"),
    [
        ({"instruction": "Add.", "input": "1", "output": "2"}, "Add.\n\n1", "2"),
        ({"instruction": "Add.", "input": "", "output": "2"}, "Add.", "2"),
        ({"prompt": "Say", "completion": "so"}, "Say", "so"),
        ({"prompt": "Say", "response": "so", "score": 3}, "Say", "so"),
    ],
)
def test_forms_of_records(record, asked, answer):
    packed = data.pack_chats([record], Letters(), length=100)
    assert scored_text(packed) == [f"{answer}<|im_end|>"]
    assert f"user\n{asked}<|im_end|>" in shown(packed.x.tokens[0])


def test_plain_text_is_scored_from_its_second_token():
    assert scored_text(data.pack_chats([{"text": "abc"}], Letters(), length=9)) == ["bc<|im_end|>"]


def test_clients_by_a_column(tmp_path):
    file = tmp_path / "chats.jsonl"
    records = [
        {"prompt": "a", "completion": "bc", "user": "eve"},
        {"prompt": "d", "completion": "e", "user": "bob"},
        {"prompt": "f", "completion": "g", "user": "eve"},
    ]
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    clients = data.from_chats(file, Letters(), client="user", length=80)
    assert clients.names == ("eve", "bob")
    assert np.asarray(clients.sizes).tolist() == [1, 1]
    eve, bob = scored_text(jax.tree.map(np.asarray, clients.examples))
    assert (eve, bob) == ("bc<|im_end|>g<|im_end|>", "e<|im_end|>")


@pytest.mark.methods
def test_a_data_set_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": "a", "completion": "bc", "user": user} for user in (3, 5, 3)]
    table = datasets.Dataset.from_list(records)
    found, expected = (
        data.from_chats(given, Letters(), client="user", length=80) for given in (table, records)
    )
    assert found.names == ("3", "5")
    jax.tree.map(np.testing.assert_array_equal, found.examples, expected.examples)


def test_packing_keeps_every_sequence_once():
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(60):
        size = rng.integers(2, 34)
        flags = rng.random(size) < 0.5
        flags[-1] = True
        sequences.append((rng.integers(0, 99, size), flags))
    packed = data.pack(sequences, 32)
    found = []
    for tokens, segments, targets in zip(*packed.x, packed.y, strict=True):
        for number in range(1, segments.max() + 1):
            (places,) = np.nonzero(segments == number)
            assert np.all(np.diff(places) == 1)
            found.append((tokens[places].tolist(), targets[places].tolist()))
        assert (targets[segments == 0] == -1).all()
    expected = [(t[:-1].tolist(), np.where(f[1:], t[1:], -1).tolist()) for t, f in sequences]
    assert sorted(found) == sorted(expected)
    places = sum(len(tokens) - 1 for tokens, _ in sequences)
    assert len(packed.y) <= 1.15 * places / 32
    flags = sum(f[1:].sum() for _, f in sequences)
    assert data.scored_per_row(packed) == pytest.approx(flags / len(packed.y))


def test_packed_together_or_alone_is_the_same():
    """The loss of packed rows is that of the texts one by one: none sees another."""
    rng = np.random.default_rng(1)
    sequences = [(rng.integers(0, 29, size), np.arange(size) > 2) for size in (5, 9, 4, 7)]
    config = models.DecoderConfig(
        vocab_size=29, width=16, num_layers=1, num_heads=2, mlp_width=16, init_std=0.5
    )
    model = models.decoder(config)
    params = model.init(jax.random.key(0), np.zeros((1, 1), np.int32))
    packed = data.pack(sequences, 24)
    assert len(packed.y) == 1

    @jax.jit
    def total_loss(examples):
        """Of all scored tokens."""
        return models.answer_loss(model.apply, 1.0)(params, examples, jax.random.key(0)).sum()

    def in_four_rows(values, fill):
        return np.concatenate([values, np.full((3, 24), fill, np.int32)])

    alone = jax.tree.map(lambda leaf: np.zeros((4, 24), np.int32), packed)
    alone = alone._replace(y=alone.y - 1)
    for row, (tokens, scored) in enumerate(sequences):
        places = slice(0, len(tokens) - 1)
        alone.x.tokens[row, places], alone.x.segments[row, places] = tokens[:-1], 1
        alone.y[row, places] = np.where(scored[1:], tokens[1:], -1)
    together = data.Examples(
        data.Tokens(in_four_rows(packed.x.tokens, 0), in_four_rows(packed.x.segments, 0)),
        in_four_rows(packed.y, -1),
    )
    expected = float(total_loss(alone))
    assert float(total_loss(together)) == pytest.approx(expected, abs=1e-4)
    as_one = together._replace(x=together.x._replace(segments=np.ones((4, 24), np.int32)))
    assert abs(float(total_loss(as_one)) - expected) > 0.1


def test_losses_by_hand():
    logits = np.random.default_rng(2).normal(size=(2, 3, 5)).astype(np.float32)
    examples = data.Examples(jnp.zeros((2, 3)), jnp.array([[1, -1, 4], [-1, -1, -1]]))
    apply = lambda params, x, key: jnp.asarray(logits)  # noqa: E731
    scores = np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
    one, other = -scores[0, 0, 1], -scores[0, 2, 4]
    rows = jax.jit(lambda: models.answer_loss(apply)(None, examples, None))()
    np.testing.assert_allclose(rows, [(one + other) / 2, 0], rtol=1e-5)
    correct, sums = jax.jit(lambda: models.answer_counts(apply, 4.0)(None, examples))()
    np.testing.assert_allclose(sums, [(one + other) / 4, 0], rtol=1e-5)
    right = (logits[0].argmax(-1) == [1, -1, 4]).sum()
    np.testing.assert_allclose(correct, [right / 4, 0])
    beyond = examples._replace(y=jnp.array([[1, 5, 4], [0, 0, 0]]))
    assert np.isnan(models.answer_loss(apply)(None, beyond, None)).tolist() == [True, False]
    with pytest.raises(ValueError, match="tokens from 0 to 5; the model has 5 logits"):
        models.answer_counts(apply).check(None, beyond)
    with pytest.raises(ValueError, match="tokens_per_row is 0"):
        models.answer_loss(apply, 0)
    with pytest.raises(ValueError, match=r"it must be the next token of each place"):
        models.answer_loss(apply)(None, examples._replace(y=jnp.zeros(2)), None)
    with pytest.raises(ValueError, match=r"must be \[B, T, V\] = \[1, 3, number of tokens\]"):
        models.answer_loss(apply)(None, examples._replace(y=examples.y[:1]), None)


def test_long_sequences():
    long = (np.arange(9), np.arange(9) > 6)
    short = (np.arange(4), np.arange(4) > 1)
    with pytest.raises(ValueError, match=r"sequences\[1\] has 9 tokens; length=5 has room for 6"):
        data.pack([short, long], 5)
    for how in ("cut", "leave_out"):  # the answer of the long one is cut off
        assert (data.pack([long, short], 5, too_long=how).x.segments > 0).sum() == 3
    cut = data.pack([long, short], 7, too_long="cut")
    assert sorted(cut.y[cut.y >= 0].tolist()) == [2, 3, 7]
    with pytest.raises(ValueError, match="sequences has none to pack"):
        data.pack([long], 5, too_long="leave_out")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"user": 1.5, "text": "a"}], r"records\[0\]: 'user' is 1.5; it must be text or"),
        ([{"text": "abc"}], r"records\[0\]: 'user' is None"),
        ([{"user": 1, "text": 3}], "text is 3; it must be text"),
        ([{"user": 1, "x": 3}], r"has \['user', 'x'\]; it must have messages"),
        ([{"user": 1, "messages": []}], r"messages is \[\]; it must be a list"),
        ([{"user": 1, "messages": [{"role": "tool"}]}], "a message is .* it must have a role"),
        ([{"user": 1, "messages": CHAT[:2]}], "the assistant says nothing"),
        ([{"user": 1, "prompt": "a", "completion": None}], "completion is None"),
        ([{"user": "bob", "text": "a" * 99}], r"client 'bob': sequences\[0\] has 100 tokens"),
        ([3], r"records\[0\] is a int"),
    ],
)
def test_records_that_are_none(records, message):
    with pytest.raises(ValueError, match=message):
        data.from_chats(records, Letters(), client="user", length=60)


def test_files_that_are_none(tmp_path):
    file = tmp_path / "a.jsonl"
    for text, message in (
        (b'{"text": "a"}\n{', "line 2: no JSON"),
        (b"[1]", "line 1: a list; no object"),
        (b"\xff\n", "line 1: no JSON"),
        (b"[" * 100_000, "line 1: no JSON"),
    ):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            data.pack_chats(file, Letters(), length=9)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        data.pack_chats(tmp_path / "b", Letters(), length=9)
    with pytest.raises(ValueError, match="template is 'chat'; it must be one of chatml, llama3"):
        data.pack_chats([{"text": "a"}], Letters(), length=9, template="chat")
    for wrong, message in (
        ([([-1, 2], [True, True])], "they must be integers"),
        ([([1, 2], [True])], r"scored has shape \(1,\)"),
        ([([1, 2], [True, False])], "has no scored token after its first"),
    ):
        with pytest.raises(ValueError, match=message):
            data.pack(wrong, 4)


def test_a_tokenizer_from_its_file(tmp_path):
    """A small one, trained here: what it makes of a chat is the text again, marks apart."""
    library = pytest.importorskip("tokenizers")
    trained = library.ByteLevelBPETokenizer()
    text = ["How do I add two numbers?", "Add them, and tell me.", "the the the numbers"] * 5
    trained.train_from_iterator(text, vocab_size=300, special_tokens=MARKS, show_progress=False)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = data.load_tokenizer(tmp_path)
    start, end = (tokenizer.token_to_id(mark) for mark in MARKS)
    packed = data.pack_chats([{"messages": CHAT}], tokenizer, length=200)
    row = packed.x.tokens[0][packed.x.segments[0] == 1]
    assert (row == start).sum() == 5
    assert (row == end).sum() == 4
    scored = packed.y[0][packed.y[0] >= 0]
    assert tokenizer.decode(scored.tolist(), skip_special_tokens=False) == "4<|im_end|>5.<|im_end|>"
    assert len(row) < 110  # by letters 120
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        data.load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError):
        data.load_tokenizer(tmp_path / "none.json")
