"""The compiled program of a sweep, and the group of runs that it advances."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.device_memory import device_memory
from fedjax_lab.machine.trace_once import trace_open
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.debugging import values_are_checked
from fedjax_lab.simulation.divergence import Watch
from fedjax_lab.simulation.history import History, check_scores, is_enough
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_rounds
from fedjax_lab.simulation.sweep_points import Point
from fedjax_lab.storage.rows import Row
from fedjax_lab.types import FedState, Key, Params, PyTree

# Share of a device's memory for a sweep; the rest is for other data.
_SHARE_OF_MEMORY = 0.8
_MARKS = ("run", "diverged")  # entries of a row in a file beside those of ``History``


@dataclasses.dataclass(eq=False)
class SweptRun:
    """One of many runs of a program.

    Attributes:
      number: its number, from 0.
      params: the initial global model.
      key: PRNG key of the run.
      point: the hyperparameters.
      history: its rows.
      diverged: whether it diverged.
      is_over: whether it has ended: by ``stop_when``, or, if there is such a function, because it
        diverged.
    """

    number: int
    params: Params
    key: Key
    point: Point
    history: History
    diverged: bool = False
    is_over: bool = False

    def enter(self, round: int, metrics: PyTree, scores: PyTree) -> Row:
        """Record a chunk of rounds; returns its row as a file has it, with ``run``, ``diverged``.

        Args:
          round: finished rounds.
          metrics: of the chunk's rounds, [length] each.
          scores: of the global model; a run that diverged gets none.
        """
        lost = np.nan if self.diverged else 0.0
        numbers = {name: float(value) + lost for name, value in scores.items()}
        marks = {"run": self.number, "diverged": int(self.diverged)}
        return {**marks, **self.history.enter(round, metrics, numbers)}

    def restore(self, marked: Row) -> None:
        """Append a row of an earlier call, as ``enter`` returned it."""
        row = {name: value for name, value in marked.items() if name not in _MARKS}
        self.diverged = bool(marked["diverged"])
        self.history.go_on_from([row])

    def ask(self, stop_when: Callable[[Row], Any] | None) -> None:
        """End the run if it diverged, or if ``stop_when`` says so of its last row."""
        if stop_when is not None:
            self.is_over = self.diverged or is_enough(stop_when, self.history.rows[-1])


def group_size(num_runs: int, multiple: int, capacity: int) -> int:
    """Choose the number of runs in a group, so that all groups have the same size.

    Args:
      multiple: the size must be a multiple of this.
      capacity: number of runs that fit into memory; less than ``multiple`` counts as ``multiple``.
    """
    units = -(-num_runs // multiple)
    groups = -(-units // max(1, capacity // multiple))
    return multiple * -(-units // groups)


def no_scores(resident: PyTree, params: Params) -> dict[str, jax.Array]:
    """Evaluate nothing."""
    return {}


def trace_evaluation(
    evaluate: Callable[[Params], Mapping[str, Any]] | None, algorithm: Algorithm, state: FedState
) -> tuple[Callable[[PyTree, Params], PyTree], PyTree, tuple[str, ...]]:
    """Trace ``evaluate`` once, so that its data become arguments of programs, not constants.

    Args:
      evaluate: as in ``sweep``.
      algorithm: the method of one of the runs.
      state: shapes of its state.

    Returns:
      ((resident, params) -> {name: scalar}; resident, the arrays that the function reads in
      addition to the params; the names).

    Raises:
      TypeError: the function cannot be traced, or returns no dict.
      ValueError: it returns an array.
    """
    if evaluate is None:
        return no_scores, (), ()
    try:
        score, arrays, shapes = trace_open(evaluate, jax.eval_shape(algorithm.params, state))
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            "evaluate cannot be traced; in a sweep it must consist of JAX operations, without "
            f"float(), NumPy functions or `if` on values that depend on the params. {error}"
        ) from error
    check_scores("evaluate", shapes)
    for name, shape in shapes.items():
        if shape.shape != ():
            raise ValueError(
                f"evaluate returned {name} of shape {shape.shape}; it must be a scalar."
            )
    return score, list(arrays), tuple(shapes)


class Program:
    """The functions that are compiled for groups of runs: the start, a chunk of rounds, the models.

    Args:
      run: the computation of one of the runs.
      build: makes the method of a run from its values, which are traced scalars.
      clients: the clients' data, which all runs share, as they share frozen weights.
      of_clients: the placement of the clients of a run.
      of_runs: the placement of the runs.
      score: (resident, params of a run) -> its scores.
      resident: arrays that ``score`` reads.
      may_end: whether single runs may end before the others; these are then not computed (with the
        run map ``vmap``, they are computed and not used).

    Attributes:
      place: the placement of the runs.
      data: the clients' data and frozen weights.
      resident: as given, on the devices.
      watch: warns of what it finds in the metrics of the runs.
      compile_seconds: time spent compiling.
    """

    def __init__(
        self,
        run: Computation,
        build: Callable[..., Algorithm],
        clients: FederatedArrays,
        of_clients: Placement,
        of_runs: Placement,
        score: Callable[[PyTree, Params], PyTree] = no_scores,
        resident: PyTree = (),
        may_end: bool = False,
    ):
        self._run_of = lambda point: dataclasses.replace(run, algorithm=build(**point))
        self._of_clients, self._score = of_clients, score
        self.place, self.may_end = of_runs, may_end
        self.data = of_runs.copies((clients, run.frozen))
        self.resident = of_runs.copies(resident)
        self.watch = Watch(None, run.on_nonfinite)
        self._compiled: dict[tuple[Any, int], jax.stages.Compiled] = {}
        self.compile_seconds = 0.0

    def compiled(
        self,
        name: Any,
        size: int,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        donated: tuple[int, ...] = (),
    ) -> jax.stages.Compiled:
        """Compile one of the functions below for ``size`` runs, once."""
        if (name, size) not in self._compiled:
            # Those for another size are dropped, because programs may be large.
            self._compiled = {key: v for key, v in self._compiled.items() if key[1] == size}
            before = time.perf_counter()
            lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
            self._compiled[name, size] = lowered.compile()
            self.compile_seconds += time.perf_counter() - before
        return self._compiled[name, size]

    def lower_one(self, run: SweptRun, length: int) -> jax.stages.Lowered:
        """Lower the rounds of a single run, which do not depend on the size of a group."""
        values = _as_arrays(run.point)
        state = jax.eval_shape(self._start_one, self.data, (run.params, run.key, values))

        def rounds(state, key, values, clients, frozen, first):
            run_rounds = build_rounds(self._run_of(values), self._of_clients)
            return run_rounds(state, clients, key, first, length, frozen)

        return jax.jit(rounds).lower(state, run.key, values, *self.data, jnp.zeros((), jnp.int32))

    # The compiled functions.

    def _map(self, one, shared, runs):
        """Apply ``one(shared, run)`` to all runs; nothing is summed over them."""

        def client_fn(shared, run, _):
            return {}, one(shared, run)

        return self.place.client_map.run(client_fn, shared, runs, {}, None)[1]

    def start_runs(self, shared: PyTree, runs: PyTree) -> PyTree:
        """Create the states of all runs before round 0; this function is compiled.

        Args:
          shared: ``data``.
          runs: (models, keys, {name: values}), leaves [runs, ...].
        """
        return self._map(self._start_one, shared, runs)

    def _start_one(self, shared, run):
        clients, frozen = shared
        params, key, values = run
        return self._run_of(values).start(params, clients, key, frozen)

    def advance_runs(self, length: int, states: PyTree, runs: PyTree, shared: PyTree) -> PyTree:
        """Run ``length`` rounds of all runs; this function is compiled.

        It returns (states, metrics, scores, whether the global models are finite).

        Args:
          states: states of the runs, leaves [runs, ...].
          runs: (keys, {name: values}, which of them go on or ()), leaves [runs, ...].
          shared: (*``data``, ``resident``, number of finished rounds).
        """

        def one(shared, run):
            clients, frozen, resident, first = shared
            state, (key, values, goes_on) = run
            run = self._run_of(values)
            run_rounds = build_rounds(run, self._of_clients)
            advance = lambda state: run_rounds(state, clients, key, first, length, frozen)  # noqa: E731
            if jax.tree.leaves(goes_on):
                shapes = jax.eval_shape(advance, state)[1]
                nothing = tree.zeros_like(shapes)
                stay = lambda state: (state, nothing)  # noqa: E731
                state, metrics = jax.lax.cond(goes_on, advance, stay, state)
            else:
                state, metrics = advance(state)
            params = run.algorithm.params(state)
            return state, metrics, self._score(resident, params), tree.all_finite(params)

        return self._map(one, shared, (states, runs))

    def params_of_runs(self, states: PyTree, runs: PyTree) -> PyTree:
        """Compute the global models of all runs; this function is compiled.

        Args:
          states: states of the runs, leaves [runs, ...].
          runs: (keys, {name: values}), leaves [runs, ...].
        """

        def one(_, run):
            state, (_, values) = run
            return self._run_of(values).algorithm.params(state)

        return self._map(one, (), (states, runs))


class Group:
    """A group of runs on the devices, which a program advances.

    Args:
      program: the program.
      runs: the runs, at most ``size``.
      size: number of runs that the program computes, which is rounded up to a number that its
        devices can share. If there are fewer runs, the last one is repeated.
      states: as ``saved`` returned them; None: the runs start before round 0.

    Attributes:
      runs: as given; their rows are those of the rounds so far.
    """

    def __init__(
        self,
        program: Program,
        runs: Sequence[SweptRun],
        size: int,
        states: FedState | None = None,
    ):
        multiple = program.place.client_map.multiple
        size = multiple * -(-size // multiple)
        self._program, self.runs, self._size = program, runs, size
        self._places = np.minimum(np.arange(size), len(runs) - 1)
        padded = [runs[place] for place in self._places]
        models = tree.stack([run.params for run in padded])
        values = tree.stack([_as_arrays(run.point) for run in padded])
        keys = jnp.stack([run.key for run in padded])
        models, *self._inputs = program.place.divided((models, keys, values))
        if states is not None:
            self.restore(states)
            return
        arguments = program.data, (models, *self._inputs)
        start = program.compiled("start", size, program.start_runs, arguments)
        self._states = start(*arguments)

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling so far, for all groups of the program."""
        return self._program.compile_seconds

    @property
    def params(self) -> Params:
        """Global models, on the host: leaves [runs, ...]."""
        program, arguments = self._program, (self._states, self._inputs)
        params = program.compiled("params", self._size, program.params_of_runs, arguments)
        return self._on_host(params(*arguments))

    def saved(self) -> FedState:
        """Copy the states to the host: leaves [runs, ...]."""
        return jax.tree.map(np.array, self._on_host(self._states))

    def template(self) -> FedState:
        """Return a template of ``saved``: structure, shapes and dtypes."""
        return tree.with_rows(self._states, len(self.runs))

    def restore(self, saved: FedState) -> None:
        """Continue from other states, as ``saved`` returned them."""
        padded = jax.tree.map(lambda leaf: leaf[self._places], saved)
        self._states = self._program.place.divided(padded)

    def advance(self, first: int, length: int) -> tuple[PyTree, ...]:
        """Run rounds ``first`` to ``first + length``; runs that are over stay as they are.

        Returns:
          (metrics [runs, length], scores [runs], bool [runs]: which runs diverged).
        """
        rounds, arguments = self._chunk(first, length)
        self._states = None  # donated
        if values_are_checked():
            rounds = jax.jit(functools.partial(self._program.advance_runs, length))
        try:
            self._states, *results = rounds(*arguments)
        except FloatingPointError as error:
            last = first + length - 1
            raise FloatingPointError(f"in rounds {first} to {last} of a run: {error}") from error
        metrics, scores, is_finite = self._on_host(results)
        return metrics, scores, self._program.watch.look(first, metrics, is_finite)[1]

    def run_chunks(
        self,
        round: int,
        length_of: Callable[[int], int],
        stop_when: Callable[[Row], Any] | None = None,
    ) -> Iterator[tuple[int, list[Row]]]:
        """Run chunks of rounds.

        Yields (finished rounds, new rows as a file has them) after each, with the rows of the runs
        that are not over; ``stop_when`` is called with them when the next chunk is asked for.

        Args:
          round: rounds that are finished already.
          length_of: finished rounds -> rounds of the next chunk; 0: there is none.
        """
        while (length := length_of(round)) and not all(run.is_over for run in self.runs):
            metrics, scores, diverged = self.advance(round, length)
            check_scores("evaluate", scores, self.runs[0].history.names(metrics))
            round += length
            rows = []
            for place, run in enumerate(self.runs):
                run.diverged |= bool(diverged[place])
                if not run.is_over:
                    own = jax.tree.map(lambda leaf, place=place: leaf[place], (metrics, scores))
                    rows.append(run.enter(round, *own))
            yield round, rows
            for run in self.runs:
                if not run.is_over:
                    run.ask(stop_when)

    def restore_rows(
        self, rows: Sequence[Row], round: int, stop_when: Callable[[Row], Any] | None
    ) -> None:
        """Restore the runs from the rows of earlier calls.

        Args:
          rows: as a file has them; ``stop_when`` gets them.
          round: finished rounds.
        """
        for row in rows:
            run = self.runs[row["run"] - self.runs[0].number]
            run.restore(row)
            run.ask(stop_when)
        for run in self.runs:
            run.is_over |= 0 < run.history.round < round

    def summary(self, scores: Sequence[str]) -> dict[str, float]:
        """Summarise the last rows for a progress bar: means; of a privacy budget, the largest."""
        rows = [run.history.rows[-1] for run in self.runs]
        spent = dict.fromkeys(self.runs[0].history.guarantees(0), np.max)
        shown: dict[str, Any] = {**dict.fromkeys(("loss", *scores), np.mean), **spent}
        there = {name: of for name, of in shown.items() if name in rows[0]}
        return {name: float(of([row[name] for row in rows])) for name, of in there.items()}

    def bytes_of_chunk(self, length: int) -> int:
        """Compile a chunk of rounds; returns the bytes that it needs, or 0 if they are unknown."""
        memory = self._chunk(0, length)[0].memory_analysis()
        if memory is None:  # not every backend reports it
            return 0
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new

    def _chunk(self, first: int, length: int) -> tuple[Any, tuple[Any, ...]]:
        """Return (a chunk of rounds, compiled; its arguments)."""
        program, active = self._program, ()
        goes_on = np.array([not run.is_over for run in self.runs])
        may_end = program.may_end or not goes_on.all()  # some ended in an earlier call
        if may_end:
            active = program.place.divided(goes_on[self._places])
        shared = *program.data, program.resident, jnp.asarray(first, jnp.int32)
        arguments = self._states, (*self._inputs, active), shared
        rounds = functools.partial(program.advance_runs, length)
        name = length, may_end
        return program.compiled(name, self._size, rounds, arguments, (0,)), arguments

    def _on_host(self, values: PyTree) -> PyTree:
        """Copy values [size, ...] to the host, without those of repeated runs."""
        return jax.tree.map(lambda leaf: leaf[: len(self.runs)], jax.device_get(values))


