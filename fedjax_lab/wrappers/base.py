"""The code that all wrappers share.

A wrapper's file changes a message, a row or the server of a phase. ``Wrapper`` does the rest: it
checks the order of wrappers, passes the method's own state to the method's phases, numbers the
phases, and combines names, hyperparameters and models::

    def with_something(algorithm, strength):
        wrapper = Wrapper(algorithm, "something")

        def change(phase, place):
            def client_update(received, row, batch):
                message, row, report = phase.client_update(received, row, batch)
                return shortened(message, strength), row, report

            return phase._replace(client_update=client_update)

        return wrapper.wrap("something", change, hyperparameters={"strength": strength})
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import is_traced
from fedjax_lab.clients.metrics import OWN_METRICS
from fedjax_lab.machine.keys import seeded
from fedjax_lab.machine.trace_once import used_inputs
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import Cohort, FedState, Params, PyTree, Scalar
from fedjax_lab.wrappers.nesting import check_order, name_of


@dataclasses.dataclass(frozen=True)
class Place:
    """The position of a phase in a round.

    Attributes:
      number: its number among all phases, from 0.
      index: its number among the phases that the wrapper changes, from 0.
      count: number of phases that the wrapper changes.
    """

    number: int
    index: int
    count: int

    @property
    def is_last(self) -> bool:
        """True if it is the last phase that the wrapper changes."""
        return self.index == self.count - 1


# (params, N, server, rows) -> (server, rows) with the wrapper's state added
Around = Callable[[Params, int, PyTree, PyTree], tuple[PyTree, PyTree]]


class State(NamedTuple):
    """The state of a wrapper between rounds.

    Attributes:
      around: adds it to the method's initial state, which it may also check. None: nothing to do.
      server: class of the wrapper's server state, a NamedTuple whose first field is the method's
        server state; None: the wrapper has no server state.
      row: class of a client's row, likewise.
      first_batch: whether ``init`` passes its batch to the method, for first estimates. These do
        not go through a phase, so the wrapper does not change them. If False, they are computed in
        the first round and wrapped like everything else.
    """

    around: Around | None = None
    server: type | None = None
    row: type | None = None
    first_batch: bool = False

    def inside(self, state: FedState) -> FedState:
        """Return the state of the method inside the wrapper.

        Args:
          state: state of the wrapped method.
        """
        server = state.server if self.server is None else state.server[0]
        # A table on the host has the wrapper's rows, too, and stays whole; a server has no rows.
        has_rows = self.row is not None and isinstance(state.clients, self.row)
        return state._replace(
            server=server, clients=state.clients[0] if has_rows else state.clients
        )

    def lifted(self, phase: Phase) -> Phase:
        """Convert a phase of the method to one on the wrapper's state, whose inner part it changes.

        Args:
          phase: a phase of the method.
        """

        def broadcast(server, round):
            return phase.broadcast(server[0], round)

        def client_update(received, row, batch):
            message, inner, report = phase.client_update(received, row[0], batch)
            return message, type(row)(inner, *row[1:]), report

        def server_update(server, messages, cohort):
            inner, metrics = phase.server_update(server[0], messages, cohort)
            return type(server)(inner, *server[1:]), metrics

        halves: dict[str, Any] = {}
        if self.row is not None:
            halves = {"client_update": client_update}
        if self.server is not None:
            halves |= {"broadcast": broadcast, "server_update": server_update}
        return phase._replace(**halves)


STATELESS = State()


def sends(phase: Phase) -> bool:
    """Return True if clients send messages in a phase.

    Args:
      phase: a phase of a method.
    """
    return bool(phase.reduce)


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A wrapper around a method.

    Attributes:
      algorithm: the method.
      wrapper: name of the wrapper in ``algorithm.wrappers``, such as "dp".

    Raises:
      ValueError: the wrapper cannot be applied to the method (see ``order``).
    """

    algorithm: Algorithm
    wrapper: str

    def __post_init__(self):
        check_order(self.algorithm, self.wrapper)

    def wrap(
        self,
        suffix: str,
        change: Callable[[Phase, Place], Phase],
        *,
        of: Callable[[Phase], bool] = sends,
        otherwise: Callable[[Phase], Phase] = lambda phase: phase,
        needs_floats: bool = False,
        state: State = STATELESS,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> Algorithm:
        """Build the wrapped method.

        Args:
          suffix: suffix of the method's name.
          change: (phase, its place) -> changed phase. The phases that ``change`` and ``otherwise``
            get already work on the wrapper's state.
          of: phase -> whether it is changed.
          otherwise: change of the other phases.
          needs_floats: whether the messages that are changed must be floats: a factor or noise
            would be rounded to an integer.
          state: state of the wrapper.
          hyperparameters: hyperparameters of the wrapper.
        """
        algorithm = self.algorithm

        def start(params, num_clients, batch):
            if needs_floats:
                self._check_floats(params, filter(of, algorithm.phases))
            first = algorithm.start(params, num_clients, batch if state.first_batch else None)
            return first if state.around is None else state.around(params, num_clients, *first)

        changed = [number for number, phase in enumerate(algorithm.phases) if of(phase)]

        def wrapped(number, phase):
            if number not in changed:
                return otherwise(state.lifted(phase))
            place = Place(number, changed.index(number), len(changed))
            return change(state.lifted(phase), place)

        return dataclasses.replace(
            algorithm,
            name=f"{algorithm.name}+{suffix}",
            start=start,
            phases=tuple(wrapped(*numbered) for numbered in enumerate(algorithm.phases)),
            params=lambda outer: algorithm.params(state.inside(outer)),
            personal=algorithm.personal and algorithm.personal.inside(state.inside),
            hyperparameters=_joined(algorithm.hyperparameters, hyperparameters or {}),
            wrappers=(*algorithm.wrappers, self.wrapper),
        )

    def _check_floats(self, params: Params, phases: Iterable[Phase]) -> None:
        for phase in phases:
            message = phase.message_like(params)
            for field in message.keys() - set(phase.costs.derived):
                for leaf in jax.tree.leaves(message[field]):
                    if not jnp.issubdtype(leaf.dtype, jnp.floating):
                        raise ValueError(
                            f"message[{field!r}] of {self.algorithm.name} has "
                            f"{leaf.dtype}{list(leaf.shape)}; {name_of(self.wrapper)} requires "
                            "messages of floats."
                        )

    def only_phase(self, why: str = "") -> Phase:
        """Return the phase of a method that has only one.

        Args:
          why: reason against several phases, for the error; may be "".

        Raises:
          ValueError: the method has several phases.
        """
        phases = self.algorithm.phases
        if len(phases) != 1:
            raise ValueError(
                f"algorithm is {self.algorithm.name}, which has {len(phases)} exchanges per round; "
                f"{name_of(self.wrapper)} requires methods with one{why and f', because {why}'}."
            )
        return phases[0]

    def refuse_stacks(self, why: str) -> None:
        """Refuse a method whose server needs the messages of single clients.

        Args:
          why: reason, for the error.

        Raises:
          ValueError: a field of a message is stacked.
        """
        phases = self.algorithm.phases
        fields = [name for p in phases for name, how in p.reduce.items() if how == "stack"]
        if fields:
            raise ValueError(
                f"algorithm is {self.algorithm.name}, whose server needs the "
                f"{', '.join(fields)} of each client; {name_of(self.wrapper)} requires methods "
                f"whose server needs only means and sums, because {why}."
            )

    def refuse_step_counts(self, params: Params, server: PyTree) -> None:
        """Refuse a method whose server uses the number of steps of each client.

        Args:
          params: the initial global model.
          server: the method's initial server state.

        Raises:
          ValueError: a server half depends on K_i.
        """
        one, number = jnp.ones(1), jnp.zeros((), jnp.int32)
        slot = jnp.zeros(1, jnp.int32)
        for phase in filter(sends, self.algorithm.phases):
            message = jax.tree.map(jnp.zeros_like, phase.message_like(params))

            def update(num_steps, server, message, phase=phase):
                key = seeded(0)
                cohort = Cohort(slot, one > 0, one, number, number + 1, 1, num_steps, key, True)
                return phase.server_update(server, message, cohort)

            if used_inputs(jax.make_jaxpr(update)(slot, server, message))[0]:
                raise ValueError(
                    f"algorithm is {self.algorithm.name}, whose server uses the number of local "
                    f"steps of each client, which {name_of(self.wrapper)} does not hide."
                )


def _joined(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Join hyperparameters; of two with one name, the inner one is called "inner_NAME"."""
    renamed: dict[str, Any] = {}
    for name, value in inner.items():
        while name in outer or name in renamed:
            name = f"inner_{name}"
        renamed[name] = value
    return {**renamed, **outer}


def with_field(
    phase: Phase, name: str, like: Callable[[dict[str, Any]], PyTree], how: str, nbytes: int = 0
) -> Phase:
    """Add a field to the message of a phase, which costs no bytes but the given ones.

    Args:
      phase: a phase of a method.
      name: name of the field.
      like: message of the phase -> the field, of which only the shapes are used.
      how: "mean", "sum" or "stack", as in ``phase.reduce``.
      nbytes: size of the field in bytes, as sent.
    """

    def message(params):
        own = jax.tree.map(jnp.zeros_like, phase.message_like(params))
        return {**own, name: like(own)}

    costs = phase.costs
    costs = costs._replace(derived=(*costs.derived, name), extra=costs.extra + nbytes)
    return phase._replace(message=message, reduce={**phase.reduce, name: how}, costs=costs)


def add_metrics(report: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """Add metrics of a wrapper to a client's report.

    Of two wrappers with the same metric, the outer one takes precedence.

    Args:
      report: report of the method inside the wrapper.
      metrics: name -> (total, weight).

    Raises:
      ValueError: the loss or a measure has a metric of the same name. (They cannot use the reserved
        names, ``OWN_METRICS``.)
    """
    if twice := sorted((report.keys() & metrics.keys()) - OWN_METRICS):
        raise ValueError(f"a loss and a wrapper both have a metric called {', '.join(twice)}.")
    return {**report, **metrics}


def recorded(value: Scalar) -> float | str:
    """Convert a number for a method's ``hyperparameters``; a traced one becomes "traced".

    Args:
      value: a number, traced or not.
    """
    return "traced" if is_traced(value) else float(value)


def tag(number: int) -> np.uint32:
    """Return a large number to fold into a key; phases, steps and clients fold in small ones.

    Args:
      number: different for each use, from 1. Used: 1 for FedPD's coin and full gradients of a
        client, 2 for compressed messages, 4 for attackers' noise, 5 for private noise, 6 for masks.
    """
    return np.uint32(2**32 - number)
