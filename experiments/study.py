"""What the studies of the papers share: tune, run with several seeds, keep, report.

A paper's package holds a module for each table or figure, with a ``Study``: methods (rows) with
their grids, and scales, each with its columns: "paper" is the paper's own setting, "machine" what
two CPU cores do in minutes, "smoke" what CI runs. The package is called as

    python -m experiments.PAPER [STUDY ...] [--scale machine] [--columns C ...] [--methods M ...]
        [--dataset D --model M] [--seeds 1 2 3]
    python -m experiments.PAPER [STUDY ...] --report

A cell of the table is an ordinary run: ``runner.run`` with a ``RunConfig``, in a run directory
of its own, runs/PAPER/STUDY/SCALE/COLUMN/METHOD/seedS. What is finished is not run again, and
``fedjax-lab run --config .../config.json`` repeats a single one.

Tuning: one seed. Training images are held out beforehand; they are divided like the others,
so that they stand for held-out clients, whose pooled accuracy is the score. A grid is one
``sweep``, a compiled program over all its points: ``tuning_rounds`` for all, then all rounds for
the best, until as many as ``finalists`` says have stayed finite; the best of those is chosen. A
run that does not stay finite has no score. Final runs have all training images and other seeds;
the test set is read by them only. tuning.json beside them says what was tried.

``--report`` gathers the run directories into PAPER/results/STUDY.json and writes RESULTS.md,
RESULTS.html and the figures from that; without run directories, from the file alone.
"""

import argparse
import dataclasses
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

from experiments.paper_numbers import paper_accuracies
from fedjax_lab import data, sweep
from fedjax_lab.config import RunConfig
from fedjax_lab.report import load_runs
from fedjax_lab.runner import build, load, run
from fedjax_lab.simulation.programs import keep_programs
from fedjax_lab.simulation.run_dir import CHECKPOINTS, PARTITION, versions, write_json

TUNING, LANDSCAPE = "tuning.json", "landscape.json"
TUNING_SEED = 0
Point = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the paper's table.

    Attributes:
      algorithm: the method's name in fedjax_lab.
      grid: hyper-parameter -> values, of which all combinations are tried: client_lr,
        server_lr, or the method's own.
      then: hyper-parameter -> values, tried one after the other at the best of ``grid``.
      start: where those of ``then`` begin; its first value where it is not given.
      option: the method's other arguments.
      settings: other settings of its runs, such as client_lr_schedule.
      style: (colour, dash) in figures; None: by its place.
      at: where it stands on the study's axis.
    """

    algorithm: str
    grid: Mapping[str, Sequence[float]]
    then: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    start: Mapping[str, float] = dataclasses.field(default_factory=dict)
    option: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    style: tuple[int, int] | None = None
    at: float | None = None

    def config(self, column: "Column", point: Mapping[str, float], **more: Any) -> RunConfig:
        """The settings of a run at a point of the grid."""
        rates = {name: point[name] for name in ("client_lr", "server_lr") if name in point}
        option = {name: value for name, value in point.items() if name not in rates}
        settings = {**column.settings, **self.settings, **rates, **more}
        return RunConfig.from_dict(
            {**settings, "algorithm": self.algorithm, "option": {**self.option, **option}}
        )

    def declared(self) -> dict[str, Any]:
        """What decides its numbers, as JSON has it."""
        names = ("algorithm", "grid", "then", "start", "option", "settings")
        return _as_json({name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table: the conditions under which methods are compared.

    Attributes:
      settings: of its runs, by the names of ``RunConfig``.
      tuning_rounds: of the grids.
      paper: what to look up among the paper's numbers, such as {"table": "1", "dataset":
        "MNIST", "partition": "dirichlet:0.1"}; {}: the paper has no such column.
    """

    settings: Mapping[str, Any]
    tuning_rounds: int
    paper: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large a study is run, on what, and for how long.

    Attributes:
      columns: name -> column.
      hardware: on which it is meant to run.
      minutes: that it takes there, roughly.
      finalists: points of a grid that stay finite for all rounds; 1: tuning decides alone.
      seeds: of the final runs; not 0, which tunes.
      held_out: training images that tuning takes as validation data.
      grid_points: values of each hyper-parameter that are tried; None: all.
      methods: those that are run; None: all.
      landscape: methods for whose last model, of the first seed, the largest eigenvalue of the
        Hessian and a loss surface are computed.
    """

    columns: Mapping[str, Column]
    hardware: str
    minutes: float
    finalists: int = 1
    seeds: tuple[int, ...] = (1, 2, 3)
    held_out: int = 5_000
    grid_points: int | None = None
    methods: tuple[str, ...] | None = None
    landscape: tuple[str, ...] = ()

    def declared(self) -> dict[str, Any]:
        """As JSON has it."""
        return _as_json(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Study:
    """A table or figure of a paper.

    Attributes:
      name: "PAPER/STUDY".
      title: its heading in the report.
      notes: the setting and how it departs from the paper's, for the report.
      methods: name in the table, as the paper has it -> method.
      scales: name -> scale.
      allowed: whether a point of a method's grid is tried.
      paper_head: the head of the column with the paper's numbers.
      axis: the hyper-parameter by which the methods differ, against which accuracy is drawn.
    """

    name: str
    title: str
    notes: str
    methods: Mapping[str, Method]
    scales: Mapping[str, Scale]
    allowed: Callable[[Point], bool] = lambda point: True
    paper_head: str = "paper %"
    axis: str | None = None

    @property
    def paper(self) -> str:
        """The paper's package."""
        return self.name.partition("/")[0]

    @property
    def short(self) -> str:
        """The study's name within its paper."""
        return self.name.partition("/")[2]

    def result_path(self, folder: Path) -> Path:
        """Where a paper's folder keeps the compact copy of its run directories."""
        return folder / "results" / f"{self.short}.json"


