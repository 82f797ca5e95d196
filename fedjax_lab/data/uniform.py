"""Uniform client sampling without replacement: cohorts of a fixed size."""

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_int
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.sampler import RoundKeys, Sampler, check_key
from fedjax_lab.machine.keys import below, threefry
from fedjax_lab.types import Key

_FEW = 4096  # clients; a random permutation of so few takes no noticeable time
_ORDER = 1  # folded into the round's key for the cohort, apart from what the clock folds in


def sample_clients(key: Key, clients: FederatedArrays, cohort_size: int) -> jax.Array:
    """Sample clients uniformly without replacement from the clients with data.

    The cost depends on S and not on N, with two exceptions: cohorts of more than half of the
    clients, and cohorts of more than 4 sqrt(N) of at most 4,096 clients. These are the start of a
    random permutation.

    Args:
      key: typed PRNG key; consumed.
      clients: the federation; clients without data are never sampled.
      cohort_size: S, static.

    Returns:
      int32 [S], client ids in random order; in ascending order if all clients are sampled.

    Raises:
      TypeError: ``cohort_size`` is no integer, or ``key`` no typed key.
      ValueError: ``cohort_size`` exceeds the number of clients with data.
    """
    check_key(key)
    key, available = threefry(key), clients.num_available
    cohort_size = check_int("cohort_size", cohort_size, minimum=1, maximum=available)
    if cohort_size == available:
        drawn = jnp.arange(available, dtype=jnp.int32)
    elif cohort_size**2 <= 16 * available:
        drawn = _floyd(key, available, cohort_size)
    elif available <= _FEW or 2 * cohort_size > available:
        drawn = jax.random.permutation(key, available)[:cohort_size].astype(jnp.int32)
    else:
        drawn = _redrawn(key, available, cohort_size)
    return drawn if clients.nonempty is None else clients.nonempty[drawn]


def sample_available(key: Key, available: jax.Array, count: int) -> jax.Array:
    """Sample distinct available clients uniformly: int32 [count] in random order.

    If there are fewer, the remaining places have N. The cost is that of N random numbers.

    Args:
      available: bool [N].
      count: number of clients, at most N.
    """
    numbers = jax.random.uniform(jax.random.fold_in(key, _ORDER), available.shape, jnp.float32)
    largest, ids = jax.lax.top_k(jnp.where(available, numbers, -1.0), count)
    return jnp.where(largest >= 0, ids, available.shape[0]).astype(jnp.int32)


def _sample(
    keys: RoundKeys, clients: FederatedArrays, cohort_size: int, round: jax.Array
) -> tuple[jax.Array, None]:
    return sample_clients(keys.cohort, clients, cohort_size), None


UNIFORM = Sampler(lambda cohort_size, available: cohort_size, _sample, pads=False)


def _floyd(key: Key, available: int, count: int) -> jax.Array:
    """Sample distinct numbers below ``available``: int32 [count] in random order (Floyd 1987).

    Floyd's loop replaces a number that was drawn before by the largest one, which is not there
    yet. Here, all numbers are examined at once, because a GPU starts several kernels for each
    iteration of a loop.
    """
    bits, order = jax.random.bits(key, (2, count), jnp.uint32)
    place = jnp.arange(count, dtype=jnp.int32)
    largest = place + (available - count)
    draws = below(bits, largest + 1)
    # A number is there if it was drawn before. So is the largest of an earlier place, if it was
    # taken there: a place refers to that one, or to ``count`` if it takes its own largest, or to
    # itself. Each step follows the references twice as far.
    was_drawn = jnp.any((place[None] < place[:, None]) & (draws[None] == draws[:, None]), axis=1)
    earlier = draws - (available - count)
    earlier = jnp.where((earlier >= 0) & (earlier < place), earlier, place)
    refers = jnp.append(jnp.where(was_drawn, count, earlier), count)
    for _ in range((count - 1).bit_length()):
        refers = refers.at[refers].get(mode="promise_in_bounds")
    chosen = jnp.where(refers[:count] == count, largest, draws)
    # Shuffled, because large numbers are more frequent in late places.
    return jax.lax.sort((order, chosen), num_keys=1)[1]


def _redrawn(key: Key, available: int, count: int) -> jax.Array:
    """Sample distinct numbers below ``available``, int32 [count], by redrawing duplicates.

    Which numbers are redrawn depends only on which ones are equal, not on their values. All
    sequences of distinct numbers are therefore equally likely.
    """
    place = jnp.arange(count, dtype=jnp.int32)

    def draw(carry):
        key, chosen, again = carry
        key, own = jax.random.split(key)
        chosen = jnp.where(
            again, jax.random.randint(own, (count,), 0, available, jnp.int32), chosen
        )
        ordered, places = jax.lax.sort((chosen, place), num_keys=1, is_stable=True)
        again = jnp.zeros(count, bool).at[places[1:]].set(ordered[1:] == ordered[:-1])
        return key, chosen, again

    first = (key, jnp.zeros(count, jnp.int32), jnp.ones(count, bool))
    return jax.lax.while_loop(lambda carry: carry[2].any(), draw, first)[1]
