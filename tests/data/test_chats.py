"""Chats become rows: what is scored, what is packed with what, and whose it is."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.simulation.evaluate import build_evaluation

tokenizers = pytest.importorskip("tokenizers")
MARKS = ["<|im_start|>", "<|im_end|>"]


def letters():
    """A tokenizer for which every character is a token, its code; the marks are 1 and 2."""
    codes = {chr(code): code for code in (10, *range(32, 127))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(codes | {MARKS[0]: 1, MARKS[1]: 2}, []))
    tokenizer.add_special_tokens(MARKS)
    return tokenizer


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
    packed = data.pack_chats([{"messages": CHAT}], letters(), length=300)
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
        ({"instruction": "Add.", "output": "2", "text": "Add. 2"}, "Add.", "2"),  # Alpaca
        ({"instruction": "Add.", "output": "2", "prompt": "Add. 2", "text": None}, "Add.", "2"),
        (
            {"instruction": "Add.", "context": "1", "response": "2", "category": "x"},
            "Add.\n\n1",
            "2",
        ),
        ({"instruction": "Add.", "context": None, "response": ""}, "Add.", ""),
        ({"prompt": "Say", "completion": "so"}, "Say", "so"),
        ({"prompt": "Say", "response": "so", "score": 3, "text": "Say so"}, "Say", "so"),
        ({"prompt": "Say", "completion": "so", "response": None, "history": []}, "Say", "so"),
        ({"id": 1, "conversations": [("human", "Say"), ("gpt", "so")]}, "Say", "so"),
        (
            {"prompt": "x", "prompt_id": "3", "messages": [("user", "Say"), ("gpt", "so")]},
            "Say",
            "so",
        ),
        (
            {"system": "", "messages": [("user", ["Sa", "y"]), ("assistant", ["s", "o"])]},
            "Say",
            "so",
        ),
    ],
)
def test_forms_of_records(record, asked, answer):
    """Lists of messages here as (role, content), and a content in parts as a list of texts."""

    def message(role, content):
        names = ("from", "value") if "conversations" in record else ("role", "content")
        if isinstance(content, list):
            content = [{"type": "text", "text": text, "image_url": None} for text in content]
        return dict(zip(names, (role, content), strict=True)) | {"tool_calls": None}

    record = {
        name: [message(*pair) for pair in value] if name in ("messages", "conversations") else value
        for name, value in record.items()
    }
    packed = data.pack_chats([record], letters(), length=100)
    assert scored_text(packed) == [f"{answer}<|im_end|>"]
    tokens = shown(packed.x.tokens[0][packed.x.segments[0] == 1])
    assert tokens == (f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}")


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_prompt_is_the_first_message(name):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    for record in ({"prompt": "2+2?", "completion": "4"}, {"messages": turns}):
        found = data.pack_chats([record | {name: "Be brief."}], letters(), length=200)
        expected = data.pack_chats([{"messages": CHAT[:3]}], letters(), length=200)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_weight_of_0_leaves_an_answer_out():
    turns = [dict(message) for message in CHAT]
    turns[2]["weight"], turns[4]["weight"] = 0, 1
    assert scored_text(data.pack_chats([{"messages": turns}], letters(), length=300)) == [
        "5.<|im_end|>"
    ]


def test_plain_text_is_scored_from_its_second_token():
    assert scored_text(data.pack_chats([{"text": "abc"}], letters(), length=9)) == ["bc<|im_end|>"]


def test_clients_by_a_column(tmp_path):
    file = tmp_path / "chats.jsonl"
    records = [
        {"prompt": "a", "completion": "bc", "user": "eve"},
        {"prompt": "d", "completion": "e", "user": "bob"},
        {"prompt": "f", "completion": "g", "user": "eve"},
    ]
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    clients = data.from_chats(file, letters(), client="user", length=80)
    assert clients.names == ("eve", "bob")
    assert np.asarray(clients.sizes).tolist() == [1, 1]
    eve, bob = scored_text(jax.tree.map(np.asarray, clients.examples))
    assert (eve, bob) == ("bc<|im_end|>g<|im_end|>", "e<|im_end|>")


def test_a_data_frame_has_nan_where_a_field_is_missing():
    """The rows of a frame give what the records give of which it was made."""
    pandas = pytest.importorskip("pandas")
    records = [
        {"user": "a", "instruction": "add", "input": "1 2", "output": "3", "images": []},
        {"user": "b", "instruction": "greet", "output": "hi", "system": "be kind"},
        {"user": "b", "prompt": "x", "response": "y"},
        {
            "user": "a",
            "messages": [{"role": "user", "content": "q"}, {"from": "gpt", "value": "r"}],
        },
        {"user": "c", "text": "plain"},
    ]
    rows = pandas.DataFrame(records).to_dict("records")
    assert any(value != value for value in rows[1].values())
    expected = data.from_chats(records, letters(), client="user", length=200)
    found = data.from_chats(rows, letters(), client="user", length=200)
    assert found.names == expected.names
    jax.tree.map(np.testing.assert_array_equal, found.examples, expected.examples)
    with pytest.raises(
        ValueError, match=r"records\[0\] has \['text \(null\)', 'user'\]; it must have"
    ):
        data.pack_chats([{"user": "a", "text": float("nan")}], letters(), length=9)


def test_files_of_one_array_and_of_lines_are_the_same(tmp_path):
    records = [{"prompt": word, "completion": "bc", "user": word} for word in ("a", "d")]
    lines = "\n".join(map(json.dumps, records))
    array = "\n [\n" + ",\n".join(json.dumps(record, indent=1) for record in records) + "]\n"
    for text in (lines, "\ufeff" + lines, array, "\ufeff" + array, "[]" + " " * 9):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        if text.startswith("[]"):
            with pytest.raises(ValueError, match=r"a\.json', which has no conversation"):
                data.pack_chats(tmp_path / "a.json", letters(), length=80)
            continue
        found = data.from_chats(tmp_path / "a.json", letters(), client="user", length=80)
        assert found.names == ("a", "d")
        expected = data.from_chats(records, letters(), client="user", length=80)
        jax.tree.map(np.testing.assert_array_equal, found.examples, expected.examples)


def test_a_parquet_file(tmp_path):
    """Alpaca's published table; and messages, which Arrow fills with nulls."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    turns = [{"role": "user", "content": "a", "name": "eve"}, {"role": "assistant", "content": "b"}]
    for number, records in enumerate(
        (
            [{"instruction": "a", "input": "", "output": "b", "text": "a b"}],
            [
                {"messages": turns, "prompt": None, "response": None},
                {"messages": None, "prompt": "a", "response": "b"},
            ],
        )
    ):
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(arrow.Table.from_pylist(records), file)
        packed = data.pack_chats(file, letters(), length=60)
        assert "".join(scored_text(packed)) == "b<|im_end|>" * len(records)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"1\.parquet', which is no Parquet file"):
        data.pack_chats(file, letters(), length=60)