def columns(settings: Mapping[str, Any], partitions: Sequence[str], tuning_rounds: int, **paper):
    """Columns that differ in the partition only, named by it."""
    return {
        spec: Column(
            {**settings, "partition": spec}, tuning_rounds, paper and paper_at(paper, spec)
        )
        for spec in partitions
    }


def paper_at(paper: Mapping[str, str], partition: str) -> dict[str, str]:
    """The paper's numbers for a partition."""
    return {**paper, "partition": partition}


def smoke(num_clients: int, cohort_size: int, methods: Sequence[str] = (), **settings) -> Scale:
    """The scale on which CI runs a study: a few rounds on digits, one point of each grid."""
    column = {
        "dataset": "digits",
        "model": "mlp",
        "model_option": {"hidden": [16]},
        "partition": "dirichlet:0.1",
        "num_clients": num_clients,
        "cohort_size": cohort_size,
        "batch_size": 16,
        "local_steps": 3,
        "rounds": 4,
        "eval_every": 2,
        **settings,
    }
    return Scale(
        columns={"digits": Column(column, tuning_rounds=2)},
        hardware="any",
        minutes=1,
        seeds=(1,),
        held_out=200,
        grid_points=1,
        methods=tuple(methods) or None,
    )


class Problem:
    """A column's data: all of it for final runs, cut in two for tuning."""

    def __init__(self, column: Column, held_out: int):
        self.column = column
        self.train, self.test = load(RunConfig.from_dict(column.settings))
        order = np.random.default_rng(TUNING_SEED).permutation(len(self.train.y))
        self.validation = self._take(order[:held_out])
        self.fit = self._take(order[held_out:])

    def _take(self, chosen: np.ndarray) -> data.Examples:
        chosen = np.sort(chosen)
        return data.Examples(self.train.x[chosen], self.train.y[chosen])

    def scores(self, method: Method, points: Sequence[Point], rounds: int) -> list[float]:
        """The best validation accuracy at each point; NaN where the run did not stay finite."""
        config = method.config(self.column, points[0], rounds=rounds, seed=TUNING_SEED).resolve()
        setup = build(config, (self.fit, self.validation))
        result = sweep(
            setup.vary,
            setup.params,
            setup.clients,
            points=list(points),
            seeds=[TUNING_SEED],
            rounds=rounds,
            cohort_size=config.cohort_size,
            batch_size=config.batch_size,
            local_steps=config.local_steps,
            local_epochs=config.local_epochs,
            weights=config.weights,
            full_examples=config.full_examples,
            devices=config.devices(),
            evaluate=setup.evaluate,
            eval_every=config.eval_every,
        )
        if result.interrupted:
            raise KeyboardInterrupt
        finite = [np.isfinite(result.history[name][:, 0]).all(1) for name in ("loss", "delta_norm")]
        best = np.nanmax(result.history["accuracy"][:, 0], axis=1)
        return np.where(np.all(finite, axis=0), best, np.nan).tolist()


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
    ranked = sorted(tried, key=lambda key: _rank(tried[key]), reverse=True)
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
    column = {"settings": problem.column.settings, "tuning_rounds": problem.column.tuning_rounds}
    rest = {"finalists": scale.finalists, "grid_points": scale.grid_points}
    declared = _as_json({**method.declared(), **column, **rest, "held_out": scale.held_out})
    if tuning_file.exists():
        tuning = json.loads(tuning_file.read_text(encoding="utf-8"))
        if tuning["declared"] != declared:
            raise SystemExit(f"{folder} holds results of other settings; move it away first.")
    else:
        began = time.perf_counter()
        chosen, tried, finals = tune(problem, method, scale, study.allowed)
        seconds = round(time.perf_counter() - began, 1)
        tuning = {"declared": declared, "chosen": chosen, "tried": tried, "finalists": finals}
        tuning = _finite({**tuning, "seconds": seconds, "versions": versions()})
        folder.mkdir(parents=True, exist_ok=True)
        write_json(tuning_file, tuning)
    for seed in scale.seeds:
        path = folder / f"seed{seed}"
        if _finished(path):
            continue
        rounds = problem.column.settings["rounds"]
        config = method.config(
            problem.column,
            tuning["chosen"],
            seed=seed,
            run_dir=str(path),
            checkpoint_every=rounds,
        )
        result = run(config, examples=(problem.train, problem.test), progress=False)
        if result.interrupted:
            raise KeyboardInterrupt
        if method_name in scale.landscape and seed == scale.seeds[0]:
            write_json(path / LANDSCAPE, _landscape(config, result.params, problem))
        # A study keeps numbers; its models would be gigabytes.
        shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)
    return tuning


