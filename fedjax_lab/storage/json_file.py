"""JSON in files that others may have written: whole or refused, and no link is followed."""

import json
import math
from pathlib import Path
from typing import IO, Any


def parse_json(text: str) -> Any:
    """Like ``json.loads``, of numbers that are finite alone.

    Args:
      text: JSON.

    Raises:
      ValueError: it is no JSON, is nested too deeply, or holds NaN or a number beyond a float.
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


def new_file(path: Path, mode: str = "w", **options: Any) -> IO[Any]:
    """A new file to write to, in place of what has the name: a link is taken away, not followed.

    Args:
      path: the file; its folder exists.
      mode: "w" or "wb".
      **options: as of ``open``.
    """
    path.unlink(missing_ok=True)
    options = options if "b" in mode else {"encoding": "utf-8", **options}
    return open(path, mode.replace("w", "x"), **options)
