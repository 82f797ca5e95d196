"""The host's loop: compiled chunks of rounds, with evaluation, logging and checkpoints between.

All randomness of a run depends on (seed, round, client id). The same seed gives the same bits
on one kind of machine, whether or not the run was interrupted; other client maps and other
devices agree up to rounding.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.checks import LAST_SEED, MOST_ROUNDS, check_choice, check_int
from fedjax_lab.clients.mapping import PLANNED, check_client_map, parse_client_map
from fedjax_lab.clients.model_axis import ParamsSharding
from fedjax_lab.data import ClientTimes, Devices, FederatedArrays, FederatedStream
from fedjax_lab.data.cohort import CohortSampler, check_cohorts
from fedjax_lab.round import ON_NONFINITE, Algorithm
from fedjax_lab.simulation import processes
from fedjax_lab.simulation.arguments import check_simulate, check_stop_when, warn_of_statistics
from fedjax_lab.simulation.chunk_planner import ChunkPlanner
from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.feed import feed_of
from fedjax_lab.simulation.fingerprint import hash_program
from fedjax_lab.simulation.host_chunks import HostChunks
from fedjax_lab.simulation.host_processes import DividedHostChunks
from fedjax_lab.simulation.identity import run_contents, run_record
from fedjax_lab.simulation.loggers import Hook, Hooks
from fedjax_lab.simulation.loop import (
    Tally,
    Watch,
    adopt_state,
    closed,
    first_state,
    guarantees,
    is_enough,
    params_of,
    scores_of,
    traced,
)
from fedjax_lab.simulation.programs import keep_by_default
from fedjax_lab.simulation.progress import Progress
from fedjax_lab.simulation.recorder import Recorder, Row, check_names, go_on
from fedjax_lab.simulation.result import SimulationResult
from fedjax_lab.simulation.rounds import Schedule, build_chunk, place
from fedjax_lab.simulation.stop import stop_on_signal
from fedjax_lab.simulation.stores import (
    check_host_store,
    choose_store,
    left_by_chunks,
    place_model,
    start_on_host,
    state_sharding,
    stays_on_host,
)
from fedjax_lab.simulation.timed import record_times, with_times
from fedjax_lab.types import FedState, Params


def simulate(
    algorithm: Algorithm,
    params: Params | None,
    clients: FederatedArrays | FederatedStream,
    *,
    state: FedState | None = None,
    rounds: int,
    cohort_size: int,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    replace: bool = False,
    weights: str = "uniform",
    full_examples: bool = False,
    devices: Devices | None = None,
    times: ClientTimes | None = None,
    sample_cohort: CohortSampler | None = None,
    sampling: str = "without_replacement",
    seed: int = 0,
    evaluate: Callable[[Params], Mapping[str, Any]] | None = None,
    diagnose: Callable[[FedState], Mapping[str, Any]] | None = None,
    eval_every: int = 10,
    client_map: str = "auto",
    client_store: str = "auto",
    params_sharding: ParamsSharding = None,
    run_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    config: Mapping[str, Any] | None = None,
    on_row: Hook | Iterable[Hook] = (),
    stop_when: Callable[[Row], Any] | None = None,
    profile_dir: str | Path | None = None,
    progress: bool = False,
    on_nonfinite: str = "exclude",
) -> SimulationResult:
    """Run ``rounds`` rounds of a method and return its history.

    With several processes of ``jax.distributed``, each makes the same call and gets the same
    result; process 0 alone writes, calls ``on_row`` and shows progress. See
    ``fedjax_lab.simulation.processes``.

    With ``run_dir``, metrics and checkpoints are kept there, and a second call with the same
    arguments goes on where the first one stopped, and with a larger ``rounds`` from its end; the
    result equals that of an uninterrupted run bit for bit. The directory is bound to its run by
    content: params or state, frozen weights, data, the compiled rounds, ``evaluate``, ``diagnose``
    and ``sample_cohort``. Ctrl-C or SIGTERM finishes the running chunk, saves, and returns; a
    second one stops at once.

    A server model that is not finite, or a round in which no participant is, ends the run as
    "diverged", with a warning: the model is not evaluated, and no checkpoint is written.

    Args:
      algorithm: the method.
      params: the first server model; None with ``state``.
      clients: the clients' data, on the device or a stream of examples on the host; see
        ``fedjax_lab.data.stream``.
      state: what the run starts from in place of ``algorithm.init(params, ...)``, such as
        ``result.state`` of another run; its rounds are counted from 0. None: a fresh start.
      rounds: rounds of the whole run.
      cohort_size: clients per round, S; with "poisson" sampling, how many are expected; with
        "cyclic", at most.
      batch_size: examples per mini-batch, B.
      local_steps: local steps per client; exactly one of this and ``local_epochs``.
      local_epochs: passes over each client's data.
      replace: draw mini-batches with replacement; otherwise in shuffled passes.
      weights: "uniform" or "examples" (the clients' sizes).
      full_examples: give methods the client's whole data set for full local gradients.
      devices: unequal numbers of local steps, a time budget, drop-outs; None: every client
        does all its work. History then has ``simulated_seconds`` since round 0.
      times: who is there, how long clients compute and send, over-selection, a deadline; history
        then has ``simulated_seconds``, too. None: everybody is there, and time is not counted.
      sample_cohort: (key, round) -> ids of the round's cohort, int32 [S], distinct clients with
        data, in operations that JAX can trace; it is compiled with the rounds. The ids of ten
        cohorts are checked. None: uniform.
      sampling: "without_replacement", cohorts of a fixed size; "poisson": each client with data
        takes part with the same probability, by a coin of its own; or "cyclic": groups of clients,
        dealt once, take turns. See ``fedjax_lab.data.poisson`` and ``fedjax_lab.data.cyclic``.
      seed: of the cohorts, mini-batches and everything random inside a round.
      evaluate: params -> dict of scalars.
      diagnose: state -> dict of scalars, called with each evaluation; such as
        ``fedjax_lab.simulation.diagnostics.build_control_error`` returns.
      eval_every: rounds between evaluations, which are also the compiled chunks.
      client_map: see ``fedjax_lab.clients.mapping``; "auto" lets the planner choose, "measure"
        times its two best plans first (a few rounds each) and remembers the answer.
      client_store: where the table of client rows stands: whole on each "device" that runs
        clients, "sharded" over them, or on the "host"; "auto" chooses by its size. With "host",
        ``result.state.clients`` is a ``HostTable``. See ``fedjax_lab.simulation.stores``.
      params_sharding: with a ``client_map`` of the kind "shard_map:CxM", how M devices divide the
        params, all that is shaped like them, and frozen weights: a function (path of a leaf such
        as "dense_0/kernel", leaf) -> ``PartitionSpec`` over the axis "model", or the specs
        themselves, a prefix of the params' tree (with frozen weights, a pair of prefixes). None:
        each array along its longest axis that M divides.
      run_dir: where to keep metrics and checkpoints; None keeps nothing.
      checkpoint_every: rounds between checkpoints, rounded up to a multiple of
        ``eval_every``; None: a tenth of the run. The last round is always saved.
      config: written to config.json beside what this function knows.
      on_row: a function of a row, or several, called with each row of the history, those from
        before an interruption first; see ``fedjax_lab.simulation.loggers``. One that raises an
        error is left out from then on, with a warning.
      stop_when: a function of a row; where it returns something true, the run ends after that row
        and its checkpoint. It is called after ``on_row``, with the same rows, but not with that
        of a run that diverged. It does not bind ``run_dir``: the same call returns what there
        is, and one with another ``stop_when`` goes on. Its errors are the caller's.
      profile_dir: a folder for a profile of ``eval_every`` rounds, once they are compiled; see
        ``fedjax_lab.simulation.loop.traced``. None: no profile.
      progress: show progress on stderr.
      on_nonfinite: a client whose message or row is not finite is left out of its round
        ("exclude"; rows have the total ``nonfinite_clients``), ends the run before that round,
        as diverged ("stop"), or is added up like the others ("keep").

    Raises:
      ValueError: an argument is out of range, ``state`` is not the method's or fits on no device, a
        round's examples do not fit into a stream's memory, ``run_dir`` holds more rounds, all
        checkpoints are damaged, ``evaluate`` or ``diagnose`` returned a name that rows have, or
        processes were given unlike arguments.
      FileExistsError: ``run_dir`` holds another run.
      BlockingIOError: another process is writing to ``run_dir``.
      OSError: the disk is full.
      ConnectionError: another process of the run has ended, or does not answer.
      RuntimeError: another process of the run has failed, and says why; or a Poisson cohort had
        more clients than slots, as one in 10^9 has.
    """
    check_int("rounds", rounds, minimum=1, maximum=MOST_ROUNDS)
    check_int("eval_every", eval_every, minimum=1)
    check_int("seed", seed, minimum=0, maximum=LAST_SEED)
    check_choice("on_nonfinite", on_nonfinite, (*ON_NONFINITE, "stop"))
    check_simulate(algorithm, params, clients, state)
    check_stop_when(stop_when)
    check_int("checkpoint_every", 1 if checkpoint_every is None else checkpoint_every, minimum=1)
    schedule = Schedule(
        cohort_size,
        batch_size,
        local_steps,
        local_epochs,
        replace,
        weights,
        full_examples,
        devices,
        sample_cohort,
        sampling,
    )
    check_client_map(client_map)
    processes.check_map(client_map)
    keep_by_default()
    is_first = processes.is_first()
    progress = progress and is_first
    hooks = Hooks(on_row if is_first else ())
    key = jax.random.key(seed)
    if times is not None:
        model = params if state is None else params_of(algorithm, state)
        clients = with_times(clients, times, algorithm, model)
    feed = feed_of(clients, schedule, key, rounds, eval_every, algorithm.name if progress else None)
    clients = feed.clients
    if sample_cohort is not None:
        check_cohorts(sample_cohort, clients, key, cohort_size, rounds)
    is_fresh = state is None
    start = first_state(algorithm, schedule)
    params, state = processes.local(params), processes.gathered(state, everywhere=True)
    if is_fresh:
        shapes = jax.eval_shape(start, params, clients, key, algorithm.frozen)
    else:
        adopted = adopt_state(algorithm, state, clients, schedule, key)
        shapes = state = adopted._replace(frozen=())
        params = algorithm.params(state)
    record = run_record(
        algorithm,
        params,
        clients,
        schedule,
        rounds=rounds,
        seed=seed,
        eval_every=eval_every,
        client_map=client_map,
        client_store=client_store,
        on_nonfinite=on_nonfinite,
        **record_times(clients),
        **feed.record(),
    )
    check_names({**record, "num_devices": 1}, config)
    if run_dir is not None or processes.several():
        functions = {"evaluate": evaluate, "diagnose": diagnose, "sample_cohort": sample_cohort}
        record["content"] = run_contents(
            params, None if is_fresh else state, feed.content(), algorithm.frozen, **functions
        )
    every = checkpoint_every or -(-rounds // 10)
    processes.agree({**record, "run_dir": run_dir is not None, "every": every, **(config or {})})
    feed.warn_of_nonfinite()
    warn_of_statistics(params)
    params, frozen, layout = place_model(params, algorithm.frozen, client_map, params_sharding)
    in_round = "keep" if on_nonfinite == "keep" else "exclude"
    spent = guarantees(algorithm, schedule, clients)
    table, planning_seconds = None, 0.0
    compiled: dict[int, Any] = {}
    if processes.first_says(stays_on_host(client_store, shapes)):
        client_store = "host"
        check_host_store(is_fresh, diagnose, client_map)
        state, table = start_on_host(algorithm, params, clients, key, frozen, schedule, progress)
        shapes = state
    if client_map in PLANNED:
        first = shapes
        if is_fresh and client_map == "measure":
            first = jax.jit(start)(params, clients, key, frozen)
        asked = algorithm, schedule, first._replace(frozen=frozen), clients, key, in_round
        planner = ChunkPlanner(*asked, client_store=client_store)
        client_map, compiled = planner.choose(client_map, min(feed.longest, rounds), progress)
        planning_seconds = planner.compile_seconds
        del first, asked, planner
    if table is None:
        sizes = shapes, clients.num_clients, algorithm.name, layout
        client_store = processes.together(lambda: choose_store(client_store, client_map, *sizes))
    sharding = state_sharding(shapes, client_map, client_store, layout)
    clients, (key, frozen) = feed.place(client_map), place((key, frozen), client_map)
    if is_fresh and table is None:
        params = place(params, client_map)
        state = jax.jit(start, out_shardings=sharding)(params, clients, key, frozen)
    state = processes.put(state, sharding)
    divided = (params_sharding, left_by_chunks(sharding, table, layout))
    run_chunk = build_chunk(algorithm, schedule, client_map, in_round, None, client_store, *divided)
    if table is None:
        chunks = Chunks(run_chunk, feed, key, frozen, compiled, planning_seconds)
    else:
        kind = DividedHostChunks if processes.several() else HostChunks
        chunks = kind(run_chunk, feed, key, frozen, table, schedule, client_map, layout)
    clients = feed.index  # of a stream's examples, a device is to hold two chunks' alone
    num_devices = max(1, len(parse_client_map(client_map).devices))
    record |= dict(client_map=client_map, client_store=client_store, num_devices=num_devices)
    if "content" in record:
        record["content"]["program"] = hash_program(chunks.lower(state, eval_every))
        processes.agree({"content": record["content"]})
    told = {**record, **(config or {})}
    recorder = processes.together(
        lambda: Recorder(run_dir, every=every, config=told, params=algorithm.params)
    )
    if table is not None and run_dir is not None and is_first:
        table.folder = run_dir
    bar = Progress(algorithm.name, 0, rounds, progress)
    watch = Watch(algorithm, on_nonfinite)
    with processes.told_of_losses(), closed(recorder, bar, feed), stop_on_signal() as stop:
        round, state, history = go_on(recorder, state, chunks, sharding)
        tally = Tally(algorithm, params, history, in_round == "exclude")
        seconds, chunks_before = recorder.spent
        chunks.compile_seconds = chunks_before + (chunks.compile_seconds if round < rounds else 0)
        enough = False
        for row in history:
            hooks(row)
            enough = is_enough(stop_when, row)
        bar.go_on_from(round, finished=enough)
        began = time.perf_counter() - seconds - chunks.compile_seconds
        while round < rounds:
            interrupted, enough = processes.any_of(stop.is_set(), enough)
            if interrupted or watch.diverged or enough:
                break
            length = min(eval_every, rounds - round)
            kept = jax.tree.map(jnp.copy, state) if on_nonfinite == "stop" else None
            if chunks.prepare(state, length):
                bar.start_clock()
            with traced(profile_dir):
                state, metrics = chunks.run(state, round, length)
                if (after := round + length) < rounds:
                    chunks.look_ahead(after, min(eval_every, rounds - after))
                if profile_dir is not None:
                    jax.block_until_ready(state)
            profile_dir = None  # one profile is enough
            good = watch.look(round, state, metrics)
            if good < length and kept is not None:  # the rounds before the one that is stopped at
                state, length = kept, good
                if not good:
                    break
                state, metrics = chunks.run(state, round, good)
            del kept
            chunks.keep()
            round += length
            scores: dict[str, Any] = {}
            if not watch.diverged or on_nonfinite == "stop":
                taken = tally.names(metrics) | spent(0).keys()
                own = processes.local(algorithm.params(state))
                scores = scores_of(evaluate, own, taken, "evaluate")
                if diagnose is not None:
                    own = processes.own(state._replace(frozen=frozen))
                    scores |= scores_of(diagnose, own, {*taken, *scores}, "diagnose")
            scores = {**spent(round), **scores}
            row = {"round": round, **tally.row(metrics), **scores}
            history.append(row)
            seconds = time.perf_counter() - began - chunks.compile_seconds
            recorder.row(row, seconds, chunks.compile_seconds)
            bar.update(round, {"loss": row["loss"], **scores})
            if not watch.diverged:
                # Before a shorter last chunk, too: there a longer run would go on.
                recorder.checkpoint(
                    round, state, history, chunks.whole, last=round + eval_every > rounds
                )
            began += hooks(row)
            enough = not watch.diverged and is_enough(stop_when, row)
        if not watch.diverged:
            recorder.checkpoint(round, state, history, chunks.whole, last=True)
        stopped = None
        if watch.diverged:
            stopped = "diverged"
        elif round < rounds:
            stopped = "stop_when" if enough else "interrupt"
        summary = {"round": round, "seconds": seconds, "compile_seconds": chunks.compile_seconds}
        summary |= {"interrupted": stopped == "interrupt", "stopped": stopped}
        processes.together(lambda: recorder.summarise(**summary))
    return SimulationResult(
        processes.local(algorithm.params(state)),
        processes.local(chunks.result(state)._replace(frozen=frozen)),
        history,
        seconds,
        chunks.compile_seconds,
        stopped,
        stop.signal if stopped == "interrupt" else None,
    )
