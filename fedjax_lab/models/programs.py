"""Traced programs (``jax.extend.core``): what evaluates their operations anew."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal


def bind(equation: JaxprEqn, operands: Sequence[Any], **changes: Any) -> Sequence[Any]:
    """Call an operation on other operands, and return its results."""
    primitive = equation.primitive
    params = {**primitive.get_bind_params(equation.params), **changes}
    results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]


def value_of(variable: Any, values: Mapping[Any, Any]) -> Any:
    """Return the value of a variable, or of a literal.

    Args:
      values: variable -> its value.
    """
    return variable.val if isinstance(variable, Literal) else values[variable]
