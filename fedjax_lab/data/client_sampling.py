"""Client sampling: the cohort of a round, drawn inside jit.

The cohort is a function of (key, round). It does not depend on the devices or on the results of the
clients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_int, is_traced
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.poisson import sample_poisson
from fedjax_lab.data.times import RoundTimes
from fedjax_lab.machine.keys import below, plain, threefry
from fedjax_lab.types import Key

SAMPLINGS = ("cyclic", "poisson", "without_replacement")
_FEW = 4096  # clients; a random permutation of so few takes no noticeable time
_LOOKED_AT = 10  # number of cohorts for which a custom sampler is checked

# (key, round) -> distinct ids of clients with data, int32 [S], in operations that JAX can trace
CohortSampler = Callable[[Key, jax.Array], Any]


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


def check_cohorts(
    sample_cohort: CohortSampler, clients: FederatedArrays, key: Key, cohort_size: int, rounds: int
) -> None:
    """Check the first cohorts of a custom sampler, at most ten.

    Args:
      sample_cohort: as in ``draw_batch``.
      clients: the federation.
      key: PRNG key of the run.
      cohort_size: S.
      rounds: number of rounds of the run.

    Raises:
      TypeError: the sampler cannot be called, or does not return integers.
      ValueError: a cohort has not ``cohort_size`` ids, or an id occurs twice, is out of range, or
        belongs to a client without data.
    """
    if not callable(sample_cohort):
        raise TypeError(f"sample_cohort is {sample_cohort!r}; it must be a function (key, round).")
    draw = jax.jit(lambda t: jnp.asarray(sample_cohort(round_keys(key, t)[0], t)))
    for t in range(min(rounds, _LOOKED_AT)):
        own_cohort(lambda _, t: draw(t), clients, key, jnp.asarray(t, jnp.int32), cohort_size)


def round_keys(key: Key, round: jax.Array) -> Key:
    """Derive the four keys of a round: for the cohort, the orders, the clients, and dropouts.

    Args:
      key: PRNG key of the run.
      round: int32 scalar.
    """
    return jax.random.split(jax.random.fold_in(key, round), 4)


def draw_ids(
    clients: FederatedArrays,
    key: Key,
    round: jax.Array,
    cohort_size: int,
    sample_cohort: CohortSampler | None,
    sampling: str,
) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
    """Sample the clients of a round, for all kinds of sampling except "cyclic".

    Args:
      clients: the federation.
      key: the round's key for the cohort.
      round: int32 scalar.
      cohort_size, sample_cohort, sampling: as in ``ScheduleOptions``.

    Returns:
      (ids, int32 [S or more]; expected cohort size; metrics of availability). The expected size is
      None if the cohort size is not random, and NaN if more clients were sampled than there are
      slots.

    Raises:
      TypeError, ValueError: the cohort size is out of range, two arguments determine the cohort, or
        ``sample_cohort`` returns an invalid cohort.
    """
    times: RoundTimes | None = clients.times
    if sampling == "poisson":
        check_times(clients, sampling)
        ids, came = sample_poisson(key, clients, cohort_size)
        return ids, jnp.where(came > ids.shape[0], jnp.nan, float(cohort_size)), {}
    if sample_cohort is not None:
        if times is not None and times.chooses:
            raise ValueError(
                "sample_cohort is set, and times have availability or over_selection: both "
                "determine the cohort; omit one of them."
            )
        return own_cohort(sample_cohort, clients, key, round, cohort_size), None, {}
    if times is None:
        return sample_clients(key, clients, cohort_size), None, {}
    most = clients.num_available
    check_int("cohort_size", cohort_size, minimum=1, maximum=most)
    count = times.selected(cohort_size, most)
    if times.availability is None:
        return sample_clients(key, clients, count), None, {}
    there = times.is_there(key, round, clients.sizes)
    number = there.sum(dtype=times.step_seconds.dtype)
    return times.draw(key, there, count), None, {"available_clients": number}


def check_times(clients: FederatedArrays, sampling: str) -> None:
    """Check that not both the client times and the sampling determine the cohort.

    Args:
      clients: the federation.
      sampling: "poisson" or "cyclic".

    Raises:
      ValueError: both determine it.
    """
    if clients.times is not None and clients.times.chooses:
        raise ValueError(
            f"sampling is {sampling!r} and times have availability or over_selection: both "
            "determine the cohort; omit one of them."
        )


def own_cohort(
    sample_cohort: CohortSampler,
    clients: FederatedArrays,
    key: Key,
    round: jax.Array,
    cohort_size: int,
) -> jax.Array:
    """Call a custom sampler; returns its ids, int32 [S], checked if they are not traced.

    Args:
      sample_cohort, cohort_size: as in ``ScheduleOptions``.
      clients: the federation.
      key: the round's key for the cohort.
      round: int32 scalar.

    Raises:
      TypeError, ValueError: as in ``check_cohorts``.
    """
    available = clients.num_available
    cohort_size = check_int("cohort_size", cohort_size, minimum=1, maximum=available)
    ids = jnp.asarray(sample_cohort(plain(key), round))
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"sample_cohort returned {ids.dtype}; client ids must be integers.")
    if ids.shape != (cohort_size,):
        raise ValueError(
            f"sample_cohort returned an array of shape {ids.shape}; it must be ({cohort_size},), "
            "because that is the cohort_size."
        )
    if not is_traced((ids, clients)):
        known, sizes = np.asarray(ids), np.asarray(clients.sizes)
        wrong = "" if np.unique(known).size == known.size else "they must be distinct"
        if known.min() < 0 or known.max() >= len(sizes):
            wrong = f"they must lie between 0 and {len(sizes) - 1}"
        elif not wrong and not sizes[known].all():
            wrong = f"the clients {known[sizes[known] == 0].tolist()} have no data"
        if wrong:
            raise ValueError(
                f"sample_cohort returned the ids {known.tolist()} in round {int(round)}; {wrong}."
            )
    return ids.astype(jnp.int32)


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


def check_key(key: Any) -> None:
    """Check that a value is a single typed PRNG key.

    Args:
      key: the value to check.

    Raises:
      TypeError, ValueError: it is no such key.
    """
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(f"key is {key!r}; it must be a typed PRNG key, such as jax.random.key(0).")
    if key.shape != ():
        raise ValueError(f"key has shape {key.shape}; it must be a single key.")
