"""Hyper-parameters that may be numbers, traced scalars, or schedules of the round."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_lab.checks import check_number, check_scalar_or_schedule, is_traced
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


def check_transform(name: str, transform: Any) -> None:
    """Check that an argument is None or an optax transformation that keeps the direction's sign.

    Args:
      name: the argument's name.
      transform: what was given for it.

    Raises:
      TypeError: it is no transformation.
      ValueError: it is an optimizer, whose updates are to be added and not descended.
    """
    if transform is None:
        return
    if not all(callable(getattr(transform, part, None)) for part in ("init", "update")):
        raise TypeError(
            f"{name} is {transform!r}; it must be an optax transformation, such as "
            "optax.clip_by_global_norm(10.0) or optax.scale_by_adam()."
        )
    if _turns_round(transform):
        raise ValueError(
            f"{name} changes the sign of what it is given, as optax.adam(...) and optax.sgd(...) "
            "do, but clients descend its result, with client_lr: give the transformation without "
            "a learning rate, such as optax.scale_by_adam() or optax.trace(0.9)."
        )


def _turns_round(transform: optax.GradientTransformation) -> bool:
    """Whether every entry of some step's update has the other sign, as no noise would make it."""
    with jax.ensure_compile_time_eval():
        probe = jnp.where(jnp.arange(64) % 2, 1.0, -1.0)
        params = jnp.zeros_like(probe)
        try:
            state, turned = transform.init(params), False
            for _ in range(3):  # a schedule may begin with 0
                update, state = transform.update(probe, state, params)
                if is_traced(update):
                    return False
                turned |= bool((update * probe < 0).all())
            return turned
        except Exception:  # made for params of another structure
            return False
