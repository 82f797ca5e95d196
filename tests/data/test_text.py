"""Text: the vocabulary and the sequences of hand-made texts, files, folders and TFDS."""

import sys

import numpy as np
import pytest

from fedjax_lab import data
from fedjax_lab.data.text import build_corpus

TRAIN = ["b a b\n", "\n", "c a  b d\n", "e d"]
# b, a, b, eos, eos, c, a, b, d, eos, e, d, eos: eos 4, b 3, a and d 2, c and e 1
TEST = ["a z b", "d"]


def decode(sequences, vocabulary):
    return [[vocabulary[number] for number in row] for row in sequences]


def test_the_vocabulary_is_ordered_by_frequency_then_first_occurrence():
    corpus = build_corpus(TRAIN, TEST, sequence_length=4)
    assert corpus.vocabulary == ("<unk>", "<eos>", "b", "a", "d", "c", "e")
    x, y = corpus.train
    assert x.dtype == y.dtype == np.int32
    np.testing.assert_array_equal(x, [[2, 3, 2, 1], [1, 5, 3, 2], [4, 1, 6, 4]])
    np.testing.assert_array_equal(y, [[3, 2, 1, 1], [5, 3, 2, 4], [1, 6, 4, 1]])
    assert decode(corpus.test[0], corpus.vocabulary) == [["a", "<unk>", "b", "<eos>"]]
    assert decode(corpus.test[1], corpus.vocabulary) == [["<unk>", "b", "<eos>", "d"]]


def test_characters_are_numbered_like_words_and_lines_end_with_a_newline():
    # b, space, a, newline; a, b, newline
    corpus = build_corpus(["b a\n", "ab"], ["ax"], sequence_length=2, tokens="characters")
    assert corpus.vocabulary == ("<unk>", "\n", "b", "a", " ")
    np.testing.assert_array_equal(corpus.train[0], [[2, 4], [3, 1], [3, 2]])
    np.testing.assert_array_equal(corpus.train[1], [[4, 3], [1, 3], [2, 1]])
    np.testing.assert_array_equal(corpus.test[1], [[0, 1]])


def test_bytes_have_their_own_numbers(tmp_path):
    lines = ["näh\n", "\n", "ö"]
    corpus = build_corpus(lines, ["zz"], sequence_length=2, tokens="bytes")
    expected = np.frombuffer("näh\n\nö\n".encode(), np.uint8)
    assert len(expected) == 9
    np.testing.assert_array_equal(corpus.train[0].ravel(), expected[:8])
    np.testing.assert_array_equal(corpus.train[1].ravel(), expected[1:])
    assert len(corpus.vocabulary) == 256
    assert "".join(corpus.vocabulary[b] for b in corpus.train[0].ravel()) == "nÃ¤h\n\nÃ¶"
    with pytest.raises(ValueError, match="vocabulary_size is 9 and tokens 'bytes'"):
        build_corpus(lines, None, vocabulary_size=9, tokens="bytes")


def test_rare_words_become_unknown():
    corpus = build_corpus(TRAIN, TEST, sequence_length=4, vocabulary_size=4)
    assert corpus.vocabulary == ("<unk>", "<eos>", "b", "a")
    np.testing.assert_array_equal(corpus.train[1], [[3, 2, 1, 1], [0, 3, 2, 0], [1, 0, 0, 1]])
    smallest = build_corpus(TRAIN, TEST, sequence_length=4, vocabulary_size=2)
    assert smallest.vocabulary == ("<unk>", "<eos>")
    assert set(smallest.train[1].ravel()) == {0, 1}


def test_unknown_in_the_text_itself_is_the_same_word():
    corpus = build_corpus(["a <unk> <unk> b <unk>"], ["q r"], sequence_length=2)
    assert corpus.vocabulary[:2] == ("<unk>", "<eos>")
    np.testing.assert_array_equal(corpus.train[0], [[2, 0], [0, 3]])
    assert corpus.vocabulary == ("<unk>", "<eos>", "a", "b")


def test_words_beyond_the_last_sequence_are_left_out():
    corpus = build_corpus(["a b c d e f"], ["a b f"], sequence_length=3)  # 7 words: two sequences
    assert corpus.train[0].shape == (2, 3)
    assert corpus.vocabulary[-1] == "f"
    corpus = build_corpus(["a b c d e f"], ["a b f"], sequence_length=2)
    assert corpus.train[0].shape == (3, 2)
    corpus = build_corpus(["a b c d e f"], ["f b a q"], sequence_length=4)  # a to e: one
    np.testing.assert_array_equal(corpus.train[0], [[2, 3, 4, 5]])
    assert corpus.vocabulary == ("<unk>", "<eos>", "a", "b", "c", "d", "e")
    np.testing.assert_array_equal(corpus.test[0], [[0, 3, 2, 0]])
    assert data.num_classes(data.Examples(*corpus.train)) == 7


