"""Hyper-parameters: numbers, traced scalars or schedules of the round; the symbols of papers."""

import functools
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax

from fedjax_lab.checks import check_number, is_traced
from fedjax_lab.types import Scalar, ScalarOrSchedule

# What the mean gradient of a client's steps is computed from.
MEAN_FROM = ("gradients", "displacement")


def at_round(value: ScalarOrSchedule, round: jax.Array) -> Scalar:
    """Return the value in this round: a scalar as it is, or a schedule's value.

    Args:
      value: a number, a traced scalar, or a schedule.
      round: int32 scalar, counted from 0.
    """
    return value(round) if callable(value) else value


class OfRounds:
    """A schedule of the round that stays one in methods whose schedules are of the local step.

    Such methods (FAFED, STEM) read it at fractions of a round, see ``at_step``. For all others it
    is the schedule itself.

    Args:
      schedule: function of the round, an integer or a float.
    """

    def __init__(self, schedule: Callable[[Any], jax.Array]):
        functools.update_wrapper(self, schedule)
        self._schedule = schedule

    def __call__(self, round: Any) -> jax.Array:
        """Return the schedule's value."""
        return self._schedule(round)


def at_step(value: ScalarOrSchedule, step: jax.Array, steps: int) -> Scalar:
    """Return the value at a global local step: a scalar, or a schedule's value.

    Args:
      value: a number, a traced scalar, a schedule of the global local step, or ``OfRounds``.
      step: int32 scalar, the global local step.
      steps: K, the local steps of a round; the most of a client where they differ.
    """
    return at_round(value, step / steps if isinstance(value, OfRounds) else step)


def is_plain_zero(value: ScalarOrSchedule) -> bool:
    """Return True for a number that is 0; traced numbers and schedules may change."""
    return isinstance(value, (int, float)) and value == 0


def check_example_privacy(clip: Any, noise: Any) -> None:
    """Check the clip norm of examples and the noise on their sum.

    Args:
      clip: above 0, or None.
      noise: at least 0, or None, as it must be without ``clip``.

    Raises:
      TypeError: one is no number.
      ValueError: one is out of range, or there is noise without a clip norm.
    """
    if clip is not None:
        check_number("example_clip", clip, minimum=0.0, exclusive_minimum=True)
    elif noise is not None:
        raise ValueError(f"example_noise is {noise}; give example_clip with it.")
    if noise is not None:
        check_number("example_noise", noise, minimum=0.0)


def check_unused(argument: str, value: Any, default: Any, where: str) -> None:
    """Refuse a value for an argument that a method does not use as it is made.

    Args:
      default: what stands there if nothing was.
      where: what does not use it, such as "variant 'base'".

    Raises:
      ValueError: the value is not the default.
    """
    if callable(value) or is_traced(value) or value != default:
        raise ValueError(f"{argument} is {value}, which {where} does not use; leave it out.")


# Paper's symbol -> argument; of several arguments, the first that a method has.
Symbols = Mapping[str, str | tuple[str, ...]]
# As Python names them: `lambda` is a word of the language.
_LAMBDA = re.compile(r"^lam(?:bda|bd|b|da)?(?=\d|$)")


def meant_by(word: str, symbols: Symbols, arguments: Container[str]) -> dict[str, str]:
    """Return {argument: symbol} for the symbols that a keyword such as "lam" or "beta_1" spells.

    Args:
      symbols: those of the method's papers, in Latin letters, such as "1/lambda" or "beta_1".
    """
    meant: dict[str, str] = {}
    for symbol, names in symbols.items():
        names = (names,) if isinstance(names, str) else names
        if (own := next((name for name in names if name in arguments), None)) is not None:
            meant[symbol] = own
    exact = {meant[s]: s for s in meant if _spelled(s) == _spelled(word)}
    subscripts = {meant[s]: s for s in meant if _spelled(s.partition("_")[0]) == _spelled(word)}
    return exact or subscripts


def _spelled(symbol: str) -> str:
    letters = symbol.removeprefix("1/").replace("_", "").lower()
    return _LAMBDA.sub("lambda", letters)
