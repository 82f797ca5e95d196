"""Cyclic client sampling: clients are divided into random groups, which take turns.

A client participates again after as many rounds as there are groups. The accounting of correlated
noise relies on this (``fedjax_lab.wrappers.correlated``).
"""

import jax
import jax.numpy as jnp

from fedjax_lab.data.example_order import WORDS, shuffled
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.sampler import RoundKeys, Sampler

# Folded into the run's key, apart from the numbers of rounds and what the devices fold in.
_DEAL = jnp.iinfo(jnp.uint32).max - 16


def turns(cohort_size: int, available: int) -> int:
    """Compute the number of groups, after which a client participates again.

    Args:
      cohort_size: clients of a round, at most.
    """
    return -(-available // cohort_size)


def cyclic_slots(cohort_size: int, available: int) -> int:
    """Compute the size of the largest group; sizes differ by at most one.

    Args:
      cohort_size: clients of a round, at most.
    """
    return -(-available // turns(cohort_size, available))


def sample_cyclic(
    keys: RoundKeys, clients: FederatedArrays, cohort_size: int, round: jax.Array
) -> tuple[jax.Array, None]:
    """Return the group of a round. The cost depends on its size and not on N.

    Args:
      keys: keys of the round; the run's determines the groups.
      cohort_size: the largest number of clients in a round, at most M.
      round: int32 scalar, from 0.

    Returns:
      int32 [S], S = ``cyclic_slots``; N in the last slot of a group that is smaller by one;
      and None.
    """
    available = clients.num_available
    groups, slots = turns(cohort_size, available), cyclic_slots(cohort_size, available)
    places = round % groups + groups * jnp.arange(slots, dtype=jnp.int32)
    deal = jax.random.bits(jax.random.fold_in(keys.run, _DEAL), (1, WORDS), jnp.uint32)
    size = jnp.asarray(available, jnp.int32)
    numbers = shuffled(deal, jnp.minimum(places, available - 1)[None], size)[0]
    ids = numbers if clients.nonempty is None else clients.nonempty[numbers]
    return jnp.where(places < available, ids, clients.num_clients), None


CYCLIC = Sampler(cyclic_slots, sample_cyclic)
