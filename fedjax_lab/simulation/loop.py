"""What the host does around compiled chunks of rounds: the start, the books, the way to stop."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.data import FederatedArrays
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.fingerprint import are_the_same
from fedjax_lab.simulation.recorder import Row
from fedjax_lab.simulation.rounds import Schedule
from fedjax_lab.types import FedState, Key, Params

_TIME = "simulated_seconds"  # a total, where rounds say how long they take


def first_state(algorithm: Algorithm, schedule: Schedule) -> Callable[..., FedState]:
    """Build ``start(params, clients, key, frozen) -> state``, to be jitted: that before round 0.

    The state owns its buffers, because the rounds donate them, and is without frozen weights.

    Args:
      algorithm: the method.
      schedule: how the first batch is drawn; where a method makes no use of it, none is.
    """

    def start(params, clients, key, frozen):
        batch = schedule.draw(clients, key, jnp.zeros((), jnp.int32))
        bound = dataclasses.replace(algorithm, frozen=frozen)
        state = bound.init(params, clients.num_clients, batch)
        return jax.tree.map(jnp.copy, state._replace(frozen=()))

    return start


def adopt_state(
    algorithm: Algorithm, state: Any, clients: FederatedArrays, schedule: Schedule, key: Key
) -> FedState:
    """A copy of a state that the caller made or kept, after checking that it is the method's.

    Its frozen weights are not copied.

    Args:
      algorithm: the method.
      state: should have the structure, shapes and dtypes that ``algorithm.init`` gives.
      clients, schedule, key: the run's.

    Raises:
      TypeError: it is no ``FedState``.
      ValueError: it is the state of another method, model or number of clients.
    """
    params_of(algorithm, state)
    name, frozen = algorithm.name, jax.tree.map(jnp.asarray, algorithm.frozen)
    if not are_the_same(state.frozen, frozen):
        raise ValueError(
            f"state.frozen does not hold the frozen weights of {name}: the state was made with "
            "others, or without any."
        )
    state = state._replace(frozen=())
    try:
        shapes = jax.eval_shape(algorithm.params, state)
        start = first_state(algorithm, schedule)
        expected = jax.eval_shape(start, shapes, clients, key, frozen)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"state is not one of {name}: {error}.") from error
    given, wanted = _by_path(state), _by_path(expected)
    for verb, some, others in (("lacks", wanted, given), ("has", given, wanted)):
        if missing := [path for path in some if path not in others]:
            raise ValueError(f"state is not one of {name}: it {verb} {', '.join(missing)}.")
    for path, leaf in wanted.items():
        found, said = (f"{jnp.result_type(x)}{list(np.shape(x))}" for x in (given[path], leaf))
        if found != said:
            raise ValueError(f"state{path} is {found}; it must be {said}, as {name}.init gives.")
    if int(state.num_clients) != clients.num_clients:
        raise ValueError(
            f"state.num_clients is {int(state.num_clients)}; clients has {clients.num_clients}."
        )
    server, own = type(state.server), type(expected.server)
    if server is not own:
        raise ValueError(f"state is not one of {name}: its server is {server}, not {own}.")
    # On the host: no device need hold all of it. With the types of the rounds' own containers.
    leaves = [np.array(leaf, leaf.dtype) for leaf in jax.tree.leaves(state)]
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)._replace(frozen=frozen)


def params_of(algorithm: Algorithm, state: Any) -> Params:
    """The server model's shapes in a state that the caller made or kept.

    Args:
      algorithm: the method.
      state: should be one of it.

    Raises:
      TypeError: it is no ``FedState``.
      ValueError: it is the state of another method.
    """
    if not isinstance(state, FedState):
        raise TypeError(f"state is {type(state).__name__}; it must be a FedState, as result.state.")
    try:
        return jax.eval_shape(algorithm.params, state)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"state is not one of {algorithm.name}: {error}.") from error


def _by_path(state: FedState) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def as_value(value: Any) -> float | list:
    """A metric as a row holds it: a number, or a list of an array's numbers.

    Args:
      value: a number or an array.
    """
    array = np.asarray(value, np.float64)
    return float(array) if array.ndim == 0 else array.tolist()


def scores_of(
    function: Callable[..., Mapping[str, Any]] | None, value: Any, taken: set[str], argument: str
) -> dict[str, Any]:
    """What ``evaluate`` or ``diagnose`` says, as a row holds it.

    Args:
      function: one of them; None says nothing.
      value: what it is called with.
      taken: names that rows have already.
      argument: its name, for errors.

    Raises:
      TypeError: it returned no dict.
      ValueError: a name in it is taken.
    """
    found = {} if function is None else function(value)
    if not isinstance(found, Mapping):
        raise TypeError(f"{argument} returned {type(found).__name__}; it must be a dict.")
    for name in found:
        if name in taken:
            raise ValueError(
                f"{argument} returned {name!r}, a name that rows have already; choose another."
            )
    return {name: as_value(score) for name, score in found.items()}


def guarantees(
    algorithm: Algorithm, schedule: Schedule, clients: FederatedArrays
) -> Callable[[int], Row]:
    """rounds -> what the rows of so many rounds say of the method's guarantees, or nothing.

    Raises:
      ValueError: the method counts what uniform cohorts cost, and the run draws its own.
    """
    spent = algorithm.spent
    if spent is None:
        return lambda rounds: {}
    if clients.times is not None and clients.times.chooses:
        raise ValueError(
            f"times have availability or over_selection; {algorithm.name} counts what uniform "
            "cohorts of all clients cost. Leave out delta, or what chooses among the clients."
        )
    if schedule.sample_cohort is not None:
        raise ValueError(
            f"sample_cohort is given; {algorithm.name} counts what uniform cohorts cost. Leave out "
            "one of it and delta."
        )
    among = schedule.cohort_size, clients.num_available, schedule.sampling
    spent(1, *among)  # what is not installed is said before the first round
    return lambda rounds: dict(spent(rounds, *among))


def is_enough(stop_when: Callable[[Row], Any] | None, row: Row) -> bool:
    """Whether the run ends after a row; what a file holds as null is NaN, as it was at first.

    Args:
      stop_when: as of ``simulate``.
      row: of the history.
    """
    if stop_when is None:
        return False
    return bool(stop_when({n: math.nan if v is None else v for n, v in row.items()}))


class Tally:
    """Exact totals since round 0, and the rows of a history.

    Args:
      algorithm: the method, which knows what a client sends, receives and computes.
      params: the server model.
      history: rows of the rounds before, if there are any.
      counts_nonfinite: whether the rounds say how many clients were not finite.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        params: Params,
        history: Sequence[Row] = (),
        counts_nonfinite: bool = True,
    ):
        self._bytes_up, self._bytes_down = algorithm.uplink(params), algorithm.downlink(params)
        self._gradients_per_step = algorithm.gradients_per_step
        self._totals: dict[str, float] = dict.fromkeys(("bytes_up", "bytes_down", "gradients"), 0)
        if counts_nonfinite:
            self._totals["nonfinite_clients"] = 0
        if history:
            last = history[-1]
            known = [*self._totals, *([_TIME] if _TIME in last else [])]
            self._totals = {name: last[name] for name in known}

    def names(self, metrics: Mapping[str, Any]) -> set[str]:
        """The names of a row, beside those of an evaluation.

        Args:
          metrics: of rounds.
        """
        timed = (_TIME,) if "round_seconds" in metrics else ()
        return {"round", "seconds", "compile_seconds", *metrics, *self._totals, *timed}

    def row(self, metrics: Mapping[str, Any]) -> Row:
        """Means over a chunk's rounds (``metrics`` are stacked [rounds]), and the new totals.

        Raises:
          RuntimeError: a Poisson cohort had more clients than slots.
        """
        metrics = {name: np.asarray(values, np.float64) for name, values in metrics.items()}
        _check_overflow(metrics.pop("overflow", False))
        participants = metrics.pop("participants")
        steps = metrics.pop("local_steps")
        senders = round((participants * metrics.get("communicated", 1)).sum())
        self._totals["bytes_up"] += senders * self._bytes_up
        self._totals["bytes_down"] += senders * self._bytes_down
        self._totals["gradients"] += round((participants * steps).sum()) * self._gradients_per_step
        for name in ("bytes_up", "bytes_down"):
            metrics.pop(name)
        if "nonfinite_clients" in metrics:
            self._totals["nonfinite_clients"] += round(metrics.pop("nonfinite_clients").sum())
        if "round_seconds" in metrics:
            spent = float(metrics["round_seconds"].sum())
            self._totals[_TIME] = self._totals.get(_TIME, 0.0) + spent
        row = {name: as_value(values.mean(0)) for name, values in sorted(metrics.items())}
        return {**row, "local_steps": float(steps.mean()), **self._totals}


