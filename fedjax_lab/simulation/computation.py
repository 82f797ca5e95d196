"""The computation of a run, independent of the devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_choice
from fedjax_lab.data import FederatedArrays
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.machine.keys import is_key
from fedjax_lab.machine.target import LOWERINGS, tracing_with
from fedjax_lab.round import ON_NONFINITE, Algorithm
from fedjax_lab.types import CohortBatch, FedState, Key, Params, PyTree
from fedjax_lab.wrappers.ledger import guarantees, record_cohorts


@dataclasses.dataclass(frozen=True)
class Computation:
    """The computation of a run: a method, a schedule of batches, and an initial state.

    States are passed between chunks without frozen weights, which no round changes. ``start`` and
    ``prepare`` remove them from a state; ``Chunks`` inserts them again.

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
        """Compute the shapes of a state without running anything.

        Raises:
          TypeError: it has typed random keys, which are in no file and no table on the host.
        """
        if self.state is not None:
            return self.state
        state = jax.eval_shape(self.start, self.params, clients, self.key, self.frozen)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if is_key(leaf):
                raise TypeError(
                    f"state{jax.tree_util.keystr(path)} of {self.algorithm.name} has typed random "
                    "keys; the state of a run must be numbers: keep jax.random.key_data(key), and "
                    "draw with jax.random.wrap_key_data of it."
                )
        return state

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
