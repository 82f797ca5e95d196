"""The compiled program of a sweep, and the group of runs that it advances."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fedjax_lab import tree
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.device_memory import device_memory
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

Started = tuple[Params, Key, Point]  # initial global model, the run's key, hyperparameters


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
        self.compile_seconds = 0.0
        self.size = self.count = 0
        self._may_end = may_end

    def fit(
        self, runs: list[Started], length: int, max_bytes: int | None, size: int | None = None
    ) -> None:
        """Choose the size of a group by compiling its program.

        The first guess comes from the size of the states, the answer from the memory that the
        compiled program needs.

        Args:
          size: the size, if it is known; nothing is compiled yet. None: it is chosen.

        Raises:
          ValueError: ``max_bytes`` does not suffice.
        """
        one_run = (runs[0][0], runs[0][1], _as_arrays(runs[0][2]))
        state = jax.eval_shape(self._start_one, self._data, one_run, None)[1]
        self.structure = jax.tree.structure(state)
        self._trace_evaluation(jax.eval_shape(self._run_of(runs[0][2]).algorithm.params, state))
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

    def start(self, runs: list[Started], states: FedState | None = None) -> None:
        """Start a group of runs. If there are too few, the last one is repeated.

        Args:
          runs: at most ``size`` runs.
          states: as ``restore`` takes them; None: start before round 0.
        """
        self._states = None  # make room
        self.count = len(runs)
        self._places = np.minimum(np.arange(self.size), self.count - 1)
        runs = [runs[place] for place in self._places]
        models, keys, points = zip(*runs, strict=True)
        values = {name: jnp.stack([_as_arrays(p)[name] for p in points]) for name in points[0]}
        items = (tree.stack(list(models)), jnp.stack(keys), values)
        models, *self._runs = self._place.divided(items)
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
          (metrics [count, length], scores [count], bool [count]: whether the models are finite).
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
        return tuple(jax.tree.map(lambda leaf: leaf[: self.count], jax.device_get(results)))

    def lower_one(self, run: Started, length: int) -> jax.stages.Lowered:
        """Lower the rounds of a single run, which do not depend on the size of a group."""
        model, key, point = run
        values = _as_arrays(point)
        state = jax.eval_shape(self._start_one, self._data, (model, key, values), None)[1]

        def rounds(state, key, values, clients, frozen, first):
            run_rounds = build_rounds(self._run_of(values), self._of_clients)
            return run_rounds(state, clients, key, first, length, frozen)

        return jax.jit(rounds).lower(state, key, values, *self._data, jnp.zeros((), jnp.int32))

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

    # The compiled functions. Those of a single run have the form of a ``ClientFn``.

    def _map(self, one, shared, runs):
        return self._run_map.run(one, shared, runs, {}, None)[1]

    def start_runs(self, shared: PyTree, runs: PyTree) -> PyTree:
        """Create the states of all runs before round 0; this function is compiled.

        Args:
          runs: (models, keys, {name: values}), leaves [runs, ...].
        """
        return self._map(self._start_one, shared, runs)

    def _start_one(self, shared, run, _):
        clients, frozen = shared
        params, key, values = run
        return {}, self._run_of(values).start(params, clients, key, frozen)

    def advance_runs(self, length: int, states: PyTree, runs: PyTree, shared: PyTree) -> PyTree:
        """Run ``length`` rounds of all runs; this function is compiled.

        It returns (states, metrics, scores, whether the global models are finite).

        Args:
          states: states of the runs, leaves [runs, ...].
          runs: (keys, {name: values}, which of them go on or ()), leaves [runs, ...].
        """

        def one(shared, run, _):
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
            return {}, (state, metrics, self._score(resident, params), tree.all_finite(params))

        return self._map(one, shared, (states, runs))

    def _serve(self, states, runs):
        def one(_shared, run, _):
            state, (_, values) = run
            return {}, self._run_of(values).algorithm.params(state)

        return self._map(one, (), (states, runs))

    def _trace_evaluation(self, params: Params) -> None:
        """Trace ``evaluate`` once, so that its data become arguments, not constants."""
        if self._evaluate is None:
            return
        try:
            traced, shapes = jax.make_jaxpr(self._evaluate, return_shape=True)(params)
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

        def score(resident, params):
            run = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, resident))
            return jax.tree.unflatten(jax.tree.structure(shapes), run(*jax.tree.leaves(params)))

        self._resident, self._score = self._place.copies(list(traced.consts)), score


class RunGroup:
    """The runs that a program advances together: their rows, which diverged, and which are over.

    Args:
      histories: of the runs.
      watch: says which of them have diverged; these get no scores.
      round: finished rounds.
      stop_when: as in ``sweep``; it gets the rows of earlier calls first.
      first: number of the first run.
      rows: as of an earlier call.

    Attributes:
      histories: of the runs.
      round: finished rounds.
      rows: all rows as a file has them: with the number of the ``run`` and whether it ``diverged``.
      diverged: bool [runs], which of them diverged.
      is_over: bool [runs], which of them have ended: by ``stop_when``, or, if there is such a
        function, because they diverged.
    """

    def __init__(
        self,
        histories: Sequence[History],
        watch: Watch,
        round: int = 0,
        stop_when: Callable[[Row], Any] | None = None,
        first: int = 0,
        rows: Sequence[Row] = (),
    ):
        self.histories, self.round, self.rows = histories, round, list(rows)
        self._watch, self._stop_when, self._first = watch, stop_when, first
        self.diverged, self.is_over = np.zeros((2, len(histories)), bool)
        for marked in rows:
            place = marked["run"] - first
            row = {name: value for name, value in marked.items() if name not in _MARKS}
            self.diverged[place] = marked["diverged"]
            histories[place].go_on_from([row])
            self._ask(place)
        for place, history in enumerate(histories):
            if history.rows and history.rows[-1]["round"] < round:
                self.is_over[place] = True

    def advance(self, program: Program, rounds: int, eval_every: int) -> Iterator[list[Row]]:
        """Run chunks of rounds; yields after each the new ``rows``, of the runs that are not over.

        ``stop_when`` is called with the rows when the next chunk is asked for.
        """
        while self.round < rounds and not self.is_over.all():
            length = min(eval_every, rounds - self.round)
            metrics, scores, is_finite = program.advance(self.round, length, ~self.is_over)
            self.diverged |= self._watch.look(self.round, metrics, is_finite)[1]
            self.round += length
            check_scores("evaluate", scores, self.histories[0].names(metrics))
            going = np.flatnonzero(~self.is_over).tolist()
            rows = [self._enter(place, metrics, scores) for place in going]
            self.rows += rows
            yield rows
            for place in going:
                self._ask(place)

    def summary(self, scores: Sequence[str]) -> dict[str, float]:
        """Summarise the last rows for a progress bar: means; of a privacy budget, the largest."""
        rows = [of_run.rows[-1] for of_run in self.histories]
        spent = dict.fromkeys(self.histories[0].guarantees(0), np.max)
        shown: dict[str, Any] = {**dict.fromkeys(("loss", *scores), np.mean), **spent}
        return {name: float(of([row[name] for row in rows])) for name, of in shown.items()}

    def _enter(self, place: int, metrics: PyTree, scores: PyTree) -> Row:
        of_run, of_model = jax.tree.map(lambda values: values[place], (metrics, scores))
        lost = np.nan if self.diverged[place] else 0.0
        numbers = {name: float(value) + lost for name, value in of_model.items()}
        marks = {"run": self._first + place, "diverged": int(self.diverged[place])}
        return {**marks, **self.histories[place].enter(self.round, of_run, numbers)}

    def _ask(self, place: int) -> None:
        """End a run that diverged, or of whose last row ``stop_when`` says so."""
        if self._stop_when is not None:
            row = self.histories[place].rows[-1]
            self.is_over[place] = self.diverged[place] or is_enough(self._stop_when, row)


def _as_arrays(point: Point) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.result_type(float)) for name, value in point.items()}