def _check_overflow(overflow: Any) -> None:
    if np.any(overflow):
        raise RuntimeError(
            "more clients came to a Poisson cohort than it has slots for, which one round in 10^9 "
            "does; the run cannot go on: take another seed."
        )


class Watch:
    """Watches over a run for values that are not finite, and says so when they come.

    Args:
      algorithm: the method.
      on_nonfinite: as of ``simulate``.

    Attributes:
      diverged: whether the run has to end.
    """

    def __init__(self, algorithm: Algorithm, on_nonfinite: str):
        self._algorithm, self._stop_at_once = algorithm, on_nonfinite == "stop"
        self._params_are_finite = jax.jit(lambda state: tree.all_finite(algorithm.params(state)))
        self._told = False
        self.diverged = False

    def look(self, first: int, state: FedState, metrics: Mapping[str, Any]) -> int:
        """Look at a chunk of rounds; returns how many came before the one that ends the run.

        Args:
          first: number of its first round, from 0.
          state: the state after it.
          metrics: of its rounds, [length] each.

        Raises:
          RuntimeError: a Poisson cohort had more clients than slots.
        """
        _check_overflow(metrics.get("overflow", False))
        left = np.asarray(metrics["participants"])
        excluded = np.asarray(metrics.get("nonfinite_clients", np.zeros_like(left)))
        if self._stop_at_once and excluded.any():
            self.diverged = True
            at = int((excluded > 0).argmax())
            self._warn(f"diverged: on_nonfinite is 'stop': the run ends before round {first + at}.")
            return at
        if excluded.any() and not self._told:
            self._told = True
            at = int(excluded.argmax())
            self._warn(
                f"in round {first + at} of {self._algorithm.name} {excluded[at]:.0f} of "
                f"{excluded[at] + left[at]:.0f} clients gave values that are not finite and were "
                "left out; rows count them as nonfinite_clients."
            )
        alone = (excluded > 0) & (left == 0)
        if alone.any():
            self.diverged = True
            self._warn(f"diverged: in round {first + int(alone.argmax())} no client was finite.")
        elif not self._params_are_finite(state):
            self.diverged = True
            self._warn(f"diverged: the server model is not finite after round {first + len(left)}.")
        return len(left)

    def _warn(self, text: str) -> None:
        warnings.warn(text, UserWarning, stacklevel=4)


@contextmanager
def traced(folder: str | Path | None) -> Iterator[None]:
    """Write a profile of what is computed inside, with ``jax.profiler``; None: do nothing.

    It lies in ``folder/plugins/profile/DATE``: a .trace.json.gz, which https://ui.perfetto.dev
    opens in a browser, and a .xplane.pb for ``xprof`` or TensorBoard's plugin of that name.
    """
    if folder is None:
        yield
        return
    with jax.profiler.trace(str(folder)):
        yield


@contextmanager
def closed(*resources: Any) -> Iterator[None]:
    """Close them at the end, the last one first.

    Args:
      *resources: each with a method ``close``.
    """
    with ExitStack() as stack:
        for resource in resources:
            stack.callback(resource.close)
        yield
