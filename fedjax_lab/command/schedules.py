"""Schedules of the client learning rate as text; in Python they are optax's.

Axes: t is the round, counted from 0; r is ``client_lr``.
"""

from typing import Any

import optax

from fedjax_lab.algorithms.hyper import OfRounds
from fedjax_lab.checks import check_int, check_number
from fedjax_lab.types import ScalarOrSchedule

FORMS = (
    *("constant", "exponential:FACTOR", "step:ROUNDS:FACTOR", "multistep:ROUND,ROUND:FACTOR"),
    *("cosine", "warmup_cosine:ROUNDS"),
)
_TO_THE_END = ("cosine", "warmup_cosine")


def client_schedule(text: str, client_lr: Any, rounds: int) -> ScalarOrSchedule:
    """Build the client learning rate for a factory, which is of the rounds in every method.

    ==============================  ==============================================================
    text                            rate of round t
    ==============================  ==============================================================
    constant                        r
    exponential:FACTOR              r FACTOR^t
    step:ROUNDS:FACTOR              multiplied by FACTOR every ROUNDS rounds
    multistep:ROUND,ROUND:FACTOR    multiplied by FACTOR at each of these rounds
    cosine                          r (1 + cos(pi t / rounds)) / 2
    warmup_cosine:ROUNDS            linear from r / ROUNDS to r in ROUNDS rounds, then cosine to 0
    ==============================  ==============================================================

    Raises:
      ValueError: ``text`` has another form, or a number in it is not allowed.
    """
    try:
        return _parsed(text.split(":"), client_lr, rounds)
    except (TypeError, ValueError) as error:
        why = f" ({error})" if str(error) else ""
        raise ValueError(
            f"client_lr_schedule is {text!r}; it must be one of {', '.join(FORMS)}, such as "
            f"step:50:0.1{why}."
        ) from error


def depends_on_rounds(text: str) -> bool:
    """Return True if a schedule depends on the total number of rounds."""
    return text.partition(":")[0] in _TO_THE_END


def _parsed(words: list[str], client_lr: Any, rounds: int) -> ScalarOrSchedule:
    match words:
        case ["constant"]:
            return client_lr
        case ["exponential", factor]:
            return OfRounds(optax.exponential_decay(client_lr, 1, _factor(factor)))
        case ["step", every, factor]:
            length = check_int("ROUNDS", int(every), minimum=1)
            steps = optax.exponential_decay(client_lr, length, _factor(factor), staircase=True)
            return OfRounds(steps)
        case ["multistep", milestones, factor]:
            at = [check_int("ROUND", int(word), minimum=1) for word in milestones.split(",")]
            if at != sorted(set(at)):
                raise ValueError("each ROUND must be later than the one before")
            scales = dict.fromkeys(at, _factor(factor))
            return OfRounds(optax.piecewise_constant_schedule(client_lr, scales))
        case ["cosine"]:
            return OfRounds(optax.cosine_decay_schedule(client_lr, rounds))
        case ["warmup_cosine", warmup]:
            length = check_int("ROUNDS", int(warmup), minimum=1)
            if length >= rounds:
                raise ValueError(
                    f"ROUNDS is {length} and rounds {rounds}; rounds must be more than the warm-up"
                )
            # Not from 0: several methods divide by the rate.
            rise = optax.linear_schedule(client_lr / length, client_lr, length)
            fall = optax.cosine_decay_schedule(client_lr, rounds - length)
            return OfRounds(optax.join_schedules([rise, fall], [length]))
    raise ValueError


def _factor(text: str) -> float:
    return check_number("FACTOR", float(text), minimum=0.0, exclusive_minimum=True)
