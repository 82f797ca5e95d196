"""What a kind of client sampling is, and the random keys of a round."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_lab.machine.keys import is_key
from fedjax_lab.types import Key


class RoundKeys(NamedTuple):
    """The keys of a round.

    Attributes:
      run: the key of the run, the same in every round.
      cohort: for client sampling.
      order: for mini-batches.
      clients: for the clients' own randomness; ``CohortBatch.key``.
      dropout: for clients that fail.
    """

    run: Key
    cohort: Key
    order: Key
    clients: Key
    dropout: Key


class Sampler(NamedTuple):
    """A kind of client sampling.

    Attributes:
      slots: (cohort size, number of clients with data) -> S, the number of slots of a cohort.
      sample: (keys, clients, cohort size, round) -> (int32 [S], ids of distinct clients with data,
        N in padded slots; and the number of participants, int32, or None if it is not random). If
        that number exceeds S, the cohort is invalid.
      pads: whether a cohort may have padded slots.
    """

    slots: Callable[[int, int], int]
    sample: Callable[..., tuple[jax.Array, jax.Array | None]]
    pads: bool = True


def round_keys(key: Key, round: jax.Array) -> RoundKeys:
    """Derive the keys of a round."""
    cohort, order, clients, dropout = jax.random.split(jax.random.fold_in(key, round), 4)
    return RoundKeys(key, cohort, order, clients, dropout)


def check_key(key: Any) -> None:
    """Check that a value is a single typed PRNG key.

    Raises:
      TypeError, ValueError: it is no such key.
    """
    if not is_key(key):
        raise TypeError(f"key is {key!r}; it must be a typed PRNG key, such as jax.random.key(0).")
    if key.shape != ():
        raise ValueError(f"key has shape {key.shape}; it must be a single key.")
