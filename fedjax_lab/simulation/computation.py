"""The computation of a run, independent of the devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_choice
from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.machine.target import LOWERINGS, tracing_with
from fedjax_lab.round import ON_NONFINITE, Algorithm
from fedjax_lab.storage.fingerprint import are_the_same
from fedjax_lab.types import CohortBatch, FedState, Key, Params, PyTree
from fedjax_lab.wrappers.ledger import guarantees, record_cohorts, resume_privately


@dataclasses.dataclass(frozen=True)
class Computation:
    """The computation of a run: a method, a schedule of batches, and an initial state.

    States are passed between chunks without frozen weights, which no round changes. ``start`` and
    ``going_on_from`` remove them from a state; ``Chunks`` inserts them again.

    Attributes:
      algorithm: the method.
      schedule: client sampling and mini-batches.
      on_nonfinite: as in ``simulate``: "exclude", "keep" or "stop".
      rounds: total number of rounds.
      eval_every: rounds between evaluations.
      key: PRNG key of the run.
      params: the initial global model; None if only programs are compiled.
      state: initial state whose global model is ``params``, on the host; None: a fresh start.
      lowering: as in ``simulate``.
    """

    algorithm: Algorithm
    schedule: Schedule
    on_nonfinite: str = "exclude"
    rounds: int = 1
    eval_every: int = 1
    key: Key | None = None
    params: Params = None
    state: FedState | None = None
    lowering: str = "auto"

    def __post_init__(self) -> None:
        """Check the policy for clients that are not finite, and the lowering."""
        check_choice("lowering", self.lowering, LOWERINGS)
        check_choice("on_nonfinite", self.on_nonfinite, (*ON_NONFINITE, "stop"))

    @property
    def in_round(self) -> str:
        """Policy of a round for clients that are not finite, as in ``build_round``."""
        return "exclude" if self.on_nonfinite not in ON_NONFINITE else self.on_nonfinite

    @property
    def frozen(self) -> PyTree:
        """Frozen weights of the method."""
        return self.algorithm.frozen

    def draw(self, clients: FederatedArrays, key: Key, round: jax.Array) -> CohortBatch:
        """Draw the batch of a round; a step of ``devices`` takes as long as its gradients.

        With client times, their seconds of a step have the gradients already.

        Args:
          round: int32 scalar, counted from 0.
        """
        schedule = self.schedule
        if clients.times is None:
            schedule = schedule.with_gradients(self.algorithm.gradients_per_step)
        return schedule.draw(clients, key, round)

    def start(self, params: Params, clients: FederatedArrays, key: Key, frozen: PyTree) -> FedState:
        """Compute the state before round 0; jit this function.

        The state has its own buffers, because the rounds donate them.

        Args:
          clients: the clients' data. A first batch is drawn only if the method uses it.
        """
        return jax.tree.map(jnp.copy, self.init(params, clients, key, frozen)._replace(frozen=()))

    def init(self, params: Params, clients: FederatedArrays, key: Key, frozen: PyTree) -> FedState:
        """Compute the state before round 0 with frozen weights; it may share buffers."""
        batch = self.draw(clients, key, jnp.zeros((), jnp.int32))
        bound = dataclasses.replace(self.algorithm, frozen=frozen)
        with tracing_with(self.lowering):  # first estimates are gradients of the loss
            state = bound.init(params, clients.num_clients, batch)
        return record_cohorts(state, self.schedule, clients)

    def shapes(self, clients: FederatedArrays) -> FedState:
        """Compute the shapes of a state without running anything."""
        if self.state is not None:
            return self.state
        return jax.eval_shape(self.start, self.params, clients, self.key, self.frozen)

    def chunk_length(self, round: int) -> int:
        """Return the number of rounds of the next chunk."""
        return min(self.eval_every, self.rounds - round)

    def guarantees(self, clients: FederatedArrays) -> Callable[[int], dict[str, Any]]:
        """Build a function: number of rounds -> privacy guarantees for the rows (may be empty).

        Raises:
          ValueError: the method's accounting assumes uniform client sampling, and the run has its
            own.
        """
        return guarantees(self.algorithm, self.schedule, clients, self.state)

    def going_on_from(self, state: FedState, clients: FederatedArrays) -> "Computation":
        """Return the computation that starts from a state given by the caller.

        Args:
          state: with the structure, shapes and dtypes of ``algorithm.init``, on the host.
          clients: the clients' data; examples may be shapes.

        Raises:
          ValueError: the state belongs to another method, model or number of clients, or it is
            private and these settings may not continue it.
        """
        algorithm = self.algorithm
        if not are_the_same(state.frozen, jax.tree.map(jnp.asarray, algorithm.frozen)):
            raise ValueError(
                f"state.frozen does not hold the frozen weights of {algorithm.name}: the state was "
                "made with others, or without any."
            )
        state = state._replace(frozen=())
        try:
            expected = self.shapes(clients)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"state is not one of {algorithm.name}: {error}.") from error
        _check_same_shapes(algorithm.name, state, expected)
        if int(state.num_clients) != clients.num_clients:
            raise ValueError(
                f"state.num_clients is {int(state.num_clients)}; clients has {clients.num_clients}."
            )
        state = _with_arguments(algorithm, state)
        state = resume_privately(algorithm, state, self.schedule, clients)
        # On the host, because it may not fit on a device; with the container types of the rounds.
        leaves = [np.array(leaf, leaf.dtype) for leaf in jax.tree.leaves(state)]
        state = jax.tree.unflatten(jax.tree.structure(expected), leaves)
        return dataclasses.replace(self, params=algorithm.params(state), state=state)


def _with_arguments(algorithm: Algorithm, state: FedState) -> FedState:
    """Replace what a state has of a method's arguments, such as who attacks, by this method's own.

    A class of states or rows names these fields: ``of_arguments(hyperparameters)``.
    """

    def arguments_in(value: Any) -> Any:
        if not hasattr(value, "_fields"):
            return None
        names = getattr(value, "of_arguments", lambda _: ())(algorithm.hyperparameters)
        fields = zip(value._fields, value, strict=True)
        return {name: field if name in names else arguments_in(field) for name, field in fields}

    def replaced(value: Any, new: Any) -> Any:
        if isinstance(new, dict):
            new = {name: replaced(getattr(value, name), part) for name, part in new.items()}
            return value._replace(**new)
        return value if new is None else new

    def own(params):
        parts = algorithm.start(params, int(state.num_clients), None)
        return [arguments_in(part) for part in parts]

    server, clients = jax.jit(own)(algorithm.params(state))  # it computes nothing but these fields
    return state._replace(
        server=replaced(state.server, server), clients=replaced(state.clients, clients)
    )


def params_of(algorithm: Algorithm, state: Any) -> Params:
    """Compute the shapes of the global model in a state given by the caller.

    Raises:
      TypeError: it is no ``FedState``.
      ValueError: it belongs to another method.
    """
    if not isinstance(state, FedState):
        raise TypeError(f"state is {type(state).__name__}; it must be a FedState, as result.state.")
    return jax.eval_shape(algorithm.params, state)


def _check_same_shapes(name: str, state: FedState, expected: FedState) -> None:
    actual, wanted = _by_path(state), _by_path(expected)
    for verb, some, others in (("lacks", wanted, actual), ("has", actual, wanted)):
        if missing := [path for path in some if path not in others]:
            raise ValueError(f"state is not one of {name}: it {verb} {', '.join(missing)}.")
    for path, leaf in wanted.items():
        kind, needed = (f"{jnp.result_type(x)}{list(np.shape(x))}" for x in (actual[path], leaf))
        if kind != needed:
            raise ValueError(f"state{path} is {kind}; it must be {needed}, as {name}.init gives.")
    server, of_method = type(state.server), type(expected.server)
    if server is not of_method:
        raise ValueError(f"state is not one of {name}: its server is {server}, not {of_method}.")


def _by_path(state: FedState) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
