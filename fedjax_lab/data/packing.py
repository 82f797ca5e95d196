"""Packing of token sequences: several sequences per row, which do not attend to each other.

Axes: n rows, T places of a row, m tokens of a sequence.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import LARGEST_INT, check_choice, check_int
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.sources import Examples
from fedjax_lab.data.streams import FederatedStream
from fedjax_lab.signatures import suggest_keywords

NOT_SCORED = -1
TOO_LONG = ("error", "cut", "leave_out")


class Tokens(NamedTuple):
    """Rows of tokens with segments.

    Attributes:
      tokens: int [B, T].
      segments: int [B, T]: a token attends to earlier tokens with the same number. Padding is a
        segment of its own, by convention 0, before or after the text. The tokens of a segment are
        contiguous, and positions start again in each segment.
    """

    tokens: Any
    segments: Any


class Sentence(NamedTuple):
    """A text as tokens.

    Attributes:
      tokens: int [m].
      scored: bool [m], True for tokens that a model has to predict.
    """

    tokens: Sequence[int] | np.ndarray
    scored: Sequence[bool] | np.ndarray


@suggest_keywords
def pack(
    sequences: Iterable[Sentence | tuple[Sequence[int], Sequence[bool]]],
    length: int,
    *,
    too_long: str = "error",
) -> Examples:
    """Pack sequences into rows of one length.

    A sequence of m tokens takes m - 1 places, each with a token as input and the next token as
    target. The longest sequences are placed first, each in the fullest row that has room for it.

    Args:
      sequences: tokens of each sequence, and which of them are scored. The first token of a
        sequence is never scored, because nothing precedes it.
      length: T.
      too_long: what to do with more than T + 1 tokens: "error", "cut" the end, or "leave_out" the
        sequence. A sequence without remaining scored tokens is left out.

    Returns:
      ``Examples``: x is ``Tokens`` int32 [n, T]; y is int32 [n, T], the next token of each place,
      or -1 if it is not scored.

    Raises:
      TypeError: ``length`` is not an integer.
      ValueError: a sequence is too long, has no scored token, or has not one flag for each token;
        tokens are not integers from 0; or there is no sequence.
    """
    check_int("length", length, minimum=1)
    check_choice("too_long", too_long, TOO_LONG)
    kept = []
    for number, (given, flags) in enumerate(sequences):
        kept += _checked(number, np.asarray(given), np.asarray(flags), length, too_long)
    if not kept:
        raise ValueError("sequences has none to pack.")
    kept.sort(key=lambda pair: -len(pair[0]))
    rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
    room: list[tuple[int, int]] = []  # the free places of each row, sorted
    for pair in kept:
        size = len(pair[0]) - 1
        place = bisect.bisect_left(room, (size, -1))
        left, row = room.pop(place) if place < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(pair)
        bisect.insort(room, (left - size, row))
    inputs, segments = (np.zeros((len(rows), length), np.int32) for _ in range(2))
    targets = np.full((len(rows), length), NOT_SCORED, np.int32)
    for row, pairs in enumerate(rows):
        start = 0
        for number, (tokens, scored) in enumerate(pairs, start=1):
            places = slice(start, start + len(tokens) - 1)
            inputs[row, places], segments[row, places] = tokens[:-1], number
            targets[row, places] = np.where(scored[1:], tokens[1:], NOT_SCORED)
            start = places.stop
    return Examples(Tokens(inputs, segments), targets)


def _checked(
    number: int, tokens: np.ndarray, scored: np.ndarray, length: int, too_long: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Check a sequence and cut it if necessary; [] if it is left out."""
    name = f"sequences[{number}]"
    is_integer = tokens.ndim == 1 and tokens.dtype.kind in "iu"
    if not is_integer or not 0 <= tokens.min(initial=0) <= tokens.max(initial=0) <= LARGEST_INT:
        raise ValueError(
            f"{name} has tokens {tokens!r}; they must be integers [m] from 0 to {LARGEST_INT}."
        )
    if scored.shape != tokens.shape or scored.dtype != bool:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, and scored has shape {scored.shape} and dtype "
            f"{scored.dtype}; it must be bool, one for each."
        )
    if not scored[1:].any():
        raise ValueError(f"{name} has no scored token after its first.")
    if len(tokens) <= length + 1:
        return [(tokens, scored)]
    if too_long == "error":
        raise ValueError(
            f"{name} has {len(tokens)} tokens; length={length} has room for {length + 1}. Choose a "
            "longer one, or too_long='cut' or 'leave_out'."
        )
    cut = tokens[: length + 1], scored[: length + 1]
    return [cut] if too_long == "cut" and cut[1][1:].any() else []


def scored_per_row(examples: Examples | FederatedArrays | FederatedStream) -> float:
    """Compute the average number of scored tokens of a row.

    With this value as ``tokens_per_row``, the mean of a loss over rows is the mean over tokens.

    Args:
      examples: result of ``pack``; or clients with such examples, of which the rows that some
        client has count. Parts of a split share their examples, but not these rows.
    """
    if isinstance(examples, FederatedStream):
        y = np.asarray(examples.examples.targets)[np.asarray(examples.indices)]
    elif isinstance(examples, FederatedArrays):
        y = np.asarray(examples.examples.y)[np.asarray(examples.indices)]
    else:
        y = np.asarray(examples.y)
    return float((y >= 0).sum() / len(y))
