"""The compiled chunks of a run: one program for each number of rounds that is asked for."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.data import FederatedArrays
from fedjax_lab.simulation import processes
from fedjax_lab.types import FedState, Key, Metrics, PyTree


class Chunks:
    """Chunks of rounds, lowered and compiled once each.

    Args:
      run_chunk: what ``build_chunk`` returned.
      clients: the clients' data.
      key: the run's key.
      frozen: the weights that no round changes.
      compiled: programs that are there already, by their number of rounds.
      compile_seconds: what these took.

    Attributes:
      compile_seconds: time spent so far.
    """

    def __init__(
        self,
        run_chunk: jax.stages.Wrapped,
        clients: FederatedArrays,
        key: Key,
        frozen: PyTree = (),
        compiled: Mapping[int, Any] | None = None,
        compile_seconds: float = 0.0,
    ):
        self._run_chunk, self._clients, self._key = run_chunk, clients, key
        self._frozen = frozen
        self._lowered: dict[int, Any] = {}
        self._compiled: dict[int, Any] = dict(compiled or {})
        self.compile_seconds = compile_seconds

    def lower(self, state: FedState, length: int) -> jax.stages.Lowered:
        """The program of so many rounds before it is compiled.

        Args:
          state: without frozen weights; its shapes and its placement count.
          length: rounds.
        """
        began = time.perf_counter()
        if length not in self._lowered:
            arguments, named = self._arguments(state, length)
            self._lowered[length] = self._run_chunk.lower(*arguments, **named)
        self.compile_seconds += time.perf_counter() - began
        return self._lowered[length]

    def _arguments(self, state: FedState, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = jnp.zeros((), jnp.int32)
        return (state, self._clients, self._key, first), {"length": length, "frozen": self._frozen}

    def prepare(self, state: FedState, length: int) -> bool:
        """Compile the program of so many rounds; returns whether that was to be done.

        Args:
          state: as of ``lower``.
          length: rounds.
        """
        if length in self._compiled:
            return False
        lowered = self.lower(state, length)
        began = time.perf_counter()
        self._compiled[length] = lowered.compile()
        self._lowered.clear()
        self.compile_seconds += time.perf_counter() - began
        return True

    def run(self, state: FedState, first: int, length: int) -> tuple[FedState, Metrics]:
        """(the state after the rounds, their metrics [length]); the state is donated.

        Args:
          state: before the rounds.
          first: number of the first round.
          length: rounds.
        """
        self.prepare(state, length)
        return self._compiled[length](
            state, self._clients, self._key, jnp.asarray(first, jnp.int32), frozen=self._frozen
        )

    def look_ahead(self, first: int, length: int) -> None:
        """Say which chunk comes next, while one runs.

        Args:
          first: number of its first round.
          length: its rounds.
        """

    def keep(self) -> None:
        """The last chunk's rounds count."""

    def whole(self, state: FedState) -> FedState:
        """The state as a checkpoint has it; of several processes, in the first one alone."""
        return processes.gathered(state)

    def like(self, state: FedState) -> FedState:
        """The structure, shapes and dtypes of ``whole(state)``."""
        return state

    def handed_out(self, saved: FedState, state: FedState) -> FedState:
        """What ``adopt`` takes, in all processes.

        Args:
          saved: the state that a checkpoint had, in process 0; the others' does not count.
          state: one of its structure, shapes and dtypes, on the devices.
        """
        return processes.handed_out(saved, state)

    def adopt(self, state: FedState) -> FedState:
        """The state that a checkpoint had."""
        return state

    def result(self, state: FedState) -> FedState:
        """The state that a run returns."""
        return state
