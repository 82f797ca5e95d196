"""Buffered asynchronous aggregation (FedBuff) for methods with stateless clients.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered
Asynchronous Aggregation. AISTATS 2022, Algorithm 1, with the staleness weights of its section 5.

=========================  ==========================================
paper                      here
=========================  ==========================================
K                          ``buffer_size``, the cohort size S of a round
M, concurrency             ``concurrency``, clients in flight, C
w^t                        the wrapped method's params after t server steps
Δ_i                        the message of a client, from the params that it started with
τ_i(t)                     server steps since it started
1 / sqrt(1 + τ)            ``staleness="polynomial:0.5"``
η_g                        the wrapped method's own server
=========================  ==========================================

Departure: the K places that a server step empties are filled together, after it, from the new
params; in the paper each is filled as soon as its client is done. Up to K - 1 of C clients so wait
for the step, and all clients that start together have the same version.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.checks import check_choice, check_int, check_number
from fedjax_lab.clients.metrics import OF_EVERY_ROUND
from fedjax_lab.descriptions import describe
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Cohort, PyTree
from fedjax_lab.wrappers.base import State, Wrapper
from fedjax_lab.wrappers.client_messages import reduce_messages, stack_all

# Server steps since each client started, float [K] -> weights of the messages [K].
Staleness = Callable[[jax.Array], jax.Array]


class InFlight(NamedTuple):
    """M clients that have started and have not finished.

    Attributes:
      client_ids: int32 [M]; N in an empty place.
      seconds: float [M], simulated seconds from now until each client finishes; inf in an empty
        place. Times since the start of the run would lose digits in a long run.
      version: int32 [M], number of server steps before the client started.
      counts: bool [M], whether the client will send a message. A failed client stays in flight for
        as long as it would have trained.
      weights: float [M], weights of the batch.
      num_steps: int32 [M], K_i.
    """

    client_ids: jax.Array
    seconds: jax.Array
    version: jax.Array
    counts: jax.Array
    weights: jax.Array
    num_steps: jax.Array


class BufferedServer(NamedTuple):
    """Server state of a method with buffered aggregation.

    Attributes:
      server: server state of the wrapped method.
      in_flight: the C - K clients that are still training.
      messages: their messages, field -> pytree [C - K, ...].
      version: int32 scalar, number of server steps so far.
    """

    server: PyTree
    in_flight: InFlight
    messages: dict[str, PyTree]
    version: jax.Array


@suggest_keywords
def with_buffered_aggregation(
    algorithm: Algorithm,
    buffer_size: int,
    concurrency: int,
    *,
    staleness: str | Staleness = "polynomial:0.5",
) -> Algorithm:
    """Make a method asynchronous with buffered aggregation. Around FedAvg this is FedBuff.

    ``concurrency`` clients train at any time. A round starts ``buffer_size`` clients from the
    current global model. The server then waits for the ``buffer_size`` clients that finish first,
    regardless of when they started, and takes one step with their messages, weighted by
    staleness::

        x_{t+1} = server(x_t, sum_i w_i s(tau_i) message_i),    w_i adding up to 1

    A client's message belongs to the params with which it started. The batch has the time that each
    client takes (``simulate`` with ``times`` or ``devices``); without it, all clients take equally
    long.

    The first concurrency / buffer_size - 1 rounds only start clients, from the initial model: the
    simulated clock does not advance, and the server takes no step. A run of R rounds therefore has
    R - concurrency / buffer_size + 1 server steps. Schedules are functions of the round. With
    ``concurrency`` equal to ``buffer_size``, the method is unchanged.

    If a round has fewer than ``buffer_size`` clients, because no more are available, its other
    places stay empty. The server then does not wait until ``concurrency`` clients are in flight: it
    takes its step as soon as ``buffer_size`` are. With fewer, the round only starts clients. Places
    that stayed empty are filled by a later round that finds enough clients, without a step.

    Clients that fail (dropouts, values that are not finite) stay in flight until they would have
    finished, and the step then has fewer messages. A round without available clients changes
    nothing. A client may be sampled again while it is in flight; it then trains twice at a time.
    Bytes and loss are reported for the clients that a round starts.

    Memory: concurrency - buffer_size messages in the state, and all messages of a cohort.

    Metrics: ``server_updates``, 1 if the server takes a step in the round, else 0;
    ``staleness``, the mean of tau over the messages of a step; with times also
    ``round_seconds``, the time that the server waited. Metrics of a step are 0 in a round without
    one; a row of the history averages them over the rounds with a step.

    Source: Nguyen et al., AISTATS 2022, Algorithm 1.

    Args:
      algorithm: a method with one phase and stateless clients, whose server needs means and sums.
      buffer_size: number of messages for a server step, K; equal to the run's ``cohort_size``.
      concurrency: number of clients in flight, a multiple of ``buffer_size``.
      staleness: the function s: "polynomial:A" for (1 + tau)^-A, "constant" for 1, or a function of
        tau, float [K] -> [K].

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range, the method is not supported, or the order of wrappers
        has no meaning; the clients have rows (by ``init``); or the cohort size differs from
        ``buffer_size`` (when a round is traced).
    """
    wrapper = Wrapper(algorithm, "buffered")
    buffer_size = check_int("buffer_size", buffer_size, minimum=1)
    concurrency = check_int("concurrency", concurrency, minimum=buffer_size)
    if concurrency % buffer_size:
        raise ValueError(
            f"concurrency is {concurrency}; it must be a multiple of buffer_size, {buffer_size}."
        )
    factor = _parse_staleness(staleness)
    like = wrapper.only_phase(
        "the server does not stay as it is between a client's first exchange and its second"
    ).message_like
    if "robust" not in algorithm.wrappers:
        wrapper.refuse_stacks("the messages of a step come from clients of several rounds")
    waiting = concurrency - buffer_size

    def around(params, num_clients, server, rows):
        _refuse_rows(algorithm, rows)
        messages = jax.tree.map(lambda s: jnp.zeros((waiting, *s.shape), s.dtype), like(params))
        zero = jnp.zeros((), jnp.int32)
        return BufferedServer(server, _nobody(waiting, num_clients), messages, zero), rows

    return wrapper.wrap(
        "buffered",
        lambda phase, place: _buffer(phase, buffer_size, waiting, factor),
        needs_floats=True,
        state=State(around, server=BufferedServer, first_batch=True),
        hyperparameters={
            "buffer_size": buffer_size,
            "concurrency": concurrency,
            "staleness": describe(staleness),
        },
    )


def _buffer(phase: Phase, buffer_size: int, waiting: int, factor: Staleness) -> Phase:
    """Wrap a phase so that its server half gets the messages of the clients that finish first."""

    def server_update(state, messages, cohort):
        _check_slots(cohort, buffer_size)
        new = _starting(cohort, state.version)
        everybody = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), state.in_flight, new)
        # The clients that finish first; for equal times, those of the oldest model, by place.
        order = jnp.lexsort((everybody.version, everybody.seconds))
        first = jnp.sort(order[:buffer_size])
        anybody = cohort.participates.any()
        starts = new.client_ids < cohort.num_clients
        in_flight = (everybody.client_ids < cohort.num_clients).sum()
        waits = anybody
        if waiting:  # until all places are filled, or no client is left to fill them
            is_full = (in_flight > waiting) | ~starts.all()
            waits = anybody & is_full & (in_flight >= buffer_size)
        done = jax.tree.map(lambda leaf: leaf[first], everybody)
        age = (state.version - done.version).astype(done.weights.dtype)
        combined, taken = _buffered(
            phase.reduce, cohort, done, _take(state.messages, messages, first), factor(age)
        )
        steps = waits & taken.participates.any()
        stepped, metrics = phase.server_update(state, combined, taken)
        is_client = done.client_ids < cohort.num_clients
        waited = jnp.where(waits & is_client, done.seconds, 0).max()

        is_done = jnp.zeros(buffer_size + waiting, bool).at[first].set(waits)
        nobody = _nobody(waiting, cohort.num_clients)
        left = jax.tree.map(
            lambda empty, old: jnp.where(is_done[:waiting], empty, old), nobody, state.in_flight
        )
        free = left.client_ids == cohort.num_clients
        target = _places(free, anybody & starts & ~is_done[waiting:])
        old = (left, state.messages)
        in_flight, kept = jax.tree.map(
            lambda table, rows: table.at[target].set(rows, mode="drop"), old, (new, messages)
        )
        metrics = {**metrics, "staleness": _mean_age(age, taken.participates)}
        metrics = {
            name: value if name in OF_EVERY_ROUND else jnp.where(steps, value, 0)
            for name, value in metrics.items()
        }
        metrics["server_updates"] = steps.astype(age.dtype)
        if cohort.seconds is not None:
            metrics["round_seconds"] = waited
        return BufferedServer(
            tree.where(steps, stepped.server, state.server),
            in_flight._replace(seconds=in_flight.seconds - waited),
            kept,
            state.version + steps,
        ), metrics

    return stack_all(phase)._replace(server_update=server_update, if_nobody="unchanged")


def _check_slots(cohort: Cohort, buffer_size: int) -> None:
    slots = cohort.client_ids.shape[0]
    if slots != buffer_size:
        raise ValueError(
            f"buffer_size is {buffer_size}, but the cohort has {slots} slots; they must be equal. "
            "Poisson cohorts have more slots than cohort_size, and cyclic ones fewer where "
            "cohort_size does not divide the number of clients."
        )


def _mean_age(age: jax.Array, participates: jax.Array) -> jax.Array:
    return tree.safe_divide((age * participates).sum(), participates.sum().astype(age.dtype))


def _refuse_rows(algorithm: Algorithm, rows: PyTree) -> None:
    if jax.tree.leaves(rows):
        raise ValueError(
            f"algorithm is {algorithm.name}, whose clients have state; with_buffered_aggregation "
            "requires stateless clients. While a client is in flight, its state and the server's "
            "would belong to different versions, which the method does not define."
        )


def _nobody(waiting: int, num_clients: int | jax.Array) -> InFlight:
    """Create places in flight without clients."""
    real, number = jnp.zeros(waiting, jnp.result_type(float)), jnp.zeros(waiting, jnp.int32)
    ids = jnp.full(waiting, num_clients, jnp.int32)
    return InFlight(ids, real + jnp.inf, number, number > 0, real, number)


def _parse_staleness(staleness: str | Staleness) -> Staleness:
    """Return the function s."""
    if callable(staleness):
        return staleness
    if not isinstance(staleness, str):
        raise TypeError(
            f"staleness is {staleness!r}; it must be text, such as polynomial:0.5, or a function."
        )
    kind, colon, number = staleness.partition(":")
    check_choice("staleness", kind, ("constant", "polynomial"))
    if kind == "constant":
        if colon:
            raise ValueError(f"staleness is {staleness!r}; constant takes no number.")
        return jnp.ones_like
    try:
        power = float(number)
    except ValueError:
        raise ValueError(f"staleness is {staleness!r}; it must be polynomial:A.") from None
    check_number("staleness", power, minimum=0.0)
    return lambda age: (1 + age) ** -power


def _starting(cohort: Cohort, version: jax.Array) -> InFlight:
    """Describe a round's clients at the moment when they start."""
    ids, weights = cohort.client_ids, cohort.weights
    seconds = jnp.ones_like(weights) if cohort.seconds is None else cohort.seconds
    seconds = jnp.where(ids < cohort.num_clients, seconds.astype(weights.dtype), jnp.inf)
    return InFlight(
        ids,
        seconds,
        jnp.full(ids.shape, version, jnp.int32),
        cohort.participates,
        weights * cohort.total_weight,
        cohort.num_steps,
    )


