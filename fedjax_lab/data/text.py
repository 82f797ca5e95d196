"""Text as integers: words, a vocabulary, and sequences for next-word prediction.

Words are separated by white space, and every line ends with the word ``<eos>``. A word's number is
its place in the vocabulary. 0 is ``<unk>`` and 1 is ``<eos>``. The words of the training text
follow in the order of their frequency, and of their first occurrence for equal frequencies.

Axes: n sequences, L words of a sequence, T words of a text, V words of the vocabulary.
"""

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_lab.checks import check_int

UNKNOWN, END = "<unk>", "<eos>"

# In a folder: the names of WikiText's own archive are taken too.
_FILES = {
    "train": ("train.txt", "wiki.train.tokens"),
    "test": ("test.txt", "wiki.test.tokens", "valid.txt", "wiki.valid.tokens"),
}


class Corpus(NamedTuple):
    """A text cut into sequences.

    Attributes:
      train: (inputs, targets), both int32 [n, L]: sequence j has the words jL to jL + L - 1 of the
        text as inputs, and the words one place further on as targets.
      test: the same of the held-out text.
      vocabulary: V words; a word's number is its place.
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
) -> Corpus:
    """Number the words of a text and cut it into sequences.

    The vocabulary comes from the training sequences; other words of the test text are ``<unk>``.
    Words at the end of a text that do not fill a sequence are dropped before counting, so that
    every word of the vocabulary occurs (except possibly ``<unk>`` and ``<eos>``).

    Args:
      train: lines.
      test: lines; None: the last tenth of the words of ``train`` is held out.
      sequence_length: L.
      vocabulary_size: the most words that the vocabulary may have, ``<unk>`` and ``<eos>``
        included, at least 2; None: all.

    Raises:
      TypeError: a number is not an integer.
      ValueError: a number is out of range, or a text has too few words for one sequence.
    """
    length = check_int("sequence_length", sequence_length, minimum=1)
    if vocabulary_size is not None:
        check_int("vocabulary_size", vocabulary_size, minimum=2)
    index = {UNKNOWN: 0, END: 1}
    numbers = {"train": number_words(train, index)}
    if test is None:
        whole = numbers["train"]
        held_out = len(whole) // 10
        numbers = {"train": whole[: len(whole) - held_out], "test": whole[len(whole) - held_out :]}
    else:
        numbers["test"] = number_words(test, index)
    for part, found in numbers.items():
        if not (found != index[END]).any():
            raise ValueError(f"the {part} text is empty: it has no words.")
        if len(found) <= length:
            raise ValueError(
                f"sequence_length is {length}, which takes {length + 1} words; the {part} text has "
                f"{len(found)} (with one {END} per line). Give a longer text or shorter sequences."
            )
        numbers[part] = found[: (len(found) - 1) // length * length + 1]
    kept = most_frequent(numbers["train"], len(index), vocabulary_size)
    places = np.zeros(len(index), np.int32)
    places[kept] = np.arange(len(kept))
    words = list(index)
    return Corpus(
        _sequences(places[numbers["train"]], length),
        _sequences(places[numbers["test"]], length),
        tuple(words[number] for number in kept),
    )


def number_words(lines: Iterable[str], index: dict[str, int]) -> np.ndarray:
    """Number words in the order in which they first occur.

    Args:
      lines: the text; ``<eos>`` follows each line.
      index: word -> number, of the words seen before; new words are added to it.

    Returns:
      int32 [T].
    """
    numbers = array("i")
    for line in lines:
        for word in line.split():
            numbers.append(index.setdefault(word, len(index)))
        numbers.append(index.setdefault(END, len(index)))
    return np.array(numbers, np.int32)


def most_frequent(numbers: np.ndarray, total: int, size: int | None) -> np.ndarray:
    """Select the vocabulary from the numbers of ``number_words``: int64 [V], V <= ``size``.

    Args:
      numbers: int32 [T], the training text, in which 0 is ``<unk>`` and 1 is ``<eos>``.
      total: number of distinct words.
      size: the most words, at least 2; None: all that occur.
    """
    counts = np.bincount(numbers, minlength=total)
    counts[:2] = np.iinfo(counts.dtype).max  # these two come first whatever their number
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
    with path.open(encoding="utf-8") as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no UTF-8 text: {error}") from error


def _sequences(numbers: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    return numbers[:-1].reshape(-1, length), numbers[1:].reshape(-1, length)
