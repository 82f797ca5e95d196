"""The compiled chunks of a run, and the state that they advance.

There is one program for each requested number of rounds. If a feed has data for fewer rounds than a
chunk has, several programs make up the chunk.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.simulation.debugging import values_are_checked
from fedjax_lab.simulation.feed import Feed
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.simulation.run import Run
from fedjax_lab.types import FedState, Metrics, Params

# (first round, state after the rounds, their metrics) -> how many of them count
Look = Callable[[int, FedState, Metrics], int]
Action = Callable[[], None]


class Chunks:
    """Owns a run's state and advances it by compiled chunks of rounds.

    Args:
      run: the computation.
      place: its placement.
      feed: the clients' data.
      shapes: shapes of the state without frozen weights.
      compiled: programs that are already compiled, by their number of rounds.
      compile_seconds: time spent on these.

    Attributes:
      team: the processes that share the state.
      compile_seconds: time spent so far.
    """

    def __init__(
        self,
        run: Run,
        place: Placement,
        feed: Feed,
        shapes: FedState,
        compiled: Mapping[int, Any] | None = None,
        compile_seconds: float = 0.0,
    ):
        self._run, self._place, self._feed = run, place, feed
        self.team = place.team
        feed.place(place)
        params, self._frozen = place.models(run.params, run.frozen)
        self._key = place.copies(run.key)
        self._state = self._started(params, shapes)
        self._sharding = place.state_sharding(self._state)
        self._state = self.team.put(self._state, self._sharding)
        self._program = build_chunk(run, place, place.left_by_programs(self._state))
        # By the rounds of a program, and of the chunk that it is of.
        self._lowered: dict[tuple[int, int], Any] = {}
        self._compiled = {self._which(n, n): program for n, program in (compiled or {}).items()}
        self.compile_seconds = compile_seconds

    def _started(self, params: Params, shapes: FedState) -> FedState:
        """Compute the state before round 0, or take the run's initial state."""
        run = self._run
        if run.state is not None:
            return run.state
        start = jax.jit(run.start, out_shardings=self._place.state_sharding(shapes))
        return start(params, self._feed.clients, self._key, self._frozen)

    @property
    def params(self) -> Params:
        """Global model, as arrays of this process."""
        return self.team.local(self._run.served(self._state))

    def is_finite(self) -> bool:
        """Return True if the global model is finite and can be evaluated."""
        return bool(tree.all_finite(self._run.served(self._state)))

    def whole_state(self) -> FedState:
        """Gather the state with its frozen weights in each process; all processes call it."""
        return self.team.own(self._run.with_frozen(self._state, self._frozen))

    def result(self) -> FedState:
        """Return the final state of the run."""
        return self.team.local(self._run.with_frozen(self._state, self._frozen))

    def keep_beside(self, run_dir: Any) -> None:
        """Store client rows that are not on the devices beside a run directory, if there is one.

        Args:
          run_dir: as in ``simulate``.
        """

    def lower(self, length: int) -> jax.stages.Lowered:
        """Lower the first program of a chunk without compiling it.

        Args:
          length: rounds.
        """
        return self._lower(min(length, self._feed.longest), length)

    def _lower(self, piece: int, length: int) -> jax.stages.Lowered:
        began = time.perf_counter()
        which = self._which(piece, length)
        if which not in self._lowered:
            arguments, named = self._arguments(piece, length)
            self._lowered[which] = self._program.lower(*arguments, **named)
        self.compile_seconds += time.perf_counter() - began
        return self._lowered[which]

    def _which(self, piece: int, length: int) -> tuple[int, int]:
        """Return the key that distinguishes programs of one length; here there is one for all."""
        return piece, 0

    def _arguments(self, piece: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = jnp.zeros((), jnp.int32)
        arguments = (self._state, self._feed.clients, self._key, first)
        return arguments, {"length": piece, "frozen": self._frozen}

    def prepare(self, length: int, patiently: Callable[[Action], bool] | None = None) -> bool:
        """Compile the programs of a chunk; returns whether they are compiled.

        Args:
          length: rounds.
          patiently: function that runs the compiler and returns whether it finished; None: it
            always finishes. With several processes, all give up together.
        """
        pieces = {piece for _, piece in self._feed.pieces(0, length)}
        missing = [n for n in pieces if self._which(n, length) not in self._compiled]
        if not missing or values_are_checked():
            return True
        lowered = {piece: self._lower(piece, length) for piece in missing}
        began = time.perf_counter()

        def compile_all() -> None:
            for piece, program in lowered.items():
                self._compiled[self._which(piece, length)] = program.compile()

        if patiently is None or self.team.is_multiprocess:
            compile_all()
        elif not patiently(compile_all):
            return False
        self.compile_seconds += time.perf_counter() - began
        self._lowered.clear()
        self.team.meet()
        return True

    def advance(self, first: int, length: int, look: Look) -> tuple[int, Metrics]:
        """Run a chunk; returns (number of its valid rounds, their metrics).

        With ``on_nonfinite="stop"`` the state is then that after the valid rounds; otherwise it is
        that after the whole chunk.

        Args:
          first: number of its first round.
          length: its rounds.
          look: function of the metrics that returns the number of valid rounds.
        """
        goes_back = self._run.on_nonfinite == "stop"
        before = jax.tree.map(jnp.copy, self._state) if goes_back else None
        metrics = self._forward(first, length)
        if after := self._run.chunk_length(first + length):
            self._look_ahead(first + length, after)
        good = look(first, self._state, metrics)
        if good < length and before is not None:
            self._state = before
            metrics = self._forward(first, good) if good else {}
        else:
            good = length
        if good:
            self._keep()
        return good, metrics

    def _forward(self, first: int, length: int, **named: Any) -> Metrics:
        """Run rounds and return their metrics [length]; donates the state."""
        self.prepare(length)
        of_pieces = []
        for start, piece in self._feed.pieces(first, length):
            clients = self._feed.take(start, piece)
            if values_are_checked():
                metrics = self._one_by_one(start, piece, clients, **named)
            else:
                self._state, metrics = self._compiled[self._which(piece, length)](
                    self._state,
                    clients,
                    self._key,
                    jnp.asarray(start, jnp.int32),
                    frozen=self._frozen,
                    **named,
                )
            self._feed.ran(metrics)
            of_pieces.append(metrics)
        return of_pieces[0] if len(of_pieces) == 1 else _joined(of_pieces)

    def _one_by_one(self, first: int, length: int, clients: Any, **named: Any) -> Metrics:
        """Run rounds one after the other, so that JAX's check of values can name the round."""
        found = []
        for round in range(first, first + length):
            arguments = self._state, clients, self._key, jnp.asarray(round, jnp.int32)
            try:
                self._state, metrics = self._program(
                    *arguments, length=1, frozen=self._frozen, **named
                )
            except FloatingPointError as error:
                name = self._run.algorithm.name
                raise FloatingPointError(f"in round {round} of {name}: {error}") from error
            found.append(metrics)
        return _joined(found)

    def _look_ahead(self, first: int, length: int) -> None:
        """Prepare the next chunk while one runs."""

    def _keep(self) -> None:
        """Commit the client rows of the last chunk."""

    def saved(self) -> FedState:
        """Return the state for a checkpoint; with several processes, only in process 0."""
        return self.team.gathered(self._state)

    def template(self) -> FedState:
        """Return a template for restoring a checkpoint: structure, shapes and dtypes."""
        return self._state

    def restore(self, saved: FedState) -> None:
        """Restore the state from a checkpoint.

        Args:
          saved: result of ``saved`` in process 0; ignored in other processes.
        """
        self._state = self.team.put(self._adopted(saved), self._sharding)

    def _adopted(self, saved: FedState) -> FedState:
        return self.team.broadcast(saved, self._state)


@jax.jit
def _joined(of_pieces: list[Metrics]) -> Metrics:
    """Concatenate the metrics of consecutive programs."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_pieces)
