"""Client sampling: who takes part in a round, inside jit.

The cohort is a function of (key, round) alone: it does not depend on the devices, nor on what the
clients compute.
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
from fedjax_lab.machine.keys import plain
from fedjax_lab.types import Key

SAMPLINGS = ("cyclic", "poisson", "without_replacement")
_FEW = 4096  # clients, that a sort puts into random order in no time
_LOOKED_AT = 10  # first cohorts of a sampler of the caller's own

# (key, round) -> distinct ids of clients with data, int32 [S], in operations that JAX can trace
CohortSampler = Callable[[Key, jax.Array], Any]


def sample_clients(key: Key, clients: FederatedArrays, cohort_size: int) -> jax.Array:
    """Draw distinct clients, every subset of the clients with data being equally likely.

    The cost depends on S and not on N, but for cohorts of more than half of the clients, which are
    the start of a random permutation; so are those beyond 4 sqrt(N) of at most 4,096 clients. All
    clients together come in the order of their ids.

    Args:
      key: typed PRNG key; consumed.
      clients: the federation; clients without data are never drawn.
      cohort_size: S, static.

    Returns:
      int32 [S], client ids, in random order unless they are all.

    Raises:
      TypeError: ``cohort_size`` is no integer, or ``key`` no typed key.
      ValueError: ``cohort_size`` exceeds the number of clients with data.
    """
    check_key(key)
    available = clients.num_available
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
    """Check the first cohorts of a sampler of the caller's own, at most ten.

    Args:
      sample_cohort: as of ``draw_batch``.
      clients: the federation.
      key: the run's key.
      cohort_size: S.
      rounds: of the run.

    Raises:
      TypeError: it cannot be called, or returns no integers.
      ValueError: it returns another number of ids, or ids that come twice, are out of range, or
        are those of clients without data.
    """
    if not callable(sample_cohort):
        raise TypeError(f"sample_cohort is {sample_cohort!r}; it must be a function (key, round).")
    draw = jax.jit(lambda t: jnp.asarray(sample_cohort(round_keys(key, t)[0], t)))
    for t in range(min(rounds, _LOOKED_AT)):
        _own_cohort(lambda _, t: draw(t), clients, key, jnp.asarray(t, jnp.int32), cohort_size)


def round_keys(key: Key, round: jax.Array) -> Key:
    """Four keys of a round: for the cohort, the orders, the clients, and who reports.

    Args:
      key: the run's key.
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
    """Draw a round's clients, all samplings but "cyclic".

    Args:
      clients: the federation.
      key: the round's key for the cohort.
      round: int32 scalar.
      cohort_size, sample_cohort, sampling: as of ``ScheduleOptions``.

    Returns:
      (ids, int32 [S or more]; the expected cohort size, NaN where more came than there are slots,
      None where chance has no say; metrics of who was there).

    Raises:
      TypeError, ValueError: the cohort size is out of range, two arguments choose the cohort, or
        ``sample_cohort`` returns no cohort.
    """
    times: RoundTimes | None = clients.times
    if sampling == "poisson":
        check_times(clients, sampling)
        ids, came = sample_poisson(key, clients, cohort_size)
        return ids, jnp.where(came > ids.shape[0], jnp.nan, float(cohort_size)), {}
    if sample_cohort is not None:
        if times is not None and times.chooses:
            raise ValueError(
                "sample_cohort is given, and times with availability or over_selection: both say "
                "who is drawn; leave out one of them."
            )
        return _own_cohort(sample_cohort, clients, key, round, cohort_size), None, {}
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
    """Check that the clients' times do not choose the cohort, where the sampling does.

    Args:
      clients: the federation.
      sampling: "poisson" or "cyclic".

    Raises:
      ValueError: both choose.
    """
    if clients.times is not None and clients.times.chooses:
        raise ValueError(
            f"sampling is {sampling!r} and times have availability or over_selection: both say who "
            "is drawn; leave out one of them."
        )


def _own_cohort(sample_cohort, clients, key, round, cohort_size):
    """What ``sample_cohort`` returns, int32 [S], checked as far as it is known."""
    available = clients.num_available
    cohort_size = check_int("cohort_size", cohort_size, minimum=1, maximum=available)
    ids = jnp.asarray(sample_cohort(plain(key), round))
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"sample_cohort returned {ids.dtype}; client ids must be integers.")
    if ids.shape != (cohort_size,):
        raise ValueError(
            f"sample_cohort returned an array of shape {ids.shape}; cohort_size is {cohort_size}, "
            f"so that it must be ({cohort_size},)."
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
    """Distinct numbers below ``available``, int32 [count], in random order (Floyd 1987)."""
    draw_key, order_key = jax.random.split(key)
    last = jnp.arange(available - count, available, dtype=jnp.int32)
    draws = jax.random.randint(draw_key, (count,), 0, last + 1, jnp.int32)

    def add(i, chosen):
        # A number drawn before makes way for the largest one, which cannot be there yet.
        taken = jnp.any(chosen == draws[i])
        return chosen.at[i].set(jnp.where(taken, last[i], draws[i]))

    chosen = jax.lax.fori_loop(0, count, add, jnp.full((count,), -1, jnp.int32))
    # A number's place betrays its size: late places hold the large ones more often.
    return jax.random.permutation(order_key, chosen)


def _redrawn(key: Key, available: int, count: int) -> jax.Array:
    """Distinct numbers below ``available``, int32 [count]: what came before is drawn again.

    What is drawn again depends on which numbers are equal, not on what they are, so that all
    sequences of distinct numbers are equally likely.
    """
    place = jnp.arange(count, dtype=jnp.int32)

    def draw(carry):
        key, chosen, again = carry
        key, own = jax.random.split(key)
        chosen = jnp.where(again, jax.random.randint(own, (count,), 0, available), chosen)
        ordered, places = jax.lax.sort((chosen, place), num_keys=1, is_stable=True)
        again = jnp.zeros(count, bool).at[places[1:]].set(ordered[1:] == ordered[:-1])
        return key, chosen, again

    first = (key, jnp.zeros(count, jnp.int32), jnp.ones(count, bool))
    return jax.lax.while_loop(lambda carry: carry[2].any(), draw, first)[1]


def check_key(key: Any) -> None:
    """Check that a key is a single typed one.

    Args:
      key: what was given.

    Raises:
      TypeError, ValueError: it is not.
    """
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(f"key is {key!r}; it must be a typed PRNG key, such as jax.random.key(0).")
    if key.shape != ():
        raise ValueError(f"key has shape {key.shape}; it must be a single key.")
