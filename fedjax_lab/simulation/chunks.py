"""The compiled chunks of a run: one program for each number of rounds that is asked for."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.data import FederatedArrays
from fedjax_lab.types import FedState, Key, Metrics


class Chunks:
    """Chunks of rounds, lowered and compiled once each.

    Args:
      run_chunk: what ``build_chunk`` returned.
      clients: the clients' data.
      key: the run's key.
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
        compiled: Mapping[int, Any] | None = None,
        compile_seconds: float = 0.0,
    ):
        self._run_chunk, self._clients, self._key = run_chunk, clients, key
        self._lowered: dict[int, Any] = {}
        self._compiled: dict[int, Any] = dict(compiled or {})
        self.compile_seconds = compile_seconds

    def lower(self, state: FedState, length: int) -> jax.stages.Lowered:
        """The program of so many rounds before it is compiled.

        Args:
          state: a state, of which the shapes and the placement count.
          length: rounds.
        """
        began = time.perf_counter()
        if length not in self._lowered:
            first = jnp.zeros((), jnp.int32)
            arguments = (state, self._clients, self._key, first)
            self._lowered[length] = self._run_chunk.lower(*arguments, length=length)
        self.compile_seconds += time.perf_counter() - began
        return self._lowered[length]

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
            state, self._clients, self._key, jnp.asarray(first, jnp.int32)
        )
