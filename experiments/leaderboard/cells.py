"""Run the cells of the leaderboard, and keep them.

A cell is a method on a task. Tuning: ``fedjax_lab.tune`` with the same number of gradients for all
methods, seeds 0 and 1, on images that no client has. Many methods contain a simpler one, or come
near to it: a search that ends below that one's row, by these scores, is repeated with the row's
point as a start point. Final runs: seeds 11 to 20, each of which also
divides the images among the clients; the test set is read by them only. With the same seed all
methods see the same partition, first model, cohorts and mini-batches.

A cell that is done is a file, results/TASK/METHOD.json, and is not run again.
"""

import dataclasses
import functools
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.leaderboard.methods import Method
from experiments.leaderboard.tasks import Problem, Task
from experiments.studies.fingerprint import fingerprint
from experiments.studies.study import as_json
from fedjax_lab import sweep, tune
from fedjax_lab.command.factories import is_own
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.storage.run_dir import versions
from fedjax_lab.tuning.halving import equal_budgets
from fedjax_lab.tuning.search_result import SearchResult

RESULTS = Path(__file__).parent / "results"
AS_MANY_POINTS = Path(__file__).parent / "as_many_points"
FINGERPRINT_CLIENTS = 100
TUNING_SEEDS = (0, 1)
_EVALUATIONS = 30


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
      points: points of the method with the most gradients in a local step; others get more.
      most_gradients: gradients in a local step of that method.
    """

    points: int = 8
    most_gradients: int = 3


SMOKE = Scale(points=2, most_gradients=2)
# The most that a method with one gradient in a local step has, for every method.
POINTS = Scale(points=58, most_gradients=1)


def slug(name: str) -> str:
    """Return a name as a file's, and as an anchor's.

    Args:
      name: name of a task or method.
    """
    return re.sub(r"[^\w.-]+", "_", name)


def path_of(folder: Path, task: str, method: str) -> Path:
    """Return the file of a cell.

    Args:
      folder: folder of all results.
      task, method: names.
    """
    return folder / slug(task) / f"{slug(method)}.json"


def load(folder: Path, task: str) -> dict[str, dict[str, Any]]:
    """Load the cells of a task: method -> cell.

    Args:
      folder: folder of all results.
      task: its name.
    """
    files = sorted((folder / slug(task)).glob("*.json"))
    cells = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {cell["method"]: cell for cell in cells}


def store(folder: Path, task: str, cell: Mapping[str, Any]) -> None:
    """Write a cell as JSON of a line for each entry.

    Args:
      folder: folder of all results.
      task: its name.
      cell: from ``run_cell``.
    """
    path = path_of(folder, task, cell["method"])
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(value)}" for name, value in as_json(cell).items()
    )
    write_text(path, f"{{\n{lines}\n}}\n")


def declared(task: Task, method: Method, scale: Scale) -> dict[str, Any]:
    """Return what decides the numbers of a cell, as JSON has it.

    Args:
      task, method, scale: of the cell.
    """
    own = {
        "factory": method.factory,
        "space": method.axes(task),
        "fixed": method.fixed_for(task.num_clients),
    }
    return as_json({"task": task.conditions(), "method": own, "scale": dataclasses.asdict(scale)})


def run_cell(
    task: Task,
    problem: Problem,
    name: str,
    method: Method,
    scale: Scale,
    others: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Tune a method on a task, and run it with all seeds.

    Args:
      task, problem: the task and its data.
      name: name of the row.
      method: the row.
      scale: how much is run.
      others: method -> cell, of the task's other rows.

    Raises:
      KeyboardInterrupt: Ctrl-C ended the final runs early.
    """
    began = time.process_time()
    cell: dict[str, Any] = {"method": name, "declared": declared(task, method, scale)}
    cell |= {"versions": versions(), "fingerprint": None}
    cell |= _search(task, problem, name, method, scale)
    cell["processor_seconds"] = time.process_time() - began
    return complete(cell, task, problem, method, scale, others)


class Start(NamedTuple):
    """A point at which a method is a simpler one, or nearly.

    Attributes:
      row: the simpler method.
      score: mean score of its tuning.
      point: hyperparameters of the method.
    """

    row: str
    score: float
    point: dict[str, float]


