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

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_int
from fedjax_lab.clients.mapping import (
    ON_SEVERAL,
    ClientMap,
    check_client_map,
    parse_client_map,
    single_device_map,
)
from fedjax_lab.clients.planner import useful_devices
from fedjax_lab.data import ClientTimes, FederatedArrays
from fedjax_lab.data.client_sampling import check_cohorts
from fedjax_lab.data.cohort import Schedule, ScheduleOptions, scheduled
from fedjax_lab.data.streams import check_resident
from fedjax_lab.machine.keys import seeded
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.arguments import check_training_labels
from fedjax_lab.simulation.book import History
from fedjax_lab.simulation.debugging import debuggable
from fedjax_lab.simulation.divergence import Watch
from fedjax_lab.simulation.feed import with_times
from fedjax_lab.simulation.loggers import Progress
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.run import Run
from fedjax_lab.simulation.stop import check_not_ended, end_later_runs, stop_on_signal
from fedjax_lab.simulation.sweep_program import Program, advance_group
from fedjax_lab.simulation.sweep_result import (
    Point,
    SweepResult,
    build_all,
    check_seeds,
    list_points,
)
from fedjax_lab.simulation.team import Team
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
    progress: bool = False,
    on_nonfinite: str = "exclude",
    **schedule: Unpack[ScheduleOptions],
) -> SweepResult:
    """Run a method at every point with every seed, all runs in one compiled program.

    A run equals ``simulate`` with that point and that seed up to rounding: its client sampling,
    mini-batches and everything random depend on its seed alone. Ctrl-C finishes the running chunk
    and returns the results so far; a second Ctrl-C stops at once. Later runs of the process then
    raise ``KeyboardInterrupt``, as with ``simulate``. All runs end together and start from
    params, so ``simulate``'s ``stop_when``, ``state`` and ``run_dir`` are not available.

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
      run_map: how runs are mapped, see above; or "shard_map:n" for n devices, and
        "shard_map/vmap" for how a device maps its share.
      client_map: how the clients of a run are mapped: "scan", "vmap", "chunk:n"; "auto" is
        ``scan`` on CPU and ``vmap`` elsewhere.
      max_bytes: memory of one device that the program may use; None: most of the device.
      progress: show progress on stderr.
      on_nonfinite: as in ``simulate``. With "stop", a run with a client that is not finite counts
        as diverged from that evaluation on.

    Raises:
      TypeError: ``clients`` is a stream, a value in ``points`` is no float, ``evaluate`` cannot be
        traced, or ``build`` returns no ``Algorithm``.
      ValueError: an argument is out of range, ``build`` does not accept a name in ``points``,
        a label has no logit, ``max_bytes`` does not suffice for the smallest group of runs,
        there are several processes, or ``jax_disable_jit`` is set.
      FloatingPointError: as ``simulate``, with the first and the last round of the chunk.
      KeyboardInterrupt: a second signal came; or one has ended an earlier run of this process.
    """
    check_not_ended()
    if (team := Team.here()).is_multiprocess:
        raise ValueError(
            f"there are {team.size} processes; a sweep runs in one. Run a part of the points in "
            "each process, without jax.distributed."
        )
    check_int("rounds", rounds, minimum=1)
    check_int("eval_every", eval_every, minimum=1)
    if max_bytes is not None:
        check_int("max_bytes", max_bytes, minimum=1)
    check_resident(clients, "a sweep")
    keep_by_default()
    points, seeds = list_points(points), check_seeds(seeds)
    how, clients = Schedule.of("sweep", schedule).bind(clients)
    run_with = functools.partial(
        Run, schedule=how, on_nonfinite=on_nonfinite, rounds=rounds, eval_every=eval_every
    )
    of_points = [run_with(algorithm) for algorithm in build_all(build, points)]
    first = of_points[0]
    clients_by = _resolve_client_map(client_map)
    runs_by = _resolve_run_map(run_map, len(points) * len(seeds))
    is_function = callable(params) and jax.tree_util.all_leaves([params])
    models = [params(jax.random.key(seed)) if is_function else params for seed in seeds]
    keys = [seeded(seed) for seed in seeds]
    clients = with_times(clients, times, first.algorithm, models[0])
    if how.sample_cohort is not None:
        check_cohorts(how.sample_cohort, clients, keys[0], how.cohort_size, rounds)
    check_training_labels(first.algorithm, models[0], clients, how.batch_size)
    runs = [(model, key, p) for p in points for model, key in zip(models, keys, strict=True)]
    # Guarantees are computed once for each point.
    spent = [functools.cache(run.guarantees(clients)) for run in of_points]
    histories = [
        History(run.algorithm, models[0], (), run.in_round == "exclude", of_point)
        for run, of_point in zip(of_points, spent, strict=True)
        for _ in seeds
    ]
    diverged = np.zeros(len(runs), bool)
    watch = Watch("a run", on_nonfinite, is_single=False)
    served: list[Params] = []  # group by group
    data = (clients, jax.tree.map(jnp.asarray, first.frozen))
    run_of = lambda **point: run_with(build(**point))  # noqa: E731
    program = Program(run_of, clients_by, Placement(runs_by), evaluate, data)
    program.fit(runs, first.chunk_length(0), max_bytes)
    began = time.perf_counter() - program.compile_seconds
    groups = [range(len(runs))[i : i + program.size] for i in range(0, len(runs), program.size)]
    bar = Progress(f"sweep of {first.algorithm.name}", 0, rounds * len(groups), progress)
    bar.start_clock()
    shown: dict[str, Any] = {"loss": np.mean, **dict.fromkeys(program.scores, np.mean)}
    shown.update(dict.fromkeys(spent[0](0), np.max))  # of a privacy budget, the largest
    with closing(bar), stop_on_signal() as stop:
        for index, group in enumerate(groups):
            if stop.is_set():
                break
            if index:  # the first group has been started
                program.start([runs[run] for run in group])
            of_group = [histories[run] for run in group]
            for done in advance_group(program, watch, of_group, 0, rounds, eval_every):
                diverged[group] = watch.diverged[: len(group)]
                values = {
                    name: float(summary([history.rows[-1][name] for history in of_group]))
                    for name, summary in shown.items()
                }
                bar.update(index * rounds + done, values)
                if stop.is_set():
                    break
            served.append(program.served(len(group)))
    if stop.is_set():
        end_later_runs(stop.signal)
    seconds = time.perf_counter() - began - program.compile_seconds
    columns = max(len(history.rows) for history in histories)
    shape = (len(points), len(seeds))
    arrays = {name: _array(histories, name, columns) for name in histories[0].rows[0]}
    return SweepResult(
        points=points,
        seeds=seeds,
        rounds=arrays.pop("round")[0].astype(np.int64),
        history={name: v.reshape(*shape, *v.shape[1:]) for name, v in arrays.items()},
        params=jax.tree.map(lambda *parts: _unflatten(parts, shape), *served),
        diverged=diverged.reshape(shape),
        seconds=seconds,
        compile_seconds=program.compile_seconds,
        interrupted=sum(len(h.rows) for h in histories) < len(runs) * -(-rounds // eval_every),
        run_map=runs_by.name,
        runs_at_once=program.size,
    )


def _array(histories: Sequence[History], name: str, columns: int) -> np.ndarray:
    """Return an entry of all rows, float64 [runs, columns, ...]; NaN where there is no row."""
    shape = np.shape(histories[0].rows[0][name])
    found = np.full((len(histories), columns, *shape), np.nan)
    for of_run, history in zip(found, histories, strict=True):
        for column, row in enumerate(history.rows):
            of_run[column] = row.get(name, np.nan)
    return found


def _resolve_run_map(run_map: str, num_runs: int) -> ClientMap:
    if run_map == "auto":
        available = jax.device_count()
        count = useful_devices(num_runs, available)
        if count == 1:
            return parse_client_map(single_device_map())
        return parse_client_map("shard_map" if count == available else f"shard_map:{count}")
    found = parse_client_map(run_map, argument="run_map")
    if found.is_planned or found.kind == "pmap" or found.parts > 1:
        raise ValueError(
            f"run_map is {run_map!r}; it must be auto, chunk:n, scan, shard_map or vmap."
        )
    return found


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


def _unflatten(parts: tuple[np.ndarray, ...], shape: tuple[int, int]) -> np.ndarray:
    """Arrange the runs of all groups as [P, R, ...]; missing runs become NaN."""
    joined = np.concatenate(parts)
    missing = shape[0] * shape[1] - len(joined)
    rest = np.full((missing, *joined.shape[1:]), np.nan, joined.dtype)
    return np.concatenate([joined, rest]).reshape(*shape, *joined.shape[1:])
