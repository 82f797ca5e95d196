"""JSON in untrusted files: strict parsing."""

import json
import math
from collections.abc import Sequence
from typing import Any


def parse_json(text: str) -> Any:
    """Parse JSON like ``json.loads``, but accept only finite numbers and distinct keys.

    Raises:
      ValueError: it is not JSON, is nested too deeply, has a key twice in an object, or has NaN or
        a number beyond a float.
    """

    def refuse(word):
        raise ValueError(f"{word} is no number of JSON")

    def number(word, kind):
        value = kind(word)  # of more than some thousand digits a ValueError, too
        try:
            is_finite = math.isfinite(value)
        except OverflowError:
            is_finite = False
        if not is_finite:
            raise ValueError(f"the number {word[:20]} is out of range")
        return value

    def distinct(pairs):
        check_distinct([key for key, _ in pairs])
        return dict(pairs)

    try:
        return json.loads(
            text,
            object_pairs_hook=distinct,
            parse_constant=refuse,
            parse_float=lambda word: number(word, float),
            parse_int=lambda word: number(word, int),
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_distinct(keys: Sequence[Any]) -> None:
    """Check that an object of a file has each key once.

    Raises:
      ValueError: a key stands twice.
    """
    twice = [key for i, key in enumerate(keys) if key in keys[:i]]  # keys of YAML may have no hash
    if twice:
        raise ValueError(f"{twice[0]!r} is given twice")
