"""The compiled program of a sweep, and the group of runs that it advances."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fedjax_lab import tree
from fedjax_lab.clients.mapping import ClientMap
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.device_memory import device_memory
from fedjax_lab.simulation.book import History
from fedjax_lab.simulation.debugging import values_are_checked
from fedjax_lab.simulation.divergence import Watch
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_rounds
from fedjax_lab.simulation.run import Run
from fedjax_lab.simulation.sweep_result import Point
from fedjax_lab.types import Key, Params, PyTree

# Share of a device's memory for a sweep; the rest is for other data.
_SHARE_OF_MEMORY = 0.8

Started = tuple[Params, Key, Point]  # initial global model, the run's key, hyperparameters


def group_size(num_runs: int, multiple: int, capacity: int) -> int:
    """Choose the number of runs in a group, so that all groups have the same size.

    Args:
      num_runs: number of runs of the sweep.
      multiple: the size must be a multiple of this.
      capacity: number of runs that fit into memory; less than ``multiple`` counts as ``multiple``.
    """
    units = -(-num_runs // multiple)
    groups = -(-units // max(1, capacity // multiple))
    return multiple * -(-units // groups)


class Program:
    """The compiled programs of a group of runs: their start, a chunk of rounds, the global models.

    ``run_of`` makes a run from a point's values as keyword arguments, which are traced scalars.
    ``data`` has the values that all runs share: the clients' data and the frozen weights, or ().
    """

    def __init__(
        self,
        run_of: Callable[..., Run],
        client_map: ClientMap,
        place: Placement,
        evaluate: Callable[[Params], Mapping[str, Any]] | None,
        data: tuple[FederatedArrays, PyTree],
    ):
        self._run_of, self._client_map = run_of, client_map
        self._place, self._run_map, self._evaluate = place, place.client_map, evaluate
        self._data = place.copies(data)
        self._resident: PyTree = ()  # arrays that ``evaluate`` reads in addition to the params
        self._score: Callable[[PyTree, Params], PyTree] = lambda resident, params: {}
        self.scores: tuple[str, ...] = ()  # names of what ``evaluate`` returns
        self._compiled: dict[Any, Any] = {}
        self.compile_seconds = 0.0
        self.size = 0

    def fit(self, runs: list[Started], length: int, max_bytes: int | None) -> None:
        """Choose the size of a group, compile its program, and start the first group.

        The first guess comes from the size of the states, the answer from the memory that the
        compiled program needs.
        """
        one_run = (runs[0][0], runs[0][1], _as_arrays(runs[0][2]))
        state = jax.eval_shape(self._start_one, self._data, one_run, None)[1]
        self._structure = jax.tree.structure(state)
        self._trace_evaluation(jax.eval_shape(self._run_of(**runs[0][2]).served, state))
        multiple, num_devices = self._run_map.multiple, max(1, len(self._run_map.devices))
        budget = max_bytes or int(_SHARE_OF_MEMORY * device_memory())
        shared = tree.nbytes((self._data, self._resident))

        def size_for(capacity):
            return group_size(len(runs), multiple, capacity)

        def needed_by(size):
            self.size = size
            self._compiled.clear()
            self.start(runs[:size])
            memory = self._chunk(0, length).memory_analysis()
            if memory is None:  # not every backend reports it
                return 0
            new = memory.output_size_in_bytes - memory.alias_size_in_bytes
            return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new

        # A program needs memory for its states at least twice: as arguments and as results.
        most = size_for(num_devices * (budget - shared) // (2 * tree.nbytes(state)))
        needed = needed_by(most)
        if needed > budget and most > multiple:
            least = needed_by(multiple)
            if least <= budget:  # the memory grows linearly with the number of runs
                per_run = (needed - least) / (most - multiple)
                capacity = multiple + int((budget - least) / per_run)
                size = size_for(min(capacity, most - multiple))
                if size > multiple and needed_by(size) > budget:
                    needed_by(multiple)
            needed = least
        if needed > budget and max_bytes is not None:
            raise ValueError(
                f"max_bytes is {max_bytes:,}; it must be at least {needed:,}, the memory for "
                f"{multiple} run{'s' * (multiple > 1)} at once."
            )

    def start(
        self, runs: list[Started], leaves: Sequence[Sequence[np.ndarray]] | None = None
    ) -> None:
        """Start a group of runs. If there are too few, the last one is repeated.

        Args:
          runs: at most ``size`` runs.
          leaves: results of ``leaves`` for each run, to continue from; None: start before round 0.
        """
        self._states = None  # make room
        extra = self.size - len(runs)
        runs = [*runs, *[runs[-1]] * extra]
        models, keys, points = zip(*runs, strict=True)
        values = {name: jnp.stack([_as_arrays(p)[name] for p in points]) for name in points[0]}
        items = (tree.stack(list(models)), jnp.stack(keys), values)
        models, *self._runs = self._place.divided(items)
        if leaves is not None:
            stacks = map(np.stack, zip(*leaves, *[leaves[-1]] * extra, strict=True))
            states = jax.tree.unflatten(self._structure, map(jnp.asarray, stacks))
            self._states = self._place.divided(states)
            return
        arguments = (self._data, (models, *self._runs))
        self._states = self._compile("start", self.start_runs, (), *arguments)(*arguments)

    def leaves(self, count: int) -> list[list[np.ndarray]]:
        """Copy the arrays of the first runs' states to the host.

        Args:
          count: number of runs.
        """
        stacks = jax.device_get(jax.tree.leaves(self._states))
        return [[np.array(stack[run]) for stack in stacks] for run in range(count)]

    def advance(self, first: int, length: int) -> tuple[PyTree, ...]:
        """Run rounds ``first`` to ``first + length``.

        Args:
          first: number of the first round.
          length: rounds.

        Returns:
          (metrics [runs, length], scores [runs], bool [runs]: whether the models are finite).
        """
        rounds = self._chunk(first, length)
        arguments = self._arguments(first)
        self._states = None  # donated
        if values_are_checked():
            rounds = jax.jit(functools.partial(self.advance_runs, length))
        try:
            self._states, *found = rounds(*arguments)
        except FloatingPointError as error:
            last = first + length - 1
            raise FloatingPointError(f"in rounds {first} to {last} of a run: {error}") from error
        return tuple(jax.device_get(found))

    def served(self, count: int) -> Params:
        """Return the global models of the first ``count`` runs, on the host."""
        serve = self._compile("serve", self._serve, (), self._states, self._runs)
        return jax.tree.map(
            lambda leaf: leaf[:count], jax.device_get(serve(self._states, self._runs))
        )

    def _arguments(self, first):
        return (
            self._states,
            self._runs,
            (*self._data, self._resident, jnp.asarray(first, jnp.int32)),
        )

    def _chunk(self, first, length):
        rounds = functools.partial(self.advance_runs, length)
        return self._compile(length, rounds, (0,), *self._arguments(first))

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
          shared: (clients, frozen).
          runs: (models, keys, {name: values}), leaves [runs, ...].
        """
        return self._map(self._start_one, shared, runs)

    def _start_one(self, shared, run, _):
        clients, frozen = shared
        params, key, values = run
        return {}, self._run_of(**values).start(params, clients, key, frozen)

    def advance_runs(self, length: int, states: PyTree, runs: PyTree, shared: PyTree) -> PyTree:
        """Run ``length`` rounds of all runs; this function is compiled.

        It returns (states, metrics, scores, whether the global models are finite).

        Args:
          length: rounds of the chunk, static.
          states: states of the runs, leaves [runs, ...].
          runs: (keys, {name: values}), leaves [runs, ...].
          shared: (clients, frozen, the evaluation's data, the first round).
        """

        def one(shared, run, _):
            clients, frozen, resident, first = shared
            state, (key, values) = run
            run = self._run_of(**values)
            run_rounds = build_rounds(run, Placement(self._client_map))
            state, metrics = run_rounds(state, clients, key, first, length, frozen)
            params = run.served(state)
            return {}, (state, metrics, self._score(resident, params), tree.all_finite(params))

        return self._map(one, shared, (states, runs))

    def _serve(self, states, runs):
        def one(_shared, run, _):
            state, (_, values) = run
            return {}, self._run_of(**values).served(state)

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


def advance_group(
    program: Program,
    watch: Watch,
    histories: Sequence[History],
    first: int,
    rounds: int,
    eval_every: int,
) -> Iterator[int]:
    """Advance the runs that a program has started; yields the finished rounds after each chunk.

    Args:
      program: has started the runs.
      watch: says which of them have diverged; these get no scores.
      histories: of the runs; each chunk adds a row.
      first: finished rounds.
      rounds: finished rounds afterwards.
      eval_every: rounds of a chunk.
    """
    watch.start()
    for start in range(first, rounds, eval_every):
        length = min(eval_every, rounds - start)
        metrics, scores, is_finite = program.advance(start, length)
        watch.look(start, metrics, is_finite)
        for slot, history in enumerate(histories):
            lost = np.nan if watch.diverged[slot] else 0.0
            history.enter(
                start + length,
                {name: values[slot] for name, values in metrics.items()},
                {name: float(values[slot]) + lost for name, values in scores.items()},
            )
        yield start + length


def _as_arrays(point: Point) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.result_type(float)) for name, value in point.items()}
