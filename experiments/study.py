"""What the studies of the papers share: tune, run with several seeds, save, report.

A study is a ``Study``: partitions, methods with their grids, and scales ("smoke" for CI,
"machine" for two CPU cores, "paper" for the paper's own setting). Its module ends in

    if __name__ == "__main__":
        main(STUDY)

and is then called as

    python -m experiments.PAPER.STUDY [--scale S] [--partitions P ...] [--methods M ...]
    python -m experiments.PAPER.STUDY --report [FILE.json]

Tuning: one seed, on training images that are held out as validation data; the score is the
best validation accuracy of the run, and a run that does not stay finite has none. The grid is run
for ``tuning_rounds``, its best points are run once more for all rounds, until as many of them as
``finalists`` says have stayed finite, and the best of those is chosen. Final runs: all
training images, other seeds. The test set is read by final runs only. A whole run is one compiled
program, in which hyper-parameters are arguments, so that a grid needs no further compilation.

Each finished (partition, method) is saved at once; a second call skips it. The report is made
from that file, or from results.json beside the study, which is its compact copy.
"""

import argparse
import dataclasses
import inspect
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import algorithms, build_round, data, models
from fedjax_lab.simulation.programs import keep_programs
from fedjax_lab.simulation.rounds import Schedule
from fedjax_lab.simulation.run_dir import versions, write_json

TUNING_SEED = 0
Hyper = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the paper's table.

    Attributes:
      factory: name in ``algorithms.ALGORITHMS``.
      grid: hyper-parameter -> values, of which all combinations are tried.
      then: hyper-parameter -> values, tried one after the other at the best of ``grid``.
      start: where those of ``then`` begin.
      fixed: other arguments of the factory.
      lr_decay: factor of ``client_lr`` per round.
      paper: partition -> the paper's accuracy in percent.
      style: (colour, dash) in figures; None: by its place.
    """

    factory: str
    grid: Mapping[str, Sequence[float]]
    then: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    start: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lr_decay: float = 1.0
    paper: Mapping[str, float] = dataclasses.field(default_factory=dict)
    style: tuple[int, int] | None = None

    def build(self, model: models.Model, preprocess: Any, hyper: Mapping[str, Any]) -> Any:
        """The algorithm with these hyper-parameters."""
        arguments = {**hyper, **self.fixed}
        if self.lr_decay != 1:
            first = arguments["client_lr"]
            arguments["client_lr"] = lambda round: first * self.lr_decay**round
        factory = algorithms.ALGORITHMS[self.factory]
        if "model" in inspect.signature(factory).parameters:
            return factory(model, preprocess=preprocess, **arguments)
        return factory(models.classification_loss(model.apply, preprocess), **arguments)

    def declared(self) -> dict[str, Any]:
        """What decides its numbers, as JSON has it; earlier results of another one are stale."""
        names = ("factory", "grid", "then", "start", "fixed", "lr_decay")
        return json.loads(json.dumps({name: getattr(self, name) for name in names}))


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large a study is run.

    Attributes:
      dataset: name of the data set.
      model: name of the model, and its options.
      num_clients: N.
      schedule: cohort, batch and local steps.
      rounds, tuning_rounds: of final runs and of tuning; multiples of ``eval_every``.
      finalists: points of a grid that stay finite for all rounds; 1: tuning decides alone.
      eval_every: rounds between evaluations.
      seeds: of the final runs; not 0, which tunes.
      held_out: training images that tuning takes as validation data.
      partitions: those that are run; None: the study's.
      grid_points: values of each hyper-parameter that are tried; None: all.
      client_map: as of ``build_round``.
    """

    dataset: str
    model: str
    num_clients: int
    schedule: Schedule
    rounds: int
    tuning_rounds: int
    eval_every: int
    finalists: int = 1
    seeds: tuple[int, ...] = (1, 2, 3)
    held_out: int = 5_000
    model_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    partitions: tuple[str, ...] | None = None
    grid_points: int | None = None
    client_map: str = "auto"

    def declared(self) -> dict[str, Any]:
        """As JSON has it."""
        schedule = {k: v for k, v in self.schedule._asdict().items() if v is not None}
        return json.loads(json.dumps({**dataclasses.asdict(self), "schedule": schedule}))


def smoke(num_clients: int, cohort_size: int, **changes: Any) -> Scale:
    """The scale on which CI runs a study: a few rounds on digits, one point of each grid."""
    scale = Scale(
        dataset="digits",
        model="mlp",
        model_options={"hidden": (16,)},
        num_clients=num_clients,
        schedule=Schedule(cohort_size=cohort_size, batch_size=16, local_steps=3),
        rounds=4,
        tuning_rounds=4,
        eval_every=2,
        seeds=(1,),
        held_out=200,
        grid_points=1,
    )
    return dataclasses.replace(scale, **changes)


