"""``simulate`` runs a whole simulation: chunks of rounds, evaluation and checkpoints.

All randomness of a run depends on (seed, round, client id). On one kind of machine the same seed
gives the same bits, whether or not the run was interrupted. Other client maps and other devices
agree up to rounding.
"""

import sys
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
from fedjax_lab.simulation.client_data import client_data_of, with_times, without_examples
from fedjax_lab.simulation.client_updates import ClientUpdates
from fedjax_lab.simulation.computation import Computation, params_of
from fedjax_lab.simulation.debugging import debuggable
from fedjax_lab.simulation.divergence import Watch
from fedjax_lab.simulation.history import (
    History,
    RunProgress,
    SimulationResult,
    warn_without_steps,
)
from fedjax_lab.simulation.host_store import with_all_rows
from fedjax_lab.simulation.loggers import Hook, Hooks, Profile, Progress
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.run_log import Row, RunLog, identity, with_program
from fedjax_lab.simulation.scores import Evaluators
from fedjax_lab.simulation.stop import check_not_ended, end_later_runs, stop_on_signal
from fedjax_lab.types import FedState, Params
from fedjax_lab.wrappers.ledger import key_of


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
        (``with_dp``) continues its count of rounds, and no draw is repeated. None: a fresh start.
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
    scores = Evaluators(evaluate, diagnose, score_clients)
    check_functions(**scores._asdict(), stop_when=stop_when)
    check_outputs(run_dir, profile_dir, config, score_clients)
    every = check_lengths(rounds, eval_every, checkpoint_every)
    check_int("seed", seed, minimum=0, maximum=LAST_SEED)
    config = config or {}
    this_call = check_not_ended(run_dir, rounds)
    keep_by_default()
    processes = Processes.here()
    asked = Placement.of(client_map, client_store, params_sharding, processes=processes)
    progress, hooks = progress and processes.is_first, Hooks(on_row if processes.is_first else ())

    def say(note: str) -> None:
        if note and progress:
            print(f"{algorithm.name}: {note}", file=sys.stderr, flush=True)

    given = Schedule.of("simulate", schedule)
    batches, clients = given.bind(clients)
    state = None if state is None else with_all_rows(state)
    model = processes.local(params) if state is None else params_of(algorithm, state)
    key = key_of(seed, state)
    run = Computation(
        algorithm, batches, on_nonfinite, rounds, eval_every, key, model, lowering=lowering
    )
    clients = with_times(clients, times, algorithm, run.params)
    if state is not None:
        state = processes.gathered(state, everywhere=True)
        run = run.going_on_from(state, without_examples(clients, batches, eval_every))
    client_data = client_data_of(run, clients, processes)
    say(client_data.note)
    shapes = run.shapes(client_data.clients)  # this checks the schedule, too
    asked.model_layout(run.params, run.frozen)  # this checks params_sharding
    functions = {"evaluate": evaluate, "diagnose": diagnose}
    keeps = run_dir is not None
    entries = identity(run, client_data, asked, functions, seed, config, keeps, given, times)
    processes.agree({**entries, "run_dir": keeps, "every": every, **config})
    client_data.check(run)
    guarantees = run.guarantees(client_data.clients)
    chosen = choose_placement(run, asked, client_data, shapes, diagnose)
    say(chosen.note)
    chunks = Chunks(run, chosen, client_data, shapes, run_dir)
    say(chunks.note)
    recorded = {**with_program(entries, run, chosen.placement, chunks), **config}
    scored = score_clients is not None
    run_log = processes.together(
        lambda: RunLog(run_dir, every=every, config=recorded, processes=processes, scored=scored)
    )
    bar, profile = Progress(algorithm.name, rounds, progress), Profile(profile_dir)
    watch, updates = Watch(algorithm.name, on_nonfinite), ClientUpdates(run_dir, processes)
    with (
        processes.reporting_losses(),
        closing(run_log),
        closing(bar),
        closing(client_data),
        stop_on_signal() as stop,
    ):
        history = History(run, guarantees)
        history.go_on_from(run_log.resume(chunks))
        clock = run_log.clock
        run_progress = RunProgress(run, history, hooks, stop_when, clock)
        if run_log.unscored:
            run_log.client_row(scores.of_clients(chunks, run_progress))
        bar.go_on_from(run_progress.round, finished=run_progress.enough)
        shown = ("loss", *guarantees(0))
        while run_progress.goes_on(processes, stop.is_set()):
            length = run.chunk_length(run_progress.round)
            if not chunks.prepare(length, stop.unless_set):
                break
            stop.at_once = False
            bar.start_clock(chunks.compile_seconds)
            with profile.once():
                metrics = chunks.advance(run_progress.round, length)
                counted, lost = watch.look(run_progress.round, metrics, chunks.is_finite())
                metrics = chunks.keep(run_progress.round, counted, metrics)
            run_progress.diverged = bool(lost)
            if not metrics:  # on_nonfinite="stop", in the first round of a chunk
                break
            metrics = updates.take(run_progress.round, metrics)
            values = scores.row(chunks, run_progress, metrics)
            row = run_progress.enter(metrics, values)
            run_log.rows([row])
            bar.update(row["round"], {name: row[name] for name in (*shown, *values)})
            if not run_progress.diverged:
                run_log.checkpoint(run_progress.round, history.rows)
            run_progress.tell(row)
            run_log.client_row(scores.of_clients(chunks, run_progress))
        if not run_progress.diverged:
            run_log.checkpoint(run_progress.round, history.rows, ends=True)
        processes.together(lambda: run_log.summarise(**run_progress.summary()))
        if run_progress.stopped is None:
            warn_without_steps([history])
    if stop.is_set() or run_progress.stopped == "interrupt":
        end_later_runs(stop.signal, this_call)
    return SimulationResult(
        on_any_device(chunks.params),
        chunks.result(),
        history.rows,
        clock.seconds,
        clock.compile_seconds,
        run_progress.stopped,
        stop.signal if run_progress.stopped == "interrupt" else None,
    )
