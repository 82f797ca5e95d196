"""JSON in untrusted files: strict parsing, and one reader with one wording of its errors."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import numpy as np

from fedjax_lab.checks import repeated

Kinds = Mapping[str, type | UnionType]  # name -> type of the value

_WORDS = {dict: "an object", int: "an integer", list: "a list", str: "text", type(None): "null"}


def read_json(
    path: Path, required: Kinds | None = None, optional: Kinds | None = None, hint: str = ""
) -> dict[str, Any]:
    """Read a file with a JSON object, and check its values' types.

    Args:
      required: values that the object must have.
      optional: values that it may have; a dot leads into an object.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it cannot be read, or a value is missing or has another type.
    """
    hint = hint and f" {hint}"
    try:
        found = parse_json(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}.") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}).{hint}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object.{hint}")
    for name in required or {}:
        if name not in found:
            raise ValueError(f"{path} has no {name!r}.{hint}")
    for name, kind in {**(required or {}), **(optional or {})}.items():
        outer, _, last = name.rpartition(".")
        holder = found.get(outer, {}) if outer else found  # checked before what it holds
        value = holder.get(last)
        if last in holder and (not isinstance(value, kind) or isinstance(value, bool)):
            words = " or ".join(_WORDS[one] for one in get_args(kind) or (kind,))
            raise ValueError(f"{path}: {name!r} is {shown(value)}; it must be {words}.{hint}")
    return found


def parse_json(text: str) -> Any:
    """Parse JSON like ``json.loads``, but accept only finite numbers and distinct keys.

    Raises:
      ValueError: it is not JSON, is nested too deeply, has a key twice in an object, or has NaN or
        a number beyond a float.
    """

    def refuse(word):
        raise ValueError(f"{word} is no number of JSON")

    def finite(word, kind):
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
            object_pairs_hook=distinct,
            parse_constant=refuse,
            parse_float=lambda word: finite(word, float),
            parse_int=lambda word: finite(word, int),
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, of which Python would keep the last of several values of one key.

    Raises:
      ValueError: a key stands twice.
    """
    if (twice := repeated(key for key, _ in pairs)) is not None:
        raise ValueError(f"{twice!r} is given twice")
    return dict(pairs)


def plain_number(value: Any) -> Any:
    """Convert a scalar of NumPy to the number that it is, for ``json.dumps(default=plain_number)``.

    Raises:
      TypeError: it is something else.
    """
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is no JSON value")


def plain_number_or_text(value: Any) -> Any:
    """Convert a value likewise, or to its text where it is something else."""
    return plain_number(value) if isinstance(value, np.generic) else str(value)


def no_numbers(value: Any) -> list[Any]:
    """Return what is neither a number nor null in a value that may be a list of lists."""
    if isinstance(value, list):
        return [wrong for part in value for wrong in no_numbers(part)]
    return [] if value is None or isinstance(value, (int, float)) else [value]


def shown(value: Any) -> str:
    """Show the beginning of a value in an error."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."
