"""The compiled chunks of a run: one program for each number of rounds that is asked for.

Where a feed has data for fewer rounds than a chunk's, the chunk is several programs.
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.simulation import processes
from fedjax_lab.simulation.feed import Feed
from fedjax_lab.types import FedState, Key, Metrics, PyTree


class Chunks:
    """Chunks of rounds, lowered and compiled once each.

    Args:
      run_chunk: what ``build_chunk`` returned.
      feed: the clients' data.
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
        feed: Feed,
        key: Key,
        frozen: PyTree = (),
        compiled: Mapping[int, Any] | None = None,
        compile_seconds: float = 0.0,
    ):
        self._run_chunk, self._feed, self._key = run_chunk, feed, key
        self._frozen = frozen
        # By the rounds of a program, and of the chunk that it is of.
        self._lowered: dict[tuple[int, int], Any] = {}
        self._compiled = {self._which(n, n): program for n, program in (compiled or {}).items()}
        self.compile_seconds = compile_seconds

    def lower(self, state: FedState, length: int) -> jax.stages.Lowered:
        """The first program of a chunk of so many rounds before it is compiled.

        Args:
          state: without frozen weights; its shapes and its placement count.
          length: rounds.
        """
        return self._lower(state, min(length, self._feed.longest), length)

    def _lower(self, state: FedState, piece: int, length: int) -> jax.stages.Lowered:
        began = time.perf_counter()
        which = self._which(piece, length)
        if which not in self._lowered:
            arguments, named = self._arguments(state, piece, length)
            self._lowered[which] = self._run_chunk.lower(*arguments, **named)
        self.compile_seconds += time.perf_counter() - began
        return self._lowered[which]

    def _which(self, piece: int, length: int) -> tuple[int, int]:
        """What tells programs apart; here chunks of any length share theirs."""
        return piece, 0

    def _arguments(
        self, state: FedState, piece: int, length: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = jnp.zeros((), jnp.int32)
        arguments = (state, self._feed.clients, self._key, first)
        return arguments, {"length": piece, "frozen": self._frozen}

    def prepare(self, state: FedState, length: int) -> bool:
        """Compile the programs of so many rounds; returns whether that was to be done.

        Args:
          state: as of ``lower``.
          length: rounds.
        """
        pieces = {piece for _, piece in self._feed.pieces(0, length)}
        missing = [n for n in pieces if self._which(n, length) not in self._compiled]
        for piece in missing:
            lowered = self._lower(state, piece, length)
            began = time.perf_counter()
            self._compiled[self._which(piece, length)] = lowered.compile()
            self.compile_seconds += time.perf_counter() - began
        if missing:
            self._lowered.clear()
            processes.meet()
        return bool(missing)

    def run(self, state: FedState, first: int, length: int) -> tuple[FedState, Metrics]:
        """(the state after the rounds, their metrics [length]); the state is donated.

        Args:
          state: before the rounds.
          first: number of the first round.
          length: rounds.
        """
        self.prepare(state, length)
        return self._run(state, first, length)

    def _run(
        self, state: FedState, first: int, length: int, **named: Any
    ) -> tuple[FedState, Metrics]:
        of_pieces = []
        for start, piece in self._feed.pieces(first, length):
            clients = self._feed.take(start, piece)
            state, metrics = self._compiled[self._which(piece, length)](
                state,
                clients,
                self._key,
                jnp.asarray(start, jnp.int32),
                frozen=self._frozen,
                **named,
            )
            self._feed.ran(metrics)
            of_pieces.append(metrics)
        return state, of_pieces[0] if len(of_pieces) == 1 else _joined(of_pieces)

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


@jax.jit
def _joined(of_pieces: list[Metrics]) -> Metrics:
    """Metrics of rounds that follow each other."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_pieces)
