"""Simulated time: who is available, who takes fewer local steps, who is late, how long it takes.

``Devices`` describes clients by distributions, ``ClientTimes`` by arrays; a run may have both. A
client that takes K_i local steps is done after ::

    latency + bytes it receives / download + K_i g step_seconds + bytes it sends / upload

seconds; with ``Devices`` alone, messages take no time. The bytes are the method's ``downlink`` and
``uplink``, or the client's part of them (``with_ranks``); g is the method's ``gradients_per_step``.
Everything is a function of (key, round, client id).

Axes: N clients, S slots of the cohort, P periods of availability.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import LARGEST_INT, check_choice, check_int, check_number
from fedjax_lab.data.files import read_npz
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Key

# Time that is exceeded by this share of it counts as met: 10 * 0.09 is more than 0.9 in binary, and
# the share is four times the spacing of float32.
ROUNDING = 2.0**-21
_OF_CLIENTS = ("step_seconds", "download", "upload", "latency")
# Folded into the run's key, apart from the numbers of rounds.
_SPEED, _STEPS = jnp.iinfo(jnp.uint32).max, jnp.iinfo(jnp.uint32).max - 1
_PRESENT = 0  # folded into the round's key for the cohort
# Types of the attributes of ``Devices`` that are compared, and recorded, by their values.
PLAIN = (int, float, str, np.generic, type(None))


@suggest_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class Devices:
    """Numbers of local steps K_i and dropouts of the clients, applied in this order.

    1. The schedule asks for K steps, or for E passes over the client's data.
    2. With ``min_local_steps`` the client takes a uniformly drawn number between that and the
       number of step 1.
    3. With ``time_budget`` a straggler takes only the steps that it finishes in time. A local step
       takes ``step_time * exp(step_time_spread * z_i)`` seconds, z_i standard normal, the same in
       every round. A client that finishes no step (K_i = 0) does not participate. The last step
       may end later than the budget by ``ROUNDING`` of it, the error of decimals in float32.
    4. With probability ``dropout`` a sampled client fails and does not participate.

    Attributes:
      min_local_steps: least number of local steps, at least 1; None: the number of step 1.
      redraw: "round": step 2 draws anew in each round; "run": once for each client.
      time_budget: simulated seconds that the server waits; None: until all clients are done.
      step_time: median over the clients of the simulated seconds of one local step with one
        gradient. In ``simulate`` and its kin, a step of a method with g gradients takes g times as
        long (``Algorithm.gradients_per_step``).
      step_time_spread: standard deviation over the clients of its logarithm; 0: all equal.
      dropout: probability that a client fails, in [0, 1), independent in each round.

    Raises:
      TypeError: a value has the wrong type.
      ValueError: a value is out of range.
    """

    min_local_steps: int | None = None
    redraw: str = "round"
    time_budget: float | None = None
    step_time: float = 1.0
    step_time_spread: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.min_local_steps is not None:
            check_int("min_local_steps", self.min_local_steps, minimum=1)
        check_choice("redraw", self.redraw, ("round", "run"))
        if self.time_budget is not None:
            check_number("time_budget", self.time_budget, minimum=0.0, exclusive_minimum=True)
        check_number("step_time", self.step_time, minimum=0.0, exclusive_minimum=True)
        check_number("step_time_spread", self.step_time_spread, minimum=0.0)
        check_number("dropout", self.dropout, minimum=0.0, maximum=1.0, exclusive_maximum=True)

    def _compared(self) -> tuple[Any, ...]:
        """Return what a program depends on, also of attributes that a subclass adds."""
        values = vars(self).items()
        return type(self), *((n, v if isinstance(v, PLAIN) else id(v)) for n, v in values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Devices) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def step_seconds(self, key: Key, client_ids: jax.Array) -> jax.Array:
        """Compute the simulated seconds of a local step of each client, float [S].

        Args:
          key: the run's key.
          client_ids: int32 [S].
        """
        normal = _per_client(jax.random.normal, jax.random.fold_in(key, _SPEED), client_ids)
        return self.step_time * jnp.exp(self.step_time_spread * normal)

    def local_steps(
        self, key: Key, round: jax.Array, client_ids: jax.Array, planned: jax.Array
    ) -> jax.Array:
        """Compute the number of local steps of each client, int32 [S].

        Args:
          key: the run's key.
          round: int32 scalar, counted from 0.
          client_ids: int32 [S].
          planned: int32 [S], the steps that the schedule asks for.
        """
        steps = planned
        if self.min_local_steps is not None:
            draw_key = jax.random.fold_in(key, _STEPS)
            if self.redraw == "round":
                draw_key = jax.random.fold_in(draw_key, round)
            least = jnp.minimum(self.min_local_steps, planned)
            share = _per_client(jax.random.uniform, draw_key, client_ids)
            drawn = jnp.floor(share * (planned - least + 1)).astype(jnp.int32)
            steps = jnp.minimum(least + drawn, planned)
        if self.time_budget is not None:
            in_time = self.time_budget / self.step_seconds(key, client_ids)
            in_time = jnp.floor(in_time * (1 + ROUNDING))
            steps = jnp.minimum(steps, jnp.minimum(in_time, planned).astype(jnp.int32))
        return steps

    def reports(self, key: Key, client_ids: jax.Array) -> jax.Array | None:
        """Sample which clients do not fail, bool [S]; None: no client fails.

        Args:
          key: the round's key for dropouts.
          client_ids: int32 [S].
        """
        if self.dropout == 0:
            return None
        return _per_client(jax.random.uniform, key, client_ids) >= self.dropout


@suggest_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class ClientTimes:
    """Client times, and how long the server waits; for ``simulate(times=...)``.

    In a round the server samples S' = ceil(over_selection * S) of the available clients, uniformly
    without replacement, and aggregates the S clients that finish first. Stragglers, which are later
    than ``deadline`` or than the first S, do not participate. A client that exceeds the deadline by
    ``clock.ROUNDING`` of it at most, the error of decimals in float32, is in time. If fewer
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
        sizes = {name: array.shape[-1] for name, array in self._arrays().items()}
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name} of {size}" for name, size in sizes.items())
            raise ValueError(f"times have arrays of different lengths ({found}); all must be [N].")
        check_int("rounds_per_period", self.rounds_per_period, minimum=1)
        check_number("over_selection", self.over_selection, minimum=1.0)
        if self.deadline is not None:
            check_number("deadline", self.deadline, minimum=0.0, exclusive_minimum=True)

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return the values that differ between clients, [..., N], by name."""
        found = {name: getattr(self, name) for name in _OF_CLIENTS if np.ndim(getattr(self, name))}
        if self.availability is not None and self.availability.size > 1:
            found["availability"] = self.availability
        return found

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
        values: dict[str, Any] = {**arrays, **others}
        return cls(**values)

    def take(self, ids: np.ndarray, num_clients: int) -> "ClientTimes":
        """Return the times of some clients, which are numbered from 0.

        Args:
          ids: int [n], their ids here.
          num_clients: N.

        Raises:
          ValueError: an array has another N.
        """
        self._check_clients(num_clients)
        taken: dict[str, Any] = {name: array[..., ids] for name, array in self._arrays().items()}
        return dataclasses.replace(self, **taken)

    def _check_clients(self, num_clients: int) -> None:
        for name, array in self._arrays().items():
            size = array.shape[-1]
            if size != num_clients:
                first = "[P, N], [N]" if name == "availability" else "[N]"
                raise ValueError(
                    f"times.{name} has {size} clients; N is {num_clients}. Its shape is "
                    f"{array.shape}; it must be {first} or one number."
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
            most_steps = jnp.asarray(most_steps)
        there = self.availability
        if there is not None:
            there = jnp.asarray(np.broadcast_to(there, (len(there), num_clients)))
        real = jnp.result_type(float)
        return RoundTimes(
            jnp.asarray(step, real),
            jnp.asarray(exchange, real),
            there,
            most_steps,
            self.rounds_per_period,
            self.over_selection,
            self.deadline,
        )


@jax.tree_util.register_dataclass
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
    rounds_per_period: int = dataclasses.field(metadata={"static": True})
    over_selection: float = dataclasses.field(metadata={"static": True})
    deadline: float | None = dataclasses.field(metadata={"static": True})

    @property
    def chooses(self) -> bool:
        """True if the times influence client sampling."""
        return self.availability is not None or self.over_selection > 1

    def sampled(self, cohort_size: int, available: int) -> int:
        """Return S', the number of clients to sample, at most ``available``."""
        # Rounded first, because 1.1 * 10 is a little more than 11 in binary.
        return min(math.ceil(round(self.over_selection * cohort_size, 9)), available)

    def available(self, key: Key, round: jax.Array, sizes: jax.Array) -> jax.Array | None:
        """Sample which clients with data are available in a round, bool [N]; None: all.

        Args:
          round: int32 scalar, counted from 0.
          sizes: int32 [N], examples of each client.
        """
        if self.availability is None:
            return None
        row = self.availability[(round // self.rounds_per_period) % self.availability.shape[0]]
        if row.dtype != bool:
            key = jax.random.fold_in(key, _PRESENT)
            row = jax.random.uniform(key, row.shape, jnp.float32) < row
        return row & (sizes > 0)


def check_devices(times: ClientTimes | RoundTimes | None, devices: Devices | None) -> None:
    """Check that only one argument determines the seconds of a step, and the server's patience.

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
    """Check availabilities; returns bool or float32 [P, N], or [1, 1] for one number."""
    array = np.asarray(value)
    if array.dtype.kind not in "bf":
        raise TypeError(
            f"availability has dtype {array.dtype}; it must be bool, or float probabilities."
        )
    if array.ndim > 2 or not array.size:
        raise ValueError(
            f"availability has shape {array.shape}; it must be [P, N], [N] or one number."
        )
    array = array.reshape(1, -1) if array.ndim < 2 else array
    if array.dtype.kind == "f":
        if not ((array >= 0) & (array <= 1)).all():
            raise ValueError("availability has values outside [0, 1]; each is a probability.")
        array = array.astype(np.float32)
    return array


def _per_client(draw, key: Key, client_ids: jax.Array) -> jax.Array:
    # float32 in every mode of JAX, so that the same clients are drawn.
    one = lambda client_id: draw(jax.random.fold_in(key, client_id), (), jnp.float32)  # noqa: E731
    return jax.vmap(one)(client_ids)
