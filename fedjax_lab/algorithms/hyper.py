"""Hyper-parameters that may be numbers, traced scalars, or schedules of the round."""

from typing import Any

import jax

from fedjax_lab.checks import check_scalar_or_schedule
from fedjax_lab.types import Scalar, ScalarOrSchedule


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
