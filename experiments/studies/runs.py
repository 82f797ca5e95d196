"""Tune a study's methods, run them with several seeds, and gather what the runs left.

A cell of the table is an ordinary run: ``runner.run`` with a ``RunConfig``, in a run directory
of its own, runs/PAPER/STUDY/SCALE/COLUMN/METHOD/seedS. What is finished is not run again, what was
interrupted goes on, and ``fedjax-lab run --config .../config.json`` repeats a single one.

Tuning: one seed. Training images are held out beforehand; they are divided like the others,
so that they stand for held-out clients, whose pooled accuracy is the score. A grid is one
``sweep``, a compiled program over all its points: ``tuning_rounds`` for all, then all rounds for
the best, until as many as ``finalists`` says have stayed finite; the best of those is chosen. A
run that does not stay finite has no score. Final runs have all training images and other seeds;
the test set is read by them only. tuning.json beside them says what was tried.
"""

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.studies.fingerprint import fingerprint, is_same, specification
from experiments.studies.paper_numbers import paper_accuracies
from experiments.studies.personal import run_personal
from experiments.studies.study import Column, Method, Point, Scale, Study, as_json, finite
from fedjax_lab import data, sweep
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.loading import load_divided
from fedjax_lab.command.runner import run
from fedjax_lab.command.setup import build
from fedjax_lab.machine.atomic_files import write_text
from fedjax_lab.report import load_runs
from fedjax_lab.report.runs import DIVERGED
from fedjax_lab.report.statistics import OWN
from fedjax_lab.storage.run_dir import (
    CHECKPOINTS,
    CONFIG,
    PARTITION,
    SUMMARY,
    versions,
    write_json,
)

TUNING, LANDSCAPE = "tuning.json", "landscape.json"
TUNING_SEED = 0


class Problem:
    """A column's data: all of it for final runs, cut in two for tuning."""

    def __init__(self, column: Column, held_out: int):
        self.column = column
        config = RunConfig.from_dict(column.settings)
        self.train, self.test = load_divided(config.data, config.partition_seed)[:2]
        order = np.random.default_rng(TUNING_SEED).permutation(len(self.train.y))
        self.validation = self._take(order[:held_out])
        self.fit = self._take(order[held_out:])

    def _take(self, chosen: np.ndarray) -> data.Examples:
        chosen = np.sort(chosen)
        return data.Examples(self.train.x[chosen], self.train.y[chosen])

    def scores(self, method: Method, points: Sequence[Point], rounds: int) -> list[float]:
        """The best validation accuracy at each point; NaN where the run did not stay finite."""
        if method.personal is not None:
            return [self._personal_score(method, point, rounds) for point in points]
        config = method.config(self.column, points[0], rounds=rounds, seed=TUNING_SEED).resolve()
        setup = build(config, (self.fit, self.validation), method.wrap)
        result = sweep(
            setup.vary,
            setup.params,
            setup.clients,
            points=list(points),
            seeds=[TUNING_SEED],
            evaluate=setup.evaluate,
            **config.schedule(),
        )
        if result.interrupted:
            raise KeyboardInterrupt
        finite = [np.isfinite(result.history[name][:, 0]).all(1) for name in ("loss", "delta_norm")]
        best = result.values("accuracy", at="best")[:, 0]
        return np.where(np.all(finite, axis=0), best, np.nan).tolist()

    def _personal_score(self, method: Method, point: Point, rounds: int) -> float:
        config = method.config(self.column, point, rounds=rounds, seed=TUNING_SEED)
        result = run_personal(config, method.personal, point, (self.fit, self.validation))
        if result.interrupted:
            raise KeyboardInterrupt
        if result.stopped == "diverged":
            return float("nan")
        return float(np.max([row["accuracy"] for row in result.history]))


