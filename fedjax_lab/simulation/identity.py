"""The identity of a run or a sweep: entries of config.json, by name and by content."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_lab.clients.metrics import is_reserved
from fedjax_lab.data.clock import ClientTimes
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.descriptions import ARRAY, describe
from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.client_data import ClientData
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.placement import Placement, Request
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.sweep_points import Point
from fedjax_lab.storage.fingerprint import hash_arrays, hash_function, hash_program
from fedjax_lab.storage.rows import Row
from fedjax_lab.storage.run_dir import versions
from fedjax_lab.types import Params


def identity(
    run: Computation,
    client_data: ClientData,
    place: Request | Placement,
    functions: Mapping[str, Callable[..., Any] | None],
    seed: int,
    given: Schedule,
    times: ClientTimes | None,
    is_kept: bool,
) -> Row:
    """Return the identity of a run, by name and by content: entries of config.json.

    A run directory is bound to it, and all processes of a run must have the same one.

    Args:
      functions: the caller's functions, by the names of ``simulate``'s arguments.
      given: the schedule with the caller's arrays.
      times: as in ``simulate``.
      is_kept: whether there is a run directory. With one, or with several processes, arrays and
        functions are hashed; the program is hashed by ``with_program``.
    """
    asked = {"client_map": place.client_map.name, "client_store": place.client_store}
    algorithm, schedule = run.algorithm, run.schedule
    entries: Row = {
        "algorithm": algorithm.name,
        "hyperparameters": dict(algorithm.hyperparameters),
        "partition": dataclasses.asdict(client_data.clients.partition),
        "num_clients": client_data.clients.num_clients,
        **schedule.record(),
        "rounds": run.rounds,
        "eval_every": run.eval_every,
        **asked,
        "on_nonfinite": run.on_nonfinite,
        **({} if run.lowering == "auto" else {"lowering": run.lowering}),
        "seed": seed,
        **client_data.record(),
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
        "versions": versions(),
        "asked": asked,
    }
    if is_kept:
        described = {"loss_fn": algorithm.loss_fn, "sample_cohort": schedule.sample_cohort}
        entries["functions"] = {
            name: describe(function) for name, function in described.items() if function is not None
        }
    if algorithm.personal is not None:
        entries["personal_models"] = True
    if arrays := _arrays_of(given, times):
        entries["arrays"] = arrays
    if is_kept or Processes.here().is_multiprocess:
        entries["content"] = {
            "params": hash_arrays(run.params),
            "state": None if run.state is None else hash_arrays(run.state),
            "examples": client_data.content(),
            **{name: hash_function(function) for name, function in functions.items()},
            "sample_cohort": hash_function(schedule.sample_cohort),
        }
        if jax.tree.leaves(run.frozen):
            entries["content"]["frozen"] = hash_arrays(run.frozen)
    return entries


def check_config_names(config: Mapping[str, Any], entries: Row) -> None:
    """Refuse the caller's entries of config.json that the run has itself.

    Raises:
      ValueError: there is one.
    """
    for name in config:
        if name in (*entries, "num_devices"):
            raise ValueError(f"config has the name {name!r}, which is reserved for the run.")


def _arrays_of(schedule: Schedule, times: ClientTimes | None) -> dict[str, Any]:
    """Describe the caller's arrays, under the names of the arguments."""
    given = {name: getattr(schedule, name) for name in ("local_steps", "local_epochs", "weights")}
    found: dict[str, Any] = {name: _range_of(n) for name, n in given.items() if np.ndim(n)}
    if times is not None:  # not those of a method, with the bytes of its messages
        fields = ((field, getattr(times, field.name)) for field in dataclasses.fields(times))
        found["times"] = {
            field.name: _range_of(value) if np.ndim(value) else value
            for field, value in fields
            if np.ndim(value) or value != field.default
        }
    if schedule.client_constants is not None:
        leaves = map(np.asarray, jax.tree.leaves(schedule.client_constants))
        shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        hashed = hash_arrays(schedule.client_constants)
        found["client_constants"] = {ARRAY: shown, "hash": hashed}
    return found


def _range_of(values: Any) -> dict[str, str]:
    values = np.asarray(values)
    numbers = 1 * values  # of truth values, too
    shown = f"{numbers.min():.6g} to {numbers.max():.6g}, mean {numbers.mean():.4g}"
    return {ARRAY: shown, "hash": hash_arrays(values)}


def with_program(entries: Row, run: Computation, place: Placement, chunks: Chunks) -> Row:
    """Return an identity with the chosen placement and the program's hash.

    All processes call it.

    Raises:
      ValueError: the processes have different programs.
    """
    recorded = {**entries, **place.record()}
    if "content" in recorded:
        program = chunks.lower(run.eval_every)
        recorded["content"] = {**recorded["content"], "program": hash_program(program)}
        if names := sorted(name for name in program.out_info[1] if not is_reserved(name)):
            recorded["client_metrics"] = names
        Processes.here().agree({"content": recorded["content"]})
    return recorded


def sweep_identity(
    one: Row,
    of_runs: Placement,
    asked: Mapping[str, str],
    points: Sequence[Point],
    seeds: Sequence[int],
    models: Sequence[Params],
    program: jax.stages.Lowered,
) -> Row:
    """Return the identity of a sweep, by name and by content: entries of config.json.

    Args:
      one: identity of the first run.
      asked: the maps, by the names of ``sweep``'s arguments.
      models: initial global model of each seed.
      program: the rounds of a run.
    """
    entries = dict(one)
    del entries["seed"]
    fixed = entries["hyperparameters"].items()
    return {
        **entries,
        "hyperparameters": {name: value for name, value in fixed if name not in points[0]},
        "asked": {**entries["asked"], **asked},
        "content": {
            **entries["content"],
            "params": hash_arrays(models),
            "program": hash_program(program),
        },
        "run_map": of_runs.client_map.name,
        "num_devices": of_runs.record()["num_devices"],
        "sweep": {"points": list(points), "seeds": list(seeds)},
    }