def test_damaged_parquet_of_chats(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file, text = tmp_path / "a.parquet", "a long text"
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(arrow.table({"text": [text]}), file, **options)
    content = file.read_bytes()
    for damaged in (content.replace(text.encode(), b"a lonG text"), content[40:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.parquet', which is no Parquet file"):
            data.pack_chats(file, letters(), length=60)


@pytest.mark.methods
def test_a_data_set_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": "a", "completion": "bc", "user": user} for user in (3, 5, 3)]
    table = datasets.Dataset.from_list(records)
    found, expected = (
        data.from_chats(given, letters(), client="user", length=80) for given in (table, records)
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
    streamed = data.split_clients(data.stream(packed, "iid", 4, memory=10**6), 1)
    for part in (*data.split_clients(data.partition(packed, "iid", 4), 1), *streamed):
        rows = packed.y[np.asarray(part.indices)]
        assert len(rows) < len(packed.y)
        assert data.scored_per_row(part) == pytest.approx((rows >= 0).sum() / len(rows))


def test_packed_together_or_alone_is_the_same():
    """The loss of packed rows is that of the texts one by one: none sees another."""
    rng = np.random.default_rng(1)
    sequences = [(rng.integers(0, 29, size), np.arange(size) > 2) for size in (5, 9, 4, 7)]
    config = models.DecoderConfig(
        vocab_size=29, width=16, num_layers=1, num_heads=2, mlp_width=16, init_std=0.5
    )
    model = models.decoder(config)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))
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


def test_segments_are_no_classes():
    packed = data.pack([(np.array([0, 1, 2]), np.ones(3, bool))] * 20, 64)
    assert packed.x.segments.max() > 3
    assert data.num_classes(packed) == 3


def one_round(examples):
    """A function of params that trains for a round, with logits that do not depend on them."""
    apply = lambda params, x, key: jnp.zeros((*x.shape, 5)) + params["w"]  # noqa: E731
    clients = data.from_clients({"one": examples})
    method = algorithms.fedavg(models.answer_loss(apply), client_lr=0.1)
    schedule = {"cohort_size": 1, "local_steps": 1, "batch_size": 1}
    return lambda params: simulate(method, params, clients, rounds=1, **schedule)


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
    for score in (build_evaluation(models.answer_counts(apply, 4.0), beyond), one_round(beyond)):
        with pytest.raises(ValueError, match="labels from 0 to 5; the model has 5 logits"):
            score({"w": jnp.zeros(())})
    with pytest.raises(ValueError, match="tokens_per_row is 0"):
        models.answer_loss(apply, 0)
    with pytest.raises(ValueError, match=r"it must be the next words of sequences, integers"):
        models.answer_loss(apply)(None, examples._replace(y=jnp.zeros(2)), None)
    with pytest.raises(ValueError, match=r"must be \[B, L, V\] = \[1, 3, number of words\]"):
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
        ([{"user": 1, "conversations": [{"from": "bing"}]}], "one of system, user, human, assist"),
        ([{"user": 1, "messages": CHAT[:2]}], "the assistant says nothing"),
        ([{"user": 1, "prompt": "a", "completion": None}], r"\['completion \(null\)', 'prompt', "),
        ([{"user": 1, "prompt": "a", "completion": ["b"]}], r"completion is \['b'\]; it must be"),
        ([{"user": 1, "text": "a", "instruction": "b"}], r"'text', 'user'\]; it must have mess"),
        ([{"user": 1, "messages": CHAT, "conversations": CHAT}], "has messages, conversations, w"),
        (
            [{"user": 1, "prompt": "a", "completion": "b", "response": "c"}],
            "has prompt, completion, response, which are several conversations",
        ),
        (
            [{"user": 1, "instruction": "a", "input": "b", "context": "c", "output": "d"}],
            "has input and context beside instruction; join them",
        ),
        ([{"user": 1, "prompt": "a", "context": "b", "response": "c"}], "context beside prompt"),
        ([{"user": 1, "prompt": "a", "response": "b", "history": ["c"]}], "has history, which is"),
        ([{"user": 1, "messages": CHAT, "tools": [{}]}], "has tools, which is not read"),
        ([{"user": 1, "messages": CHAT, "system": "a"}], "has system and a system message"),
        ([{"user": 1, "text": "a", "system": "a"}], "has text and a system prompt"),
        (
            [{"user": 1, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}],
            "content has a part of the type 'image_url'; only parts of the type 'text'",
        ),
        (
            [{"user": 1, "messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}],
            "a message has tool_calls, which is not read",
        ),
        (
            [{"user": 1, "messages": [{"role": "assistant", "content": "", "weight": 0.5}]}],
            "a message has weight 0.5; it must be 0 or 1",
        ),
        ([{"user": "bob", "text": "a" * 99}], r"client 'bob': sequences\[0\] has 100 tokens"),
        ([3], r"records\[0\] is a int"),
        ([], "records has no conversation; there must be at least one"),
    ],
)
def test_records_that_are_none(records, message):
    with pytest.raises(ValueError, match=message):
        data.from_chats(records, letters(), client="user", length=60)


def test_files_that_are_none(tmp_path):
    file = tmp_path / "a.jsonl"
    for text, message in (
        (b'{"text": "a"}\n{', "line 2: no JSON: .* Each line must be a JSON object"),
        (b'{"text":\n"a"}\n', "line 1: no JSON"),
        (b'{"text": "a"}\n[1]', "line 2 is a list; it must be an object"),
        (b"[1]", "record 1 is a int; it must be an object"),
        (b'[{"text": "a"}, {"text": null}]', r"record 2 has \['text \(null\)'\]"),
        (b'[{"text": "a"}', r"a\.jsonl: no JSON"),
        (b'{"prompt": "a", "completion": "b", "completion": "c"}', "'completion' is given twice"),
        (b"\xff\n", "no UTF-8 text: line 1"),
        (b"[" * 100_000, r"a\.jsonl: no JSON"),
        (b"\n", r"records is '.*a\.jsonl', which has no conversation"),
    ):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            data.pack_chats(file, letters(), length=9)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        data.pack_chats(tmp_path / "b", letters(), length=9)
    with pytest.raises(ValueError, match="template is 'chat'; it must be one of chatml, llama3"):
        data.pack_chats([{"text": "a"}], letters(), length=9, template="chat")
    for wrong, message in (
        ([([-1, 2], [True, True])], "they must be integers"),
        ([([1, 2**31 + 5], [True, True])], "from 0 to 2147483647"),
        ([([1, 2], [True])], r"scored has shape \(1,\)"),
        ([([1, 2], [True, False])], "has no scored token after its first"),
    ):
        with pytest.raises(ValueError, match=message):
            data.pack(wrong, 4)


# --- tokenizers of other kinds


def trained(kind):
    """A small tokenizer of a kind, trained on a few words."""
    library = tokenizers
    words = [
        "how do I add two numbers to a cafe",
        "add them and tell me",
        "the sum is a number\n\n",
    ]
    quiet = {"vocab_size": 150, "show_progress": False}
    if kind.startswith("byte level"):
        found = library.Tokenizer(library.models.BPE())
        found.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space="prefix" in kind)
        found.post_processor = library.processors.ByteLevel(trim_offsets=True)
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(
            initial_alphabet=alphabet, **quiet | {"vocab_size": 300}
        )
    elif kind.startswith("pieces"):
        found = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
        found.normalizer = library.normalizers.BertNormalizer()
        found.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        trainer = library.trainers.WordPieceTrainer(special_tokens=["[UNK]"], **quiet)
    else:
        found = library.Tokenizer(library.models.BPE(unk_token="<unk>", fuse_unk=True))
        if kind == "prepend":  # as in the files of Llama 2 and TinyLlama
            found.normalizer = library.normalizers.Sequence(
                [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
            )
        else:
            scheme = kind.removeprefix("metaspace ")
            found.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme=scheme)
        trainer = library.trainers.BpeTrainer(special_tokens=["<unk>"], **quiet)
    found.train_from_iterator(words, trainer)
    found.add_special_tokens(
        [tokenizers.AddedToken(mark, normalized=False, rstrip="strips" in kind) for mark in MARKS]
    )
    if "cut" in kind:
        found.enable_truncation(8)
        found.enable_padding(length=12)
    return found


KINDS = (
    "byte level", "byte level, prefix", "byte level, strips", "prepend", "metaspace first",
    "metaspace always", "pieces, cut",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_tokenized_in_one_piece(kind):
    """Tokens: those of the text that a template of transformers writes, whole. Scored: from the
    token of an answer's first character to that of its last, as transformers' masks are."""
    tokenizer = trained(kind)
    whole = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    whole.no_truncation()
    whole.no_padding()
    whole.post_processor = None  # or the offsets are without white space
    rng = np.random.default_rng(0)
    words = ["add", "two", " ", "\n", "\n\n", "the sum", "é", "numbers", "?", "<", "北京", ""]
    straddling = 0
    for _ in range(30):
        chat, text, spans = [], "", []
        for role in ["system"] * rng.integers(2) + ["user", "assistant"] * rng.integers(1, 4):
            content = "".join(rng.choice(words, rng.integers(6)))
            chat.append({"role": role, "content": content})
            text += "\n" * bool(text) + f"<|im_start|>{role}\n"
            if role == "assistant":
                spans.append((len(text), len(text) + len(content) + len(MARKS[1]) - 1))
            text += f"{content}<|im_end|>"
        expected = whole.encode(text, add_special_tokens=False)
        scored = np.zeros(len(expected.ids), bool)
        for first, last in spans:
            places = [expected.char_to_token(place) for place in range(first, last + 1)]
            first_token, last_token = (min(p for p in places if p is not None), places[-1])
            scored[first_token : last_token + 1] = True
            straddling += expected.offsets[first_token][0] < first
        if "strips" in kind:  # a mark that takes in the white space after it is not an answer's
            ends = np.array(expected.ids) == whole.token_to_id(MARKS[1])
            scored &= ends | (np.array(expected.ids) != whole.token_to_id(MARKS[0]))
        packed = data.pack_chats([{"messages": chat}], tokenizer, length=len(expected.ids) - 1)
        assert packed.x.tokens[0].tolist() == expected.ids[:-1]
        assert packed.y[0].tolist() == np.where(scored, expected.ids, -1)[1:].tolist()
    assert straddling or not kind.startswith("byte level")


@pytest.mark.parametrize("kind", ["byte level", "prepend", "metaspace first"])
def test_marks_in_messages_stay_text_in_the_middle_of_a_piece(kind):
    """Against a tokenizer for which other marks are special, and these are not."""
    tokenizer = trained(kind)
    chat = [("user", "add <|im_end|> two"), ("assistant", "<|im_start|>numbers")]
    other = tokenizer.to_str().replace("<|im_start|>", "<A>").replace("<|im_end|>", "<B>")
    expected = tokenizers.Tokenizer.from_str(other).encode(
        "\n".join(f"<A>{role}\n{content}<B>" for role, content in chat), add_special_tokens=False
    )
    records = [{"messages": [{"role": role, "content": content} for role, content in chat]}]
    packed = data.pack_chats(records, tokenizer, length=len(expected.ids) - 1)
    assert packed.x.tokens[0].tolist() == expected.ids[:-1]
    assert np.isin(packed.x.tokens[0], [tokenizer.token_to_id(mark) for mark in MARKS]).sum() == 3
    assert not tokenizer.encode_special_tokens  # the caller's own is as it was


def test_a_template_whose_marks_are_no_tokens_is_refused():
    tokenizer = trained("byte level")
    record = {"prompt": "a", "completion": "b"}
    with pytest.raises(
        ValueError, match=r"template has '<\|begin_of_text\|>', which the tokenizer"
    ):
        data.pack_chats([record], tokenizer, length=60, template="llama3")
    zephyr = data.Template("", "<|{role}|>\n", "<|im_end|>", "\n")
    with pytest.raises(
        ValueError, match=r"template has '<\|user\|>', which the tokenizer does not"
    ):
        data.pack_chats([record], tokenizer, length=60, template=zephyr)
    plain = zephyr._replace(plain=("<|user|>", "<|assistant|>"))
    packed = data.pack_chats([record], tokenizer, length=60, template=plain)
    text = "<|user|>\na<|im_end|>\n<|assistant|>\nb<|im_end|>"
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert packed.x.tokens[0][packed.x.segments[0] == 1].tolist() == expected[:-1]
    listed = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<|im_start|>": 1}, []))
    with pytest.raises(ValueError, match=r"has '<\|im_start\|>', which"):  # no token of its own
        data.pack_chats([record], listed, length=60)
    with pytest.raises(TypeError, match="template is a dict; it must be one of chatml, llama3, or"):
        data.pack_chats([record], tokenizer, length=60, template={})
    with pytest.raises(
        TypeError, match="tokenizer is a str; it must be a Tokenizer of the library"
    ):
        data.pack_chats([record], "gpt2", length=60)


def test_marks_that_cannot_be_kept_apart_are_refused():
    tokenizer = trained("byte level")
    added = tokenizers.Tokenizer.from_str(
        tokenizer.to_str().replace('"special":true', '"special":false')
    )
    record = {"prompt": "a", "completion": "b"}
    data.pack_chats([record], added, length=60)
    with pytest.raises(ValueError, match=r"records\[1\]: a message contains '<\|im_end\|>', which"):
        data.pack_chats([record, {"prompt": "a<|im_end|>", "completion": "b"}], added, length=60)
    with pytest.raises(ValueError, match="the tokenizer finds 5 of the 4 special tokens"):
        data.pack_chats([{"prompt": "\u4dc0" * 3 + "\u4dc1", "completion": "b"}], added, length=60)


def test_messages_are_trimmed_as_llama_3_does():
    tokenizer = trained("byte level")
    tokenizer.add_special_tokens(
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    )
    packed = data.pack_chats(
        [{"prompt": " a\n", "completion": "\nb "}], tokenizer, length=60, template="llama3"
    )
    text = (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
    )
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert packed.x.tokens[0][packed.x.segments[0] == 1].tolist() == expected[:-1]


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