def tune(
    problem: Problem, method: Method, scale: Scale, allowed: Callable[[Point], bool]
) -> tuple[Point, dict[str, float], dict[str, float]]:
    """Find a method's hyper-parameters on a column.

    Returns:
      (the chosen point; what was tried for ``tuning_rounds``: JSON of a point -> score; what
      was run for all rounds, likewise).
    """
    grid = {name: values[: scale.grid_points] for name, values in method.grid.items()}
    then = {name: values[: scale.grid_points] for name, values in method.then.items()}
    start = {**{name: values[0] for name, values in then.items()}, **method.start}
    points = [
        {**dict(zip(grid, v, strict=True)), **start} for v in itertools.product(*grid.values())
    ]
    points = [point for point in points if allowed(point)]
    if len(points) == 1 and all(len(values) == 1 for values in then.values()):
        return points[0], {}, {}
    tried = _score(problem, method, points, problem.column.tuning_rounds)
    for name, values in then.items():
        best = json.loads(_best(tried))
        further = [{**best, name: value} for value in values]
        further = [point for point in further if _key(point) not in tried]
        if further:
            tried |= _score(problem, method, further, problem.column.tuning_rounds)
    alive = [key for key in tried if np.isfinite(tried[key])]  # longer, the others diverge again
    ranked = sorted(alive, key=lambda key: tried[key], reverse=True)
    finals: dict[str, float] = {}
    rounds = problem.column.settings["rounds"]
    while scale.finalists > 1 and len(finals) < len(ranked):
        missing = scale.finalists - int(np.isfinite(list(finals.values())).sum())
        if missing <= 0:
            break
        group = [json.loads(key) for key in ranked[len(finals) : len(finals) + missing]]
        finals |= _score(problem, method, group, rounds)
    return json.loads(_best(finals or tried)), tried, finals


def _score(problem, method, points, rounds) -> dict[str, float]:
    scores = problem.scores(method, points, rounds)
    return {_key(point): score for point, score in zip(points, scores, strict=True)}


def _key(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def _rank(score: float) -> float:
    return score if np.isfinite(score) else -1.0


def _best(scores: Mapping[str, float]) -> str:
    """The first one with the highest score."""
    return max(scores, key=lambda key: _rank(scores[key]))


def run_cell(
    study: Study, scale: Scale, method_name: str, problem: Problem, folder: Path
) -> dict[str, Any]:
    """Tune a method on a column and run it with all seeds, as far as that is not done yet.

    Returns:
      What tuning.json holds.

    Raises:
      SystemExit: the folder holds results of other settings.
    """
    method, tuning_file = study.methods[method_name], folder / TUNING
    declared = _declared(method, problem.column, scale)
    if tuning_file.exists():
        tuning = json.loads(tuning_file.read_text(encoding="utf-8"))
        if tuning["declared"] != declared:
            raise SystemExit(f"{folder} holds results of other settings; move it away first.")
    else:
        began = time.perf_counter()
        chosen, tried, finals = tune(problem, method, scale, study.allowed)
        seconds = round(time.perf_counter() - began, 1)
        tuning = {"declared": declared, "chosen": chosen, "tried": tried, "finalists": finals}
        tuning["fingerprint"] = _fingerprint(method, problem.column)
        tuning = finite({**tuning, "seconds": seconds, "versions": versions()})
        folder.mkdir(parents=True, exist_ok=True)
        write_json(tuning_file, tuning)
    for seed in scale.seeds:
        path = folder / f"seed{seed}"
        has_landscape = method_name not in scale.landscape or (path / LANDSCAPE).exists()
        if is_whole(path) and has_landscape:
            continue
        rounds = problem.column.settings["rounds"]
        config = method.config(
            problem.column,
            tuning["chosen"],
            seed=seed,
            run_dir=str(path),
            checkpoint_every=rounds,
        )
        examples = (problem.train, problem.test)
        if method.personal is not None:
            result = run_personal(config, method.personal, tuning["chosen"], examples, path)
        else:
            result = run(config, examples=examples, wrap=method.wrap, progress=False)
        if result.interrupted:
            raise KeyboardInterrupt
        if method_name in scale.landscape:
            first = seed == scale.seeds[0]
            write_json(path / LANDSCAPE, _landscape(config, result.params, problem, first))
        # A study keeps numbers; its models would be gigabytes.
        shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)
    return tuning


def _declared(method: Method, column: Column, scale: Scale) -> dict[str, Any]:
    rest = {"finalists": scale.finalists, "grid_points": scale.grid_points}
    conditions = column.conditions()
    return as_json({**method.declared(), **conditions, **rest, "held_out": scale.held_out})


def _fingerprint(method: Method, column: Column) -> list[float] | None:
    specified = specification(method, column)
    return None if specified is None else list(fingerprint(specified))


