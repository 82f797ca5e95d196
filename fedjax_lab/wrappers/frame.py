"""The frame of a wrapper: what is done alike, whatever is put around a method.

A wrapper's file says what becomes of a message, a row or the server. The frame does the rest: it
checks the order, hands the method's own state to the method's own phases, counts the exchanges, and
puts name, hyper-parameters and models together::

    def with_something(algorithm, strength):
        frame = Frame(algorithm, "something")

        def change(phase, place):
            def client_update(received, row, batch):
                message, row, report = phase.client_update(received, row, batch)
                return shortened(message, strength), row, report

            return phase._replace(client_update=client_update)

        return frame.wrap("something", change, hyperparameters={"strength": strength})
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import is_traced
from fedjax_lab.clients.metrics import OWN_METRICS
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.types import Cohort, FedState, Params, PyTree, Scalar
from fedjax_lab.wrappers.order import check_order, name_of


@dataclasses.dataclass(frozen=True)
class Place:
    """Which of a round's exchanges a phase is.

    Attributes:
      number: its number among all of them, from 0.
      index: its number among those that the wrapper changes, from 0.
      count: how many the wrapper changes.
    """

    number: int
    index: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the wrapper changes none after it."""
        return self.index == self.count - 1


# (params, N, server, rows) -> (server, rows), with the wrapper's own state around the method's
Around = Callable[[Params, int, PyTree, PyTree], tuple[PyTree, PyTree]]


class State(NamedTuple):
    """What a wrapper keeps from round to round.

    Attributes:
      around: puts it around the method's first state; may check that as well. None: nothing to do.
      server: the class of the wrapper's server state, a NamedTuple whose first field is the
        method's own; None: the server keeps nothing for the wrapper.
      row: the class of a client's row, likewise.
      first_batch: whether ``init`` hands its batch to the method, for first estimates. They pass
        no phase; without it they are made in the first round, and wrapped like all else.
    """

    around: Around | None = None
    server: type | None = None
    row: type | None = None
    first_batch: bool = False

    def inside(self, state: FedState) -> FedState:
        """The method's own state.

        Args:
          state: of the wrapped method.
        """
        server = state.server if self.server is None else state.server[0]
        return state._replace(
            server=server, clients=state.clients if self.row is None else state.clients[0]
        )

    def lifted(self, phase: Phase) -> Phase:
        """The method's phase on the wrapper's state, of which it changes the method's own part.

        Args:
          phase: of the method.
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
    """Whether clients send anything in an exchange.

    Args:
      phase: of a method.
    """
    return bool(phase.reduce)


@dataclasses.dataclass(frozen=True)
class Frame:
    """A wrapper around a method.

    Attributes:
      algorithm: the method.
      wrapper: what ``algorithm.wrappers`` calls it, such as "dp".

    Raises:
      ValueError: it does not go around the method (see ``order``).
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
        state: State = STATELESS,
        hyperparameters: Mapping[str, Any] | None = None,
        whole_messages: bool = False,
    ) -> Algorithm:
        """The wrapped method.

        Args:
          suffix: what its name has after that of the method.
          change: (phase, its place) -> the phase as the wrapper changes it. The phases that it and
            ``otherwise`` get work on the wrapper's state already.
          of: which phases are changed.
          otherwise: what becomes of the others.
          state: what the wrapper keeps.
          hyperparameters: those of the wrapper.
          whole_messages: whether its messages are as long for every client, whatever part of one
            the method would send.
        """
        algorithm = self.algorithm

        def start(params, num_clients, batch):
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
            hyperparameters={**algorithm.hyperparameters, **(hyperparameters or {})},
            wrappers=(*algorithm.wrappers, self.wrapper),
            message_parts=None if whole_messages else algorithm.message_parts,
        )

    def only_phase(self, why: str = "") -> Phase:
        """The method's phase, if it has one alone.

        Args:
          why: what speaks against several; "" needs no reason.

        Raises:
          ValueError: it has several.
        """
        phases = self.algorithm.phases
        if len(phases) != 1:
            raise ValueError(
                f"algorithm is {self.algorithm.name}, which has {len(phases)} exchanges a round; "
                f"{name_of(self.wrapper)} takes methods of one{why and f', since {why}'}."
            )
        return phases[0]

    def refuse_stacks(self, why: str) -> None:
        """Refuse a method whose server takes the messages one by one.

        Args:
          why: what speaks against it.

        Raises:
          ValueError: a field of a message is stacked.
        """
        phases = self.algorithm.phases
        fields = [name for p in phases for name, how in p.reduce.items() if how == "stack"]
        if fields:
            raise ValueError(
                f"algorithm is {self.algorithm.name}, whose server works with each client's "
                f"{', '.join(fields)} by itself; {name_of(self.wrapper)} takes methods whose "
                f"server needs means and sums only, since {why}."
            )

    def refuse_step_counts(self, params: Params, server: PyTree) -> None:
        """Refuse a method whose server computes with each client's number of steps.

        Args:
          params: the first server model.
          server: the method's first server state.

        Raises:
          ValueError: a server half depends on K_i.
        """
        one, number = jnp.ones(1), jnp.zeros((), jnp.int32)
        slot = jnp.zeros(1, jnp.int32)
        for phase in filter(sends, self.algorithm.phases):
            message = jax.tree.map(jnp.zeros_like, phase.message_like(params))

            def update(num_steps, server, message, phase=phase):
                key = jax.random.key(0)
                cohort = Cohort(slot, one > 0, one, number, number + 1, 1, num_steps, key, True)
                return phase.server_update(server, message, cohort)

            traced = jax.make_jaxpr(update)(slot, server, message).jaxpr
            if any(traced.invars[0] is used for eqn in traced.eqns for used in eqn.invars):
                raise ValueError(
                    f"algorithm is {self.algorithm.name}, whose server computes with the number of "
                    f"local steps of each client, which {name_of(self.wrapper)} does not hide."
                )


