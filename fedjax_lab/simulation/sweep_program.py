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
from fedjax_lab.simulation.run_log import Row
from fedjax_lab.simulation.sweep_result import Point
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


class Program:
    """The compiled programs of a group of runs: their start, a chunk of rounds, the global models.

    Args:
      run: the computation of one of the runs.
      build: makes the method of a run from its values, which are traced scalars.
      clients: the clients' data, which all runs share, as they share frozen weights.
      of_clients: the placement of the clients of a run.
      of_runs: the placement of the runs.
      evaluate: as in ``sweep``.
      may_end: whether single runs may end before the others; these are then not computed (with the
        run map ``vmap``, they are computed and not used).

    Attributes:
      size: number of runs that are computed; ``count`` of them are asked for.
      structure: structure of a run's state.
      scores: names of what ``evaluate`` returns.
      compile_seconds: time spent compiling.
    """

    def __init__(
        self,
        run: Computation,
        build: Callable[..., Algorithm],
        clients: FederatedArrays,
        of_clients: Placement,
        of_runs: Placement,
        evaluate: Callable[[Params], Mapping[str, Any]] | None = None,
        may_end: bool = False,
    ):
        self._run_of = lambda point: dataclasses.replace(run, algorithm=build(**point))
        self._of_clients, self._evaluate = of_clients, evaluate
        self._place, self._run_map = of_runs, of_runs.client_map
        self._data = of_runs.copies((clients, jax.tree.map(jnp.asarray, run.frozen)))
        self._resident: PyTree = ()  # arrays that ``evaluate`` reads in addition to the params
        self._score: Callable[[PyTree, Params], PyTree] = lambda resident, params: {}
        self.scores: tuple[str, ...] = ()
        self._compiled: dict[Any, Any] = {}
        self._watch = Watch(None, run.on_nonfinite)
        self.compile_seconds = 0.0
        self.size = self.count = 0
        self._may_end = may_end

    def fit(
        self, runs: list[SweptRun], length: int, max_bytes: int | None, size: int | None = None
    ) -> None:
        """Choose the size of a group by compiling its program.

        The first guess comes from the size of the states, the answer from the memory that the
        compiled program needs.

        Args:
          size: the size, if it is known; nothing is compiled yet. None: it is chosen.

        Raises:
          ValueError: ``max_bytes`` does not suffice.
        """
        state = self._shapes_of(runs[0])
        self.structure = jax.tree.structure(state)
        algorithm = self._run_of(runs[0].point).algorithm
        self._trace_evaluation(jax.eval_shape(algorithm.params, state))
        multiple, num_devices = self._run_map.multiple, max(1, len(self._run_map.devices))
        budget = max_bytes or int(_SHARE_OF_MEMORY * device_memory())
        shared = tree.nbytes((self._data, self._resident))

        if size is not None:
            self.size = -(-size // multiple) * multiple
            return

        def needed_by(capacity):
            self.size = group_size(len(runs), multiple, capacity)
            self._compiled.clear()
            self.start(runs[: self.size])
            arguments = self._arguments(0, np.ones(self.count, bool))
            memory = self._chunk(length, arguments).memory_analysis()
            if memory is None:  # not every backend reports it
                return 0
            new = memory.output_size_in_bytes - memory.alias_size_in_bytes
            return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new

        # A program needs memory for its states at least twice: as arguments and as results.
        needed = needed_by(num_devices * (budget - shared) // (2 * tree.nbytes(state)))
        while needed > budget and self.size > multiple:  # what runs need grows with their number
            fits = self.size * (budget - shared) // max(1, needed - shared)
            needed = needed_by(min(fits, self.size - multiple))
        if needed > budget and max_bytes is not None:
            raise ValueError(
                f"max_bytes is {max_bytes:,}; it must be at least {needed:,}, the memory for "
                f"{multiple} run{'s' * (multiple > 1)} at once."
            )

    def start(self, runs: list[SweptRun], states: FedState | None = None) -> None:
        """Start a group of runs. If there are too few, the last one is repeated.

        Args:
          runs: at most ``size`` runs.
          states: as ``restore`` takes them; None: start before round 0.
        """
        self._states = None  # make room
        self.count = len(runs)
        self._places = np.minimum(np.arange(self.size), self.count - 1)
        runs = [runs[place] for place in self._places]
        models = tree.stack([run.params for run in runs])
        values = tree.stack([_as_arrays(run.point) for run in runs])
        keys = jnp.stack([run.key for run in runs])
        models, *self._runs = self._place.divided((models, keys, values))
        if states is not None:
            return self.restore(states)
        arguments = (self._data, (models, *self._runs))
        self._states = self._compile("start", self.start_runs, (), *arguments)(*arguments)

    def saved(self) -> FedState:
        """Copy the states to the host: leaves [count, ...]."""
        copy = lambda leaf: np.array(leaf[: self.count])  # noqa: E731
        return jax.tree.map(copy, jax.device_get(self._states))

    def template(self) -> FedState:
        """Return a template of ``saved``: structure, shapes and dtypes."""
        return tree.with_rows(self._states, self.count)

    def restore(self, states: FedState) -> None:
        """Continue from other states.

        Args:
          states: as ``saved`` returns them, leaves [count, ...].
        """
        padded = jax.tree.map(lambda leaf: jnp.asarray(leaf[self._places]), states)
        self._states = self._place.divided(padded)

    def advance(self, first: int, length: int, goes_on: np.ndarray) -> tuple[PyTree, ...]:
        """Run rounds ``first`` to ``first + length``.

        Args:
          goes_on: bool [count], which runs do; the others stay as they are.

        Returns:
          (metrics [count, length], scores [count], bool [count]: which runs diverged).
        """
        self._may_end = self._may_end or not goes_on.all()  # some ended in an earlier call
        arguments = self._arguments(first, goes_on)
        rounds = self._chunk(length, arguments)
        self._states = None  # donated
        if values_are_checked():
            rounds = jax.jit(functools.partial(self.advance_runs, length))
        try:
            self._states, *results = rounds(*arguments)
        except FloatingPointError as error:
            last = first + length - 1
            raise FloatingPointError(f"in rounds {first} to {last} of a run: {error}") from error
        found = jax.tree.map(lambda leaf: leaf[: self.count], jax.device_get(results))
        metrics, scores, is_finite = found
        return metrics, scores, self._watch.look(first, metrics, is_finite)[1]

    def lower_one(self, run: SweptRun, length: int) -> jax.stages.Lowered:
        """Lower the rounds of a single run, which do not depend on the size of a group."""
        values, state = _as_arrays(run.point), self._shapes_of(run)

        def rounds(state, key, values, clients, frozen, first):
            run_rounds = build_rounds(self._run_of(values), self._of_clients)
            return run_rounds(state, clients, key, first, length, frozen)

        return jax.jit(rounds).lower(state, run.key, values, *self._data, jnp.zeros((), jnp.int32))

    def _shapes_of(self, run: SweptRun) -> FedState:
        inputs = run.params, run.key, _as_arrays(run.point)
        return jax.eval_shape(self._start_one, self._data, inputs)

    @property
    def params(self) -> Params:
        """Global models, on the host: leaves [count, ...]."""
        arguments = self._states, self._runs
        models = self._compile("serve", self._serve, (), *arguments)(*arguments)
        return jax.tree.map(lambda leaf: leaf[: self.count], jax.device_get(models))

    def _arguments(self, first, goes_on):
        active = ()
        if self._may_end:
            active = self._place.divided(jnp.asarray(goes_on[self._places]))
        return (
            self._states,
            (*self._runs, active),
            (*self._data, self._resident, jnp.asarray(first, jnp.int32)),
        )

    def _chunk(self, length, arguments):
        rounds = functools.partial(self.advance_runs, length)
        return self._compile((length, self._may_end), rounds, (0,), *arguments)

    def _compile(self, name, function, donated, *arguments):
        if name not in self._compiled:
            before = time.perf_counter()
            lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
            self._compiled[name] = lowered.compile()
            self.compile_seconds += time.perf_counter() - before
        return self._compiled[name]

    # The compiled functions.

    def _map(self, one, shared, runs):
        """Apply ``one(shared, run)`` to all runs; nothing is summed over them."""

        def client_fn(shared, run, _):
            return {}, one(shared, run)

        return self._run_map.run(client_fn, shared, runs, {}, None)[1]

    def start_runs(self, shared: PyTree, runs: PyTree) -> PyTree:
        """Create the states of all runs before round 0; this function is compiled.

        Args:
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
        """

        def one(shared, run):
            clients, frozen, resident, first = shared
            state, (key, values, goes_on) = run
            run = self._run_of(values)
            run_rounds = build_rounds(run, self._of_clients)
            advance = lambda state: run_rounds(state, clients, key, first, length, frozen)  # noqa: E731
            if self._may_end:
                shapes = jax.eval_shape(advance, state)[1]
                nothing = tree.zeros_like(shapes)
                stay = lambda state: (state, nothing)  # noqa: E731
                state, metrics = jax.lax.cond(goes_on, advance, stay, state)
            else:
                state, metrics = advance(state)
            params = run.algorithm.params(state)
            return state, metrics, self._score(resident, params), tree.all_finite(params)

        return self._map(one, shared, (states, runs))

    def _serve(self, states, runs):
        def one(_, run):
            state, (_, values) = run
            return self._run_of(values).algorithm.params(state)

        return self._map(one, (), (states, runs))

    def _trace_evaluation(self, params: Params) -> None:
        """Trace ``evaluate`` once, so that its data become arguments, not constants."""
        if self._evaluate is None:
            return
        try:
            score, constants, shapes = trace_open(self._evaluate, params)
        except jax.errors.JAXTypeError as error:
            raise TypeError(
                "evaluate cannot be traced; in a sweep it must consist of JAX operations, without "
                f"float(), NumPy functions or `if` on values that depend on the params. {error}"
            ) from error
        check_scores("evaluate", shapes)
        self.scores = tuple(shapes)
        for name, shape in shapes.items():
            if shape.shape != ():
                raise ValueError(
                    f"evaluate returned {name} of shape {shape.shape}; it must be a scalar."
                )
        self._resident, self._score = self._place.copies(list(constants)), score


def restore_rows(
    runs: Sequence[SweptRun],
    rows: Sequence[Row],
    round: int,
    stop_when: Callable[[Row], Any] | None,
) -> None:
    """Restore the runs of a group from the rows of earlier calls.

    Args:
      rows: as a file has them; ``stop_when`` gets them.
      round: finished rounds.
    """
    for row in rows:
        run = runs[row["run"] - runs[0].number]
        run.restore(row)
        run.ask(stop_when)
    for run in runs:
        run.is_over |= 0 < run.history.round < round


def advance_group(
    program: Program,
    runs: Sequence[SweptRun],
    round: int,
    length_of: Callable[[int], int],
    stop_when: Callable[[Row], Any] | None = None,
) -> Iterator[tuple[int, list[Row]]]:
    """Run chunks of rounds of a group that a program has started.

    Yields (finished rounds, new rows as a file has them) after each, with the rows of the runs that
    are not over; ``stop_when`` is called with them when the next chunk is asked for.

    Args:
      round: rounds that are finished already.
      length_of: finished rounds -> rounds of the next chunk; 0: there is none.
    """
    while (length := length_of(round)) and not all(run.is_over for run in runs):
        goes_on = np.array([not run.is_over for run in runs])
        metrics, scores, diverged = program.advance(round, length, goes_on)
        check_scores("evaluate", scores, runs[0].history.names(metrics))
        round += length
        rows, going = [], [run for run in runs if not run.is_over]
        for place, run in enumerate(runs):
            run.diverged |= bool(diverged[place])
            if run in going:
                own = jax.tree.map(lambda leaf, place=place: leaf[place], (metrics, scores))
                rows.append(run.enter(round, *own))
        yield round, rows
        for run in going:
            run.ask(stop_when)


def summary_of(runs: Sequence[SweptRun], scores: Sequence[str]) -> dict[str, float]:
    """Summarise the last rows for a progress bar: means; of a privacy budget, the largest."""
    rows = [run.history.rows[-1] for run in runs]
    spent = dict.fromkeys(runs[0].history.guarantees(0), np.max)
    shown: dict[str, Any] = {**dict.fromkeys(("loss", *scores), np.mean), **spent}
    return {name: float(of([row[name] for row in rows])) for name, of in shown.items()}


def _as_arrays(point: Point) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.result_type(float)) for name, value in point.items()}