def keep_tuning(study: Study, scale_name: str, scale: Scale, folder: Path, stored: Path) -> None:
    """Write tuning.json of each stored cell, so that its final runs can be made again.

    A folder that has one keeps it, and a column under other conditions gets none.

    Args:
      study: the study.
      scale_name, scale: its scale.
      folder: of the scale's run directories.
      stored: the study's results.
    """
    result = json.loads(stored.read_text(encoding="utf-8"))
    if result["scale"] != scale_name:
        return
    for name, kept in result["columns"].items():
        column = scale.columns.get(name)
        if column is None or any(kept[key] != value for key, value in column.conditions().items()):
            continue
        for method_name, cell in kept["methods"].items():
            file = folder / slug(name) / slug(method_name) / TUNING
            method = study.methods.get(method_name)
            if file.exists() or method is None:
                continue
            tuning = {
                "declared": _declared(method, column, scale),
                "chosen": cell["chosen"],
                **cell["tuning"],
                "seconds": cell["seconds"],
                "fingerprint": _fingerprint(method, column),
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, tuning)


def is_whole(path: Path) -> bool:
    """Whether a run ended by itself: after all its rounds, or where it diverged.

    An interrupted one has all the files as well.

    Args:
      path: its directory.
    """
    if not (path / PARTITION).exists():  # what ``runner.run`` writes last
        return False
    config, summary = (json.loads((path / file).read_text("utf-8")) for file in (CONFIG, SUMMARY))
    return summary["stopped"] == DIVERGED or summary["round"] == config["rounds"]


def _landscape(config: RunConfig, params: Any, problem: Problem, drawn: bool) -> dict[str, Any]:
    """The Hessian's largest eigenvalue, and a loss surface around the last model if it is drawn."""
    from fedjax_lab.recipes.flatness import hessian_eigenvalues, loss_surface

    loss_fn = build(config, (problem.train, problem.test)).loss_fn
    sample = jax.tree.map(lambda leaf: leaf[:2000], problem.train)
    values = hessian_eigenvalues(loss_fn, params, sample, count=1)
    found = {"examples": len(sample.y), "eigenvalues": [float(value) for value in values]}
    if not drawn:
        return found
    surface = loss_surface(loss_fn, params, sample, radius=1.0, points=21, seed=0)
    return {
        **found,
        "offsets": np.asarray(surface.offsets, float).round(4).tolist(),
        "losses": np.asarray(surface.losses, float).round(5).tolist(),
    }


def run_study(study: Study, scale: Scale, folder: Path, chosen_columns=None, methods=None) -> None:
    """Run what ``folder`` does not hold yet, a cell at a time."""
    for column_name in chosen_columns or scale.columns:
        problem = Problem(scale.columns[column_name], scale.held_out)
        for name in methods or study.shown(scale, scale.columns[column_name]):
            began = time.perf_counter()
            cell = folder / slug(column_name) / slug(name)
            tuning = run_cell(study, scale, name, problem, cell)
            runs = load_runs([cell])
            top = [round(100 * float(np.nanmax(run.values("accuracy"))), 2) for run in runs]
            print(
                f"{study.short} {column_name} {name}: {tuning['chosen']} top {top} "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )


def slug(name: str) -> str:
    """A column's or method's name as that of a folder."""
    return re.sub(r"[^\w.+-]+", "_", name)


def gather(study: Study, scale_name: str, scale: Scale, folder: Path) -> dict[str, Any]:
    """The compact copy of a study's run directories, from which its report is made."""
    found: dict[str, Any] = {}
    for column_name, column in scale.columns.items():
        methods, first = {}, None
        for name in study.methods:
            cell = folder / slug(column_name) / slug(name)
            paths = [cell / f"seed{seed}" for seed in scale.seeds]
            paths = [path for path in paths if is_whole(path)]
            if not paths:
                continue
            runs = load_runs(paths)
            first = first or runs[0]
            methods[name] = _compact_cell(cell, runs)
        if methods:
            found[column_name] = {
                **column.conditions(),
                "paper": paper_accuracies(study.paper, column.paper, study.methods),
                "label_histogram": first.partition.get("label_histogram"),
                "methods": methods,
            }
    made_with = [cell.pop("versions") for c in found.values() for cell in c["methods"].values()]
    distinct = [v for i, v in enumerate(made_with) if v not in made_with[:i]]
    return as_json(
        {
            "study": study.name,
            "scale": scale_name,
            "declared": scale.declared(),
            "versions": distinct,
            "columns": found,
        }
    )


