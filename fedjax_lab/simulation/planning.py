"""The client map of a run, chosen by the planner or measured."""

import functools
import sys

import jax
import jax.numpy as jnp

from fedjax_lab.clients import planner
from fedjax_lab.data import FederatedArrays
from fedjax_lab.round import Algorithm, plan_round
from fedjax_lab.simulation.fingerprint import hash_function
from fedjax_lab.simulation.rounds import Schedule, build_chunk, place
from fedjax_lab.simulation.run_dir import versions
from fedjax_lab.types import FedState, Key


def plan_run(
    algorithm: Algorithm,
    schedule: Schedule,
    state: FedState,
    clients: FederatedArrays,
    key: Key,
    client_map: str,
    progress: bool,
) -> str:
    """The client map that the planner chooses.

    Args:
      algorithm: the method.
      schedule: how batches are drawn.
      state: before round 0; for "auto" its shapes will do.
      clients: the clients' data.
      key: the run's key.
      client_map: "auto" or "measure".
      progress: say on stderr what was chosen, and why.
    """
    batch = jax.eval_shape(schedule.draw, clients, key, jnp.zeros((), jnp.int32))
    plan = plan_round(algorithm, state, batch)
    if client_map == "measure":
        shapes = [f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves((state, batch))]
        device = jax.devices()[0]
        drawn = [schedule.record(), hash_function(schedule.sample_cohort)]
        method = [algorithm.name, dict(algorithm.hyperparameters), shapes, drawn]
        machine = [device.device_kind, jax.device_count(), versions()]
        chosen, remembered = planner.fastest(
            planner.alternatives(plan.client_map, schedule.cohort_size),
            functools.partial(_seconds, algorithm, schedule, state, clients, key),
            [method, machine],
        )
        plan = planner.Plan(chosen, "measured before" if remembered else "measured")
    if progress:
        print(f"{algorithm.name}: clients mapped with {plan}", file=sys.stderr, flush=True)
    return plan.client_map


def _seconds(algorithm, schedule, state, clients, key, client_map, length=5) -> float:
    """Time of a few rounds under a client map."""
    state, clients, key = place((state, clients, key), client_map)
    frozen, state = state.frozen, state._replace(frozen=())
    run_chunk = build_chunk(algorithm, schedule, client_map)
    first = jnp.zeros((), jnp.int32)
    return planner.timed(
        lambda: run_chunk(
            jax.tree.map(jnp.copy, state), clients, key, first, length=length, frozen=frozen
        )
    )
