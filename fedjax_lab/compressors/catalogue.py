"""Every compressor, by the name of its factory, and as text."""

import inspect
from collections.abc import Callable
from typing import Any

from fedjax_lab.checks import check_choice
from fedjax_lab.compressors.base import Compressor, bfloat16, identity
from fedjax_lab.compressors.compose import compose
from fedjax_lab.compressors.low_rank import low_rank
from fedjax_lab.compressors.quantize import int8, qsgd, sign, terngrad
from fedjax_lab.compressors.sparsify import random_drop, random_k, top_k

# The first line of a factory's docstring says what it does.
COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "bfloat16": bfloat16,
    "compose": compose,
    "identity": identity,
    "int8": int8,
    "low_rank": low_rank,
    "qsgd": qsgd,
    "random_drop": random_drop,
    "random_k": random_k,
    "sign": sign,
    "terngrad": terngrad,
    "top_k": top_k,
}


def as_compressor(argument: str, value: Any) -> Compressor:
    """Return a compressor, or make it from text.

    Text is a name, with a colon and its first argument where there is one, and a plus sign
    for ``compose``: "sign", "top_k:0.99", "low_rank:2", "top_k:0.99+qsgd:15".

    Args:
      argument: the argument's name, for errors.
      value: a ``Compressor`` or text.

    Raises:
      TypeError: ``value`` is neither.
      ValueError: the text names no compressor, or its argument is wrong or missing.
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
    name, colon, number = text.strip().partition(":")
    factory = COMPRESSORS[check_choice(argument, name, set(COMPRESSORS) - {"compose"})]
    parameters = [
        p for p in inspect.signature(factory).parameters.values() if p.kind is not p.KEYWORD_ONLY
    ]
    if colon and not parameters:
        raise ValueError(f"{argument} is {text!r}; {name} takes no argument.")
    if not colon:
        if parameters and parameters[0].default is inspect.Parameter.empty:
            raise ValueError(
                f"{argument} is {text!r}; it must be {name}:{parameters[0].name.upper()}."
            )
        return factory()
    kind = parameters[0].annotation
    try:
        return factory(kind(number))
    except ValueError as error:
        if "must be" in str(error):
            raise
        raise ValueError(f"{argument} is {text!r}; {number!r} must be {kind.__name__}.") from error
