"""Rounds of a method as one compiled program, timed sample by sample."""

import time

import jax
import jax.numpy as jnp

from fedjax_lab.clients.mapping import parse_client_map
from fedjax_lab.round import plan_round
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.rounds import build_chunk


class Rounds:
    """A program of ``length`` rounds. Each sample continues from the state of the last one.

    Attributes:
      client_map: the client map, the planner's choice unless it was given.
      compile_seconds: time to trace, lower and compile.
      memory: the compiler's analysis of the program's memory.
      state: the state after the last sample.
    """

    def __init__(
        self,
        algorithm,
        params,
        clients,
        schedule,
        length,
        *,
        client_map=None,
        target=None,
        seed=0,
    ):
        run = Computation(algorithm, schedule)
        key = jax.random.key(seed)
        self._first = jax.jit(run.start)(params, clients, key, ())
        if client_map is None:
            shapes = jax.eval_shape(schedule.draw, clients, key, jnp.int32(0))
            client_map = plan_round(algorithm, self._first, shapes).client_map
        self._place = Placement(parse_client_map(client_map, target), target=target)
        self._data = self._place.copies((clients, key))
        self._length, self.client_map = length, client_map
        self.restart()
        began = time.perf_counter()
        lowered = build_chunk(run, self._place).lower(
            self.state, *self._data, jnp.int32(0), length=length
        )
        self._program = lowered.compile()
        self.compile_seconds = time.perf_counter() - began
        self.memory = self._program.memory_analysis()

    def restart(self):
        """Return to the state before the first round."""
        self._round = 0
        [self.state] = self._place.copies((jax.tree.map(jnp.copy, self._first),))

    def sample(self):
        """Run the program once; returns its seconds."""
        first = jnp.int32(self._round)
        self._round += self._length
        began = time.perf_counter()
        self.state, _ = jax.block_until_ready(self._program(self.state, *self._data, first))
        return time.perf_counter() - began
