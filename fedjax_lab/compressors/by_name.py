"""The compressors by name, and their text form."""

import inspect
from collections.abc import Callable
from typing import Any

from fedjax_lab.checks import check_choice
from fedjax_lab.compressors.base import Compressor, bfloat16, identity
from fedjax_lab.compressors.compose import compose
from fedjax_lab.compressors.low_rank import low_rank
from fedjax_lab.compressors.quantize import int8, qsgd, sign, terngrad
from fedjax_lab.compressors.sparsify import random_drop, random_k, top_k

# The first line of a factory's docstring is its description.
_FACTORIES: tuple[Callable[..., Compressor], ...] = (
    *(bfloat16, compose, identity, int8, low_rank, qsgd, random_drop, random_k, sign, terngrad),
    top_k,
)
COMPRESSORS = {factory.__name__: factory for factory in _FACTORIES}


# Bytes of a message from d float32 numbers, as packed. k = max(1, round((1 - comp) * d)).
MESSAGE_BYTES: dict[str, str] = {
    "bfloat16": "2 * d",
    "compose": "positions of the sparsifier + the quantiser's bytes at d = k",
    "identity": "4 * d",
    "int8": "d + 4",
    "low_rank": "4 * min(rank, n) * (n + ceil(d / n)) with n = floor(sqrt(d))",
    "qsgd": "ceil(d * ceil(log2(2 * levels + 1)) / 8) + 4",
    "random_drop": "4 * (1 - comp) * d + 4 on average",
    "random_k": "4 * k + 4 with k = (1 - comp) * d",
    "sign": "ceil(d / 8) + 4",
    "terngrad": "ceil(d / 4) + 4",
    "top_k": "4 * k + ceil(k * ceil(log2(d)) / 8) with k = (1 - comp) * d",
}

_EXAMPLES = {
    "compose": "top_k:0.99+qsgd:15",
    "low_rank": "low_rank:4",
    "qsgd": "qsgd:15",
    "random_drop": "random_drop:0.99",
    "random_k": "random_k:0.99",
    "top_k": "top_k:0.99",
}
_EXAMPLE_SIZE = 1_000_000


def describe(name: str) -> list[str]:
    """Describe a compressor: its text form, its arguments, and the bytes of its messages.

    Raises:
      KeyError: no compressor has this name.
    """
    parameters = inspect.signature(COMPRESSORS[name]).parameters.values()
    text, flags = _arguments(COMPRESSORS[name])
    if name == "compose":
        form = "SPARSIFIER+QUANTISER"
    elif text and text[0].name == "comp":
        form = f"{name}:COMP (dropped), {name}:drop=COMP, or {name}:keep=FRACTION"
    elif text:
        form = f"{name}:{text[0].name.upper()}"
    else:
        form = name
    form += "".join(f"[:{flag}]" for flag in flags) if name != "compose" else ""
    arguments = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    example = _EXAMPLES.get(name, name)
    size = as_compressor("example", example).bytes(_EXAMPLE_SIZE)
    return [
        f"as text: {form}",
        f"arguments in Python: {', '.join(arguments) or 'none'}",
        f"bytes: {MESSAGE_BYTES[name]}",
        f"{example}, d = {_EXAMPLE_SIZE:,}: {size:,} bytes, 1/{4 * _EXAMPLE_SIZE / size:.3g} of "
        "float32",
    ]


def as_compressor(argument: str, value: Any) -> Compressor:
    """Return a compressor, or parse it from text.

    A text is a name, optionally with a colon and the first argument; a plus sign means ``compose``:
    "sign", "top_k:0.99", "low_rank:2", "top_k:0.99+qsgd:15". The name of an argument that is false
    by default sets it, at the end: "qsgd:15:scaled", "random_k:0.9:rescale". A sparsifier's
    ``comp`` is the fraction that is dropped. Since other codes use the fraction that is kept,
    "top_k:drop=0.99" and "top_k:keep=0.01" state which is meant.

    Args:
      argument: the argument's name, for errors.
      value: a ``Compressor`` or text.

    Raises:
      TypeError: ``value`` is neither.
      ValueError: the text does not name a compressor, or its argument is wrong or missing.
    """
    if isinstance(value, Compressor):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{argument} is {value!r}; it must be a Compressor or text.")
    parts = [_parse(argument, part) for part in value.split("+")]
    if len(parts) > 2:
        raise ValueError(f"{argument} is {value!r}; at most one + is allowed.")
    return compose(*parts) if len(parts) == 2 else parts[0]


def _parse(argument: str, text: str) -> Compressor:
    name, *rest = text.strip().split(":")
    factory = COMPRESSORS[check_choice(argument, name, set(COMPRESSORS) - {"compose"})]
    parameters, flags = _arguments(factory)
    set_flags = {rest.pop(): True} if rest and rest[-1] in flags else {}
    if rest and not parameters:
        raise ValueError(
            f"{argument} is {text!r}; {name} takes no argument{' but ' * bool(flags)}"
            f"{', '.join(flags)}."
        )
    if not rest:
        if parameters and parameters[0].default is inspect.Parameter.empty:
            raise ValueError(
                f"{argument} is {text!r}; it must be {name}:{parameters[0].name.upper()}."
            )
        return factory(**set_flags)
    number, kind = ":".join(rest), parameters[0].annotation
    try:
        if parameters[0].name == "comp":
            return factory(_dropped(argument, name, number), **set_flags)
        return factory(kind(number), **set_flags)
    except ValueError as error:
        if "must be" in str(error):
            raise
        raise ValueError(
            f"{argument} is {text!r}; {number.split('=')[-1]!r} must be {kind.__name__}."
        ) from error


def _arguments(factory: Callable[..., Compressor]) -> tuple[list[inspect.Parameter], list[str]]:
    """Return (parameters that a text gives by their place, names of those that it sets)."""
    parameters = inspect.signature(factory).parameters.values()
    by_place = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    return by_place, [p.name for p in parameters if p.default is False]


def _dropped(argument: str, name: str, text: str) -> float:
    """Parse the dropped fraction from "0.99", "drop=0.99" or "keep=0.01"."""
    word, equals, number = text.partition("=")
    if not equals:
        return float(text)
    if word not in ("drop", "keep"):
        raise ValueError(
            f"{argument} is {f'{name}:{text}'!r}; {word!r} must be drop or keep, such as "
            f"{name}:keep=0.01."
        )
    fraction = float(number)
    if word == "keep" and not 0 < fraction <= 1:
        raise ValueError(f"{argument} is {f'{name}:{text}'!r}; keep must be in (0, 1].")
    return fraction if word == "drop" else 1 - fraction