def _finished(path: Path) -> bool:
    return (path / PARTITION).exists()  # what ``runner.run`` writes last


def _landscape(config: RunConfig, params: Any, problem: Problem) -> dict[str, Any]:
    """The Hessian's largest eigenvalue and a loss surface around the last model."""
    from fedjax_lab.simulation.landscape import hessian_eigenvalues, loss_surface

    loss_fn = build(config, (problem.train, problem.test)).loss_fn
    sample = jax.tree.map(lambda leaf: leaf[:2000], problem.train)
    surface = loss_surface(loss_fn, params, sample, radius=1.0, points=21, seed=0)
    values = hessian_eigenvalues(loss_fn, params, sample, count=1)
    return {
        "examples": len(sample.y),
        "eigenvalues": [float(value) for value in values],
        "offsets": np.asarray(surface.offsets, float).round(4).tolist(),
        "losses": np.asarray(surface.losses, float).round(5).tolist(),
    }


def run_study(study: Study, scale: Scale, folder: Path, chosen_columns=None, methods=None) -> None:
    """Run what ``folder`` does not hold yet, a cell at a time."""
    for column_name in chosen_columns or scale.columns:
        problem = Problem(scale.columns[column_name], scale.held_out)
        for name in methods or scale.methods or study.methods:
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
            paths = [path for path in paths if _finished(path)]
            if not paths:
                continue
            runs = load_runs(paths)
            first = first or runs[0]
            methods[name] = _compact_cell(cell, runs)
        if methods:
            found[column_name] = {
                "settings": dict(column.settings),
                "tuning_rounds": column.tuning_rounds,
                "paper": paper_accuracies(study.paper, column.paper, study.methods),
                "label_histogram": first.partition.get("label_histogram"),
                "methods": methods,
            }
    made_with = [cell.pop("versions") for c in found.values() for cell in c["methods"].values()]
    distinct = [v for i, v in enumerate(made_with) if v not in made_with[:i]]
    return _as_json(
        {
            "study": study.name,
            "scale": scale_name,
            "declared": scale.declared(),
            "versions": distinct,
            "columns": found,
        }
    )


