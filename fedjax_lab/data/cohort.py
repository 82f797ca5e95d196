"""What is drawn for a round: the cohort and its mini-batches, inside jit.

All randomness is a function of (key, round, client id): a client's mini-batches do not depend
on its place in the cohort, the size of the cohort, or the devices.

Axes: N clients, S slots of the cohort, K local steps, B examples of a mini-batch,
n_i examples of client i.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_choice, check_int, is_traced
from fedjax_lab.data.cyclic import sample_cyclic
from fedjax_lab.data.devices import Devices
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.order import shuffled
from fedjax_lab.data.poisson import sample_poisson
from fedjax_lab.data.times import RoundTimes, check_devices
from fedjax_lab.types import CohortBatch, Key

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
    _check_key(key)
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


def draw_batch(
    clients: FederatedArrays,
    key: Key,
    round: Any,
    *,
    cohort_size: int,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    replace: bool = False,
    weights: Literal["uniform", "examples"] = "uniform",
    full_examples: bool = False,
    devices: Devices | None = None,
    sample_cohort: CohortSampler | None = None,
    sampling: str = "without_replacement",
) -> CohortBatch:
    """Draw a round's cohort and mini-batches.

    With ``clients.times`` the cohort is of those who are there and finish first, and the batch says
    who takes part and the ``seconds`` of each; a place that is left over has id N. ``measured`` has
    ``round_seconds``, how long the server waits, the ``dropped_clients`` that were drawn and take
    no part, and, of a trace, ``available_clients``.

    Without replacement a client passes over its data in a new random order each time. As with
    torch's ``DataLoader(drop_last=False)``, the last mini-batch of a pass may be smaller: its
    rest is masked. Step k belongs to pass k // ceil(n_i / B). The order is a keyed
    pseudo-random bijection evaluated at each position, so the cost does not depend on n_i.
    With replacement every mini-batch is B independent uniform draws.

    Args:
      clients: the federation.
      key: the run's typed PRNG key, the same in every round.
      round: int32 scalar, from 0; may be traced.
      cohort_size: S; with "poisson", how many clients are expected; with "cyclic", at most.
      batch_size: B.
      local_steps: K, the same for all clients. Exactly one of this and ``local_epochs``.
      local_epochs: E; client i takes K_i = E ceil(n_i / B) steps, and K = E ceil(max_i n_i / B).
        ``devices`` may leave it fewer in both cases.
      replace: whether mini-batches are drawn with replacement.
      weights: "uniform" (None in the batch) or "examples" (n_i).
      full_examples: whether the batch also has each client's whole data set.
      devices: unequal numbers of steps and drop-outs; None: every client does all its work.
      sample_cohort: (the round's key for it, round) -> ids [S] of the cohort, distinct clients with
        data. Its shape is checked when traced, its values where they are known. None: uniform.
      sampling: "without_replacement", or "poisson": each client with data takes part with the same
        probability, by a coin of its own; or "cyclic": groups of clients, dealt once, take turns.
        See ``fedjax_lab.data.poisson`` and ``fedjax_lab.data.cyclic``.

    Returns:
      ``CohortBatch`` whose ``examples`` are int32 indices [S, K, B] into its ``source``, and
      ``full_examples`` [S, max_i n_i] likewise. A masked place holds an example of the same
      client. ``example_mask`` and ``num_steps`` are None where all examples are real and all
      steps are taken for every client, which is decided from the sizes when traced.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range, or not exactly one of ``local_steps`` and
        ``local_epochs`` is given.
    """
    _check_key(key)
    batch_size = check_int("batch_size", batch_size, minimum=1)
    if (local_steps is None) == (local_epochs is None):
        raise ValueError(
            f"local_steps is {local_steps} and local_epochs {local_epochs}; give exactly one."
        )
    check_choice("weights", weights, ("uniform", "examples"))
    check_choice("sampling", sampling, SAMPLINGS)
    if sampling != "without_replacement" and sample_cohort is not None:
        raise ValueError(f"sampling is {sampling!r} and sample_cohort is given; give one of them.")
    if not is_traced(round) and not isinstance(round, jax.Array):
        check_int("round", round, minimum=0)
    fewest, most = -(-clients.min_size // batch_size), -(-clients.max_size // batch_size)
    if local_steps is not None:
        num_steps = check_int("local_steps", local_steps, minimum=1)
        equal_steps = True
        full = clients.min_size >= num_steps * batch_size
    else:
        epochs = check_int("local_epochs", local_epochs, minimum=1)
        num_steps = epochs * most
        equal_steps = fewest == most
        full = False
    full = full or (clients.min_size == clients.max_size and clients.max_size % batch_size == 0)

    round = jnp.asarray(round, jnp.int32)
    cohort_key, order_key, client_key, report_key = _round_keys(key, round)
    expected, measured = None, {}
    if sampling == "cyclic":
        _check_times(clients, sampling)
        check_int("cohort_size", cohort_size, minimum=1, maximum=clients.num_available)
        ids = sample_cyclic(key, clients, cohort_size, round)
    else:
        ids, expected, measured = _draw_ids(
            clients, cohort_key, round, cohort_size, sample_cohort, sampling
        )
    has_empty_slots = sampling != "without_replacement"
    participates = ids < clients.num_clients if has_empty_slots else None
    steps_taken = seconds = None
    if not equal_steps:
        steps_taken = epochs * ((clients.sizes[ids] + batch_size - 1) // batch_size)
    if devices is not None:
        check_devices(clients.times, devices)
        if devices.min_local_steps is not None:
            check_int("min_local_steps", devices.min_local_steps, minimum=1, maximum=num_steps)
        planned = jnp.full(ids.shape, num_steps) if steps_taken is None else steps_taken
        steps_taken = devices.local_steps(key, round, ids, planned)
        reports = devices.reports(report_key, ids)
        if reports is not None:
            participates = reports if participates is None else reports & participates
    if clients.times is not None:
        planned = jnp.full(ids.shape, num_steps) if steps_taken is None else steps_taken
        first, seconds, participates, waited = clients.times.first_to_finish(
            ids, planned, participates, len(ids) if has_empty_slots else cohort_size
        )
        ids, measured = ids[first], {**measured, **waited}
        steps_taken = None if steps_taken is None else steps_taken[first]
    held = ids
    if has_empty_slots or clients.times is not None:  # in a slot without a client: anybody
        someone = 0 if clients.nonempty is None else clients.nonempty[0]
        held = jnp.where(ids < clients.num_clients, ids, someone)
    starts, sizes = clients.starts[held], clients.sizes[held]
    steps = jnp.arange(num_steps, dtype=jnp.int32)

    def positions(client_id, size):  # [K, B] places in the client's data, and which are real
        own_key = jax.random.fold_in(order_key, client_id)
        if replace:
            step_keys = jax.vmap(jax.random.fold_in, (None, 0))(own_key, steps)
            draw = lambda k: jax.random.randint(k, (batch_size,), 0, size, jnp.int32)  # noqa: E731
            drawn = jax.vmap(draw)(step_keys)
            return drawn, jnp.ones(drawn.shape, bool)
        per_pass = (size + batch_size - 1) // batch_size
        first = (steps % per_pass) * batch_size
        place = first[:, None] + jnp.arange(batch_size, dtype=jnp.int32)[None, :]
        real = place < size
        pass_keys = jax.vmap(jax.random.fold_in, (None, 0))(own_key, steps // per_pass)
        return shuffled(pass_keys, jnp.where(real, place, 0), size), real

    places, real = jax.vmap(positions)(ids, sizes)
    if steps_taken is not None:
        real = real & (steps[None, :] < steps_taken[:, None])[..., None]
    everything = every_real = None
    if full_examples:
        place = jnp.arange(clients.max_size, dtype=jnp.int32)[None, :]
        every_real = place < sizes[:, None]
        everything = _held(clients, starts[:, None] + jnp.where(every_real, place, 0))
    return CohortBatch(
        client_ids=ids,
        examples=_held(clients, starts[:, None, None] + places),
        key=client_key,
        round=round,
        full_examples=everything,
        full_mask=every_real,
        example_mask=None if (replace and equal_steps) or (not replace and full) else real,
        num_steps=steps_taken,
        weights=sizes.astype(jnp.float32) if weights == "examples" else None,
        participates=participates,
        source=clients.examples,
        expected_size=expected,
        seconds=seconds,
        measured=measured or None,
    )


def _held(clients: FederatedArrays, places: jax.Array) -> jax.Array:
    """The examples at some places of the clients' lists, as indices into ``clients.examples``."""
    numbers = clients.indices[places]
    if clients.window is None:
        return numbers
    return jnp.searchsorted(clients.window, numbers).astype(jnp.int32)


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
    draw = jax.jit(lambda t: jnp.asarray(sample_cohort(_round_keys(key, t)[0], t)))
    for t in range(min(rounds, _LOOKED_AT)):
        _own_cohort(lambda _, t: draw(t), clients, key, jnp.asarray(t, jnp.int32), cohort_size)


def _round_keys(key: Key, round: jax.Array) -> Key:
    """Four keys of a round: for the cohort, the orders, the clients, and who reports."""
    return jax.random.split(jax.random.fold_in(key, round), 4)


def _draw_ids(clients, key, round, cohort_size, sample_cohort, sampling):
    """The clients that are drawn, S or more, how many are expected, and metrics of who was there.

    As many as expected is NaN where more came than there are slots, None where chance has no say.
    """
    times: RoundTimes | None = clients.times
    if sampling == "poisson":
        _check_times(clients, sampling)
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


def _check_times(clients, sampling):
    if clients.times is not None and clients.times.chooses:
        raise ValueError(
            f"sampling is {sampling!r} and times have availability or over_selection: both say who "
            "is drawn; leave out one of them."
        )


def _own_cohort(sample_cohort, clients, key, round, cohort_size):
    """What ``sample_cohort`` returns, int32 [S], checked as far as it is known."""
    available = clients.num_available
    cohort_size = check_int("cohort_size", cohort_size, minimum=1, maximum=available)
    ids = jnp.asarray(sample_cohort(key, round))
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


def _check_key(key: Any) -> None:
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(f"key is {key!r}; it must be a typed PRNG key, such as jax.random.key(0).")
    if key.shape != ():
        raise ValueError(f"key has shape {key.shape}; it must be a single key.")
