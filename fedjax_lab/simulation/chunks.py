"""The compiled chunks of a run, and the state that goes through them.

There is one program for each number of rounds that is asked for. Where a feed has data for fewer
rounds than a chunk's, the chunk is several programs.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.simulation.feed import Feed
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.simulation.run import Run
from fedjax_lab.types import FedState, Metrics, Params

# (first round, state after the rounds, their metrics) -> how many of them count
Look = Callable[[int, FedState, Metrics], int]
Action = Callable[[], None]


class Chunks:
    """Owns a run's state, and advances it by chunks of rounds, compiled once each.

    Args:
      run: what is computed.
      place: where.
      feed: the clients' data.
      compiled: programs that are there already, by their number of rounds.
      compile_seconds: what these took.

    Attributes:
      team: the processes that share the state.
      compile_seconds: time spent so far.
    """

    def __init__(
        self,
        run: Run,
        place: Placement,
        feed: Feed,
        compiled: Mapping[int, Any] | None = None,
        compile_seconds: float = 0.0,
    ):
        self._run, self._place, self._feed = run, place, feed
        self.team = place.team
        feed.place(place)
        params, self._frozen = place.models(run.params, run.frozen)
        self._key = place.copies(run.key)
        self._state = self._started(params)
        self._sharding = place.state_sharding(self._state)
        self._state = self.team.put(self._state, self._sharding)
        self._program = build_chunk(run, place, place.left_by_programs(self._state))
        # By the rounds of a program, and of the chunk that it is of.
        self._lowered: dict[tuple[int, int], Any] = {}
        self._compiled = {self._which(n, n): program for n, program in (compiled or {}).items()}
        self.compile_seconds = compile_seconds

    def _started(self, params: Params) -> FedState:
        """The state before round 0."""
        run, clients = self._run, self._feed.clients
        if run.state is not None:
            return run.state
        sharding = self._place.state_sharding(run.shapes(clients))
        start = jax.jit(run.start, out_shardings=sharding)
        return start(params, clients, self._key, self._frozen)

    @property
    def params(self) -> Params:
        """The server model, as this process has it."""
        return self.team.local(self._run.served(self._state))

    def is_finite(self) -> bool:
        """Whether the server model is finite, so that it can be evaluated."""
        return bool(tree.all_finite(self._run.served(self._state)))

    def whole_state(self) -> FedState:
        """The state with its frozen weights, put together in each process; all call it."""
        return self.team.own(self._run.whole(self._state, self._frozen))

    def result(self) -> FedState:
        """The state that a run returns."""
        return self.team.local(self._run.whole(self._state, self._frozen))

    def keep_beside(self, run_dir: Any) -> None:
        """Keep client rows that do not stay on the devices beside a run directory, if any.

        Args:
          run_dir: as of ``simulate``.
        """

    def lower(self, length: int) -> jax.stages.Lowered:
        """The first program of a chunk of so many rounds before it is compiled.

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
        """What tells programs apart; here chunks of any length share theirs."""
        return piece, 0

    def _arguments(self, piece: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = jnp.zeros((), jnp.int32)
        arguments = (self._state, self._feed.clients, self._key, first)
        return arguments, {"length": piece, "frozen": self._frozen}

    def prepare(self, length: int, patiently: Callable[[Action], bool] | None = None) -> bool:
        """Compile the programs of so many rounds; returns whether they are there.

        Args:
          length: rounds.
          patiently: runs the compiler, and returns whether it was let finish; None: it is. Of
            several processes, none gives up alone.
        """
        pieces = {piece for _, piece in self._feed.pieces(0, length)}
        missing = [n for n in pieces if self._which(n, length) not in self._compiled]
        if not missing:
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
        """Run a chunk; returns (how many of its rounds count, the metrics of these).

        Where on_nonfinite is "stop", the state is then that after the rounds that count; elsewhere
        it is that after the chunk.

        Args:
          first: number of its first round.
          length: its rounds.
          look: says how many of them count.
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
        """Run rounds, and return their metrics [length]; the state before them is donated."""
        self.prepare(length)
        of_pieces = []
        for start, piece in self._feed.pieces(first, length):
            clients = self._feed.take(start, piece)
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

    def _look_ahead(self, first: int, length: int) -> None:
        """Hear which chunk comes next, while one runs."""

    def _keep(self) -> None:
        """Commit the client rows of the last chunk."""

    def saved(self) -> FedState:
        """The state as a checkpoint holds it; of several processes, in the first one alone."""
        return self.team.gathered(self._state)

    def template(self) -> FedState:
        """The structure, shapes and dtypes of a checkpoint's state."""
        return self._state

    def restore(self, saved: FedState) -> None:
        """Go on from a checkpoint.

        Args:
          saved: what ``saved`` returned, in process 0; the other processes' does not count.
        """
        self._state = self.team.put(self._adopted(saved), self._sharding)

    def _adopted(self, saved: FedState) -> FedState:
        return self.team.broadcast(saved, self._state)


@jax.jit
def _joined(of_pieces: list[Metrics]) -> Metrics:
    """Metrics of rounds that follow each other."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_pieces)
