"""The number and cohorts of the noised rounds that a private server has released so far.

They are part of the server state, so that a run from another run's state continues the accounting.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.data.cohort import SAMPLINGS
from fedjax_lab.data.cyclic import turns
from fedjax_lab.types import Key, Scalar

OTHER = "other"  # custom sampling, for which there is no accounting
_KINDS = (OTHER, *SAMPLINGS)  # in the order of their numbers, except OTHER, whose number is -1
_RUN = np.uint32(2**32 - 33)  # folded into a run's key, apart from rounds, groups and devices


class Released(NamedTuple):
    """The released rounds, a part of the server state.

    Attributes:
      rounds: int32 scalar, number of noised rounds of all runs. For cyclic cohorts, the rounds of
        each earlier run are rounded up to full cycles.
      multiplier: float scalar, noise multiplier of these rounds.
      cohort_size: int32 scalar, cohort size of these rounds.
      available: int32 scalar, number of clients that might be sampled.
      sampling: int32 scalar, number of the kind of sampling; 0: not recorded; -1: custom sampling,
        or rounds of different kinds.
    """

    rounds: jax.Array
    multiplier: jax.Array
    cohort_size: jax.Array
    available: jax.Array
    sampling: jax.Array


def nothing_released(multiplier: Scalar) -> Released:
    """Create the record before the first round.

    Args:
      multiplier: noise multiplier of the coming rounds.
    """
    return Released(
        jnp.zeros((), jnp.int32),
        jnp.asarray(multiplier, jnp.result_type(float)),
        *jnp.zeros((3,), jnp.int32),
    )


def go_on(
    released: Released, multiplier: Scalar, cohort_size: int, available: int, sampling: str
) -> Released:
    """Prepare the record for a new run.

    Args:
      released: record of the run's initial state.
      multiplier: noise multiplier of the run.
      cohort_size: as in ``simulate``.
      available: number of clients that may be sampled.
      sampling: as in ``simulate``, or ``OTHER``.
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
    """Add a round to the record.

    Args:
      released: the record before the round.
      multiplier: noise multiplier of the round.
    """
    is_alike = released.multiplier == jnp.asarray(multiplier, released.multiplier.dtype)
    return released._replace(
        rounds=released.rounds + 1, sampling=jnp.where(is_alike, released.sampling, -1)
    )


def describe(released: Released) -> str | None:
    """Describe the kind of the rounds; None if it was not recorded, or for several kinds.

    Args:
      released: a record that is not traced.
    """
    if (kind := int(released.sampling)) < 1:
        return None
    return (
        f"noise_multiplier {float(released.multiplier):g} and {_KINDS[kind]} cohorts of "
        f"{int(released.cohort_size)} of {int(released.available)} clients"
    )


def noise_index(released: Released, index: int, exchanges: int, round: jax.Array) -> jax.Array:
    """Return the number to fold into a round's key for noise, unique over several runs.

    It equals ``index`` as long as the number of the round equals the number of released rounds.

    Args:
      released: the record before the round.
      index: index of the phase.
      exchanges: number of phases in a round.
      round: int32 scalar, number of the round in the run.
    """
    before = (released.rounds - round).astype(jnp.uint32)
    return jnp.uint32(index) + jnp.uint32(exchanges) * before


def run_key(key: Key, rounds: int) -> Key:
    """Derive the key of a run after private rounds, so that their cohorts do not repeat.

    The epsilon of random cohorts assumes that every round samples independently.

    Args:
      key: key of the run's seed.
      rounds: number of rounds released before; for 0 the result is ``key``.
    """
    return jax.random.fold_in(jax.random.fold_in(key, _RUN), rounds) if rounds else key
