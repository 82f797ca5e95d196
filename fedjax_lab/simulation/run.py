"""The host's loop: compiled chunks of rounds, with evaluation, logging and checkpoints between.

All randomness of a run depends on (seed, round, client id). The same seed gives the same bits
on one kind of machine, whether or not the run was interrupted; other client maps and other
devices agree up to rounding.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_int
from fedjax_lab.clients import planner
from fedjax_lab.clients.mapping import PLANNED, check_client_map
from fedjax_lab.data import Devices, FederatedArrays
from fedjax_lab.round import Algorithm, plan_round
from fedjax_lab.simulation.loggers import Hook, Hooks
from fedjax_lab.simulation.loop import Tally, start_state, stop_on_interrupt, traced
from fedjax_lab.simulation.progress import Progress
from fedjax_lab.simulation.recorder import Recorder, Row
from fedjax_lab.simulation.rounds import Schedule, build_chunk, place
from fedjax_lab.simulation.run_dir import versions
from fedjax_lab.types import FedState, Params


class SimulationResult(NamedTuple):
    """What a run leaves.

    Attributes:
      params: the last server model.
      state: the method's last state.
      history: one row per evaluation. ``round`` counts finished rounds; ``bytes_up``,
        ``bytes_down`` and ``gradients`` (mini-batch gradients taken) are exact totals since
        round 0; other metrics of the rounds are means over the rounds since the last row;
        the rest is what ``evaluate`` returned.
      seconds: time spent in rounds and evaluation, compilation left out; the parts before an
        interruption are included.
      compile_seconds: time spent compiling rounds, likewise.
      interrupted: whether Ctrl-C ended the run early.
    """

    params: Params
    state: FedState
    history: list[Row]
    seconds: float
    compile_seconds: float
    interrupted: bool


def simulate(
    algorithm: Algorithm,
    params: Params,
    clients: FederatedArrays,
    *,
    rounds: int,
    cohort_size: int,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    replace: bool = False,
    weights: str = "uniform",
    full_examples: bool = False,
    devices: Devices | None = None,
    seed: int = 0,
    evaluate: Callable[[Params], Mapping[str, Any]] | None = None,
    diagnose: Callable[[FedState], Mapping[str, Any]] | None = None,
    eval_every: int = 10,
    client_map: str = "auto",
    run_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    config: Mapping[str, Any] | None = None,
    on_row: Hook | Iterable[Hook] = (),
    profile_dir: str | Path | None = None,
    progress: bool = False,
) -> SimulationResult:
    """Run ``rounds`` rounds of a method and return its history.

    With ``run_dir``, metrics and checkpoints are kept there, and a second call with the same
    arguments goes on where the first one stopped; the result equals that of an uninterrupted
    run bit for bit. Ctrl-C finishes the running chunk, saves, and returns; a second Ctrl-C
    stops at once.

    Args:
      algorithm: the method.
      params: the first server model.
      clients: the clients' data.
      rounds: rounds of the whole run.
      cohort_size: clients per round, S.
      batch_size: examples per mini-batch, B.
      local_steps: local steps per client; exactly one of this and ``local_epochs``.
      local_epochs: passes over each client's data.
      replace: draw mini-batches with replacement; otherwise in shuffled passes.
      weights: "uniform" or "examples" (the clients' sizes).
      full_examples: give methods the client's whole data set for full local gradients.
      devices: unequal numbers of local steps, a time budget, drop-outs; None: every client
        does all its work. History then has ``simulated_seconds`` since round 0.
      seed: of the cohorts, mini-batches and everything random inside a round.
      evaluate: params -> dict of scalars.
      diagnose: state -> dict of scalars, called with each evaluation; such as
        ``fedjax_lab.simulation.diagnostics.build_control_error`` returns.
      eval_every: rounds between evaluations, which are also the compiled chunks.
      client_map: see ``fedjax_lab.clients.mapping``; "auto" lets the planner choose, "measure"
        times its two best plans first (a few rounds each) and remembers the answer.
      run_dir: where to keep metrics and checkpoints; None keeps nothing.
      checkpoint_every: rounds between checkpoints, rounded up to a multiple of
        ``eval_every``; None: a tenth of the run. The last round is always saved.
      config: written to config.json beside what this function knows.
      on_row: a function of a row, or several, called with each row of the history, those from
        before an interruption first; see ``fedjax_lab.simulation.loggers``. One that raises an
        error is left out from then on, with a warning.
      profile_dir: a folder for a profile of ``eval_every`` rounds, once they are compiled; see
        ``fedjax_lab.simulation.loop.traced``. None: no profile.
      progress: show progress on stderr.

    Raises:
      ValueError: an argument is out of range, or a checkpoint is damaged.
      FileExistsError: ``run_dir`` holds another run.
    """
    check_int("rounds", rounds, minimum=1)
    check_int("eval_every", eval_every, minimum=1)
    check_int("seed", seed, minimum=0)
    if checkpoint_every is not None:
        check_int("checkpoint_every", checkpoint_every, minimum=1)
    schedule = Schedule(
        cohort_size,
        batch_size,
        local_steps,
        local_epochs,
        replace,
        weights,
        full_examples,
        devices,
    )
    check_client_map(client_map)
    hooks = Hooks(on_row)
    key = jax.random.key(seed)
    state = start_state(algorithm, params, clients, schedule, key)
    if client_map in PLANNED:
        client_map = _plan(algorithm, schedule, state, clients, key, client_map, progress)
    state, clients, key = place((state, clients, key), client_map)
    recorder = Recorder(
        run_dir,
        every=checkpoint_every or -(-rounds // 10),
        config={
            "algorithm": algorithm.name,
            "hyperparameters": dict(algorithm.hyperparameters),
            "partition": dataclasses.asdict(clients.partition),
            "num_clients": clients.num_clients,
            "rounds": rounds,
            **schedule._asdict(),
            "devices": None if devices is None else dataclasses.asdict(devices),
            "seed": seed,
            "eval_every": eval_every,
            "client_map": client_map,
            "num_params": sum(leaf.size for leaf in jax.tree.leaves(params)),
            **(config or {}),
            "versions": versions(),
        },
    )
    round, state, history = recorder.begin(state)
    state = place(state, client_map)
    run_chunk = build_chunk(algorithm, schedule, client_map)
    compiled: dict[int, Any] = {}
    bar = Progress(algorithm.name, round, rounds, progress)
    tally = Tally(algorithm, params, schedule, history)
    seconds, compile_seconds = recorder.spent
    for row in history:
        hooks(row)
    began = time.perf_counter() - seconds - compile_seconds
    with closing(recorder), closing(bar), stop_on_interrupt() as stop:
        while round < rounds and not stop.is_set():
            length = min(eval_every, rounds - round)
            first = jnp.asarray(round, jnp.int32)
            if length not in compiled:
                before = time.perf_counter()
                lowered = run_chunk.lower(state, clients, key, first, length=length)
                compiled[length] = lowered.compile()
                compile_seconds += time.perf_counter() - before
                bar.start_clock()
            with traced(profile_dir):
                state, metrics = compiled[length](state, clients, key, first)
                if profile_dir is not None:
                    jax.block_until_ready(state)
            profile_dir = None  # one profile is enough
            round += length
            scores = {} if evaluate is None else evaluate(algorithm.params(state))
            found = {} if diagnose is None else diagnose(state)
            scores = {name: float(value) for name, value in {**scores, **found}.items()}
            row = {"round": round, **tally.row(metrics), **scores}
            history.append(row)
            seconds = time.perf_counter() - began - compile_seconds
            recorder.row(row, seconds, compile_seconds)
            bar.update(round, {"loss": row["loss"], **scores})
            recorder.checkpoint(round, state, history, last=round == rounds or stop.is_set())
            began += hooks(row)
    interrupted = round < rounds
    recorder.summarise(
        round=round, seconds=seconds, compile_seconds=compile_seconds, interrupted=interrupted
    )
    return SimulationResult(
        algorithm.params(state), state, history, seconds, compile_seconds, interrupted
    )


def _plan(algorithm, schedule, state, clients, key, client_map, progress) -> str:
    """The client map that the planner chooses, said on stderr."""
    batch = jax.eval_shape(schedule.draw, clients, key, jnp.zeros((), jnp.int32))
    plan = plan_round(algorithm, state, batch)
    if client_map == "measure":
        shapes = [f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves((state, batch))]
        device = jax.devices()[0]
        method = [algorithm.name, dict(algorithm.hyperparameters), shapes, *schedule[1:]]
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
    run_chunk = build_chunk(algorithm, schedule, client_map)
    first = jnp.zeros((), jnp.int32)
    return planner.timed(
        lambda: run_chunk(jax.tree.map(jnp.copy, state), clients, key, first, length=length)
    )
