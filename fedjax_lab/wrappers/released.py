"""What a private server has released so far: how many noised rounds, and of which cohorts.

It lies in the server's state, so that a run that starts from the state of another one counts on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.data.cohort import SAMPLINGS
from fedjax_lab.data.cyclic import turns
from fedjax_lab.types import Key, Scalar

OTHER = "other"  # sampling of a caller's own, of which no account is given
_KINDS = (OTHER, *SAMPLINGS)  # in the order of their numbers, but that OTHER has -1
_RUN = np.uint32(2**32 - 33)  # folded into a run's key, apart from rounds, groups and devices


class Released(NamedTuple):
    """A part of the server's state.

    Attributes:
      rounds: int32 scalar, noised rounds of all runs; of cyclic cohorts, those of earlier runs in
        whole turns, after each of which every client may have come once more.
      multiplier: float scalar, the noise multiplier of all of them.
      cohort_size, available: int32 scalars, of whom so many might be drawn.
      sampling: int32 scalar, the number of the cohorts' kind; 0 where nobody said it, -1 where it
        is a caller's own, or where rounds were unlike each other.
    """

    rounds: jax.Array
    multiplier: jax.Array
    cohort_size: jax.Array
    available: jax.Array
    sampling: jax.Array


def nothing_released(multiplier: Scalar) -> Released:
    """Before the first round.

    Args:
      multiplier: the noise multiplier of the rounds to come.
    """
    return Released(
        jnp.zeros((), jnp.int32),
        jnp.asarray(multiplier, jnp.result_type(float)),
        *jnp.zeros((3,), jnp.int32),
    )


def go_on(
    released: Released, multiplier: Scalar, cohort_size: int, available: int, sampling: str
) -> Released:
    """What a run begins with that draws such cohorts, with such noise.

    Args:
      released: of the state that it starts from.
      multiplier: its noise multiplier.
      cohort_size: as of ``simulate``.
      available: clients that may be drawn.
      sampling: as of ``simulate``, or ``OTHER``.
    """
    numbers = (cohort_size, available, _KINDS.index(sampling) or -1)
    own = Released(
        released.rounds,
        jnp.asarray(multiplier, released.multiplier.dtype),
        *(jnp.asarray(number, jnp.int32) for number in numbers),
    )
    if sampling == "cyclic":
        turn = turns(cohort_size, available)
        own = own._replace(rounds=jnp.asarray(-(-released.rounds // turn) * turn, jnp.int32))
    alike = [a == b for a, b in zip(own[1:], released[1:], strict=True)]
    is_one_kind = (released.rounds == 0) | jnp.stack(alike).all()
    return own._replace(sampling=jnp.where(is_one_kind, own.sampling, -1))


def one_more(released: Released, multiplier: Scalar) -> Released:
    """After one more round with such noise.

    Args:
      released: before it.
      multiplier: its noise multiplier.
    """
    is_alike = released.multiplier == jnp.asarray(multiplier, released.multiplier.dtype)
    return released._replace(
        rounds=released.rounds + 1, sampling=jnp.where(is_alike, released.sampling, -1)
    )


def describe(released: Released) -> str | None:
    """Of which kind the rounds were, in words; None: nobody said it, or of several.

    Args:
      released: of a state at rest.
    """
    if (kind := int(released.sampling)) < 1:
        return None
    return (
        f"noise_multiplier {float(released.multiplier):g} and {_KINDS[kind]} cohorts of "
        f"{int(released.cohort_size)} of {int(released.available)} clients"
    )


def noise_index(released: Released, index: int, exchanges: int, round: jax.Array) -> jax.Array:
    """What is folded into a round's key for noise; another number if the key has served before.

    It is ``index`` itself while rounds are as many as were released before them.

    Args:
      released: of the state before the round.
      index: of the exchange.
      exchanges: of a round.
      round: int32 scalar, that of the run.
    """
    before = (released.rounds - round).astype(jnp.uint32)
    return jnp.uint32(index) + jnp.uint32(exchanges) * before


def run_key(key: Key, rounds: int) -> Key:
    """The key of a run that starts after so many private rounds: their cohorts are not to return.

    That cohorts are drawn anew in every round is what epsilon of random cohorts counts on.

    Args:
      key: of the run's seed.
      rounds: released before; with 0 it is ``key``.
    """
    return jax.random.fold_in(jax.random.fold_in(key, _RUN), rounds) if rounds else key