def choose_size(
    program: Program,
    runs: Sequence[SweptRun],
    length: int,
    state: FedState,
    max_bytes: int | None = None,
) -> int:
    """Choose the size of groups by compiling a chunk of rounds.

    The first guess comes from the size of a state, the answer from the memory that the compiled
    program needs.

    Args:
      state: shapes of a run's state.
      max_bytes: as in ``sweep``.

    Raises:
      ValueError: ``max_bytes`` does not suffice.
    """
    run_map = program.place.client_map
    multiple, num_devices = run_map.multiple, max(1, len(run_map.devices))
    budget = max_bytes or int(_SHARE_OF_MEMORY * device_memory())
    shared = tree.nbytes((program.data, program.resident))

    def tried(capacity: int) -> tuple[int, int]:
        size = group_size(len(runs), multiple, capacity)
        return size, Group(program, runs[:size], size).bytes_of_chunk(length)

    # A program needs memory for its states at least twice: as arguments and as results.
    size, needed = tried(num_devices * (budget - shared) // (2 * tree.nbytes(state)))
    while needed > budget and size > multiple:  # what runs need grows with their number
        fits = size * (budget - shared) // max(1, needed - shared)
        size, needed = tried(min(fits, size - multiple))
    if needed > budget and max_bytes is not None:
        raise ValueError(
            f"max_bytes is {max_bytes:,}; it must be at least {needed:,}, the memory for "
            f"{multiple} run{'s' * (multiple > 1)} at once."
        )
    return size


def _as_arrays(point: Point) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.result_type(float)) for name, value in point.items()}
