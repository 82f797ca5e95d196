"""Client sampling and mini-batches of a round, inside jit.

All randomness is a function of (key, round, client id). A client's mini-batches do not depend on
its slot, the cohort size, or the devices.

Axes: N clients, S slots of the cohort, K local steps, B examples of a mini-batch,
n_i examples of client i.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Required, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import (
    KNOWN,
    LARGEST_INT,
    check_choice,
    check_counts,
    check_int,
    did_you_mean,
    is_traced,
)
from fedjax_lab.data.client_sampling import SAMPLINGS, CohortSampler, own_cohort, sample_cohort
from fedjax_lab.data.clock import PLAIN, Devices
from fedjax_lab.data.dtypes import to_device
from fedjax_lab.data.federated import FederatedArrays, PartitionInfo
from fedjax_lab.data.local_work import LocalWork
from fedjax_lab.data.sampler import check_key, round_keys
from fedjax_lab.data.streams import AnyClients, check_clients, check_resident, replace_index
from fedjax_lab.machine.keys import compact, plain, threefry
from fedjax_lab.signatures import described, show, spell_out, suggest_keywords, unknown
from fedjax_lab.types import CohortBatch, Key

Function = TypeVar("Function", bound=Callable[..., Any])
Array = np.ndarray | jax.Array


class ScheduleOptions(TypedDict, total=False):
    """Options of client sampling and mini-batches: keyword arguments of ``simulate`` and others.

    To add an option, add it here and to ``Schedule``; signatures and help follow.

    Attributes:
      cohort_size: clients per round, S; with "poisson" the expected number, with "cyclic" the
        largest number.
      batch_size: examples per mini-batch, B.
      local_steps: local steps per client and round, K; or an array of integers [N], those of each
        client. Exclusive with ``local_epochs``.
      local_epochs: passes over each client's data per round, E: client i takes
        K_i = E ceil(n_i / B) local steps. An array of integers [N] has the E_i of each client. With
        an array, K is the largest K_i, and a client with 0 does not participate.
      replace: draw mini-batches with replacement; False: in shuffled passes over the data.
      weights: weights of the clients in the aggregation: "uniform", "examples" (the number of the
        client's examples), or an array of numbers [N] with the weight of each client. A client
        of weight 0 trains and counts as a participant, but not in means: methods that add up
        messages over clients (SCAFFOLD), or store them (GradMA, MIFA), use its own.
      full_examples: pass each client's whole data set to the method, for full local gradients.
      devices: system heterogeneity: unequal numbers of local steps, a time budget for stragglers,
        dropouts. A subclass may compute the steps in its ``local_steps``. None: every client takes
        all its steps.
      sample_cohort: custom client sampling: (key, round) -> ids of the cohort, int32 [S], distinct
        clients with data, in operations that JAX can trace. None: uniform client sampling.
      sampling: kind of client sampling. "without_replacement": cohorts of a fixed size. "poisson":
        each client with data participates independently with the same probability. "cyclic": fixed
        random groups of clients take turns. See ``fedjax_lab.data.poisson`` and
        ``fedjax_lab.data.cyclic``.
      client_constants: constants of each client, a pytree of arrays [N, ...], such as its class
        frequencies. A method reads its client's part in ``batch.constants``; a loss function gets
        it if it has an argument named ``constants``. None: there are none.
    """

    cohort_size: Required[int]
    batch_size: Required[int]
    local_steps: int | Sequence[int] | Array | None
    local_epochs: int | Sequence[int] | Array | None
    replace: bool
    weights: str | Sequence[float] | Array
    full_examples: bool
    devices: Devices | None
    sample_cohort: CohortSampler | None
    sampling: str
    client_constants: Any


_WEIGHTS = ("examples", "uniform")
_WORK = ("local_steps", "local_epochs")


class Schedule(NamedTuple):
    """Client sampling and mini-batches of a run; see ``ScheduleOptions``."""

    cohort_size: int
    batch_size: int
    local_steps: Any = None
    local_epochs: Any = None
    replace: bool = False
    weights: Any = "uniform"
    full_examples: bool = False
    devices: Devices | None = None
    sample_cohort: CohortSampler | None = None
    sampling: str = "without_replacement"
    client_constants: Any = None

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
        """Return the entries of config.json, without those of which hashes are recorded."""
        devices = None
        if self.devices is not None:
            devices = {n: v for n, v in vars(self.devices).items() if isinstance(v, PLAIN)}
            if type(self.devices) is not Devices:
                devices["class"] = type(self.devices).__qualname__
        hashed = ("sample_cohort", "client_constants")
        kept = {name: v for name, v in self._asdict().items() if name not in hashed}
        if self.sampling == "without_replacement":  # not recorded, as in older run directories
            del kept["sampling"]
        return {**kept, "devices": devices}

    def of_clients(self, ids: np.ndarray, num_clients: int) -> "Schedule":
        """Return the schedule of some of the clients, which are numbered anew.

        Args:
          ids: integers [M], the numbers of these clients.
          num_clients: N, the number of all clients.

        Raises:
          TypeError, ValueError: an array of local steps, epochs or weights is invalid.
        """
        constants, weights = self.client_constants, self.weights
        if constants is not None:
            constants = check_constants(constants, num_clients)
            constants = jax.tree.map(lambda leaf: leaf[ids], constants)
        if _is_array(weights):
            weights = _check_weights(weights, num_clients)[ids]
        work = {name: getattr(self, name) for name in _WORK}
        for name, value in work.items():
            if _is_array(value):
                work[name] = check_counts(name, value, num_clients)[ids]
        return self._replace(weights=weights, client_constants=constants, **work)

    def bind(self, clients: AnyClients) -> tuple["Schedule", AnyClients]:
        """Attach the arrays with values of each client to the clients.

        So they are arguments of a program and not constants in it. Local steps or epochs become
        ``clients.local_steps``, of which the schedule has the largest number, ``client_constants``
        become ``clients.constants``, and weights ``clients.weights``.

        Args:
          clients: the clients' data.

        Returns:
          The schedule without arrays, and the clients. Without arrays, both are unchanged.

        Raises:
          TypeError, ValueError: an array is no array of N integers from 0, one of them positive;
            the numbers of steps are unknown, because they are traced; weights are no finite
            numbers from 0, one of them positive; or as ``check_constants``.
        """
        schedule, arrays, count = self, {}, clients.num_clients
        if _is_array(self.weights):
            arrays["weights"] = _check_weights(self.weights, count)
            schedule = schedule._replace(weights=None)
        if self.client_constants is not None:
            arrays["constants"] = check_constants(self.client_constants, count)
            schedule = schedule._replace(client_constants=None)
        if any(_is_array(getattr(self, name)) for name in _WORK):
            most, arrays["local_steps"] = self._steps_of_each(clients)
            schedule = schedule._replace(local_steps=most, local_epochs=None)
        return schedule, replace_index(clients, **arrays) if arrays else clients

    def _steps_of_each(self, clients: AnyClients) -> tuple[int, jax.Array]:
        """Compute (the largest number of local steps; those of each client, int32 [N])."""
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_steps and local_epochs are both set; set exactly one.")
        name = "local_steps" if self.local_epochs is None else "local_epochs"
        steps = check_counts(name, getattr(self, name), clients.num_clients).astype(np.int64)
        if name == "local_epochs":
            check_int("batch_size", self.batch_size, minimum=1, maximum=LARGEST_INT)
            if is_traced(clients.sizes):
                raise TypeError(
                    "local_epochs is an array, and clients is an argument of a traced function: "
                    "the largest number of local steps is unknown. Let the function close over "
                    "the clients, or pass local_steps as an array."
                )
            steps = steps * -(-np.asarray(clients.sizes, np.int64) // self.batch_size)
        most = check_int(f"the largest number of local steps of {name}", int(steps.max()),
                         minimum=1, maximum=LARGEST_INT)  # fmt: skip
        return most, jnp.asarray(steps, jnp.int32)

    def slots(self, clients: FederatedArrays) -> int:
        """Compute S, the number of slots of a cohort.

        Args:
          clients: the clients' data.
        """
        return SAMPLINGS[self.sampling].slots(self.cohort_size, clients.num_available)

    def read_in_rounds(self, clients: FederatedArrays) -> FederatedArrays:
        """Return a federation without what is constant in a program of rounds, but not needed.

        Names and origin are left out, and the smallest and largest sizes are replaced by sizes of
        the same consequences. So the rounds of two partitions are traced and compiled only once.

        Args:
          clients: the clients' data.

        Raises:
          ValueError: as in ``draw_batch``.
        """
        smallest, largest = self._work(clients).sizes_alike()
        if self.full_examples:
            smallest, largest = clients.min_size, clients.max_size
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
        work, num_clients = self._work(clients), clients.num_clients
        round = jnp.asarray(round, jnp.int32)
        keys = round_keys(compact(threefry(key)), round)
        ids, expected, measured = sample_cohort(
            keys, clients, round, self.cohort_size, self.sampling, self.sample_cohort
        )
        has_empty_slots = SAMPLINGS[self.sampling].pads or clients.times is not None
        participates = ids < num_clients if has_empty_slots else None
        asked = work.ask(keys, round, ids)
        steps, seconds = asked.steps, None
        if self.devices is not None or clients.times is not None:
            ids, steps, seconds, participates, spent = work.first_to_finish(
                keys, asked, self.slots(clients)
            )
            measured = {**measured, **spent}
        num_steps = None if work.is_equal and self.devices is None else steps
        if expected is not None:
            expected = expected * work.expected_share(keys, round)
        holders = ids
        if has_empty_slots:  # a padded slot reads what a client of the cohort does, or anyone
            someone = 0 if clients.nonempty is None else clients.nonempty[0]
            someone = jnp.where(ids.min() < num_clients, ids.min(), someone)
            holders = jnp.where(ids < num_clients, ids, someone)
        starts, sizes = clients.starts[holders], clients.sizes[holders]
        places, example_mask = work.mini_batches(keys.order, holders, sizes, num_steps)
        full_examples = full_mask = None
        if self.full_examples:
            place = jnp.arange(clients.max_size, dtype=jnp.int32)[None, :]
            full_mask = place < sizes[:, None]
            full_examples = _held(clients, starts[:, None] + jnp.where(full_mask, place, 0))
        return CohortBatch(
            client_ids=ids,
            examples=_held(clients, starts[:, None, None] + places),
            key=plain(keys.clients),
            round=round,
            full_examples=full_examples,
            full_mask=full_mask,
            example_mask=example_mask,
            num_steps=num_steps,
            weights=self._weights(clients, holders, sizes),
            participates=participates,
            source=clients.examples,
            expected_size=expected,
            seconds=seconds,
            measured=measured or None,
            constants=clients.constants,
        )

    def _weights(
        self, clients: FederatedArrays, holders: jax.Array, sizes: jax.Array
    ) -> jax.Array | None:
        """Compute the weights of a cohort, float32 [S]; None: all are equal."""
        if clients.weights is not None:
            return clients.weights[holders]
        return sizes.astype(jnp.float32) if self.weights == "examples" else None

    def _work(self, clients: FederatedArrays) -> LocalWork:
        """Check all options but the cohort's, and return the local work of a round."""
        if clients.weights is None and str(self.weights) not in _WEIGHTS:
            raise ValueError(
                f"weights is {self.weights!r}; it must be one of examples, uniform, or an array "
                f"with the weight of each client.{did_you_mean(str(self.weights), _WEIGHTS)}"
            )
        check_choice("sampling", self.sampling, SAMPLINGS)
        if self.sampling != "without_replacement" and self.sample_cohort is not None:
            raise ValueError(
                f"sampling is {self.sampling!r} and sample_cohort is set; omit one of them."
            )
        batch_size = check_int("batch_size", self.batch_size, minimum=1, maximum=LARGEST_INT)
        if (self.local_steps is None) == (self.local_epochs is None):
            raise ValueError(
                f"local_steps is {self.local_steps} and local_epochs {self.local_epochs}; set "
                "exactly one."
            )
        if self.local_steps is not None:
            epochs = None
            steps = check_int("local_steps", self.local_steps, minimum=1, maximum=LARGEST_INT)
        else:
            per_pass = -(-clients.max_size // batch_size)
            most = LARGEST_INT // per_pass
            epochs = check_int("local_epochs", self.local_epochs, minimum=1, maximum=most)
            steps = epochs * per_pass
        return LocalWork(clients, self.devices, self.replace, batch_size, steps, epochs)

    def with_gradients(self, count: int) -> "Schedule":
        """Return the schedule whose devices take longer for a local step.

        Args:
          count: gradients that a method computes in one local step.
        """
        if self.devices is None or count == 1:
            return self
        devices = copy.copy(self.devices)  # also of a class with arguments of its own
        object.__setattr__(devices, "step_time", count * devices.step_time)
        return self._replace(devices=devices)


def check_constants(constants: Any, num_clients: int) -> Any:
    """Check the constants of the clients, and put them on the device: pytree of arrays [N, ...].

    Raises:
      ValueError: there is no array, or one has another leading axis or is not numeric.
    """
    if not jax.tree.leaves(constants):
        raise ValueError(
            f"client_constants is {constants!r}; it must have at least one array [N, ...]."
        )

    def check(path, leaf):
        name = f"client_constants{jax.tree_util.keystr(path)}"
        if np.shape(leaf)[:1] != (num_clients,):
            raise ValueError(
                f"{name} has the shape {np.shape(leaf)}; its leading axis must have an entry for "
                f"each of the {num_clients} clients."
            )
        return to_device(name, leaf)

    return jax.tree_util.tree_map_with_path(check, constants)


def _check_weights(weights: Any, num_clients: int) -> jax.Array:
    """Check an array of clients' weights, and put it on the device: float32 [N]."""
    found = to_device("weights", weights)
    if found.shape != (num_clients,):
        raise ValueError(
            f"weights has the shape {found.shape}; it must be 'uniform', 'examples' or an array "
            f"with the weight of each of the {num_clients} clients."
        )
    found = found.astype(jnp.float32)
    if not is_traced(found):
        numbers = np.asarray(found)
        if not np.isfinite(numbers).all() or numbers.min() < 0 or not numbers.any():
            raise ValueError(
                f"weights are between {numbers.min()} and {numbers.max()}; they must be finite and "
                "at least 0, and one of them positive."
            )
    return found


def _is_array(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or np.ndim(value) > 0


def scheduled(function: Function) -> Function:
    """Show ``ScheduleOptions`` in the signature, help and errors of a function.

    Args:
      function: function with ``**schedule: Unpack[ScheduleOptions]``.
    """
    own = inspect.signature(function)
    signature = spell_out(own, "schedule", ScheduleOptions, Schedule._field_defaults)
    show(function, signature, described(ScheduleOptions))
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
    - ``dropped_clients``, the number of clients that were sampled and asked for local steps, but do
      not participate;
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
      TypeError: an argument has the wrong type, or ``clients`` is a stream.
      ValueError: an argument is out of range, or not exactly one of ``local_steps`` and
        ``local_epochs`` is set.
    """
    check_clients(clients)
    check_resident(clients, "draw_batch")
    check_key(key)
    if not isinstance(round, jax.Array):
        round = np.int32(check_int("round", round, minimum=0, maximum=LARGEST_INT))
    how, clients = Schedule.of("draw_batch", schedule).bind(clients)
    if is_traced((clients, key, round)):
        return how.draw(clients, key, round)
    read, ids = how.read_in_rounds(clients), None
    if how.sample_cohort is not None:  # not part of the program: a new function is no new program
        own_key = _cohort_key(key, round)
        ids = own_cohort(how.sample_cohort, clients, own_key, jnp.asarray(round), how.cohort_size)
        how = how._replace(sample_cohort=None)
    batch = _drawn(how, dataclasses.replace(read, examples=(), constants=()), key, round, ids)
    batch = batch._replace(source=clients.examples, constants=clients.constants)
    KNOWN.add(batch.client_ids, clients.num_clients)
    for values in (batch.num_steps, batch.weights):
        if values is not None:
            KNOWN.add(values, batch.examples.shape[1])  # K
    return batch


@functools.partial(jax.jit, static_argnums=0)
def _drawn(schedule: Schedule, clients, key, round, ids) -> CohortBatch:
    """Draw a batch without its ``source``; ``ids`` is the cohort of a custom sampler, or None."""
    if ids is not None:
        schedule = schedule._replace(sample_cohort=lambda key, round: ids)
    return schedule.draw(clients, key, round)


@jax.jit
def _cohort_key(key: Key, round: jax.Array) -> Key:
    return round_keys(compact(threefry(key)), round).cohort


def _held(clients: FederatedArrays, places: jax.Array) -> jax.Array:
    """Convert positions in the clients' lists to indices into ``clients.examples``."""
    numbers = clients.indices[places]
    if clients.window is None:
        return numbers
    return jnp.searchsorted(clients.window, numbers).astype(jnp.int32)
