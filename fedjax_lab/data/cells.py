"""The meaning of text in the cells of a table: numbers, truth values, missing values, categories.

Axes: n rows of a table, d distinct values of a column.
"""

import math
import numbers
import re
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np

# Marks of a missing value, in small letters.
MARKS = ("", "?", "na", "n/a", "#n/a", "nan", "<na>", "null", "none", "-", ".")
# Those that also mark a missing value among text, where the others may be values.
TEXT_MARKS = ("", "na", "n/a", "#n/a", "nan", "<na>", "null")
MEANINGS = ("drop", "mean", "keep")
NUMBER = r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*"
INTEGER = r"\s*[+-]?[0-9]+\s*"

_NUMBER, _INTEGER = re.compile(NUMBER), re.compile(INTEGER)
# A number written for people: a currency, a percent sign, thousands, a decimal comma, the minus of
# typesetters.
_FOR_PEOPLE = re.compile(
    r"\s*\(?[+\u2212-]?[$€£¥]?\s*[+\u2212-]?"
    r"([0-9]{1,3}([,. '_\u00a0\u202f][0-9]{3})+|[0-9]+)?([.,][0-9]+)?"
    r"(?<=[0-9])([eE][+-]?[0-9]+)?\s*[%‰$€£¥]?\)?\s*"
)
# A date or a time of ISO 8601, or as people write them: 31/1/2020, 31.01.2020, 2020/01/31.
_TIME = re.compile(
    r"\s*(([0-9]{4}([-/.])[0-9]{2}\3[0-9]{2}|[0-9]{1,2}([-/.])[0-9]{1,2}\4[0-9]{4})([ T].*)?"
    r"|[0-9]{1,2}:[0-9]{2}(:[0-9.]+)?( ?[AaPp][Mm])?)\s*"
)


class Text(NamedTuple):
    """A column of text.

    Attributes:
      distinct: d values, sorted.
      codes: int [n], each row's place in ``distinct``.
    """

    distinct: list[str]
    codes: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [n], as of an array."""
        return self.codes.shape

    def rows_of(self, value: str) -> np.ndarray:
        """Return the rows with this value, one of ``distinct``."""
        return np.flatnonzero(self.codes == self.distinct.index(value))


class Missing:
    """The meaning of marks of missing values.

    Args:
      meaning: "drop" (leave the row out), "mean" (of the column's other numbers), "keep" (text: a
        value like others), or the number to fill in; or (meaning in columns of numbers, meaning in
        columns of text); or {mark: a single meaning}, where "" stands for an empty cell, None and
        NaN, and other marks are errors. None: all are errors.

    Raises:
      ValueError: it is none of these, or marks that differ in capitals only have two meanings.
    """

    def __init__(self, meaning: Any):
        marks = meaning if isinstance(meaning, Mapping) else {}
        of_all: Any = None if isinstance(meaning, Mapping) else meaning
        is_pair = isinstance(of_all, (tuple, list)) and len(of_all) == 2
        pair: tuple[Any, Any] = of_all if is_pair else (of_all, of_all)
        self._in_numbers, self._in_text = pair
        self.marks: dict[str, Any] = {}
        for mark, value in marks.items():
            if self.marks.setdefault(str(mark).strip().lower(), value) != value:
                raise ValueError(
                    f"missing is {meaning!r}; {mark!r} has two meanings: capitals do not matter."
                )
        of_columns = [] if of_all is None else [self._in_numbers, self._in_text]
        for value in [*self.marks.values(), *of_columns]:
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            is_word = isinstance(value, str) and value in MEANINGS
            if not is_word and not (is_number and math.isfinite(value)):
                raise ValueError(
                    f"missing is {meaning!r}; it must be 'drop', 'mean', 'keep' or a finite "
                    "number, a pair of these for columns of numbers and of text, such as "
                    "('mean', 'keep'), or map marks of missing values to these, such as "
                    "{'?': 'drop'}."
                )

    def has(self, meaning: str) -> bool:
        """Return True if a mark has this meaning."""
        return meaning in (self._in_numbers, self._in_text, *self.marks.values())

    def of(self, mark: str, *, is_text: bool = False) -> Any:
        """Return the meaning of a mark in a column of numbers, or of text; or None."""
        of_all = self._in_text if is_text else self._in_numbers
        return self.marks.get(mark.strip().lower(), of_all)

    def is_mark(self, cell: str, marks: tuple[str, ...]) -> bool:
        """Return True if text is one of ``marks``, of this file, or of the user's marks."""
        cell = cell.strip().lower()
        return cell in marks or cell in self.marks


def is_missing(value: Any) -> bool:
    """Return True for None, NaN, and pandas' NA and NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, (float, np.floating)) and value != value


def check_text(about: str, text: str) -> str:
    """Return ``text`` if it can be written as UTF-8; JSON's escapes may have half of a pair.

    Args:
      about: what it is, for the error, such as "line 2: content".

    Raises:
      ValueError: it has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        raise ValueError(
            f"{about} has half of a surrogate pair, {half}, as character {error.start + 1}, which "
            "is no text (an emoji that was cut in two?); remove it."
        ) from error
    return text


def is_number(cell: str) -> bool:
    """Return True if text is a number as programs write it."""
    return _NUMBER.fullmatch(cell) is not None


def is_truth(cell: str) -> bool:
    """Return True if text is "true" or "false", in any case."""
    return cell.strip().lower() in ("true", "false")


def to_numbers(cells: list[str], marks: Container[str]) -> np.ndarray:
    """Convert text to int64 or float64 [d].

    Args:
      cells: text, each of it a number by ``is_number`` or a mark.
      marks: those of missing values, which become 0.
    """
    cells = ["0" if cell in marks else cell for cell in cells]
    if all(map(_INTEGER.fullmatch, cells)):
        try:
            return np.array(list(map(int, cells)), np.int64)
        except OverflowError:
            pass
    return np.array(list(map(float, cells)), np.float64)


def kind_of(text: Text, missing: Missing) -> str:
    """Infer a column's kind: "numbers", "truths", "times", "text", or "nothing" if all is missing.

    It is "numbers" if at least half of the cells that are not missing are numbers, also those that
    people write. Then other cells are mistakes.
    """
    counts = np.bincount(text.codes, minlength=len(text.distinct))
    filled = [
        (cell, int(count))
        for cell, count in zip(text.distinct, counts, strict=True)
        if count and not missing.is_mark(cell, MARKS)
    ]
    total = sum(count for _, count in filled)
    if not total:
        is_empty = all(missing.is_mark(cell, TEXT_MARKS) for cell in text.distinct)
        return "nothing" if is_empty else "text"
    for kind, is_kind in (("truths", is_truth), ("times", _TIME.fullmatch)):
        if all(is_kind(cell) for cell, _ in filled):
            return kind
    of_numbers = sum(n for cell, n in filled if is_number(cell) or _FOR_PEOPLE.fullmatch(cell))
    return "numbers" if 2 * of_numbers >= total else "text"