def start_of(
    cell: Mapping[str, Any], method: Method, others: Mapping[str, Mapping[str, Any]]
) -> Start | None:
    """Return the point from which a row's search is repeated; None: it is not.

    Its first search ended below a simpler form of the method, by the scores of tuning.

    Args:
      cell: the row's cell, tuned.
      method: the row.
      others: method -> cell, of the task's other rows.
    """
    axes = cell["declared"]["method"]["space"]
    forms = [
        Start(row, _mean(others[row]), {n: {**others[row]["chosen"], **at}[n] for n in axes})
        for row, at in method.simpler.items()
        if row in others and others[row]["chosen"] is not None
    ]
    best = max(forms, key=lambda form: form.score, default=None)
    if best is None or "start" in cell:
        return None
    return best if cell["chosen"] is None or _mean(cell) < best.score else None


def _mean(cell: Mapping[str, Any]) -> float:
    """Return the mean score of a cell's chosen point in its tuning."""
    return sum(cell["validation"]) / len(cell["validation"])


def complete(
    cell: Mapping[str, Any],
    task: Task,
    problem: Problem,
    method: Method,
    scale: Scale,
    others: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Complete a tuned cell: repeat a search that ended below a simpler form; add the final runs.

    The better one of the two searches counts, by the scores of tuning.

    Args:
      cell: the row's cell, tuned.
      task, problem, method, scale, others: as in ``run_cell``.

    Raises:
      KeyboardInterrupt: Ctrl-C ended the runs early.
    """
    began, found = time.process_time(), dict(cell)
    start = start_of(cell, method, others)
    if start is not None:
        again = _search(task, problem, cell["method"], method, scale, start)
        found |= {"versions": versions(), "start": start._asdict()}
        found["first_search"] = {name: cell.get(name) for name in ("chosen", "validation")}
        if again["chosen"] is not None and (cell["chosen"] is None or _mean(again) >= _mean(cell)):
            again["tuning_gradients"] += cell.get("tuning_gradients", 0)
            found |= again
    found["processor_seconds"] += time.process_time() - began
    if found["chosen"] is None:
        return {**found, "processor_seconds": round(found["processor_seconds"], 1)}
    return _with_final_runs(found, task, problem, method)


def _search(
    task: Task,
    problem: Problem,
    name: str,
    method: Method,
    scale: Scale,
    start: Start | None = None,
) -> dict[str, Any]:
    """Tune a method on a task; return what the cell has of it."""
    build, rounds = functools.partial(method.build, task, problem), _rounds(task, problem, method)
    per_step = [gradients_per_step(task, problem, method), scale.most_gradients]
    plan = equal_budgets(per_step, rounds, scale.points, 2, len(TUNING_SEEDS))[0]
    try:
        found = tune(
            {name: build},
            {name: method.axes(task)},
            problem.params(jax.random.key(0)),
            problem.clients,
            rounds=rounds,
            validation=problem.validation,
            budget=plan.points[0],
            finalists=2,
            start_points=None if start is None else {name: [start.point]},
            seeds=TUNING_SEEDS,
            score=problem.score,
            mode="max",
            **task.options(),
        )
    except RuntimeError as error:  # no point stayed finite
        return {"chosen": None, "said": str(error)}
    return _tuning(name, found)


def _rounds(task: Task, problem: Problem, method: Method) -> int:
    """Return the rounds of a run; with a compressed uplink, those that cost as many bytes."""
    if task.compressor is None:
        return task.rounds
    params = problem.params(jax.random.key(0))
    plain = Method("fedavg").build(task, problem, client_lr=0.1)
    own = method.build(task, problem, **_first(task, method))
    return max(1, round(task.rounds * plain.uplink(params) / own.uplink(params)))


def gradients_per_step(task: Task, problem: Problem, method: Method) -> int:
    """Return how many gradients a method takes in a local step.

    Args:
      task, problem, method: as in ``run_cell``.
    """
    return method.build(task, problem, **_first(task, method)).gradients_per_step


def _first(task: Task, method: Method) -> dict[str, Any]:
    return {name: axis[0] for name, axis in method.axes(task).items()}


def has_tuning(cell: Mapping[str, Any], task: Task, method: Method, scale: Scale) -> bool:
    """Return whether a cell was tuned as it would be today.

    Args:
      cell: stored cell.
      task, method, scale: what it would be run with.
    """
    now = declared(task, method, scale)
    return all(_tunes(cell["declared"][part]) == _tunes(now[part]) for part in now)


def _tunes(part: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the tuning, of a part of what decides a cell."""
    return {name: value for name, value in part.items() if name not in ("seeds", "one_draw")}


def run_again(
    cell: Mapping[str, Any], task: Task, problem: Problem, method: Method, scale: Scale
) -> dict[str, Any]:
    """Run the final runs of a cell anew, at the point that its tuning chose.

    Args:
      cell: stored cell.
      task, problem, method, scale: as in ``run_cell``.

    Raises:
      KeyboardInterrupt: Ctrl-C ended the runs early.
    """
    again = {**cell, "declared": declared(task, method, scale), "versions": versions()}
    if cell["chosen"] is None:
        return again
    return _with_final_runs(again, task, problem, method)


def _with_final_runs(
    cell: Mapping[str, Any], task: Task, problem: Problem, method: Method
) -> dict[str, Any]:
    """Add the final runs and the fingerprint to a cell that is tuned, and their time to its own."""
    began = time.process_time()
    rounds = _rounds(task, problem, method)
    runs = final_runs(method, cell["chosen"], task, problem, rounds)
    specified = specification(method)
    found = {**cell, **runs, "fingerprint": None if specified is None else fingerprint(specified)}
    spent = cell["processor_seconds"] + time.process_time() - began
    return {**found, "processor_seconds": round(spent, 1)}


def _tuning(name: str, found: SearchResult) -> dict[str, Any]:
    tried = {tuple(trial.point.items()) for trial in found.trials}
    return {
        "chosen": {n: _short(value, 4) for n, value in found.best[name].items()},
        "edges": found.edges.get(name, []),
        "validation": [_short(value, 5) for value in found.scores[name]],
        "points": len(tried),
        "diverged": _short(found.diverged[name], 3),
        "tuning_gradients": found.gradients[name],
    }


def final_runs(
    method: Method,
    point: Mapping[str, Any],
    task: Task,
    problem: Problem,
    rounds: int,
) -> dict[str, Any]:
    """Run a method at a point with all seeds.

    Args:
      method: the row.
      point: its hyperparameters.
      task, problem: the task and its data.
      rounds: of each run.

    Raises:
      KeyboardInterrupt: Ctrl-C ended the runs early.
    """
    runs, passed = [], []
    for seeds in [task.seeds] if task.one_draw else [(seed,) for seed in task.seeds]:
        drawn = problem.redrawn(seeds[0])
        result = sweep(
            functools.partial(method.build, task, problem),
            drawn.params,
            drawn.clients,
            points=[point],
            seeds=seeds,
            rounds=rounds,
            evaluate=drawn.evaluate,
            eval_every=max(1, rounds // _EVALUATIONS),
            **task.options(),
        )
        if result.interrupted:  # it is no result
            raise KeyboardInterrupt
        passed = [int(value) for value in result.rounds]
        history = {n: v[0] for n, v in result.history.items()}
        runs += [
            {
                "seed": seed,
                "scores": [_short(value, 5) for value in history["score"][i]],
                **({"train": _short(history["train"][i, -1], 5)} if "train" in history else {}),
                "bytes_up": int(history["bytes_up"][i, -1]),
                "gradients": int(history["gradients"][i, -1]),
            }
            for i, seed in enumerate(seeds)
        ]
    return {"rounds": passed, "runs": runs}


def specification(method: Method) -> str | None:
    """Return what the fingerprint of a row depends on, as JSON; None: it has none.

    Its hyperparameters are the first of each axis that is not 0, so that all cells of a row have
    the same one. A method that looks inside its model has none, and neither has one's own.

    Args:
      method: the row.
    """
    if method.looks_inside or is_own("algorithm", method.factory):
        return None
    option = {name: next(filter(None, axis)) for name, axis in method.axes().items()}
    option |= method.fixed_for(FINGERPRINT_CLIENTS)
    option.pop("client_lr", None)
    chosen: dict[str, Any] = {"algorithm": method.factory}
    if "server_lr" in option:
        chosen["server_lr"] = option.pop("server_lr")
    return json.dumps({**chosen, "option": option}, sort_keys=True)


def _short(value: float, digits: int) -> float:
    return float(f"{float(value):.{digits}g}")
