"""Hyper-parameters that may be numbers, traced scalars, or schedules of the round."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from fedjax_lab.checks import check_scalar_or_schedule, is_traced
from fedjax_lab.compressors import Compressor
from fedjax_lab.types import Scalar, ScalarOrSchedule

Factory = TypeVar("Factory", bound=Callable[..., Any])


def factory(build: Factory) -> Factory:
    """Record a factory's arguments in ``algorithm.hyperparameters``, defaults included.

    Numbers, strings and None are kept as they are; a schedule, an optimiser, a
    compressor or a traced scalar is kept as a short description.

    Args:
      build: a method's factory: keyword arguments -> ``Algorithm``.

    Returns:
      The same function, whose results carry their hyper-parameters.
    """
    signature = inspect.signature(build)

    @functools.wraps(build)
    def wrapper(*args, **kwargs):
        algorithm = build(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        described = {
            name: _describe(value)
            for name, value in given.arguments.items()
            if name not in ("loss_fn", "model", "preprocess")
        }
        return dataclasses.replace(algorithm, hyperparameters=described)

    return wrapper  # type: ignore[return-value]


def _describe(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_traced(value):
        return "traced"
    if isinstance(value, Compressor):
        return str(value)
    if callable(value):
        return f"function {getattr(value, '__qualname__', type(value).__name__)}"
    return float(value) if _is_scalar(value) else type(value).__name__


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, tuple) and np.ndim(value) == 0


def at_round(value: ScalarOrSchedule, round: jax.Array) -> Scalar:
    """The value in this round: a schedule is evaluated, a scalar is returned.

    Args:
      value: a number, a traced scalar, or a schedule.
      round: int32 scalar, counted from 0.
    """
    return value(round) if callable(value) else value


def is_plain_zero(value: ScalarOrSchedule) -> bool:
    """Whether a number is 0 and known to stay so, which a traced one or a schedule is not.

    Args:
      value: a number, a traced scalar, or a schedule.
    """
    return isinstance(value, (int, float)) and value == 0


def check_lrs(**learning_rates: Any) -> None:
    """Check learning rates by name.

    Args:
      learning_rates: argument's name -> number, traced scalar or schedule.

    Raises:
      TypeError: one is neither a number nor a schedule.
      ValueError: one is negative or not finite.
    """
    for name, value in learning_rates.items():
        check_scalar_or_schedule(name, value, minimum=0.0)
