"""Poisson client sampling: each client participates independently.

A cohort's arrays have enough slots that at most one round in 10^9 has more clients. The remaining
slots are padding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.sampler import RoundKeys, Sampler

_OVERFLOW = 1e-9  # probability that a round has more clients than slots


@functools.lru_cache(maxsize=64)
def poisson_slots(expected: int, available: int) -> int:
    """Compute the least S that a binomial number of clients exceeds with probability at most 1e-9.

    Args:
      expected: expected cohort size; each client participates with probability ``expected /
        available``.
    """
    if expected >= available:
        return available
    from scipy import special

    beyond = special.bdtrc(np.arange(available + 1), available, expected / available)  # P(X > k)
    return int(np.argmax(beyond <= _OVERFLOW))


def sample_poisson(
    keys: RoundKeys, clients: FederatedArrays, cohort_size: int, round: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sample a cohort: each client with data independently, with probability cohort_size / M.

    A client's draw is a function of the key and its id. The cost grows with N.

    Args:
      cohort_size: expected number of clients, at most M.
      round: not used.

    Returns:
      int32 [S] in rising order, N in padded slots; and the number of participants, int32. If this
      exceeds S, the last participants are missing and the cohort is invalid.
    """
    available, everyone = clients.num_available, clients.num_clients
    ids = jnp.arange(everyone, dtype=jnp.int32) if clients.nonempty is None else clients.nonempty
    own = jax.vmap(jax.random.fold_in, (None, 0))(keys.cohort, ids)
    # Integers, because for floats in [0, 1) the probability of a value below q is rounded.
    limit = int(np.rint(cohort_size / available * 2**32))
    comes = jnp.ones(ids.shape, bool)
    if limit < 2**32:
        comes = jax.vmap(lambda k: jax.random.bits(k, (), jnp.uint32))(own) < np.uint32(limit)
    slots = poisson_slots(cohort_size, available)
    (places,) = jnp.nonzero(comes, size=slots, fill_value=available)
    padded = jnp.concatenate([ids, jnp.full(1, everyone, jnp.int32)])
    return padded[places], comes.sum(dtype=jnp.int32)


POISSON = Sampler(poisson_slots, sample_poisson)