def _compact_cell(cell: Path, runs: Sequence[Any]) -> dict[str, Any]:
    tuning = json.loads((cell / TUNING).read_text(encoding="utf-8"))
    compact = []
    for run_ in runs:
        landscape = run_.path / LANDSCAPE
        compact.append(
            {
                "seed": run_.seed,
                "partition_hash": run_.partition["hash"],
                "rows": [{k: _short(v) for k, v in row.items()} for row in run_.rows],
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
        "runs": compact,
    }


def _short(value: Any) -> Any:
    """Six digits say all that the report shows."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(_finite(value)))


def write_compact(path: Path, result: Mapping[str, Any]) -> None:
    """Write JSON in which a run is a line, so that changes can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(_lines(result, depth=6) + "\n", encoding="utf-8")
    scratch.replace(path)


def _lines(value: Any, depth: int) -> str:
    """JSON; what is short, or deeper than ``depth``, is on one line."""
    line = json.dumps(value, sort_keys=True)
    if depth == 0 or len(line) < 100 or not isinstance(value, (dict, list)):
        return line
    if isinstance(value, list):
        return "[\n" + ",\n".join(_lines(item, depth - 1) for item in value) + "\n]"
    pairs = (f"{json.dumps(k)}: {_lines(v, depth - 1)}" for k, v in sorted(value.items()))
    return "{\n" + ",\n".join(pairs) + "\n}"


def main(studies: Sequence[Study], arguments: Sequence[str] | None = None) -> None:
    """The command line of a paper's studies."""
    paper = studies[0].paper
    by_name = {study.short: study for study in studies}
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{paper}",
        description="Studies: " + "; ".join(f"{s.short} ({s.title})" for s in studies),
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="all by default")
    parser.add_argument("--scale", default="machine", choices=["paper", "machine", "smoke"])
    parser.add_argument("--columns", nargs="+", metavar="C", help="of the table; all by default")
    parser.add_argument("--methods", nargs="+", metavar="M", help="rows of the table")
    parser.add_argument("--dataset", help="in place of the study's")
    parser.add_argument("--model", help="in place of the study's, where the data set needs another")
    parser.add_argument("--seeds", nargs="+", type=int, help="of the final runs")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--report", action="store_true", help="write RESULTS.md; run nothing")
    parser.add_argument("--list", action="store_true", help="say what there is; run nothing")
    parser.add_argument("--out", type=Path, help="folder of the report; the paper's by default")
    given = parser.parse_args(arguments)
    for name in given.studies:
        if name not in by_name:
            parser.error(f"there is no study {name!r}; there are: {', '.join(by_name)}")
    chosen = [by_name[name] for name in given.studies or by_name]
    if given.list:
        print("\n".join(line for study in chosen for line in _listed(study)))
        return
    own = Path(__file__).parent / paper
    out = given.out or own
    if given.report:
        _report(chosen if given.studies else studies, given, out)
        return
    keep_programs()
    for study in chosen:
        scale = _with_changes(study.scales[given.scale], given)
        for kind, names, known in (
            ("column", given.columns, scale.columns),
            ("method", given.methods, study.methods),
        ):
            for name in names or ():
                if name not in known:
                    parser.error(f"{study.short} has no {kind} {name!r}; it has {', '.join(known)}")
        run_study(study, scale, _folder(study, given), given.columns, given.methods)


def _listed(study: Study) -> list[str]:
    lines = [f"{study.name}: {study.title}", f"  methods: {', '.join(study.methods)}"]
    for name, scale in study.scales.items():
        lines.append(
            f"  --scale {name}: {', '.join(scale.columns)}; {len(scale.seeds)} seeds; "
            f"{scale.minutes:g} minutes on {scale.hardware}"
        )
    return lines


def _with_changes(scale: Scale, given: argparse.Namespace) -> Scale:
    """The scale with another data set, model or seeds."""
    changes = {name: getattr(given, name) for name in ("dataset", "model") if getattr(given, name)}
    if "model" in changes:
        changes["model_option"] = {}
    changed = {
        name: dataclasses.replace(column, settings={**column.settings, **changes})
        for name, column in scale.columns.items()
    }
    return dataclasses.replace(
        scale, columns=changed, seeds=tuple(given.seeds) if given.seeds else scale.seeds
    )


def _folder(study: Study, given: argparse.Namespace) -> Path:
    changed = [value for value in (given.dataset, given.model) if value]
    return given.runs / study.name / slug("-".join([given.scale, *changed]))


def _report(studies: Sequence[Study], given: argparse.Namespace, out: Path) -> None:
    from experiments.study_report import write_results  # needs matplotlib

    for study in studies:
        folder = _folder(study, given)
        if folder.exists():
            scale = _with_changes(study.scales[given.scale], given)
            write_compact(study.result_path(out), gather(study, given.scale, scale, folder))
    print(write_results(studies, out))