def with_kept(
    found: dict[str, Any], kept: Mapping[str, Any], seeds: Sequence[int]
) -> dict[str, Any]:
    """A study's results, where cells without all seeds are those that were kept before.

    So a few cells can be run again, or with further seeds, without the run directories of the
    others. A cell of the same point and code keeps the runs of its earlier seeds.

    Args:
      found: from ``gather``.
      kept: an earlier result. Of another scale, or of a column under other conditions, nothing is
        taken.
      seeds: that a cell must have.
    """
    if kept["scale"] != found["scale"]:
        return found
    columns = dict(found["columns"])
    for name, before in kept["columns"].items():
        declared = found["declared"]["columns"].get(name, {})
        conditions = ("settings", "tuning_rounds", "published", "override")
        if any(before[key] != declared.get(key) for key in conditions):
            continue
        now = columns.get(name, before)
        methods = dict(before["methods"])
        for method, cell in now["methods"].items():
            earlier = methods.get(method, cell)
            cell = _with_earlier_seeds(cell, earlier)
            if method not in methods or {run["seed"] for run in cell["runs"]} >= set(seeds):
                methods[method] = cell
        first = next(iter(now["methods"].values()))["runs"][0]["seed"]
        drawn = now if first == seeds[0] else before
        columns[name] = {**now, "label_histogram": drawn["label_histogram"], "methods": methods}
    left = {m["code"]["fedjax_lab"] for c in columns.values() for m in c["methods"].values()}
    versions = [*(v for v in kept["versions"] if v["fedjax_lab"] in left), *found["versions"]]
    distinct = [v for i, v in enumerate(versions) if v not in versions[:i]]
    return {**found, "columns": columns, "versions": distinct}


def _with_earlier_seeds(cell: dict[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The cell, with the runs of an earlier one of the same point and code for the seeds that it
    lacks."""
    if cell["chosen"] != earlier["chosen"] or not _is_same_code(cell["code"], earlier["code"]):
        return cell
    runs = {run["seed"]: run for run in (*earlier["runs"], *cell["runs"])}
    return {**cell, "runs": [runs[seed] for seed in sorted(runs)]}


def _is_same_code(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two cells were made by code that computes the same."""
    prints = one["fingerprint"], other["fingerprint"]
    if one["fedjax_lab"] != other["fedjax_lab"] or (prints[0] is None) != (prints[1] is None):
        return False
    return prints[0] is None or is_same(*prints)


def _compact_cell(cell: Path, runs: Sequence[Any]) -> dict[str, Any]:
    tuning = json.loads((cell / TUNING).read_text(encoding="utf-8"))
    compact = []
    for run_ in runs:
        landscape = run_.path / LANDSCAPE
        compact.append(
            {
                "seed": run_.seed,
                "stopped": run_.summary["stopped"],
                "partition_hash": run_.partition["hash"],
                "curves": {
                    name: [_short(row.get(name)) for row in run_.rows]
                    for name in dict.fromkeys(name for row in run_.rows for name in row)
                    if not name.startswith(OWN)  # which ``with_own`` adds again
                },
                "summary": {
                    name: run_.summary.get(name)
                    for name in ("client_accuracy_mean", "worst_10_percent_accuracy")
                },
                "landscape": json.loads(landscape.read_text()) if landscape.exists() else None,
            }
        )
    return {
        "chosen": tuning["chosen"],
        "tuning": {"tried": tuning["tried"], "finalists": tuning["finalists"]},
        "seconds": round(tuning["seconds"] + sum(r.seconds + r.compile_seconds for r in runs), 1),
        "versions": runs[0].config["versions"],
        "code": {
            "fedjax_lab": runs[0].config["versions"]["fedjax_lab"],
            "fingerprint": tuning["fingerprint"],
        },
        "runs": compact,
    }


def _short(value: Any) -> Any:
    """Six digits say all that the report shows."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_compact(path: Path, result: Mapping[str, Any]) -> None:
    """Write JSON in which a run is a line, so that changes can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _lines(result, depth=6) + "\n")


def _lines(value: Any, depth: int) -> str:
    """JSON; what is short, or deeper than ``depth``, is on one line."""
    line = json.dumps(value, sort_keys=True)
    if depth == 0 or len(line) < 100 or not isinstance(value, (dict, list)):
        return line
    if isinstance(value, list):
        return "[\n" + ",\n".join(_lines(item, depth - 1) for item in value) + "\n]"
    pairs = (f"{json.dumps(k)}: {_lines(v, depth - 1)}" for k, v in sorted(value.items()))
    return "{\n" + ",\n".join(pairs) + "\n}"
