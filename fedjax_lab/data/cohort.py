"""Client sampling and mini-batches of a round, inside jit.

All randomness is a function of (key, round, client id). A client's mini-batches do not depend on
its slot, the cohort size, or the devices.

Axes: N clients, S slots of the cohort, K local steps, B examples of a mini-batch,
n_i examples of client i.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Required, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp

from fedjax_lab.checks import LARGEST_INT, check_choice, check_int, is_traced
from fedjax_lab.data.client_sampling import (
    SAMPLINGS,
    CohortSampler,
    check_key,
    check_times,
    draw_ids,
    round_keys,
)
from fedjax_lab.data.cyclic import cyclic_slots, sample_cyclic
from fedjax_lab.data.devices import Devices
from fedjax_lab.data.federated import FederatedArrays, PartitionInfo
from fedjax_lab.data.order import WORDS, shuffled
from fedjax_lab.data.poisson import poisson_slots
from fedjax_lab.data.times import check_devices
from fedjax_lab.machine.keys import below, bits_at, compact, plain
from fedjax_lab.signatures import (
    complete_doc,
    described,
    show,
    spell_out,
    suggest_keywords,
    unknown,
)
from fedjax_lab.types import CohortBatch, Key

Function = TypeVar("Function", bound=Callable[..., Any])


class ScheduleOptions(TypedDict, total=False):
    """Options of client sampling and mini-batches: keyword arguments of ``simulate`` and others.

    To add an option, add it here and to ``Schedule``; signatures and help follow.

    Attributes:
      cohort_size: clients per round, S; with "poisson" the expected number, with "cyclic" the
        largest number.
      batch_size: examples per mini-batch, B.
      local_steps: local steps per client and round, K; exclusive with ``local_epochs``.
      local_epochs: passes over each client's data per round, E: client i takes
        K_i = E ceil(n_i / B) local steps.
      replace: draw mini-batches with replacement; False: in shuffled passes over the data.
      weights: weights of the clients in the aggregation: "uniform", or "examples" (the number of
        the client's examples).
      full_examples: pass each client's whole data set to the method, for full local gradients.
      devices: system heterogeneity: unequal numbers of local steps, a time budget for stragglers,
        dropouts. None: every client takes all its steps.
      sample_cohort: custom client sampling: (key, round) -> ids of the cohort, int32 [S], distinct
        clients with data, in operations that JAX can trace. None: uniform client sampling.
      sampling: kind of client sampling. "without_replacement": cohorts of a fixed size. "poisson":
        each client with data participates independently with the same probability. "cyclic": fixed
        random groups of clients take turns. See ``fedjax_lab.data.poisson`` and
        ``fedjax_lab.data.cyclic``.
    """

    cohort_size: Required[int]
    batch_size: Required[int]
    local_steps: int | None
    local_epochs: int | None
    replace: bool
    weights: str
    full_examples: bool
    devices: Devices | None
    sample_cohort: CohortSampler | None
    sampling: str


class Schedule(NamedTuple):
    """Client sampling and mini-batches of a run; see ``ScheduleOptions``."""

    cohort_size: int
    batch_size: int
    local_steps: int | None = None
    local_epochs: int | None = None
    replace: bool = False
    weights: str = "uniform"
    full_examples: bool = False
    devices: Devices | None = None
    sample_cohort: CohortSampler | None = None
    sampling: str = "without_replacement"

    @classmethod
    def of(cls, function: str, options: Mapping[str, Any]) -> "Schedule":
        """Create a schedule from a function's keyword arguments.

        Args:
          function: name of the function, for errors.
          options: its keyword arguments.

        Raises:
          TypeError: an option is unknown or missing, or ``devices`` has the wrong type.
        """
        for name in options:
            if name not in cls._fields:
                raise unknown(function, name, cls._fields)
        for name in ScheduleOptions.__required_keys__ - options.keys():
            raise TypeError(f"{function}() lacks the argument {name!r}.")
        if not isinstance(options.get("devices"), (Devices, type(None))):
            raise TypeError(
                f"devices is {options['devices']!r}; it must be a data.Devices or None."
            )
        return cls(**options)

    def record(self) -> dict[str, Any]:
        """Return the entries of config.json, without a custom sampler, whose hash is recorded."""
        devices = None if self.devices is None else dataclasses.asdict(self.devices)
        kept = {name: v for name, v in self._asdict().items() if name != "sample_cohort"}
        if self.sampling == "without_replacement":  # not recorded, as in older run directories
            del kept["sampling"]
        return {**kept, "devices": devices}

    def slots(self, clients: FederatedArrays) -> int:
        """Compute S, the number of slots of a cohort.

        Args:
          clients: the clients' data.
        """
        if self.sampling == "poisson":
            return poisson_slots(self.cohort_size, clients.num_available)
        if self.sampling == "cyclic":
            return cyclic_slots(self.cohort_size, clients.num_available)
        return self.cohort_size

    def read_in_rounds(self, clients: FederatedArrays) -> FederatedArrays:
        """Return a federation without what is constant in a program of rounds, but not needed.

        Names and origin are left out, and the smallest and largest sizes are replaced by sizes of
        the same consequences. So the rounds of two partitions are traced and compiled only once.

        Args:
          clients: the clients' data.

        Raises:
          ValueError: as in ``draw_batch``.
        """
        smallest, largest = clients.min_size, clients.max_size
        if not self.full_examples:
            batch_size, num_steps, equal_steps, full = _checked_steps(self, clients)
            if self.local_epochs is None:
                smallest, largest = (num_steps * batch_size,) * 2 if full else (1, 2)
            else:
                most = num_steps // self.local_epochs
                largest = most * batch_size
                partly = largest - batch_size + 1 if equal_steps else 1
                smallest = largest if full else partly
        return dataclasses.replace(
            clients,
            partition=PartitionInfo("", 0, ""),
            names=None,
            categories=(),
            min_size=smallest,
            max_size=largest,
        )

    def draw(self, clients: FederatedArrays, key: Key, round: jax.Array) -> CohortBatch:
        """Draw the batch of one round; see ``draw_batch``.

        Args:
          clients: the clients' data.
          key: the run's key.
          round: int32 scalar, counted from 0.

        Returns:
          ``CohortBatch`` with indices [S, K, B].

        Raises:
          TypeError, ValueError: as in ``draw_batch``.
        """
        return _draw(self, clients, key, round)

    def with_gradients(self, count: int) -> "Schedule":
        """Return the schedule whose devices take longer for a local step.

        Args:
          count: gradients that a method computes in one local step.
        """
        if self.devices is None or count == 1:
            return self
        step_time = count * self.devices.step_time
        return self._replace(devices=dataclasses.replace(self.devices, step_time=step_time))


def scheduled(function: Function) -> Function:
    """Show ``ScheduleOptions`` in the signature, help and errors of a function.

    Args:
      function: function with ``**schedule: Unpack[ScheduleOptions]``.
    """
    own = inspect.signature(function)
    signature = spell_out(own, "schedule", ScheduleOptions, Schedule._field_defaults)
    if function.__doc__:
        function.__doc__ = complete_doc(function.__doc__, signature, described(ScheduleOptions))
    show(function, signature)
    return suggest_keywords(function)


@scheduled
def draw_batch(
    clients: FederatedArrays, key: Key, round: Any, **schedule: Unpack[ScheduleOptions]
) -> CohortBatch:
    """Sample the cohort of a round, and draw its mini-batches.

    Without replacement, a client takes its examples in shuffled passes, each in a new random order.
    As with torch's ``DataLoader(drop_last=False)``, the last mini-batch of a pass may be smaller;
    the remaining places are masked. Step k belongs to pass k // ceil(n_i / B). The order is a keyed
    pseudo-random bijection that is evaluated at each position, so the cost does not depend on n_i.
    With replacement, every mini-batch consists of B independent uniform draws.

    With ``clients.times``, the cohort has the available clients that finish first. Remaining slots
    have id N. The batch then has ``participates`` and ``seconds``, and ``measured`` has

    - ``round_seconds``, the time that the server waits, also with ``devices``;
    - ``dropped_clients``, the number of clients that were sampled but do not participate;
    - ``available_clients``, if the times have an availability.

    Args:
      clients: the federation.
      key: typed PRNG key of the run, the same in every round.
      round: int32 scalar, counted from 0; may be traced.

    Returns:
      ``CohortBatch`` whose ``examples`` are int32 indices [S, K, B] into its ``source``;
      ``full_examples`` [S, max_i n_i] likewise. Masked places have an example of the same client.
      ``example_mask`` and ``num_steps`` are None if the clients' sizes imply that all examples are
      real and that all clients take all steps.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range, or not exactly one of ``local_steps`` and
        ``local_epochs`` is set.
    """
    return _draw(Schedule.of("draw_batch", schedule), clients, key, round)


def _draw(schedule: Schedule, clients: FederatedArrays, key: Key, round: Any) -> CohortBatch:
    cohort_size, replace, weights = schedule.cohort_size, schedule.replace, schedule.weights
    devices, sampling = schedule.devices, schedule.sampling
    check_key(key)
    if not is_traced(round) and not isinstance(round, jax.Array):
        check_int("round", round, minimum=0)
    batch_size, num_steps, equal_steps, full = _checked_steps(schedule, clients)
    round, key = jnp.asarray(round, jnp.int32), compact(key)
    cohort_key, order_key, client_key, report_key = round_keys(key, round)
    expected: jax.Array | None = None
    measured: dict[str, jax.Array] = {}
    if sampling == "cyclic":
        check_times(clients, sampling)
        check_int("cohort_size", cohort_size, minimum=1, maximum=clients.num_available)
        ids = sample_cyclic(key, clients, cohort_size, round)
    else:
        ids, expected, measured = draw_ids(
            clients, cohort_key, round, cohort_size, schedule.sample_cohort, sampling
        )
    has_empty_slots = sampling != "without_replacement"
    participates = ids < clients.num_clients if has_empty_slots else None
    steps_taken = seconds = None
    if not equal_steps:
        assert schedule.local_epochs is not None
        steps_taken = schedule.local_epochs * ((clients.sizes[ids] + batch_size - 1) // batch_size)
    if devices is not None:
        if not isinstance(devices, Devices):
            raise TypeError(f"devices is {devices!r}; it must be a data.Devices or None.")
        check_devices(clients.times, devices)
        if devices.min_local_steps is not None:
            check_int("min_local_steps", devices.min_local_steps, minimum=1, maximum=num_steps)
        planned = jnp.full(ids.shape, num_steps) if steps_taken is None else steps_taken
        steps_taken = devices.local_steps(key, round, ids, planned)
        reports = devices.reports(report_key, ids)
        is_client = jnp.ones(ids.shape, bool) if participates is None else participates
        if reports is not None:
            participates = reports & is_client
        if clients.times is None:
            seconds = devices.seconds(key, ids, steps_taken)
            came = is_client if participates is None else participates
            spent = devices.round_seconds(seconds, came & (steps_taken > 0), is_client)
            measured = {"round_seconds": spent}
    if clients.times is not None:
        planned = jnp.full(ids.shape, num_steps) if steps_taken is None else steps_taken
        first, seconds, participates, waited = clients.times.first_to_finish(
            ids, planned, participates, len(ids) if has_empty_slots else cohort_size
        )
        ids, measured = ids[first], {**measured, **waited}
        steps_taken = None if steps_taken is None else steps_taken[first]
    held = ids
    if has_empty_slots or clients.times is not None:  # empty slots: any client
        someone = 0 if clients.nonempty is None else clients.nonempty[0]
        held = jnp.where(ids < clients.num_clients, ids, someone)
    starts, sizes = clients.starts[held], clients.sizes[held]
    steps = jnp.arange(num_steps, dtype=jnp.int32)
    places, real = _positions(order_key, ids, sizes, steps, batch_size, replace)
    if steps_taken is not None:
        real = real & (steps[None, :] < steps_taken[:, None])[..., None]
    everything = every_real = None
    if schedule.full_examples:
        place = jnp.arange(clients.max_size, dtype=jnp.int32)[None, :]
        every_real = place < sizes[:, None]
        everything = _held(clients, starts[:, None] + jnp.where(every_real, place, 0))
    return CohortBatch(
        client_ids=ids,
        examples=_held(clients, starts[:, None, None] + places),
        key=plain(client_key),
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


def _checked_steps(schedule: Schedule, clients: FederatedArrays) -> tuple[int, int, bool, bool]:
    """Return (B, K, whether all clients take K steps, whether all their examples are real)."""
    local_steps, local_epochs = schedule.local_steps, schedule.local_epochs
    sampling = schedule.sampling
    batch_size = check_int("batch_size", schedule.batch_size, minimum=1, maximum=LARGEST_INT)
    if (local_steps is None) == (local_epochs is None):
        raise ValueError(
            f"local_steps is {local_steps} and local_epochs {local_epochs}; set exactly one."
        )
    check_choice("weights", schedule.weights, ("uniform", "examples"))
    check_choice("sampling", sampling, SAMPLINGS)
    if sampling != "without_replacement" and schedule.sample_cohort is not None:
        raise ValueError(f"sampling is {sampling!r} and sample_cohort is set; omit one of them.")
    fewest, most = -(-clients.min_size // batch_size), -(-clients.max_size // batch_size)
    divides = clients.min_size == clients.max_size and clients.max_size % batch_size == 0
    if local_steps is not None:
        num_steps = check_int("local_steps", local_steps, minimum=1, maximum=LARGEST_INT)
        return batch_size, num_steps, True, divides or clients.min_size >= num_steps * batch_size
    epochs = check_int("local_epochs", local_epochs, minimum=1, maximum=LARGEST_INT // most)
    return batch_size, epochs * most, fewest == most, divides


def _positions(order_key, ids, sizes, steps, batch_size, replace):
    """Compute positions of the mini-batches in the clients' lists, [S, K, B], and their mask."""
    # All bits of a round in one block: keys folded by client, pass and step compile for longer.
    places = jnp.arange(batch_size, dtype=jnp.int32)[None, None]
    if replace:
        bits = bits_at(order_key, ids[:, None, None], steps[None, :, None] * batch_size + places)
        drawn = below(bits, sizes[:, None, None])
        return drawn, jnp.ones(drawn.shape, bool)
    per_pass = ((sizes + batch_size - 1) // batch_size)[:, None]
    steps, per_pass = jnp.broadcast_arrays(steps[None], per_pass)
    passes = jax.lax.div(steps, per_pass)
    first = (steps - passes * per_pass) * batch_size
    place = first[..., None] + places
    real = place < sizes[:, None, None]
    numbers = passes[..., None] * WORDS + jnp.arange(WORDS)[None, None]
    words = bits_at(order_key, ids[:, None, None], numbers)
    return shuffled(words, jnp.where(real, place, 0), sizes), real


def _held(clients: FederatedArrays, places: jax.Array) -> jax.Array:
    """Convert positions in the clients' lists to indices into ``clients.examples``."""
    numbers = clients.indices[places]
    if clients.window is None:
        return numbers
    return jnp.searchsorted(clients.window, numbers).astype(jnp.int32)