def with_field(phase: Phase, name: str, dtype: type, how: str, nbytes: int = 0) -> Phase:
    """The phase whose message has one more field, a scalar.

    Args:
      phase: of a method.
      name: of the field.
      dtype: of the scalar, float or bool.
      how: "mean", "sum" or "stack", as in ``phase.reduce``.
      nbytes: that it takes on its way.
    """

    def message(params):
        own = jax.tree.map(jnp.zeros_like, phase.message_like(params))
        return {**own, name: jnp.zeros((), dtype)}

    return phase._replace(
        message=message,
        reduce={**phase.reduce, name: how},
        derived=(*phase.derived, name),
        extra_bytes=phase.extra_bytes + nbytes,
    )


def add_metrics(report: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """A client's report with the wrapper's own metrics.

    Args:
      report: of the wrapped method's client half.
      metrics: name -> (total, weight).

    Raises:
      ValueError: a loss or a measure has a metric of that name. Those of ``OWN_METRICS`` neither
        can have, and of two wrappers the outer one's count.
    """
    if twice := sorted((report.keys() & metrics.keys()) - OWN_METRICS):
        raise ValueError(f"a loss and a wrapper both have a metric called {', '.join(twice)}.")
    return {**report, **metrics}


def recorded(value: Scalar) -> float | str:
    """A number as a method's hyper-parameters have it; of a sweep, "traced".

    Args:
      value: a number, traced or not.
    """
    return "traced" if is_traced(value) else float(value)


def tag(number: int) -> np.uint32:
    """What a wrapper folds into a key; phases, steps and clients fold in small numbers.

    Args:
      number: from 1, another one for each use. 1 is FedPD's coin and a client's full gradient, 2
        compressed messages, 4 attackers' noise, 5 private noise, 6 masks.
    """
    return np.uint32(2**32 - number)