def _take(old: dict[str, PyTree], new: dict[str, PyTree], places: jax.Array) -> dict[str, PyTree]:
    """Select messages [K, ...] from old [C - K, ...] and new [K, ...] ones."""

    def take(old, new):
        count = old.shape[0]
        rows = new.at[places - count].get(mode="clip")
        if not count:
            return rows
        return jnp.where(tree.along(places >= count, rows), rows, old.at[places].get(mode="clip"))

    return jax.tree.map(take, old, new)


def _buffered(reduce, cohort, done: InFlight, messages, factors) -> tuple[dict, Cohort]:
    """Aggregate the messages of a step; returns (aggregated messages, cohort of their clients)."""
    if jnp.shape(factors) != done.seconds.shape:
        raise ValueError(
            f"staleness returned an array of shape {jnp.shape(factors)}; it must be "
            f"{done.seconds.shape}, a weight for each client."
        )
    weights = jnp.where(done.counts, done.weights, 0)
    taken = cohort._replace(
        client_ids=done.client_ids,
        participates=done.counts,
        weights=tree.safe_divide(weights, weights.sum()),
        num_steps=jnp.where(done.counts, done.num_steps, 0),
        total_weight=weights.sum(),
        seconds=done.seconds,
    )
    return reduce_messages(reduce, tree.scale_rows(messages, factors), taken), taken


def _places(free: jax.Array, stays: jax.Array) -> jax.Array:
    """Assign free places to the clients that stay in flight; others get a place past the end.

    Args:
      free: bool [M], the free places: at least as many as clients that stay.
      stays: bool [K], which clients stay in flight.
    """
    size = free.shape[0]
    (places,) = jnp.nonzero(free, size=stays.shape[0], fill_value=size)
    return jnp.where(stays, places[jnp.cumsum(stays) - 1], size)
