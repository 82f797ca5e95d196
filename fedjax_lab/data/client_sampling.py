"""Client sampling: the cohort of a round, drawn inside jit.

The cohort is a function of (key, round). It does not depend on the devices or on the results of the
clients. Each kind of sampling is a ``Sampler`` in a file of its own; to add one, write the file and
name it in ``SAMPLINGS``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import NEEDS_VALUE, check_int, is_traced
from fedjax_lab.data.cyclic import CYCLIC
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.poisson import POISSON
from fedjax_lab.data.sampler import RoundKeys, round_keys
from fedjax_lab.data.uniform import UNIFORM, sample_available
from fedjax_lab.machine.keys import plain
from fedjax_lab.types import Key, Metrics

SAMPLINGS = {"cyclic": CYCLIC, "poisson": POISSON, "without_replacement": UNIFORM}
_ASKED = 4  # times that a custom sampler is asked for the same cohort
_LOOKED_AT = 10  # number of cohorts for which a custom sampler is checked

# (key, round) -> distinct ids of clients with data, int32 [S], in operations that JAX can trace
CohortSampler = Callable[[Key, jax.Array], Any]


def sample_cohort(
    keys: RoundKeys,
    clients: FederatedArrays,
    round: jax.Array,
    cohort_size: int,
    sampling: str,
    sampler: CohortSampler | None,
) -> tuple[jax.Array, jax.Array | None, Metrics]:
    """Sample the clients of a round.

    Args:
      clients: the federation; its times may select clients.
      round: int32 scalar.
      sampler: custom client sampling, or None.

    Returns:
      The ids of the sampled clients, int32 [S'], N in padded places, with S' at least the number of
      slots; the cohort's ``expected_size`` as in ``CohortBatch``; and metrics of the round.

    Raises:
      TypeError, ValueError: the cohort size is out of range, two arguments determine the cohort, or
        ``sampler`` returns an invalid cohort.
    """
    available = clients.num_available
    cohort_size = check_int("cohort_size", cohort_size, minimum=1, maximum=available)
    kind = SAMPLINGS[sampling]
    times = clients.times
    if times is not None and times.chooses and (sampler is not None or kind is not UNIFORM):
        other = "sample_cohort is set" if sampler is not None else f"sampling is {sampling!r}"
        raise ValueError(
            f"{other}, and times have availability or over_selection: both determine the cohort; "
            "omit one of them."
        )
    if sampler is not None:
        ids = own_cohort(sampler, clients, keys.cohort, round, cohort_size)
        return ids, None, {}
    count = cohort_size
    if times is not None:
        count = times.sampled(cohort_size, available)
        there = times.available(keys.cohort, round, clients.sizes)
        if there is not None:
            number = there.sum(dtype=jnp.result_type(float))
            ids = sample_available(keys.cohort, there, count)
            return ids, None, {"available_clients": number}
    ids, came = kind.sample(keys, clients, count, round)
    if came is None:
        return ids, None, {}
    slots = kind.slots(cohort_size, available)
    return ids, jnp.where(came > slots, jnp.nan, float(cohort_size)), {}


def check_cohorts(
    sample_cohort: CohortSampler, clients: FederatedArrays, key: Key, cohort_size: int, rounds: int
) -> None:
    """Check the first cohorts of a custom sampler, at most ten.

    Raises:
      TypeError: the sampler cannot be called, does not return integers, or needs the value of
        the round or the key, which are traced.
      ValueError: a cohort has not ``cohort_size`` ids, or an id occurs twice, is out of range, or
        belongs to a client without data; or the sampler draws without the key.
    """
    if not callable(sample_cohort):
        raise TypeError(f"sample_cohort is {sample_cohort!r}; it must be a function (key, round).")
    now = round_keys(key, jnp.int32(0)).cohort, jnp.int32(0)
    first, *others = (np.asarray(sample_cohort(plain(now[0]), now[1])) for _ in range(_ASKED))
    if any(not np.array_equal(first, other) for other in others):
        raise ValueError(
            "sample_cohort returned different cohorts for the same key and round, so it draws from "
            "another source, such as numpy.random; a compiled program would repeat its first "
            "cohort in all rounds. Draw with the key: jax.random.choice(key, ...)."
        )
    draw = jax.jit(lambda t: _ask(sample_cohort, round_keys(key, t).cohort, t))
    for t in range(min(rounds, _LOOKED_AT)):
        own_cohort(lambda _, t: draw(t), clients, key, jnp.asarray(t, jnp.int32), cohort_size)


def _ask(sample_cohort: CohortSampler, key: Key, round: jax.Array) -> jax.Array:
    """Call a custom sampler; returns what it returns, as an array.

    Raises:
      TypeError: it needs the value of a traced argument, or returns None.
    """
    try:
        if (ids := sample_cohort(key, round)) is None:
            raise TypeError("sample_cohort returned None; it must return the ids of a cohort.")
        return jnp.asarray(ids)
    except NEEDS_VALUE as error:
        raise TypeError(
            "sample_cohort uses the value of its key or round, as int(round), `if` and NumPy do, "
            "but both are traced in the compiled rounds: write jnp.asarray(table)[round] for "
            "table[int(round)], and jnp.where(round < 10, a, b) for `if`."
        ) from error


def own_cohort(
    sample_cohort: CohortSampler,
    clients: FederatedArrays,
    key: Key,
    round: jax.Array,
    cohort_size: int,
) -> jax.Array:
    """Call a custom sampler; returns its ids, int32 [S], checked if they are not traced.

    Args:
      round: int32 scalar.

    Raises:
      TypeError, ValueError: as in ``check_cohorts``.
    """
    available = clients.num_available
    cohort_size = check_int("cohort_size", cohort_size, minimum=1, maximum=available)
    ids = _ask(sample_cohort, plain(key), round)
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
        return jnp.asarray(known, jnp.int32)  # on any device
    return ids.astype(jnp.int32)
