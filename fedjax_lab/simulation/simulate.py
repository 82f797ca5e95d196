"""``simulate`` runs a whole simulation: chunks of rounds, evaluation and checkpoints.

All randomness of a run depends on (seed, round, client id). On one kind of machine the same seed
gives the same bits, whether or not the run was interrupted. Other client maps and other devices
agree up to rounding.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

from fedjax_lab.checks import LAST_SEED, check_int
from fedjax_lab.clients.model_axis import ParamsSharding
from fedjax_lab.clients.sources import on_any_device
from fedjax_lab.data import ClientTimes, FederatedArrays, FederatedStream
from fedjax_lab.data.cohort import Schedule, ScheduleOptions, scheduled
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.arguments import (
    check_functions,
    check_lengths,
    check_outputs,
    check_simulate,
)
from fedjax_lab.simulation.chunk_planner import choose_placement
from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.client_data import client_data_of
from fedjax_lab.simulation.client_updates import ClientUpdates
from fedjax_lab.simulation.debugging import debuggable
from fedjax_lab.simulation.history import (
    History,
    SimulationResult,
    is_enough,
    reason_to_stop,
    warn_without_steps,
)
from fedjax_lab.simulation.identity import check_config_names, identity, with_program
from fedjax_lab.simulation.loggers import Hook, Hooks, Profile, Progress
from fedjax_lab.simulation.placement import Request
from fedjax_lab.simulation.prepare import computation_of
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.run_log import RunLog
from fedjax_lab.simulation.scores import Evaluators
from fedjax_lab.simulation.stop import check_not_ended, end_later_runs, stop_on_signal
from fedjax_lab.storage.rows import Row
from fedjax_lab.types import FedState, Params


@scheduled
@debuggable
def simulate(
    algorithm: Algorithm,
    params: Params | None,
    clients: FederatedArrays | FederatedStream,
    *,
    state: FedState | None = None,
    rounds: int,
    times: ClientTimes | None = None,
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
    score_clients: Callable[[Params], Mapping[str, Any]] | None = None,
    profile_dir: str | Path | None = None,
    progress: bool = False,
    on_nonfinite: str = "exclude",
    lowering: str = "auto",
    **schedule: Unpack[ScheduleOptions],
) -> SimulationResult:
    """Run a method for ``rounds`` rounds and return its history.

    With several processes of ``jax.distributed``, each process makes the same call and gets the
    same result. Only process 0 writes files, calls ``on_row`` and shows progress. See
    ``fedjax_lab.simulation.processes``.

    ``run_dir`` receives metrics and checkpoints. A second call with the same arguments resumes
    where the first one stopped. A larger ``rounds`` continues from its end. The result equals that
    of an uninterrupted run bit for bit. The directory is bound to the run's content: params or
    state, frozen weights, data, the compiled rounds, ``evaluate``, ``diagnose`` and
    ``sample_cohort``.

    Ctrl-C or SIGTERM finishes the running chunk, saves, and returns; a second signal stops at once.
    While the first chunk compiles, the first signal ends the run at once. The signal also ends a
    loop of runs: until ``fedjax_lab.forget_signal`` is called, later calls raise
    ``KeyboardInterrupt``, except the one that resumes this run.

    The run ends as "diverged", with a warning, if the global model or all participants of a round
    are not finite. The model is then not evaluated (its row has NaN under the names that
    ``evaluate`` returns), and no checkpoint is written.

    ``fedjax_lab.simulation.debugging`` says what JAX's settings for debugging do.

    Args:
      algorithm: the method.
      params: the initial global model; None with ``state``.
      clients: the clients' data, on the device or a stream of examples on the host; see
        ``fedjax_lab.data.stream``.
      state: initial state in place of ``algorithm.init(params, ...)``, such as ``result.state`` of
        another run, wherever its client rows are. Rounds are counted from 0. A private state
        (``with_dp``) continues its count of rounds, and no draw is repeated. The method's arguments
        hold, such as who attacks, whatever the state has of earlier ones. None: a fresh start.
      rounds: total number of rounds.
      times: availability, times for computing and sending, over-selection and a deadline for
        stragglers. The history then has ``simulated_seconds``. None: all clients are available, and
        time is not simulated.
      seed: seed of client sampling, mini-batches and everything random inside a round.
      evaluate: params -> dict of numbers or arrays. It may keep the params.
      diagnose: state -> dict of numbers or arrays, called with each evaluation; such as
        ``build_control_error`` of the recipe ``control_error`` returns. It may keep
        ``state.server``. Of ``state.clients`` it must copy what it keeps: the next rounds take this
        memory.
      eval_every: rounds between evaluations, which are also the compiled chunks.
      client_map: how clients are mapped to devices; see ``fedjax_lab.clients.mapping``. "auto" lets
        the planner choose. "measure" times its two best plans for a few rounds each and remembers
        the faster one.
      client_store: where the table of client state is stored: a full copy on each "device" that
        runs clients, "sharded" over them, or on the "host". "auto" chooses by its size. With
        "host", ``result.state.clients`` is a ``HostTable``. See
        ``fedjax_lab.simulation.placement``.
      params_sharding: with a ``client_map`` such as "shard_map:CxM", how M devices divide the
        params, everything of their shape, and frozen weights. Either a function (path of a leaf
        such as "dense_0/kernel", leaf) -> ``PartitionSpec`` over the axis "model", or a prefix tree
        of specs (with frozen weights, a pair of them). None: each array along its longest axis that
        M divides.
      run_dir: directory for metrics and checkpoints. None: nothing is written.
      checkpoint_every: rounds between checkpoints, rounded up to a multiple of
        ``eval_every``; None: a tenth of the run. The last round is always saved.
      config: additional entries of config.json. "dataset" and "model" are their names in a report.
      on_row: function of a row, or several, called with each row of the history, first with the
        rows from before an interruption; see ``fedjax_lab.simulation.loggers``. A function that
        raises an error is not called again, with a warning.
      stop_when: function of a row. If it returns a true value, the run ends after that row and its
        checkpoint. It is called after ``on_row`` with the same rows, except the row of a diverged
        run. ``run_dir`` is not bound to it: the same call returns the existing result, and a call
        with another ``stop_when`` continues. Its errors are raised.
      score_clients: global model -> dict of numbers or arrays, called after each row for
        ``clients.jsonl`` of ``run_dir``; such as the mean accuracy over the clients' own test
        examples. Neither rows nor ``seconds`` depend on it, and ``run_dir`` is not bound to it.
      profile_dir: folder for a profile of ``eval_every`` compiled rounds; see ``jax.profiler``.
        None: no profile.
      progress: show progress on stderr.
      on_nonfinite: what to do about a client whose message or row is not finite. "exclude" leaves
        it out of its round; rows have the total ``nonfinite_clients``. "stop" ends the run before
        that round, as diverged. "keep" aggregates it like the others.
      lowering: of the convolutions and poolings of the loss, also of a model of your own. "auto":
        the form that is fast on this machine; see ``fedjax_lab.models.lowering``. "lax": as
        ``jax.lax`` has them. An evaluation has an argument ``lowering`` of its own.

    Returns:
      ``SimulationResult``: ``params``, ``state``, ``history``, ``stopped``.

    Raises:
      FloatingPointError: with ``jax_debug_nans`` or ``jax_debug_infs``, a round has such a value;
        rounds then run one by one, and the message names the round.
      TypeError: an argument has the wrong type, or a function does not return a dict of numbers.
      ValueError: an argument is out of range; a label has no logit; ``state`` belongs to another
        method, fits on no device, or is private with unknown noise or cost; a round's examples do
        not fit into a stream's memory; ``run_dir`` has more rounds; all checkpoints are damaged;
        ``score_clients`` is given without ``run_dir``; ``evaluate`` or ``diagnose`` returned a
        reserved name; processes have different arguments; or ``jax_disable_jit`` is set.
      FileExistsError: ``run_dir`` has another run.
      BlockingIOError: another process is writing to ``run_dir``.
      OSError: the disk is full.
      ConnectionError: another process of the run has ended, or does not answer.
      KeyboardInterrupt: a second signal came; or one has ended an earlier run of this process.
      RuntimeError: another process of the run has failed (the message says why); or a Poisson
        cohort had more clients than slots, which has a probability of 1e-9.
    """
    check_simulate(algorithm, params, clients, state)
    functions = {"evaluate": evaluate, "diagnose": diagnose}
    check_functions(**functions, score_clients=score_clients, stop_when=stop_when)
    check_outputs(run_dir, profile_dir, config, score_clients)
    every = check_lengths(rounds, eval_every, checkpoint_every)
    check_int("seed", seed, minimum=0, maximum=LAST_SEED)
    this_call = check_not_ended(run_dir, rounds)
    keep_by_default()
    processes, config = Processes.here(), config or {}
    asked = Request.of(client_map, client_store, params_sharding)
    hooks = Hooks(on_row if processes.is_first else ())
    bar = Progress(algorithm.name, rounds, progress and processes.is_first)

    # What is computed.
    given = Schedule.of("simulate", schedule)
    run, clients = computation_of(
        algorithm,
        params,
        clients,
        given,
        times,
        seed=seed,
        state=state,
        rounds=rounds,
        eval_every=eval_every,
        on_nonfinite=on_nonfinite,
        lowering=lowering,
    )
    client_data = client_data_of(run, clients)
    bar.note(client_data.note)
    shapes = run.shapes(client_data.clients)  # this checks the schedule, too
    asked.layout(run.params, run.frozen)  # this checks params_sharding
    keeps = run_dir is not None
    record = identity(run, client_data, asked, functions, seed, given, times, keeps)
    check_config_names(config, record)
    processes.agree({**record, "run_dir": keeps, "every": every, **config})
    client_data.check(run)
    guarantees = run.guarantees(client_data.clients)

    # Where, and where it is recorded.
    chosen = choose_placement(run, asked, client_data, shapes, diagnose)
    bar.note(chosen.note)
    chunks = Chunks(run, chosen, client_data, shapes, run_dir)
    bar.note(chunks.note)
    record = {**with_program(record, run, chosen.placement, chunks), **config}
    evaluators = Evaluators(run, chunks, evaluate, diagnose, score_clients)
    updates, profile = ClientUpdates(run_dir), Profile(profile_dir)

    with (
        processes.reporting_losses(),
        closing(bar),
        closing(client_data),
        stop_on_signal() as stop,
        closing(RunLog(run_dir, every, record, chunks, score_clients is not None)) as run_log,
    ):
        history = History(run, guarantees, run_log.history)
        diverged, enough, clock = False, False, run_log.clock
        for row in history.rows:
            hooks(row)
            enough = is_enough(stop_when, row)
        if run_log.unscored:
            run_log.client_row(evaluators.of_clients(history.round, clock))
        bar.go_on_from(history.round, finished=enough)
        while history.round < rounds and not diverged:
            is_stopped, enough = processes.any_of(stop.is_set(), enough)
            first, length = history.round, run.chunk_length(history.round)
            if is_stopped or enough or not chunks.prepare(length, stop.unless_set):
                break
            stop.at_once = False
            bar.start_clock(chunks.compile_seconds)
            with profile.once():
                metrics, diverged = chunks.advance(first, length)
            if not metrics:  # on_nonfinite="stop", in the first round of a chunk
                break
            metrics = updates.take(first, metrics)
            scores = evaluators.row(history, metrics, diverged)
            row = history.enter(first + len(metrics["participants"]), metrics, scores)
            run_log.rows([row])
            bar.update(history.round, history.shown(scores))
            if not diverged:
                run_log.checkpoint(history.round, history.rows)
            with clock.uncounted():
                hooks(row)
            if not diverged:
                enough = is_enough(stop_when, row)
                run_log.client_row(evaluators.of_clients(history.round, clock))
        if not diverged:
            run_log.checkpoint(history.round, history.rows, ends=True)
        stopped = reason_to_stop(rounds - history.round, diverged, enough)
        summary = {"round": history.round, **clock.record(), **guarantees(history.round)}
        summary |= {"stopped": stopped, "interrupted": stopped == "interrupt"}
        processes.together(lambda: run_log.summarise(summary))
        if stopped is None:
            warn_without_steps([history])
    if stop.is_set() or stopped == "interrupt":
        end_later_runs(stop.signal, this_call)
    return SimulationResult(
        on_any_device(chunks.params),
        chunks.result(),
        history.rows,
        **clock.record(),
        stopped=stopped,
        signal=stop.signal if stopped == "interrupt" else None,
    )
