"""Choice of a run's client map: the planner compiles the program that is going to run."""

import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.clients import planner
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.compiler import abstract, try_compile
from fedjax_lab.machine.target import here
from fedjax_lab.round import RoundFn, build_round
from fedjax_lab.simulation.client_data import ClientData
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.host_store import check_host_store
from fedjax_lab.simulation.placement import HOST, Placement, Request
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.rounds import build_chunk
from fedjax_lab.storage.fingerprint import hash_function
from fedjax_lab.storage.run_dir import versions
from fedjax_lab.types import FedState

_TIMED_ROUNDS = 5  # of a measurement


class ChunkPlanner:
    """Plans chunks of rounds; programs compiled for planning are reused by the run.

    Args:
      run: what is computed.
      asked: the requested placement. With the store "host", whose programs take other arguments,
        the programs compiled here give an estimate.
      shapes: shapes of a state.
      clients: the clients' data, or their shapes.

    Attributes:
      batch: the shapes of a round's batch.
      compile_seconds: time spent compiling.
    """

    def __init__(
        self, run: Computation, asked: Request, shapes: FedState, clients: FederatedArrays
    ):
        self._run, self._asked, self._target = run, asked, asked.target
        self._state = shapes._replace(frozen=run.frozen)
        self._clients = run.schedule.read_in_rounds(clients)
        first = jax.ShapeDtypeStruct((), jnp.int32)
        self.batch = jax.eval_shape(run.draw, clients, run.key, first)
        self._compiled: dict[tuple[str, int], Any] = {}  # one is kept: they may be large
        self.compile_seconds = 0.0

    def choose_map(self, length: int) -> planner.MapChoice:
        """Resolve "auto" for chunks of a given number of rounds; other client maps stay."""
        if not self._asked.client_map.is_planned:
            return planner.MapChoice(self._asked.client_map.name, "as given")
        target = here() if self._target is None else self._target

        def needs(client_map):
            began = time.perf_counter()
            arguments, named = self.program(client_map, length)
            program, needed = try_compile(target, *arguments, **named)
            self._compiled = {(client_map, length): program}
            self.compile_seconds += time.perf_counter() - began
            return needed

        return planner.choose_map(
            self.round_of,
            self._state,
            self.batch,
            target=target,
            needs=needs if target.devices else None,
            also=[length, [f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves(self._clients)]],
        )

    def round_of(self, client_map: str) -> RoundFn:
        """Build the round under a client map."""
        run = self._run
        return build_round(
            run.algorithm, client_map, run.in_round, self._target, lowering=run.lowering
        )

    def program(self, client_map: str, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a chunk's function under a client map, and the shapes of its arguments.

        Args:
          client_map: a name, "auto" and "measure" excepted.
        """
        state, frozen = self._state._replace(frozen=()), self._state.frozen
        place = self._placement(client_map)
        run_chunk = build_chunk(self._run, place, place.left_by_programs(state))
        arguments = state, self._clients, self._run.key, frozen
        devices = () if self._target is None else self._target.devices[:1]
        shapes = abstract(arguments, devices)
        if (shardings := place.of_arguments(*arguments)) is not None:
            shapes = jax.tree.map(lambda leaf, to: leaf.update(sharding=to), shapes, shardings)
        *shapes, frozen = shapes
        first = jax.ShapeDtypeStruct((), jnp.int32)
        return (run_chunk, *shapes, first), {"length": length, "frozen": frozen}

    def _placement(self, client_map: str) -> Placement:
        """Return the placement under a client map, with the table on the devices."""
        store = "sharded" if self._divides_table(client_map) else "device"
        asked = self._asked.with_map(client_map)
        return asked.placement(store, self._run.params, self._run.frozen)

    def _divides_table(self, client_map: str) -> bool:
        return self._asked.with_map(client_map).divides_table(self._clients.num_clients)

    def choose(self, length: int) -> tuple[planner.MapChoice, dict[int, Any]]:
        """Choose (the client map, its compiled programs by length) for this machine."""
        processes = Processes.here()
        if processes.is_multiprocess:  # of which one may have a stored answer, and another may not
            reason = f"{processes.size} processes; a share of the cohort for each of their devices"
            choice = planner.MapChoice("shard_map", reason)
        else:
            choice = self.choose_map(length)
        if self._asked.client_map.name == "measure":
            choice = self._measured(choice)
        program = self.compiled(choice.client_map, length)
        return choice, {} if program is None else {length: program}

    def compiled(self, client_map: str, length: int) -> Any:
        """Return the program of a chunk if planning compiled it last, else None."""
        return self._compiled.get((client_map, length))

    def _measured(self, choice: planner.MapChoice) -> planner.MapChoice:
        leaves = jax.tree.leaves((self._state, self.batch))
        shapes = [f"{leaf.dtype}{leaf.shape}" for leaf in leaves]
        device = jax.devices()[0]
        schedule, algorithm = self._run.schedule, self._run.algorithm
        drawn = [schedule.record(), hash_function(schedule.sample_cohort)]
        # The traced round knows the dtypes in which it computes.
        traced = planner.traced_text(self.round_of("scan"), self._state, self.batch)
        asked = [self._run.in_round, self._asked.client_store, traced]
        method = [algorithm.name, dict(algorithm.hyperparameters), shapes, drawn, asked]
        machine = [device.device_kind, jax.device_count(), versions()]
        candidates = list(planner.alternatives(choice.client_map, schedule.slots(self._clients)))
        if self._asked.client_store == "sharded" and not self._divides_table(candidates[-1]):
            candidates.pop()
        chosen, remembered = planner.fastest(candidates, self._seconds, [method, machine])
        return planner.MapChoice(chosen, "measured before" if remembered else "measured")

    def _seconds(self, client_map: str) -> float:
        """Measure the time of a few rounds under a client map."""
        place, run = self._placement(client_map), self._run
        values = run.params, self._clients, run.key, run.frozen
        state = jax.jit(run.start)(*values) if run.state is None else run.state
        state, clients, key, frozen = place.copies((state, *values[1:]))
        state = Processes.here().put(state, place.state_sharding(state))
        run_chunk = build_chunk(run, place)
        first = jnp.zeros((), jnp.int32)
        rounds = functools.partial(run_chunk, length=_TIMED_ROUNDS, frozen=frozen)
        return planner.timed(lambda: rounds(jax.tree.map(jnp.copy, state), clients, key, first))


class Chosen(NamedTuple):
    """The placement of a run, and the programs that were compiled to choose it.

    Attributes:
      placement: the placement.
      programs: programs of chunks, by their number of rounds.
      compile_seconds: time spent compiling.
      note: a line about the choice for the progress of a run, or "".
    """

    placement: Placement
    programs: dict[int, Any]
    compile_seconds: float
    note: str


def choose_placement(
    run: Computation,
    asked: Request,
    client_data: ClientData,
    shapes: FedState,
    diagnose: Any,
) -> Chosen:
    """Choose the placement of a run.

    Raises:
      ValueError: the request cannot be met, or the state fits on no device.
    """
    processes = Processes.here()
    on_host = processes.first_says(asked.keeps_rows_on_host(shapes))
    if on_host:
        check_host_store(asked, diagnose)
        asked = dataclasses.replace(asked, client_store=HOST)
    programs: dict[int, Any] = {}
    seconds, note = 0.0, ""
    if asked.client_map.is_planned:
        of_chunk = shapes
        if on_host:  # a program gets the rows of its own clients
            of_chunk = shapes._replace(clients=tree.with_rows(shapes.clients, 1))
        planner = ChunkPlanner(run, asked, of_chunk, client_data.clients)
        choice, programs = planner.choose(min(client_data.longest, run.rounds))
        asked, note = asked.with_map(choice.client_map), f"clients mapped with {choice}"
        seconds = planner.compile_seconds
    if on_host:
        return Chosen(asked.placement(HOST, run.params, run.frozen), {}, seconds, note)

    def on_devices() -> Placement:
        store = asked.store_on_devices(client_data.clients.num_clients)
        placement = asked.placement(store, run.params, run.frozen)
        placement.check_memory(shapes, run.algorithm.name)
        return placement

    return Chosen(processes.together(on_devices), programs, seconds, note)
