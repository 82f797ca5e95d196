"""Text as integers: tokens, a vocabulary, and sequences for next-token prediction.

Tokens are words, characters or bytes:

- Words are separated by white space, and every line ends with the word ``<eos>``. A word's number
  is its index in the vocabulary: 0 is ``<unk>``, and 1 is ``<eos>``. The words of the training text
  follow by decreasing frequency, and by first occurrence for equal frequencies.
- Characters are numbered like words; 1 is the newline that ends every line.
- Bytes are those of the text in UTF-8, with one newline after each line, however the file ends its
  lines. A byte's number is its value, so the vocabulary is the same for all texts.

Axes: n sequences, L tokens of a sequence, T tokens of a text, V tokens of the vocabulary.
"""

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_lab.checks import check_choice, check_int
from fedjax_lab.data.files import open_text

UNKNOWN, END = "<unk>", "<eos>"
TOKENS = ("words", "characters", "bytes")
NUM_BYTES = 256

# Files of a folder; the names in WikiText's archive are also accepted.
_FILES = {
    "train": ("train.txt", "wiki.train.tokens"),
    "test": ("test.txt", "wiki.test.tokens", "valid.txt", "wiki.valid.tokens"),
}


class Corpus(NamedTuple):
    """A text cut into sequences.

    Attributes:
      train: (inputs, targets), both int32 [n, L]: sequence j has the tokens jL to jL + L - 1 of the
        text as inputs, and the tokens one place further on as targets.
      test: the same for the held-out text.
      vocabulary: V tokens; a token's number is its index. The byte b is ``chr(b)`` here.
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    vocabulary: tuple[str, ...]


def build_corpus(
    train: Iterable[str],
    test: Iterable[str] | None,
    *,
    sequence_length: int = 35,
    vocabulary_size: int | None = None,
    tokens: str = "words",
) -> Corpus:
    """Number the tokens of a text and cut it into sequences.

    The vocabulary comes from the training sequences; other words or characters of the test text are
    ``<unk>``. Tokens at the end of a text that do not fill a sequence are dropped before counting,
    so that every word of the vocabulary occurs (except possibly ``<unk>`` and ``<eos>``).

    Args:
      test: lines; None: the last tenth of the tokens of ``train`` is held out.
      vocabulary_size: the most tokens that the vocabulary may have, 0 and 1 included, at least 2;
        None: all. Must be None for bytes, which are always 256.
      tokens: "words", "characters" or "bytes".

    Raises:
      TypeError: a number is not an integer.
      ValueError: a number is out of range, ``tokens`` is unknown, or a text has too few tokens for
        one sequence.
    """
    check_choice("tokens", tokens, TOKENS)
    length = check_int("sequence_length", sequence_length, minimum=1)
    if vocabulary_size is not None:
        check_int("vocabulary_size", vocabulary_size, minimum=2)
        if tokens == "bytes":
            raise ValueError(
                f"vocabulary_size is {vocabulary_size} and tokens 'bytes'; there are {NUM_BYTES} "
                "bytes: leave vocabulary_size out."
            )
    index = {UNKNOWN: 0, END if tokens == "words" else "\n": 1}
    numbers = {"train": number_tokens(train, index, tokens)}
    if test is None:
        whole = numbers["train"]
        held_out = len(whole) // 10
        numbers = {"train": whole[: len(whole) - held_out], "test": whole[len(whole) - held_out :]}
    else:
        numbers["test"] = number_tokens(test, index, tokens)
    end = ord("\n") if tokens == "bytes" else 1
    for part, found in numbers.items():
        if not (found != end).any():
            raise ValueError(f"the {part} text is empty: it has no {tokens}.")
        if len(found) <= length:
            ends = "one <eos>" if tokens == "words" else "a newline"
            raise ValueError(
                f"sequence_length is {length}, which takes {length + 1} {tokens}; the {part} text "
                f"has {len(found)} (with {ends} per line). Give a longer text or shorter sequences."
            )
        numbers[part] = found[: (len(found) - 1) // length * length + 1]
    if tokens == "bytes":
        places, vocabulary = np.arange(NUM_BYTES, dtype=np.int32), map(chr, range(NUM_BYTES))
    else:
        kept = most_frequent(numbers["train"], len(index), vocabulary_size)
        places = np.zeros(len(index), np.int32)
        places[kept] = np.arange(len(kept))
        words = list(index)
        vocabulary = map(words.__getitem__, kept)
    return Corpus(
        _sequences(places[numbers["train"]], length),
        _sequences(places[numbers["test"]], length),
        tuple(vocabulary),
    )


def number_tokens(lines: Iterable[str], index: dict[str, int], tokens: str) -> np.ndarray:
    """Number tokens in the order in which they first occur, bytes by their values.

    Args:
      lines: the text; ``<eos>`` or a newline follows each line.
      index: token -> number, of the tokens seen before; new tokens are added to it, but no bytes.
      tokens: "words", "characters" or "bytes".

    Returns:
      int32 [T].
    """
    if tokens == "bytes":
        whole = b"".join(line.rstrip("\n").encode() + b"\n" for line in lines)
        return np.frombuffer(whole, np.uint8).astype(np.int32)
    numbers = array("i")
    for line in lines:
        found = [*line.split(), END] if tokens == "words" else line.rstrip("\n") + "\n"
        numbers.extend(index.setdefault(token, len(index)) for token in found)
    return np.array(numbers, np.int32)


def most_frequent(numbers: np.ndarray, total: int, size: int | None) -> np.ndarray:
    """Select the vocabulary from the numbers of ``number_tokens``: int64 [V], V <= ``size``.

    Args:
      numbers: int32 [T], the training text, in which 0 is ``<unk>`` and 1 is ``<eos>``.
      size: largest number of words, at least 2; None: all that occur.
    """
    counts = np.bincount(numbers, minlength=total)
    counts[:2] = np.iinfo(counts.dtype).max  # these two are always first
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)][:size]


def read_lines(path: Path) -> tuple[Iterator[str], Iterator[str] | None]:
    """Read the lines of the training text and of the test text (None for a single file).

    Args:
      path: a UTF-8 file, or a folder with train.txt and test.txt (or else valid.txt), or with
        WikiText's files of these names (wiki.train.tokens, ...).

    Raises:
      FileNotFoundError: there is no such file or folder, or the folder lacks a file.
      ValueError: a file is not UTF-8 (when its lines are read).
    """
    if path.is_file():
        return _lines(path), None
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {path}.")
    found = []
    for names in _FILES.values():
        file = next((path / name for name in names if (path / name).is_file()), None)
        if file is None:
            raise FileNotFoundError(f"{path} has no {' or '.join(names)}.")
        found.append(_lines(file))
    return found[0], found[1]


def _lines(path: Path) -> Iterator[str]:
    with open_text(path) as file:
        yield from file


def _sequences(numbers: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    return numbers[:-1].reshape(-1, length), numbers[1:].reshape(-1, length)