def test_sequences_are_contiguous_and_the_last_tenth_of_one_file_is_held_out(tmp_path):
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(list("abcdefgh"), rng.integers(0, 9))) for _ in range(60)]
    path = tmp_path / "one.txt"
    path.write_text("\n".join(lines))
    words = [word for line in lines for word in [*line.split(), "<eos>"]]
    held_out = len(words) // 10
    train, test = data.load(f"text:{path}", sequence_length=5)
    vocabulary = build_corpus(lines, None, sequence_length=5).vocabulary
    for part, expected in ((train, words[:-held_out]), (test, words[-held_out:])):
        n = (len(expected) - 1) // 5
        assert part.x.shape == part.y.shape == (n, 5)
        assert decode([part.x.ravel()], vocabulary)[0] == expected[: 5 * n]
        assert decode([part.y.ravel()], vocabulary)[0] == expected[1 : 5 * n + 1]
    assert data.num_classes(train) == len(vocabulary) == 10


@pytest.mark.parametrize(
    "names", [("train.txt", "test.txt"), ("train.txt", "valid.txt"), ("wiki.train.tokens",) * 2]
)
def test_a_folder(tmp_path, names):
    first, second = names[0], names[1].replace("train", "test")
    (tmp_path / first).write_text("ä b ä\nc ä b\n", encoding="utf-8")
    (tmp_path / second).write_text("b ä ö\n", encoding="utf-8")
    train, test = data.load(f"text:{tmp_path}", sequence_length=3)
    np.testing.assert_array_equal(train.x, [[2, 3, 2], [1, 4, 2]])
    np.testing.assert_array_equal(train.y, [[3, 2, 1], [4, 2, 3]])
    np.testing.assert_array_equal(test.x, [[3, 2, 0]])


def test_files_that_are_missing_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*none"):
        data.load(f"text:{tmp_path / 'none'}")
    with pytest.raises(FileNotFoundError, match=r"has no train\.txt or wiki\.train\.tokens"):
        data.load(f"text:{tmp_path}")
    path = tmp_path / "train.txt"
    path.write_text("a b c")
    with pytest.raises(FileNotFoundError, match=r"has no test\.txt or .* or valid\.txt"):
        data.load(f"text:{tmp_path}")
    path.write_bytes(b"a b\xff")
    with pytest.raises(ValueError, match=r"train\.txt is no UTF-8 text"):
        data.load(f"text:{path}")
    with pytest.raises(ValueError, match="must follow the colon"):
        data.load("text:")


@pytest.mark.parametrize(
    ("content", "options", "error", "message"),
    [
        ("", {}, ValueError, "the train text is empty"),
        ("\n \n", {}, ValueError, "the train text is empty"),
        ("a b\n", {"sequence_length": 1}, ValueError, "the test text is empty"),
        ("a b " * 20, {}, ValueError, "takes 36 words; the test text has 4"),
        ("a b " * 20, {"sequence_length": 40}, ValueError, "takes 41 words; the train text has 37"),
        ("a b", {"sequence_length": 0}, ValueError, "sequence_length is 0; it must be at least 1"),
        ("a b", {"sequence_length": 2.0}, TypeError, "sequence_length is 2.0; it must be an int"),
        ("a b", {"vocabulary_size": 1}, ValueError, "vocabulary_size is 1; it must be at least 2"),
    ],
)
def test_texts_and_numbers_that_will_not_do(tmp_path, content, options, error, message):
    path = tmp_path / "one.txt"
    path.write_text(content)
    with pytest.raises(error, match=message):
        data.load(f"text:{path}", **options)


RECORDS = {"train": ["x y x\n", "", "z\ny x", "y"], "test": ["y w x"]}


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    """A prepared TFDS directory with a small text, and one whose records hold two texts."""
    tfds = pytest.importorskip("tensorflow_datasets")
    folder = tmp_path_factory.mktemp("tfds")

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        texts = ("text", "title")

        def _info(self):
            features = {name: tfds.features.Text() for name in self.texts}
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in RECORDS}

        def _generate_examples(self, split):
            for i, text in enumerate(RECORDS[split]):
                yield i, {name: text for name in self.texts}

    class SmallText(Builder, skip_registration=True):
        pass

    class TwoTexts(Builder, skip_registration=True):
        texts = ("question", "answer")

    for builder in (SmallText, TwoTexts):
        builder(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_tfds(tfds_dir):
    train, test = data.load("tfds_text:small_text", data_dir=tfds_dir, sequence_length=3)
    expected = build_corpus(["x y x", "", "z", "y x", "y"], ["y w x"], sequence_length=3)
    for found, (x, y) in ((train, expected.train), (test, expected.test)):
        np.testing.assert_array_equal(found.x, x)
        np.testing.assert_array_equal(found.y, y)
    with pytest.raises(ValueError, match="two_texts has the text features answer, question"):
        data.load("tfds_text:two_texts", data_dir=tfds_dir)
    with pytest.raises(ValueError, match="tfds_text:no_such_text: tensorflow-datasets knows no"):
        data.load("tfds_text:no_such_text", data_dir=tfds_dir)


def test_tfds_text_is_read_without_tensorflow(tfds_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    train, _ = data.load("tfds_text:small_text", data_dir=tfds_dir, sequence_length=3)
    assert train.x.shape == (3, 3)
