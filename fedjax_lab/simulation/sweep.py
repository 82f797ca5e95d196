"""A grid of seeds and scalar hyperparameters as one compiled program.

A run map says how the program maps the runs. Run maps are the client maps of
``fedjax_lab.clients.mapping`` one level up; nothing is summed over runs:

=============  ============================================
``vmap``       all runs at once
``scan``       one after the other
``chunk:n``    n at once, chunk after chunk
``shard_map``  an equal share of the runs on each device, which maps its share with ``scan`` on
               CPU and ``vmap`` elsewhere; devices do not communicate
``auto``       with several devices, ``shard_map`` over as many as are useful; otherwise ``scan`` on
               CPU (where batched products with per-run weights are slow) and ``vmap`` elsewhere
=============  ============================================

If all runs together need too much memory, groups of equal size run one after the other with the
same program.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from fedjax_lab.checks import check_int
from fedjax_lab.clients.mapping import (
    ON_SEVERAL,
    ClientMap,
    check_client_map,
    parse_client_map,
    single_device_map,
)
from fedjax_lab.clients.planner import over_devices, useful_devices
from fedjax_lab.data import ClientTimes, FederatedArrays
from fedjax_lab.data.cohort import Schedule, ScheduleOptions, scheduled
from fedjax_lab.data.streams import check_resident
from fedjax_lab.machine.keys import seeded
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.arguments import check_functions, check_lengths, check_simulate
from fedjax_lab.simulation.client_data import client_data_of
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.debugging import debuggable
from fedjax_lab.simulation.history import History, warn_without_steps
from fedjax_lab.simulation.identity import identity, sweep_identity
from fedjax_lab.simulation.loggers import Progress
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.prepare import computation_of
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.stop import check_not_ended, end_later_runs, stop_on_signal
from fedjax_lab.simulation.stopwatch import Stopwatch
from fedjax_lab.simulation.sweep_log import SweepFolder
from fedjax_lab.simulation.sweep_points import Point, build_all, check_seeds, list_points
from fedjax_lab.simulation.sweep_program import (
    Group,
    Program,
    SweptRun,
    choose_size,
    trace_evaluation,
)
from fedjax_lab.simulation.sweep_result import SweepResult
from fedjax_lab.storage.rows import Row
from fedjax_lab.storage.run_path import check_run_dir
from fedjax_lab.types import Key, Params


@scheduled
@debuggable
def sweep(
    build: Callable[..., Algorithm],
    params: Params | Callable[[Key], Params],
    clients: FederatedArrays,
    *,
    points: Mapping[str, Sequence[float]] | Sequence[Point],
    rounds: int,
    times: ClientTimes | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    evaluate: Callable[[Params], Mapping[str, Any]] | None = None,
    eval_every: int = 10,
    run_map: str = "auto",
    client_map: str = "auto",
    max_bytes: int | None = None,
    run_dir: str | Path | None = None,
    stop_when: Callable[[Row], Any] | None = None,
    progress: bool = False,
    on_nonfinite: str = "exclude",
    lowering: str = "auto",
    **schedule: Unpack[ScheduleOptions],
) -> SweepResult:
    """Run a method at every point with every seed, all runs in one compiled program.

    A run equals ``simulate`` with that point and that seed up to rounding: its client sampling,
    mini-batches and everything random depend on its seed alone. Ctrl-C finishes the running chunk
    and returns the results so far; a second Ctrl-C stops at once. Later runs of the process then
    raise ``KeyboardInterrupt``, as with ``simulate``.

    ``run_dir`` receives the rows and checkpoints of all runs. As with ``simulate``, a second call
    with the same arguments resumes where the first one stopped, a larger ``rounds`` continues from
    the end, and the result equals that of an uninterrupted sweep bit for bit. Each group of runs
    has a folder there. In ``metrics.jsonl``, ``run`` counts the runs from 0, all seeds of the
    first point first, and ``diverged`` is 1 from the row on in which a run diverged.

    Args:
      build: function that makes the method; it gets a point's values as keyword arguments, which
        are traced scalars.
      params: the initial global model of all runs, or a function of ``jax.random.key(seed)`` that
        makes one for each seed.
      clients: the clients' data.
      points: name -> floats, for all combinations; or a list of dicts. ``{}`` varies only the seed.
      rounds: rounds of each run.
      times: as in ``simulate``; message sizes are those of the first point.
      seeds: every point is run once with each seed.
      evaluate: params -> dict of scalars, in operations that JAX can trace.
      eval_every: rounds between evaluations, which are also the compiled chunks.
      run_map: how runs are mapped, see ``fedjax_lab.simulation.sweep``; or "shard_map:n" for n
        devices, and "shard_map/vmap" for how a device maps its share.
      client_map: how the clients of a run are mapped: "scan", "vmap", "chunk:n"; "auto" is
        ``scan`` on CPU and ``vmap`` elsewhere.
      max_bytes: memory of one device that the program may use; None: most of the device.
      run_dir: directory for rows and checkpoints. None: nothing is written.
      stop_when: function of a row of a run, as in ``simulate``. If it returns a true value, this
        run ends, and the others go on; so does a run that diverged. A run that is over keeps its
        last values: its later evaluations in ``history`` repeat them, and ``params`` has its
        model. A resumed sweep calls the function with all earlier rows. A run stays over if
        ``run_dir`` is continued, even with another ``stop_when``; where all runs of the same
        compiled program ended together, they go on with ``stop_when`` as it is then.
      progress: show progress on stderr.
      on_nonfinite: as in ``simulate``. With "stop", a run with a client that is not finite counts
        as diverged from that evaluation on.
      lowering: as in ``simulate``; ``evaluate`` has its own.

    Returns:
      ``SweepResult``: ``history``, ``params``, ``table()``, ``best()``.

    Raises:
      TypeError: ``clients`` is a stream, a value in ``points`` is no float, ``evaluate`` cannot be
        traced, or ``build`` returns no ``Algorithm``.
      ValueError: an argument is out of range, ``build`` does not accept a name in ``points``,
        a label has no logit, ``max_bytes`` does not suffice for the smallest group of runs,
        there are several processes, ``run_dir`` has more rounds or only damaged checkpoints, or
        ``jax_disable_jit`` is set.
      FileExistsError: ``run_dir`` has another sweep, or a run.
      BlockingIOError: another process is writing to ``run_dir``.
      OSError: the disk is full.
      FloatingPointError: as ``simulate``, with the first and the last round of the chunk.
      KeyboardInterrupt: a second signal came; or one has ended an earlier run of this process.
    """
    this_call = check_not_ended(run_dir, rounds)
    Processes.here().check_single("a sweep")
    checkpoint_every = check_lengths(rounds, eval_every, None)
    check_functions(evaluate=evaluate, stop_when=stop_when)
    check_run_dir(run_dir)
    if max_bytes is not None:
        check_int("max_bytes", max_bytes, minimum=1)
    points, seeds = list_points(points), check_seeds(seeds)
    algorithms, models = build_all(build, points), _models(params, seeds)
    check_simulate(algorithms[0], models[0], clients)
    check_resident(clients, "a sweep")
    keep_by_default()
    of_clients = Placement(_resolve_client_map(client_map))
    of_runs = Placement(_resolve_run_map(run_map, len(points) * len(seeds)))

    # What is computed.
    given = Schedule.of("sweep", schedule)
    first, clients = computation_of(
        algorithms[0],
        models[0],
        clients,
        given,
        times,
        seed=seeds[0],
        rounds=rounds,
        eval_every=eval_every,
        on_nonfinite=on_nonfinite,
        lowering=lowering,
    )
    client_data = client_data_of(first, clients)
    client_data.check(first)
    runs = _runs(first, client_data.clients, algorithms, points, models, seeds)
    state = first.shapes(client_data.clients)
    score, resident, scores = trace_evaluation(evaluate, first.algorithm, state)

    # Where, and where it is recorded.
    placed = client_data.clients, of_clients, of_runs
    program = Program(first, build, *placed, score, resident, may_end=stop_when is not None)
    record: Row = {}
    if run_dir is not None:
        functions, asked = {"evaluate": evaluate}, {"run_map": run_map, "client_map": client_map}
        one = identity(first, client_data, of_clients, functions, seeds[0], given, None, True)
        lowered = program.lower_one(runs[0], eval_every)  # whatever rounds there are
        record = sweep_identity(one, of_runs, asked, points, seeds, models, lowered)
    folder = SweepFolder(run_dir, checkpoint_every, record)
    if (size := folder.runs_at_once) is None:
        size = choose_size(program, runs, first.chunk_length(0), state, max_bytes)
    groups = [runs[i : i + size] for i in range(0, len(runs), size)]
    bar = Progress(f"sweep of {first.algorithm.name}", rounds * len(groups), progress)
    bar.start_clock()

    ended: list[tuple[Params, Stopwatch]] = []  # of groups: global models [runs, ...], time
    with closing(bar), stop_on_signal() as stop:
        stop.at_once = False  # the first chunk is waited for, also while it compiles
        for index, of_group in enumerate(groups):
            if stop.is_set() and ended:
                break
            group = Group(program, of_group, size)
            with closing(folder.open(index, size, group)) as log:
                rows, done = log.history, log.saved
                group.restore_rows(rows, done, stop_when)
                if done:
                    bar.go_on_from(index * rounds + done)
                chunks = group.run_chunks(done, first.chunk_length, stop_when)
                for done, new in chunks:
                    rows += new
                    log.rows(new)
                    log.checkpoint(done, rows)
                    bar.update(index * rounds + done, group.summary(scores))
                    if stop.is_set():
                        break
                log.checkpoint(done, rows, ends=True)
            ended.append((group.params, log.clock))
            del group, log  # the next group takes their memory
    if stop.is_set():
        end_later_runs(stop.signal, this_call)
    else:
        warn_without_steps([run.history for run in runs])
    return _result(first, points, seeds, runs, ended, size, of_runs.client_map.name)


def _runs(
    first: Computation,
    clients: FederatedArrays,
    algorithms: Sequence[Algorithm],
    points: Sequence[Point],
    models: Sequence[Params],
    seeds: Sequence[int],
) -> list[SweptRun]:
    """Return the runs, all seeds of the first point first."""
    runs: list[SweptRun] = []
    for algorithm, point in zip(algorithms, points, strict=True):
        run = dataclasses.replace(first, algorithm=algorithm)
        guarantees = functools.cache(run.guarantees(clients))  # computed once for each point
        runs += [
            SweptRun(len(runs) + place, model, seeded(seed), point, History(run, guarantees))
            for place, (model, seed) in enumerate(zip(models, seeds, strict=True))
        ]
    return runs


def _models(params: Params | Callable[[Key], Params], seeds: list[int]) -> list[Params]:
    """Return the initial global model of each seed."""
    if callable(params) and jax.tree_util.all_leaves([params]):
        return [params(jax.random.key(seed)) for seed in seeds]
    return [params] * len(seeds)


def _result(
    first: Computation,
    points: list[Point],
    seeds: list[int],
    runs: Sequence[SweptRun],
    ended: Sequence[tuple[Params, Stopwatch]],
    size: int,
    run_map: str,
) -> SweepResult:
    shape = (len(points), len(seeds))
    lengths = np.array([len(run.history.rows) for run in runs])
    diverged, is_over = np.array([(run.diverged, run.is_over) for run in runs]).T
    is_short = lengths < -(-first.rounds // first.eval_every)
    arrays = {name: _array(runs, name) for name in runs[0].history.rows[0] if name != "round"}
    counts = np.arange(1, lengths.max() + 1) * first.eval_every
    return SweepResult(
        points=points,
        seeds=seeds,
        rounds=np.minimum(counts, first.rounds),
        history={name: v.reshape(*shape, *v.shape[1:]) for name, v in arrays.items()},
        params=jax.tree.map(
            lambda *parts: _all_runs(parts, shape), *(params for params, _ in ended)
        ),
        diverged=diverged.reshape(shape),
        stopped=(is_over & ~diverged & is_short).reshape(shape),
        seconds=sum(clock.seconds for _, clock in ended),
        compile_seconds=max(clock.compile_seconds for _, clock in ended),
        interrupted=bool((~is_over & is_short).any()),
        run_map=run_map,
        runs_at_once=size,
    )


def _array(runs: Sequence[SweptRun], name: str) -> np.ndarray:
    """Return an entry of all rows, float64 [runs, columns, ...].

    A run that is over repeats its last row; otherwise NaN stands where there is no row.
    """
    columns = max(len(run.history.rows) for run in runs)
    shape = np.shape(runs[0].history.rows[0][name])
    values = np.full((len(runs), columns, *shape), np.nan)
    for of_run, run in zip(values, runs, strict=True):
        for column, row in enumerate(run.history.rows):
            of_run[column] = row.get(name, np.nan)
        if run.is_over:
            of_run[column + 1 :] = of_run[column]
    return values


def _all_runs(parts: tuple[np.ndarray, ...], shape: tuple[int, int]) -> np.ndarray:
    """Arrange the runs of all groups as [P, R, ...]; missing runs become NaN."""
    joined = np.concatenate(parts)
    missing = shape[0] * shape[1] - len(joined)
    rest = np.full((missing, *joined.shape[1:]), np.nan, joined.dtype)
    return np.concatenate([joined, rest]).reshape(*shape, *joined.shape[1:])


def _resolve_run_map(run_map: str, num_runs: int) -> ClientMap:
    if run_map == "auto":
        available = jax.device_count()
        spread = over_devices(useful_devices(num_runs, available), available)
        return parse_client_map(spread or single_device_map())
    parsed = parse_client_map(run_map, argument="run_map")
    if parsed.is_planned or parsed.kind == "pmap" or parsed.parts > 1:
        raise ValueError(
            f"run_map is {run_map!r}; it must be auto, chunk:n, scan, shard_map or vmap."
        )
    return parsed


def _resolve_client_map(client_map: str) -> ClientMap:
    if client_map == "auto":
        return parse_client_map(single_device_map())
    check_client_map(client_map)
    if client_map.startswith(("measure", *ON_SEVERAL)):
        raise ValueError(
            f"client_map is {client_map!r}; within a sweep it must be auto, chunk:n, scan or vmap. "
            "Devices share the runs (run_map), not the clients of a run."
        )
    return parse_client_map(client_map)
