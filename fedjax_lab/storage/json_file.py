"""JSON in untrusted files: strict parsing."""

import json
import math
from typing import Any


def parse_json(text: str) -> Any:
    """Parse JSON like ``json.loads``, but accept only finite numbers.

    Args:
      text: JSON.

    Raises:
      ValueError: it is not JSON, is nested too deeply, or has NaN or a number beyond a float.
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

    try:
        return json.loads(
            text,
            parse_constant=refuse,
            parse_float=lambda word: number(word, float),
            parse_int=lambda word: number(word, int),
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
