"""The client map of a run: the planner is asked about the very program that is going to run."""

import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_lab.clients import planner
from fedjax_lab.clients.mapping import parse_client_map, shares_of
from fedjax_lab.clients.model_axis import ParamsSharding, model_layout
from fedjax_lab.data import FederatedArrays
from fedjax_lab.machine.compiler import abstract, try_compile
from fedjax_lab.machine.target import Target, here
from fedjax_lab.round import Algorithm, RoundFn, build_round
from fedjax_lab.simulation.fingerprint import hash_function
from fedjax_lab.simulation.processes import first_says, several
from fedjax_lab.simulation.rounds import Schedule, build_chunk, place
from fedjax_lab.simulation.run_dir import versions
from fedjax_lab.simulation.stores import state_sharding
from fedjax_lab.types import FedState, Key


class ChunkPlanner:
    """Plans chunks of rounds; what it compiles to find out is not compiled again.

    Args:
      algorithm: the method.
      schedule: how batches are drawn.
      state: a state with its frozen weights, or the shapes of it.
      clients: the clients' data, or their shapes.
      key: the run's key, or its shape.
      on_nonfinite: as of ``build_round``.
      target: the machine; None: the running one.
      client_store: as of ``simulate``. With "host", whose programs take other arguments, what is
        compiled here is an estimate.
      params_sharding: as of ``simulate``.

    Attributes:
      batch: the shapes of a round's batch.
      compile_seconds: time spent compiling.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        schedule: Schedule,
        state: FedState,
        clients: FederatedArrays,
        key: Key,
        on_nonfinite: str = "exclude",
        target: Target | None = None,
        client_store: str = "device",
        params_sharding: ParamsSharding = None,
    ):
        self._algorithm, self._schedule, self._on_nonfinite = algorithm, schedule, on_nonfinite
        self._state, self._clients, self._key = state, clients, key
        self._target, self._client_store = target, client_store
        self._params_sharding = params_sharding
        first = jax.ShapeDtypeStruct((), jnp.int32)
        self.batch = jax.eval_shape(schedule.draw, clients, key, first)
        self._compiled: tuple[str, int, Any] | None = None  # one is kept: they may be large
        self.compile_seconds = 0.0

    def plan(self, length: int) -> planner.Plan:
        """What "auto" means for chunks of so many rounds.

        Args:
          length: rounds.
        """
        target = here() if self._target is None else self._target

        def needs(client_map):
            began = time.perf_counter()
            arguments, named = self.program(client_map, length)
            program, needed = try_compile(target, *arguments, **named)
            self._compiled = None if program is None else (client_map, length, program)
            self.compile_seconds += time.perf_counter() - began
            return needed

        return planner.plan(
            self.round_of,
            self._state,
            self.batch,
            target=target,
            needs=needs if target.devices else None,
            also=[length, [f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves(self._clients)]],
            table_shares=self.table_shares,
        )

    def table_shares(self, client_map: str) -> int:
        """Among how many devices a client map divides the clients' rows.

        Args:
          client_map: a name, "auto" and "measure" excepted.
        """
        if self._client_store not in ("auto", "sharded"):
            return 1
        shares = shares_of(client_map, self._target)
        return 1 if self._clients.num_clients % shares else shares

    def round_of(self, client_map: str) -> RoundFn:
        """The round under a client map.

        Args:
          client_map: a name.
        """
        return build_round(self._algorithm, client_map, self._on_nonfinite, self._target)

    def program(self, client_map: str, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A chunk's function under a client map with the shapes of its arguments, and named ones.

        Args:
          client_map: a name, "auto" and "measure" excepted.
          length: rounds.
        """
        mapped = parse_client_map(client_map, self._target)
        devices, state = mapped.devices, self._state._replace(frozen=())
        frozen, params = self._state.frozen, jax.eval_shape(self._algorithm.params, state)
        layout = model_layout(params, mapped.mesh, self._params_sharding, frozen)
        if self._target is not None:
            devices = devices or self._target.devices[:1]
        shard = self.table_shares(client_map) > 1
        store = "sharded" if shard else "device"
        placed = layout and state_sharding(state, client_map, store, layout, self._target)
        run_chunk = build_chunk(
            self._algorithm,
            self._schedule,
            client_map,
            self._on_nonfinite,
            self._target,
            store,
            self._params_sharding,
            placed,
        )
        whole = state, self._clients, self._key, frozen
        if layout is None:
            rows = abstract(state.clients, devices, split=shard)
            state, clients, key, frozen = abstract(whole, devices)
            state = state._replace(clients=rows)
        else:
            copies = jax.tree.map(lambda _: NamedSharding(layout.mesh, PartitionSpec()), whole[1:3])
            state, clients, key, frozen = jax.tree.map(
                lambda leaf, to: leaf.update(sharding=to),
                abstract(whole, ()),
                (placed, *copies, layout.shardings(layout.frozen)),
            )
        first = jax.ShapeDtypeStruct((), jnp.int32)
        return (run_chunk, state, clients, key, first), {"length": length, "frozen": frozen}

    def choose(self, how: str, length: int, progress: bool) -> tuple[str, dict[int, Any]]:
        """(the client map, its compiled programs by length), for the running machine.

        Args:
          how: "auto" or "measure".
          length: rounds of a chunk.
          progress: say the choice on stderr.
        """
        plan = self._plan_for_all() if several() else self.plan(length)
        if how == "measure":
            plan = self._measured(plan)
        if progress:
            print(
                f"{self._algorithm.name}: clients mapped with {plan}", file=sys.stderr, flush=True
            )
        program = self.compiled(plan.client_map, length)
        if self._client_store == "host":
            program = None
        return plan.client_map, {} if program is None else {length: program}

    def _plan_for_all(self) -> planner.Plan:
        """A plan over the devices of all processes, by an estimate of process 0.

        Compilers are not asked: of several processes one may remember the answer and another not,
        and what is compiled for all devices is compiled by all processes.
        """
        alone = dataclasses.replace(here(), devices=())
        found = planner.plan(self.round_of, self._state, self.batch, target=alone)
        whole, _, share = found.client_map.partition("/")
        if alone.platform != "cpu" and not whole.startswith(("shard_map", "vmap")):
            share = found.client_map
        client_map = f"shard_map/{share}" if share else "shard_map"
        name, reason = first_says([client_map, found.reason])
        return planner.Plan(name, f"{jax.process_count()} processes; {reason}")

    def compiled(self, client_map: str, length: int) -> Any:
        """The program of a chunk, if planning compiled it last; else None.

        Args:
          client_map: its name.
          length: rounds.
        """
        if self._compiled is None or self._compiled[:2] != (client_map, length):
            return None
        return self._compiled[2]

    def _measured(self, plan: planner.Plan) -> planner.Plan:
        leaves = jax.tree.leaves((self._state, self.batch))
        shapes = [f"{leaf.dtype}{leaf.shape}" for leaf in leaves]
        device = jax.devices()[0]
        drawn = [self._schedule.record(), hash_function(self._schedule.sample_cohort)]
        method = [self._algorithm.name, dict(self._algorithm.hyperparameters), shapes, drawn]
        machine = [device.device_kind, jax.device_count(), versions()]
        chosen, remembered = planner.fastest(
            planner.alternatives(plan.client_map, self._schedule.slots(self._clients)),
            self._seconds,
            [method, machine],
        )
        return planner.Plan(chosen, "measured before" if remembered else "measured")

    def _seconds(self, client_map: str, length: int = 5) -> float:
        """Time of a few rounds under a client map."""
        state, clients, key = place((self._state, self._clients, self._key), client_map)
        frozen, state = state.frozen, state._replace(frozen=())
        run_chunk = build_chunk(self._algorithm, self._schedule, client_map)
        first = jnp.zeros((), jnp.int32)
        run = functools.partial(run_chunk, length=length, frozen=frozen)
        return planner.timed(lambda: run(jax.tree.map(jnp.copy, state), clients, key, first))
