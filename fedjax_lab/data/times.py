"""Availability, client times, stragglers and the duration of a round.

A client that takes K_i local steps in a round is done after ::

    latency + bytes it receives / download + K_i g step_seconds + bytes it sends / upload

seconds. The bytes are the method's ``downlink`` and ``uplink``, or the client's part of them
(``with_ranks``); g is the method's ``gradients_per_step``. Everything is a function of (key, round,
client id).

Axes: N clients, S slots of the cohort, P periods of availability.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import LARGEST_INT, check_int, check_number
from fedjax_lab.data.devices import ROUNDING, Devices
from fedjax_lab.data.files import read_npz
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Key

_OF_CLIENTS = ("step_seconds", "download", "upload", "latency")
_PRESENT, _ORDER = 0, 1  # folded into the round's key for the cohort


@suggest_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class ClientTimes:
    """Client times, and how long the server waits; for ``simulate(times=...)``.

    In a round the server samples S' = ceil(over_selection * S) of the available clients, uniformly
    without replacement, and aggregates the S clients that finish first. Stragglers, which are later
    than ``deadline`` or than the first S, do not participate. A client that exceeds the deadline by
    ``devices.ROUNDING`` of it at most, the error of decimals in float32, is in time. If fewer
    clients are available, all of them are sampled. If none is available, the round changes nothing
    and takes no time.

    Attributes:
      step_seconds: simulated seconds of one local step with one gradient, [N] or one number for
        all; above 0. A step of a method with g gradients takes g times as long.
      download, upload: bytes per second, [N] or one number; inf: messages take no time.
      latency: additional seconds of a client in a round, [N] or one number.
      availability: which clients are available: bool [P, N]; or probabilities, float [P, N] in [0,
        1], sampled for each round and client; [N] or one number: the same in all periods. A round
        uses row (round // rounds_per_period) % P. None: all clients are always available.
      rounds_per_period: number of rounds for each row of ``availability``.
      over_selection: sampled clients per participant, at least 1.
      deadline: simulated seconds after which the server stops waiting; None: it waits until S
        clients are done.

    Raises:
      TypeError: a value has the wrong type.
      ValueError: a value is out of range, or arrays disagree about N.
    """

    step_seconds: Any = 1.0
    download: Any = math.inf
    upload: Any = math.inf
    latency: Any = 0.0
    availability: Any = None
    rounds_per_period: int = 1
    over_selection: float = 1.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        """Check the values, and convert arrays."""
        for name in _OF_CLIENTS:
            object.__setattr__(self, name, _of_clients(name, getattr(self, name)))
        if self.availability is not None:
            object.__setattr__(self, "availability", _availability(self.availability))
        sizes = {name: len(getattr(self, name)) for name in _OF_CLIENTS if self._is_array(name)}
        if self.availability is not None and self.availability.shape[1] > 1:
            sizes["availability"] = self.availability.shape[1]
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name} of {size}" for name, size in sizes.items())
            raise ValueError(f"times have arrays of different lengths ({found}); all must be [N].")
        check_int("rounds_per_period", self.rounds_per_period, minimum=1)
        check_number("over_selection", self.over_selection, minimum=1.0)
        if self.deadline is not None:
            check_number("deadline", self.deadline, minimum=0.0, exclusive_minimum=True)

    def _is_array(self, name: str) -> bool:
        return np.ndim(getattr(self, name)) == 1

    @classmethod
    def log_normal(
        cls,
        num_clients: int,
        seed: int = 0,
        *,
        step_seconds: float = 1.0,
        step_spread: float = 0.5,
        download: float = math.inf,
        upload: float = math.inf,
        network_spread: float = 0.5,
        **others: Any,
    ) -> "ClientTimes":
        """Draw clients with log-normal speeds, from medians and deviations of the logarithm.

        A client's two bandwidths differ from their medians by the same factor, which is independent
        of its computing speed.

        Args:
          num_clients: N.
          seed: the same seed gives the same clients.
          step_seconds: median of the seconds of a local step.
          step_spread: standard deviation of their logarithm over the clients.
          download, upload: medians, in bytes per second.
          network_spread: standard deviation of their logarithm.
          **others: the other attributes.

        Raises:
          TypeError, ValueError: as of the class.
        """
        num_clients = check_int("num_clients", num_clients, minimum=1)
        check_int("seed", seed, minimum=0)
        check_number("step_spread", step_spread, minimum=0.0)
        check_number("network_spread", network_spread, minimum=0.0)
        steps, network = np.random.default_rng(seed).normal(size=(2, num_clients))
        factor = np.exp(network_spread * network)
        return cls(
            _of_clients("step_seconds", step_seconds) * np.exp(step_spread * steps),
            _of_clients("download", download) * factor,
            _of_clients("upload", upload) * factor,
            **others,
        )

    @classmethod
    def load(cls, path: str | Path, **others: Any) -> "ClientTimes":
        """Read an .npz file whose arrays are named like the attributes.

        Args:
          path: the file; it has at least one of step_seconds, download, upload, latency and
            availability, and nothing else.
          **others: the other attributes.

        Raises:
          FileNotFoundError: there is no such file.
          TypeError, ValueError: it is damaged or has another array, or as in the class.
        """
        arrays = read_npz(Path(path), "times", None)
        known = (*_OF_CLIENTS, "availability")
        if not arrays or set(arrays) - set(known):
            raise ValueError(
                f"{path} has the arrays {', '.join(sorted(arrays)) or 'none'}; there must be some "
                f"of {', '.join(known)}, and no others."
            )
        values: dict[str, Any] = {name: v[()] if v.ndim == 0 else v for name, v in arrays.items()}
        return cls(**values, **others)

    def take(self, ids: np.ndarray, num_clients: int) -> "ClientTimes":
        """Return the times of some clients, which are numbered from 0.

        Args:
          ids: int [n], their ids here.
          num_clients: N.

        Raises:
          ValueError: an array has another N.
        """
        self._check_clients(num_clients)
        taken = {name: getattr(self, name)[ids] for name in _OF_CLIENTS if self._is_array(name)}
        if self.availability is not None and self.availability.shape[1] > 1:
            taken["availability"] = self.availability[:, ids]
        return dataclasses.replace(self, **taken)

    def _check_clients(self, num_clients: int) -> None:
        for name in _OF_CLIENTS:
            value = getattr(self, name)
            if np.ndim(value) == 1 and len(value) != num_clients:
                raise ValueError(f"times.{name} has {len(value)} clients; N is {num_clients}.")
        there = self.availability
        if there is not None and there.shape[1] not in (1, num_clients):
            raise ValueError(
                f"times.availability has {there.shape[1]} clients; N is {num_clients}."
            )

    def resolve(
        self, num_clients: int, bytes_up: Any, bytes_down: Any, gradients_per_step: int = 1
    ) -> "RoundTimes":
        """Compute the arrays that a method's rounds need, on the device.

        Args:
          num_clients: N.
          bytes_up: bytes that a client sends in a round, a number or [N].
          bytes_down: bytes that a client receives in a round, a number or [N].
          gradients_per_step: gradients that a client computes in one local step.

        Raises:
          ValueError: an array has another N.
        """
        self._check_clients(num_clients)
        values = {name: np.broadcast_to(getattr(self, name), num_clients) for name in _OF_CLIENTS}
        step = gradients_per_step * values["step_seconds"]
        exchange = bytes_down / values["download"] + bytes_up / values["upload"]
        exchange = values["latency"] + exchange
        most_steps = None
        if self.deadline is not None:  # in float64: an integer per client, exact on the device
            left = self.deadline * (1 + ROUNDING) - exchange
            most_steps = np.clip(np.floor(left / step), 0, LARGEST_INT).astype(np.int32)
        there = self.availability
        if there is not None:
            there = jnp.asarray(np.broadcast_to(there, (len(there), num_clients)))
        real = jnp.result_type(float)
        return RoundTimes(
            jnp.asarray(step, real),
            jnp.asarray(exchange, real),
            there,
            None if most_steps is None else jnp.asarray(most_steps),
            self.rounds_per_period,
            self.over_selection,
            self.deadline,
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step_seconds", "exchange_seconds", "availability", "most_steps"],
    meta_fields=["rounds_per_period", "over_selection", "deadline"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class RoundTimes:
    """``ClientTimes`` of one method; a pytree that can be passed to jitted functions.

    Attributes:
      step_seconds: float [N], seconds of a local step of the method.
      exchange_seconds: float [N], latency and both messages of a round.
      availability: bool or float [P, N], or None.
      most_steps: int32 [N], local steps with which a client meets the deadline; None without one.
      rounds_per_period, over_selection, deadline: as in ``ClientTimes``.
    """

    step_seconds: jax.Array
    exchange_seconds: jax.Array
    availability: jax.Array | None
    most_steps: jax.Array | None
    rounds_per_period: int
    over_selection: float
    deadline: float | None

    @property
    def chooses(self) -> bool:
        """True if the times influence client sampling or participation."""
        return self.availability is not None or self.over_selection > 1

    def selected(self, cohort_size: int, most: int) -> int:
        """Return S', the number of clients to sample, at most ``most``.

        Args:
          cohort_size: S.
          most: number of clients that can be sampled.
        """
        # Rounded first, because 1.1 * 10 is a little more than 11 in binary.
        return min(math.ceil(round(self.over_selection * cohort_size, 9)), most)

    def is_there(self, key: Key, round: jax.Array, sizes: jax.Array) -> jax.Array:
        """Sample which clients with data are available in a round, bool [N].

        Args:
          key: the round's key of cohorts.
          round: int32 scalar, counted from 0.
          sizes: int32 [N], examples of each client.
        """
        assert self.availability is not None
        period = (round // self.rounds_per_period) % self.availability.shape[0]
        row = self.availability[period]
        if row.dtype != bool:
            key = jax.random.fold_in(key, _PRESENT)
            row = jax.random.uniform(key, row.shape, jnp.float32) < row
        return row & (sizes > 0)

    def draw(self, key: Key, there: jax.Array, count: int) -> jax.Array:
        """Sample distinct available clients uniformly: int32 [count] in random order.

        If there are fewer, the remaining places have N. The cost is that of N random numbers.

        Args:
          key: the round's key of cohorts.
          there: bool [N].
          count: number of clients, at most N.
        """
        numbers = jax.random.uniform(jax.random.fold_in(key, _ORDER), there.shape, jnp.float32)
        largest, ids = jax.lax.top_k(jnp.where(there, numbers, -1.0), count)
        return jnp.where(largest >= 0, ids, there.shape[0]).astype(jnp.int32)

    def seconds(self, client_ids: jax.Array, steps: jax.Array) -> jax.Array:
        """Compute the simulated seconds until each client is done, float [S]; 0 in a padded slot.

        Args:
          client_ids: int32 [S]; a padded slot has id N.
          steps: int32 [S], the local steps K_i.
        """
        computing = steps * self.step_seconds[client_ids]
        is_client = client_ids < self.step_seconds.shape[0]
        return jnp.where(is_client, self.exchange_seconds[client_ids] + computing, 0.0)

    def first_to_finish(
        self, client_ids: jax.Array, steps: jax.Array, reports: jax.Array | None, cohort_size: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
        """Select the participants among S' sampled clients, and compute the server's waiting time.

        The server waits until S clients (or all, if fewer) have reported; if that never happens,
        until the deadline. Without a deadline, the server knows which clients have failed.

        Args:
          client_ids: int32 [S'], distinct; N in padded places.
          steps: int32 [S'], the local steps K_i.
          reports: bool [S'], which clients do not fail; None: all.
          cohort_size: S.

        Returns:
          Places of the cohort, int32 [S], in the order of sampling; the seconds of each, float [S];
          which clients participate, bool [S]; and metrics of the round.
        """
        seconds = self.seconds(client_ids, steps)
        is_client = client_ids < self.step_seconds.shape[0]
        in_time = is_client & (steps > 0)
        if reports is not None:
            in_time = in_time & reports
        if self.most_steps is not None:
            in_time = in_time & (steps <= self.most_steps[client_ids])
        places = jnp.arange(cohort_size, dtype=jnp.int32)
        if client_ids.shape[0] > cohort_size:
            order = jnp.argsort(jnp.where(in_time, seconds, jnp.inf), stable=True)
            places = jnp.sort(order[:cohort_size]).astype(jnp.int32)
        seconds, participates = seconds[places], in_time[places]
        waited = jnp.where(participates, seconds, 0.0).max()
        if self.deadline is not None:
            wanted = jnp.minimum(is_client.sum(), cohort_size)
            waited = jnp.minimum(waited, self.deadline)
            waited = jnp.where(in_time.sum() >= wanted, waited, self.deadline)
        dropped = is_client.sum() - participates.sum()
        return (
            places,
            seconds,
            participates,
            {"round_seconds": waited, "dropped_clients": dropped.astype(seconds.dtype)},
        )


def check_devices(times: ClientTimes | RoundTimes | None, devices: Devices | None) -> None:
    """Check that only one argument determines step times.

    Args:
      times: client times, or None.
      devices: the schedule's devices, or None.

    Raises:
      ValueError: both determine them.
    """
    if times is None or devices is None:
        return
    for name in ("time_budget", "step_time", "step_time_spread"):
        value = getattr(devices, name)
        if value != getattr(Devices, name):
            raise ValueError(
                f"devices.{name} is {value}, and times is set, too; omit it, because "
                "times.step_seconds and times.deadline have the same role."
            )


@suggest_keywords
def diurnal_availability(
    num_clients: int, periods: int = 24, seed: int = 0, *, low: float = 0.1, high: float = 0.9
) -> np.ndarray:
    """Compute availabilities that rise and fall once a day, each client in its own time zone.

    Client i is available in period p with probability ::

        low + (high - low) (1 + cos(2 pi (p / P - u_i))) / 2,    u_i uniform in [0, 1)

    Args:
      num_clients: N.
      periods: P, periods of a day.
      seed: seed of the u_i.
      low, high: least and largest probability.

    Returns:
      float32 [P, N], for ``ClientTimes.availability``.

    Raises:
      TypeError, ValueError: an argument is out of range.
    """
    num_clients = check_int("num_clients", num_clients, minimum=1)
    periods = check_int("periods", periods, minimum=1)
    check_int("seed", seed, minimum=0)
    check_number("low", low, minimum=0.0, maximum=1.0)
    check_number("high", high, minimum=low, maximum=1.0)
    phase = np.random.default_rng(seed).uniform(size=num_clients)
    wave = np.cos(2 * np.pi * (np.arange(periods)[:, None] / periods - phase))
    return (low + (high - low) * (1 + wave) / 2).astype(np.float32)


def _of_clients(name: str, value: Any) -> Any:
    """Check seconds or bytes per second: a number or an array [N]."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {value!r}; it must be a number, or an array [N].") from error
    if array.ndim > 1 or not array.size:
        raise ValueError(f"{name} has shape {array.shape}; it must be a number, or an array [N].")
    may_be_0, may_be_inf = name == "latency", name in ("download", "upload")
    good = (array >= 0 if may_be_0 else array > 0) & (may_be_inf | np.isfinite(array))
    if not good.all():
        wrong = array[~good].ravel()[0]
        relation = "at least 0" if may_be_0 else "above 0"
        finite = "" if may_be_inf else " and finite"
        raise ValueError(f"{name} has the value {wrong}; each must be {relation}{finite}.")
    return array if array.ndim else float(array)


def _availability(value: Any) -> np.ndarray:
    """Check availabilities; returns bool or float32 [P, N] or [P, 1]."""
    array = np.asarray(value)
    if array.dtype.kind not in "bf":
        raise TypeError(
            f"availability has dtype {array.dtype}; it must be bool, or float probabilities."
        )
    if array.ndim > 2 or not array.size:
        raise ValueError(f"availability has shape {array.shape}; it must be [P, N] or [N].")
    array = array.reshape(1, -1) if array.ndim < 2 else array
    if array.dtype.kind == "f":
        if not ((array >= 0) & (array <= 1)).all():
            raise ValueError("availability has values outside [0, 1]; each is a probability.")
        array = array.astype(np.float32)
    return array
