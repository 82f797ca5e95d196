"""Many rounds as one compiled program: a scan over client sampling and rounds."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.clients.resident import flatten_examples
from fedjax_lab.clients.store import window_rows
from fedjax_lab.machine.target import here
from fedjax_lab.round import Algorithm, build_round
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.types import FedState, Metrics


def build_rounds(run: Computation, place: Placement) -> Callable[..., tuple[FedState, Metrics]]:
    """Build ``run_rounds(state, clients, key, first_round, length, frozen=(), window=None)``.

    It returns (state, metrics) with the metrics of its rounds stacked [length]. ``length`` is a
    Python int. ``frozen`` becomes ``state.frozen``, which states are passed without. With the store
    "host", ``window`` has the ids of the state's rows.

    Args:
      run: the computation; its method, its schedule and its policy for clients that are not finite.
      place: the placement; its client map and client store.
    """
    round_of = functools.partial(
        build_round,
        run.algorithm,
        place.client_map,
        run.in_round,
        place.target,
        params_sharding=place.params_sharding,
        lowering=run.lowering,
    )
    of_all_rows = round_of(rows=place.rows)

    def run_rounds(state, clients, key, first_round, length, frozen=(), window=None):
        round_fn = of_all_rows if window is None else round_of(rows=window_rows(window, place.rows))
        if (here() if place.target is None else place.target).platform == "tpu":
            examples = flatten_examples(clients.examples)
            clients = dataclasses.replace(clients, examples=examples)

        def body(state, round):
            batch = run.draw(clients, key, round)
            measured = dict(batch.measured or {})
            state, metrics = round_fn(state._replace(frozen=frozen), batch)
            if "local_steps" not in metrics:
                raise ValueError(
                    f"algorithm is {run.algorithm.name}, whose clients report no local_steps, by "
                    "which a run counts gradients: put local_steps: (the client's steps, 1.0) into "
                    "the report of client_update."
                )
            if batch.expected_size is not None:
                measured["overflow"] = jnp.isnan(batch.expected_size)
            # An asynchronous method does not wait for the round's clients; it reports its own time.
            return state._replace(frozen=()), {**measured, **metrics}

        return jax.lax.scan(body, state, first_round + jnp.arange(length, dtype=jnp.int32))

    return run_rounds


_kept: list[tuple[Algorithm, dict[Any, jax.stages.Wrapped]]] = []  # at most one


def keep_chunks(algorithm: Algorithm) -> None:
    """Let later runs of this very object trace and compile its chunks no more; one is kept.

    What its functions close over must not change from now on, since nothing would notice.
    """
    if not _kept or _kept[0][0] is not algorithm:
        _kept[:] = [(algorithm, {})]


def build_chunk(
    run: Computation, place: Placement, state_sharding: Any = None
) -> jax.stages.Wrapped:
    """Jit ``build_rounds``, with the state donated and ``length`` static.

    The data and the frozen weights are arguments, never constants of the program.

    Args:
      state_sharding: shardings of the returned state; None: the compiler chooses.
    """
    options: dict[str, Any] = {"static_argnames": "length", "donate_argnums": 0}
    if state_sharding is not None:
        options["out_shardings"] = state_sharding, None
    is_kept = bool(_kept) and _kept[0][0] is run.algorithm
    if not is_kept or place.target or place.layout:
        return jax.jit(build_rounds(run, place), **options)
    shardings = tuple(jax.tree.leaves(state_sharding)), jax.tree.structure(state_sharding)
    policies = run.in_round, run.lowering, run.schedule
    how = place.client_map.name, place.client_store, policies, shardings
    chunks = _kept[0][1]
    if how not in chunks:
        chunks[how] = jax.jit(build_rounds(run, place), **options)
    return chunks[how]