@dataclasses.dataclass(frozen=True)
class Study:
    """A table or figure of a paper.

    Attributes:
      name: "PAPER/STUDY".
      title: the first line of the report.
      notes: the setting and how it departs from the paper's, for the report.
      partitions: specs, as of ``data.partition``.
      methods: name in the table -> method.
      scales: name -> scale.
      allowed: whether a point of a method's grid is tried.
      paper_head: the head of the column with the paper's numbers.
    """

    name: str
    title: str
    notes: str
    partitions: tuple[str, ...]
    methods: Mapping[str, Method]
    scales: Mapping[str, Scale]
    allowed: Callable[[Hyper], bool] = lambda hyper: True
    paper_head: str = "paper %"

    @property
    def module(self) -> str:
        """The module that declares it."""
        return f"experiments.{self.name.replace('/', '.')}"


class Problem:
    """A scale's data and model, and one compiled program per method and length."""

    def __init__(self, scale: Scale):
        self.scale = scale
        self.train, self.test = data.load(scale.dataset)
        mean, std, factor = data.normalization(self.train)
        self.preprocess = data.preprocess(mean, std, scale=factor)
        classes = data.num_classes(self.train)
        self.model = models.build(scale.model, num_classes=classes, **scale.model_options)
        self.counts = models.accuracy_counts(self.model.apply, self.preprocess)
        order = np.random.default_rng(TUNING_SEED).permutation(len(self.train.y))
        self.validation = self._take(order[: scale.held_out])
        self.fit = self._take(order[scale.held_out :])
        self._programs: dict[tuple[str, int], Any] = {}

    def _take(self, chosen: np.ndarray) -> data.Examples:
        chosen = np.sort(chosen)
        return data.Examples(self.train.x[chosen], self.train.y[chosen])

    def clients(self, examples: data.Examples, partition: str, seed: int) -> data.FederatedArrays:
        """``examples`` divided among the clients."""
        return data.partition(examples, partition, num_clients=self.scale.num_clients, seed=seed)

    def run(self, name, method, rounds, hyper, seed, clients, examples):
        """One run: accuracies on ``examples`` [evaluations], and the metrics' means."""
        if (name, rounds) not in self._programs:
            self._programs[name, rounds] = jax.jit(self._build(method, rounds))
        params = self.model.init(jax.random.key(seed), self.train.x[:1])
        # What is part of an argument's type would have each partition compiled anew. The sizes
        # decide shapes where epochs are counted, and else only what is known not to be padded.
        clients = dataclasses.replace(clients, partition=None)
        schedule = self.scale.schedule
        if schedule.local_epochs is None and not schedule.full_examples:
            most = len(self.train.y)
            clients = dataclasses.replace(clients, min_size=1, max_size=most)
        examples = jax.tree.map(jnp.asarray, examples)
        run = self._programs[name, rounds]
        accuracies, metrics = run(hyper, params, jax.random.key(seed), clients, examples)
        return np.asarray(accuracies, float), {k: float(v) for k, v in metrics.items()}

    def _build(self, method, rounds):
        schedule, eval_every = self.scale.schedule, self.scale.eval_every

        def run(hyper, params, key, clients, examples):
            algorithm = method.build(self.model, self.preprocess, hyper)
            round_fn = build_round(algorithm, self.scale.client_map)

            def one_round(state, round):
                return round_fn(state, schedule.draw(clients, key, round))

            def chunk(state, first):
                state, metrics = jax.lax.scan(one_round, state, first + jnp.arange(eval_every))
                correct, _ = self.counts(algorithm.params(state), examples)
                return state, (correct.mean(), metrics)

            first_batch = schedule.draw(clients, key, 0) if algorithm.needs_first_batch else None
            state = algorithm.init(params, clients.num_clients, first_batch)
            _, (accuracies, metrics) = jax.lax.scan(chunk, state, jnp.arange(0, rounds, eval_every))
            return accuracies, jax.tree.map(jnp.mean, metrics)

        return run


def score(problem, name, method, rounds, hyper, clients) -> float:
    """The best validation accuracy of a run that tunes; NaN if it did not stay finite."""
    arguments = (hyper, TUNING_SEED, clients, problem.validation)
    accuracies, metrics = problem.run(name, method, rounds, *arguments)
    return float(np.nanmax(accuracies)) if np.isfinite(list(metrics.values())).all() else np.nan


def _rank(score: float) -> float:
    return score if np.isfinite(score) else -1.0


def tune(problem, name, method, partition, allowed) -> tuple[Hyper, dict[str, float]]:
    """(the best hyper-parameters, JSON of those tried -> best validation accuracy)."""
    scale = problem.scale
    clients = problem.clients(problem.fit, partition, TUNING_SEED)
    trials: dict[str, float] = {}

    def tried(hyper):
        key = json.dumps(hyper, sort_keys=True)
        if key not in trials:
            trials[key] = score(problem, name, method, scale.tuning_rounds, hyper, clients)
        return _rank(trials[key])

    grid = {key: values[: scale.grid_points] for key, values in method.grid.items()}
    then = {key: values[: scale.grid_points] for key, values in method.then.items()}
    points = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    points = [{**point, **method.start} for point in points]
    points = [point for point in points if allowed(point)]
    if len(points) == 1 and all(len(values) == 1 for values in then.values()):
        return points[0], {}
    best = max(points, key=tried)
    for key, values in then.items():
        best = max(best, *({**best, key: value} for value in values), key=tried)
    return best, trials


