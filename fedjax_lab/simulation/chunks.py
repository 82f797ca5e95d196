"""The compiled chunks of a run, and the state that they advance.

There is one program for each requested number of rounds. If a device holds the examples of fewer
rounds than a chunk has, several programs make up the chunk.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.clients.sources import on_any_device
from fedjax_lab.simulation.chunk_planner import Chosen
from fedjax_lab.simulation.client_data import ClientData
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.debugging import values_are_checked
from fedjax_lab.simulation.divergence import Watch
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.simulation.stores import open_store
from fedjax_lab.types import FedState, Metrics, Params

Action = Callable[[], None]


class Chunks:
    """Owns a run's state and advances it by compiled chunks of rounds.

    Args:
      run: the computation.
      chosen: its placement, and programs that are already compiled.
      client_data: the clients' data.
      shapes: shapes of the state without frozen weights.
      run_dir: as in ``simulate``; rows on the host are stored there.

    Attributes:
      processes: the processes that share the state.
      compile_seconds: time spent so far.
      note: a line about the store of client rows for the progress of a run, or "".
    """

    def __init__(
        self,
        run: Computation,
        chosen: Chosen,
        client_data: ClientData,
        shapes: FedState,
        run_dir: str | Path | None = None,
    ):
        place = chosen.placement
        self._run, self._client_data, self.processes = run, client_data, Processes.here()
        client_data.place(place)
        params, self._frozen = place.models(run.params, run.frozen)
        self._key = place.copies(run.key)
        inputs = params, self._key, self._frozen
        state, self._store = open_store(run, place, client_data, inputs, shapes, run_dir)
        self.note = self._store.note
        self._sharding = place.state_sharding(state)
        self._state = self.processes.put(state, self._sharding)
        self._watch = Watch(run.algorithm.name, run.on_nonfinite)
        self._params_are_finite = jax.jit(
            lambda state: tree.all_finite(run.algorithm.params(state))
        )
        self._program = build_chunk(run, place, place.left_by_programs(self._state))
        # By the rounds of a program and the rows of its window.
        self._lowered: dict[tuple[int, int], Any] = {}
        self._compiled = {(length, 0): program for length, program in chosen.programs.items()}
        self.compile_seconds = chosen.compile_seconds

    @property
    def params(self) -> Params:
        """Global model, as arrays of this process."""
        return self.processes.local(self._run.algorithm.params(self._state))

    def is_finite(self) -> bool:
        """Return True if the global model is finite and can be evaluated."""
        return bool(self._params_are_finite(self._state))

    def whole_state(self) -> FedState:
        """Gather the state with its frozen weights in each process; all processes call it."""
        return self.processes.collected(self._state._replace(frozen=self._frozen))

    def result(self) -> FedState:
        """Return the final state of the run."""
        server, count = on_any_device((self._state.server, self._state.num_clients))
        state = self._state._replace(server=server, num_clients=count, frozen=self._frozen)
        return self._store.result(self.processes.local(state))

    def lower(self, length: int) -> jax.stages.Lowered:
        """Lower the first program of a chunk without compiling it."""
        return self._lower(min(length, self._client_data.longest), length)

    def _lower(self, piece: int, length: int) -> jax.stages.Lowered:
        """Lower a program of ``piece`` rounds, of a chunk of ``length`` rounds."""
        began = time.perf_counter()
        which = piece, self._store.size(length)
        if which not in self._lowered:
            state, named = self._store.shapes(self._state, length)
            first = jnp.zeros((), jnp.int32)
            self._lowered[which] = self._program.lower(
                state,
                self._run.schedule.read_in_rounds(self._client_data.clients),
                self._key,
                first,
                length=piece,
                frozen=self._frozen,
                **named,
            )
        self.compile_seconds += time.perf_counter() - began
        return self._lowered[which]

    def prepare(self, length: int, patiently: Callable[[Action], bool] | None = None) -> bool:
        """Compile the programs of a chunk; returns whether they are compiled.

        Args:
          patiently: function that runs the compiler and returns whether it finished; None: it
            always finishes. With several processes, all give up together.
        """
        pieces = {piece for _, piece in self._client_data.pieces(0, length)}
        size = self._store.size(length)
        missing = [piece for piece in pieces if (piece, size) not in self._compiled]
        if not missing or values_are_checked():
            return True
        lowered = {piece: self._lower(piece, length) for piece in missing}
        began = time.perf_counter()

        def compile_all() -> None:
            for piece, program in lowered.items():
                self._compiled[piece, size] = program.compile()

        if patiently is None or self.processes.is_multiprocess:
            compile_all()
        elif not patiently(compile_all):
            return False
        self.compile_seconds += time.perf_counter() - began
        self._lowered.clear()
        self.processes.meet()
        return True

    def advance(self, first: int, length: int) -> tuple[Metrics, bool]:
        """Run a chunk; returns (the metrics of its rounds, [length]; whether the run diverged).

        With ``on_nonfinite="stop"``, the rounds before one that is not finite run again from the
        state before the chunk; {}: there are none.
        """
        before = None
        if self._run.on_nonfinite == "stop":
            before = jax.tree.map(jnp.copy, self._state)
        metrics = self._forward(first, length)
        if after := self._run.chunk_length(first + length):
            self._store.prefetch(first + length, after)
        counted, lost = self._watch.look(first, metrics, self.is_finite())
        if counted < length:
            self._state = before
            metrics = self._forward(first, counted) if counted else {}
        if counted:
            self._state = self._store.commit(self._state)
        return metrics, bool(lost)

    def _forward(self, first: int, length: int) -> Metrics:
        """Run rounds and return their metrics [length]; donates the state."""
        self.prepare(length)
        size = self._store.size(length)
        self._state, named = self._store.load(self._state, first, length)
        of_pieces = []
        for start, piece in self._client_data.pieces(first, length):
            clients = self._run.schedule.read_in_rounds(self._client_data.take(start, piece))
            if values_are_checked():
                metrics = self._one_by_one(start, piece, clients, named)
            else:
                metrics = self._run_program(self._compiled[piece, size], start, clients, named)
            self._client_data.ran(metrics)
            of_pieces.append(metrics)
        return of_pieces[0] if len(of_pieces) == 1 else _joined(of_pieces)

    def _run_program(self, program: Any, first: int, clients: Any, named: dict) -> Metrics:
        """Advance the state by a program; returns the metrics of its rounds."""
        start = jnp.asarray(first, jnp.int32)
        self._state, metrics = program(
            self._state, clients, self._key, start, frozen=self._frozen, **named
        )
        return metrics

    def _one_by_one(self, first: int, length: int, clients: Any, named: dict) -> Metrics:
        """Run rounds one after the other, so that JAX's check of values can name the round."""
        one_round = functools.partial(self._program, length=1)
        found = []
        for round in range(first, first + length):
            try:
                found.append(self._run_program(one_round, round, clients, named))
            except FloatingPointError as error:
                name = self._run.algorithm.name
                raise FloatingPointError(f"in round {round} of {name}: {error}") from error
        return _joined(found)

    def saved(self) -> FedState:
        """Return the state for a checkpoint; with several processes, only in process 0."""
        return self._store.snapshot(self._state)

    def template(self) -> FedState:
        """Return a template for restoring a checkpoint: structure, shapes and dtypes."""
        return self._store.template(self._state)

    def restore(self, saved: FedState) -> None:
        """Restore the state from a checkpoint.

        Args:
          saved: result of ``saved`` in process 0; ignored in other processes.
        """
        self._state = self.processes.put(self._store.restore(saved, self._state), self._sharding)


@jax.jit
def _joined(of_pieces: list[Metrics]) -> Metrics:
    """Concatenate the metrics of consecutive programs."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_pieces)