def settle(problem, name, method, partition, trials) -> dict[str, float]:
    """The best of ``trials`` run for all rounds: JSON -> best validation accuracy, or NaN."""
    clients = problem.clients(problem.fit, partition, TUNING_SEED)
    finals: dict[str, float] = {}
    for key in sorted(trials, key=lambda key: _rank(trials[key]), reverse=True):
        finals[key] = score(problem, name, method, problem.scale.rounds, json.loads(key), clients)
        if np.isfinite(list(finals.values())).sum() == problem.scale.finalists:
            break
    return finals


def run_entry(problem, name, method, partition, allowed) -> dict[str, Any]:
    """Tune and run one method on one partition; returns a JSON value."""
    began = time.perf_counter()
    chosen, trials = tune(problem, name, method, partition, allowed)
    finals: dict[str, float] = {}
    if problem.scale.finalists > 1 and trials:
        finals = settle(problem, name, method, partition, trials)
        chosen = json.loads(max(finals, key=lambda key: _rank(finals[key])))
    tuned = time.perf_counter()
    runs = []
    for seed in problem.scale.seeds:
        clients = problem.clients(problem.train, partition, seed)
        arguments = (chosen, seed, clients, problem.test)
        accuracies, metrics = problem.run(name, method, problem.scale.rounds, *arguments)
        found = {"seed": seed, "partition_hash": clients.partition.hash}
        runs.append({**found, "accuracy": accuracies.round(4).tolist(), "metrics": metrics})
    return {
        "declared": method.declared(),
        "chosen": chosen,
        "validation": trials,
        "finalists": finals,
        "runs": runs,
        "tuning_seconds": round(tuned - began, 1),
        "final_seconds": round(time.perf_counter() - tuned, 1),
    }


def run_study(study: Study, scale: Scale, path: Path, partitions=None, methods=None) -> None:
    """Run what ``path`` does not hold yet, and add it there."""
    result: dict[str, Any] = {"study": study.name, "scale": scale.declared(), "entries": {}}
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["scale"] != scale.declared():
            raise SystemExit(f"{path} holds results of another scale; move it away first.")
    result["versions"] = versions()
    problem = Problem(scale)
    for partition in partitions or scale.partitions or study.partitions:
        entries = result["entries"].setdefault(partition, {})
        for name in methods or study.methods:
            method = study.methods[name]
            if name in entries and entries[name]["declared"] == method.declared():
                continue
            entries[name] = run_entry(problem, name, method, partition, study.allowed)
            write_json(path, _finite(result))
            top = [max(run["accuracy"]) for run in entries[name]["runs"]]
            print(f"{partition} {name}: {entries[name]['chosen']} top {top} "
                  f"{entries[name]['tuning_seconds']:.0f} + {entries[name]['final_seconds']:.0f} s",
                  flush=True)  # fmt: skip


def _finite(value: Any) -> Any:
    """JSON has no NaN: a diverged run's metrics are null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def main(study: Study, arguments: Sequence[str] | None = None) -> None:
    """The command line of a study."""
    parser = argparse.ArgumentParser(prog=f"python -m {study.module}", description=study.title)
    parser.add_argument("--scale", default="machine", choices=list(study.scales))
    parser.add_argument("--partitions", nargs="+")
    parser.add_argument("--methods", nargs="+", choices=list(study.methods))
    parser.add_argument("--dataset", help="in place of the scale's")
    parser.add_argument("--out", type=Path, help="file of the results, below runs/ by default")
    explained = "write RESULTS.md and figures from FILE, which becomes results.json, or from that"
    report = {"nargs": "?", "const": "results.json", "metavar": "FILE", "help": explained}
    parser.add_argument("--report", **report)
    parser.add_argument("--folder", type=Path, help="of the report; the study's own by default")
    given = parser.parse_args(arguments)
    from experiments.study_report import table, write_report  # needs matplotlib

    if given.report:
        own = Path(__file__).parent / study.name.partition("/")[0]
        folder = given.folder or own
        source = own / "results.json" if given.report == "results.json" else Path(given.report)
        print(write_report(study, source, folder))
        return
    keep_programs()
    scale = study.scales[given.scale]
    if given.dataset:
        scale = dataclasses.replace(scale, dataset=given.dataset)
    path = given.out or Path("runs") / study.name / f"{given.scale}-{scale.dataset}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    run_study(study, scale, path, given.partitions, given.methods)
    print(table(study, json.loads(path.read_text(encoding="utf-8"))))
    print(f"Results: {path}")
