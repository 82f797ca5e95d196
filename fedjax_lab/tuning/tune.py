"""Hyperparameter search for several methods, each with the same budget of gradients.

The search is successive halving, after Jamieson, Talwalkar: Non-stochastic Best Arm Identification
and Hyperparameter Optimization. AISTATS 2016. The points of a method are batched in one compiled
program, as in ``sweep``. After a ninth of the rounds the best third of the points continues, and
after a third of the rounds the finalists do. Diverged points are stopped.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_choice, check_int
from fedjax_lab.clients.mapping import parse_client_map, single_device_map
from fedjax_lab.clients.metrics import with_frozen_weights
from fedjax_lab.data import FederatedArrays, split_clients, split_examples
from fedjax_lab.data.cohort import Schedule, ScheduleOptions, scheduled
from fedjax_lab.data.streams import check_resident
from fedjax_lab.machine.files import write_atomically
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.round import Algorithm, check_algorithm
from fedjax_lab.simulation.evaluate import build_evaluation
from fedjax_lab.simulation.placement import Placement
from fedjax_lab.simulation.run import Run
from fedjax_lab.simulation.sweep_program import Program
from fedjax_lab.simulation.sweep_result import Point, check_seeds
from fedjax_lab.storage.fingerprint import hash_arrays, hash_function
from fedjax_lab.storage.run_dir import versions, write_json
from fedjax_lab.tuning.found import Found, Trial
from fedjax_lab.tuning.halving import Rungs, best_first, equal_budgets
from fedjax_lab.tuning.space import Build, Range, Space, check_tune, read_space, spread
from fedjax_lab.types import Params, PyTree

TRIALS = "trials.json"
# (params, examples [B, ...]) -> a score of each example, [B]
ScoreFn = Callable[[Params, PyTree], jax.Array]


@scheduled
def tune(
    methods: Mapping[str, Build],
    space: Mapping[str, Any],
    params: Params,
    clients: FederatedArrays,
    *,
    rounds: int,
    validation: float | FederatedArrays = 0.2,
    hold_out: str = "examples",
    budget: int = 24,
    finalists: int = 2,
    seeds: Sequence[int] = (0, 1),
    score: ScoreFn | None = None,
    mode: str = "min",
    run_dir: str | Path | None = None,
    progress: bool = False,
    **schedule: Unpack[ScheduleOptions],
) -> Found:
    """Tune the hyperparameters of methods on validation data of the clients, without a test set.

    All methods spend the same number of gradients. A quarter of the points is reserved: if the best
    point lies at an end of a range, these points extend the range; otherwise they refine the
    neighbourhood of the best point.

    With ``run_dir``, trials and the states of the remaining points are stored after each rung, and
    the same call resumes the search.

    Args:
      methods: name -> function that makes the method from hyperparameters as keyword arguments. It
        gets traced scalars, as in ``sweep``.
      space: hyperparameter -> (low, high), searched log-uniformly, or a list of values, for all
        methods that have it. Method -> such a mapping: only for this method.
      params: the initial global model.
      clients: the clients' training data.
      rounds: number of rounds of a full run.
      validation: share of each client's examples (with ``hold_out="clients"``, of the clients) that
        is held out for validation; or a separate federation.
      hold_out: what to hold out, "examples" or "clients".
      budget: number of initial points of the method with the most gradients in a local step; other
        methods get more points for the same number of gradients.
      finalists: number of points of each method that run to the end, with all seeds.
      seeds: seeds of the runs; the first one is used before the last rung.
      score: (params, examples [B, ...]) -> float [B], a score of each example. A point's score is
        the mean over all validation examples. None: the loss of the methods.
      mode: "min" if a small score is good, "max" if a large one is.
      run_dir: directory for the search; None: nothing is written.
      progress: show progress on stderr.

    Returns:
      ``Found``: ``best``, ``trials``, ``edges``, ``table()``.

    Raises:
      TypeError: an argument has the wrong type, or a method has no such hyperparameter.
      ValueError: an argument is out of range, or ``score`` is None and a method has no loss.
      FileExistsError: ``run_dir`` has another search.
      RuntimeError: all points of a method diverged.
    """
    check_tune(methods, validation)
    check_int("rounds", rounds, minimum=1)
    check_int("budget", budget, minimum=1)
    check_int("finalists", finalists, minimum=1, maximum=budget)
    check_choice("hold_out", hold_out, ("clients", "examples"))
    check_choice("mode", mode, ("max", "min"))
    check_resident(clients, "tune")
    keep_by_default()
    seeds = check_seeds(seeds)
    spaces = read_space(space, methods)
    firsts = {name: _first(name, build, spaces[name]) for name, build in methods.items()}
    train, held = _divided(clients, validation, hold_out, seeds[0])
    how = Schedule.of("tune", schedule)
    settings = _settings(spaces, firsts, params, (train, held), how, seeds, score)
    settings |= {"rounds": rounds, "budget": budget, "finalists": finalists, "mode": mode}
    kept = Kept(run_dir, settings)
    plans = equal_budgets(
        [a.gradients_per_step for a in firsts.values()], rounds, budget, finalists, len(seeds)
    )
    trials: list[Trial] = []
    step = plans[0].rounds[0]  # divides all rungs, so that one program is enough
    for (name, build), plan in zip(methods.items(), plans, strict=True):
        count_fn = _score_of(firsts[name], score)
        evaluate = build_evaluation(count_fn, held)
        lanes = Lanes(build, how, evaluate, train, firsts[name], (params, seeds, mode, step))
        search = Search(name, spaces[name], plan, lanes, kept, progress)
        trials += search.run()
    return Found(trials, rounds, mode, spaces)


def _first(name: str, build: Build, space: Space) -> Algorithm:
    """Build the method at the middle of its space, to check the function."""
    algorithm = build(**{key: axis.at(0.5) for key, axis in space.items()})
    check_algorithm(algorithm, f"methods[{name!r}](...)")
    return algorithm


def _divided(clients, validation, hold_out, seed) -> tuple[FederatedArrays, FederatedArrays]:
    if isinstance(validation, FederatedArrays):
        return clients, validation
    if hold_out == "clients":
        return split_clients(clients, validation, seed)
    return split_examples(clients, validation, seed)


def _score_of(algorithm: Algorithm, score: ScoreFn | None) -> Callable[..., Any]:
    loss_fn = algorithm.loss_fn
    if score is None and loss_fn is None:
        raise ValueError(f"{algorithm.name} takes a model and no loss; set score to tune it.")

    def count(params, examples):
        if score is not None:
            values = score(params, examples)
        else:
            assert loss_fn is not None
            loss = with_frozen_weights(loss_fn, algorithm.frozen)
            values = loss(params, examples, jax.random.key(0))
        values = values[0] if isinstance(values, tuple) else values
        return values.astype(jnp.float32), values.astype(jnp.float32)

    count.score = "score"  # type: ignore[attr-defined]
    return count


def _settings(spaces, firsts, params, data, how, seeds, score) -> dict[str, Any]:
    """Collect the settings of a search for its directory."""
    return {
        "spaces": {name: {k: list(_ends(v)) for k, v in s.items()} for name, s in spaces.items()},
        "methods": {name: {**a.hyperparameters, "name": a.name} for name, a in firsts.items()},
        "losses": {name: hash_function(a.loss_fn) for name, a in firsts.items()},
        "params": hash_arrays(params),
        "data": [hash_arrays((part.examples, part.indices, part.sizes)) for part in data],
        "schedule": how.record(),
        "sample_cohort": hash_function(how.sample_cohort),
        "score": hash_function(score),
        "seeds": list(seeds),
        "versions": versions(),
    }


def _ends(axis: Any) -> Sequence[float]:
    return axis if isinstance(axis, Range) else axis.values


@dataclasses.dataclass
class Lane:
    """A run of a point with a seed.

    Attributes:
      point: the hyperparameters.
      seed: seed of the run.
      rounds: finished rounds.
      score: score after these rounds; NaN for a diverged run.
      leaves: arrays of the state, on the host; None before the run starts.
    """

    point: Point
    seed: int
    rounds: int = 0
    score: float = float("nan")
    leaves: list[np.ndarray] | None = None


class Lanes:
    """Runs of one method, advanced in groups of the size of its compiled program."""

    def __init__(
        self,
        build: Build,
        how: Schedule,
        evaluate: Callable[[Params], Mapping[str, Any]],
        clients: FederatedArrays,
        first: Algorithm,
        common: tuple[Params, Sequence[int], str, int],
    ):
        self._params, self.seeds, self.mode, self._step = common
        self.gradients_per_step = first.gradients_per_step
        kind = single_device_map()
        many = "shard_map" if jax.device_count() > 1 else kind
        place = Placement(parse_client_map(many))
        frozen = jax.tree.map(jnp.asarray, first.frozen)
        client_map = parse_client_map(kind)
        data = (clients, frozen)
        run_of = lambda **point: Run(build(**point), how)  # noqa: E731
        self._program = Program(run_of, client_map, place, evaluate, data)
        self._one_by_one = kind == "scan"

    def advance(self, lanes: Sequence[Lane], rounds: int) -> None:
        """Run lanes up to a number of rounds.

        Args:
          lanes: lanes with the same number of finished rounds.
          rounds: number of finished rounds afterwards.
        """
        if not lanes:
            return
        begun = lanes[0].rounds
        runs = [(self._params, jax.random.key(lane.seed), lane.point) for lane in lanes]
        # On CPU, lanes run one after the other, so a small program is enough for all rungs.
        few = runs[: jax.device_count()] if self._one_by_one else runs
        if not self._program.size or len(few) <= self._program.size // 2:
            self._program.fit(few, min(self._step, rounds - begun), None)
        size = self._program.size
        for start in range(0, len(lanes), size):
            group = lanes[start : start + size]
            leaves = None if group[0].leaves is None else [lane.leaves or [] for lane in group]
            self._program.start(runs[start : start + size], leaves)
            is_finite = np.ones(len(group), bool)
            for first in range(begun, rounds, self._step):
                length = min(self._step, rounds - first)
                metrics, scores = self._program.advance(first, length)
                for name in ("loss", "delta_norm"):
                    is_finite &= np.isfinite(metrics[name][: len(group)]).all(1)
            values = np.where(is_finite, scores["score"][: len(group)], np.nan)
            values = np.where(np.isfinite(values), values, np.nan)
            after = self._program.leaves(len(group))
            for lane, value, own in zip(group, values, after, strict=True):
                lane.score, lane.rounds, lane.leaves = float(value), rounds, own


class Search:
    """The search of one method.

    Args:
      name: the caller's name of the method.
      space: search space of the method.
      plan: rungs of the method.
      lanes: advances the method's runs.
      kept: the search's directory.
      progress: show progress on stderr.
    """

    def __init__(
        self, name: str, space: Space, plan: Rungs, lanes: Lanes, kept: "Kept", progress: bool
    ):
        self._name, self._space, self._plan, self._lanes = name, space, plan, lanes
        self._kept, self._progress = kept, progress
        self._sign = 1.0 if lanes.mode == "min" else -1.0
        self._trials: list[Trial] = []

    def run(self) -> list[Trial]:
        """Run the search; returns all trials of the method, in order."""
        done, lanes, self._trials = self._kept.load(self._name)
        for rung, rounds in enumerate(self._plan.rounds):
            if rung < done:
                continue
            lanes = self._first_rung(rounds) if rung == 0 else self._next(lanes, rung)
            if not any(np.isfinite(lane.score) for lane in lanes):
                raise RuntimeError(
                    f"all points of {self._name!r} diverged within {rounds} rounds; lower its "
                    "ranges."
                )
            lanes = self._going_on(lanes, rung + 1)
            self._kept.save(self._name, rung + 1, lanes, self._trials)
        return self._trials

    def _first_rung(self, rounds: int) -> list[Lane]:
        count, reserved = self._plan.points[0], self._plan.reserved
        seed = self._lanes.seeds[0]
        points = spread(self._space, max(count - reserved, 1), seed)
        lanes = [Lane(point, seed) for point in points]
        self._advance(lanes, rounds)
        while (more := self._further(lanes, count - len(lanes))) and len(lanes) < count:
            new = [Lane(point, seed) for point in more]
            self._advance(new, rounds)
            lanes += new
        return lanes

    def _further(self, lanes: list[Lane], room: int) -> list[Point]:
        """Choose points beyond the ends at which the best point lies, or else around it."""
        order = best_first([self._sign * lane.score for lane in lanes])
        tried = [lane.point for lane in lanes]
        if not order or room <= 0:
            return []
        best = lanes[order[0]].point
        beyond, around = [], []
        for name, axis in self._space.items():
            if not isinstance(axis, Range):
                continue
            there = sorted({point[name] for point in tried})
            place = there.index(best[name])
            wide = (axis.high / axis.low) ** (1 / max(len(there) - 1, 1))
            if place == 0 and best[name] <= axis.at(1 / max(len(there), 1)):
                beyond.append({**best, name: best[name] / max(wide, 1.5)})
            if place == len(there) - 1 and best[name] >= axis.at(1 - 1 / max(len(there), 1)):
                beyond.append({**best, name: best[name] * max(wide, 1.5)})
            for other in (place - 1, place + 1):
                if 0 <= other < len(there):
                    middle = float(np.sqrt(best[name] * there[other]))
                    if not np.isclose(middle, best[name], rtol=0.05):
                        around.append({**best, name: middle})
        chosen = beyond or around
        return [point for point in chosen if point not in tried][:room]

    def _next(self, lanes: list[Lane], rung: int) -> list[Lane]:
        """Select the lanes that continue; finalists also run with the other seeds."""
        rounds = self._plan.rounds[rung]
        self._advance(lanes, rounds)
        if rounds < self._plan.rounds[-1]:
            return lanes
        alive = [lane for lane in lanes if np.isfinite(lane.score)]
        again = [Lane(x.point, seed) for seed in self._lanes.seeds[1:] for x in alive]
        self._advance(again, rounds)
        return [*lanes, *again]

    def _going_on(self, lanes: list[Lane], rung: int) -> list[Lane]:
        if rung == len(self._plan.rounds):
            return []
        order = best_first([self._sign * lane.score for lane in lanes])
        return [lanes[place] for place in order[: self._plan.points[rung]]]

    def _advance(self, lanes: list[Lane], rounds: int) -> None:
        before = [lane.rounds for lane in lanes]
        self._lanes.advance(lanes, rounds)
        for lane, start in zip(lanes, before, strict=True):
            trial = Trial(self._name, dict(lane.point), lane.seed, rounds, lane.score)
            cost = (rounds - start) * self._lanes.gradients_per_step
            self._trials.append(trial._replace(gradients=cost))
        if self._progress and lanes:
            best = [self._sign * lane.score for lane in lanes]
            at = best_first(best)[:1]
            summary = f"best {lanes[at[0]].score:.4g} at {lanes[at[0]].point}" if at else "diverged"
            print(f"{self._name}: {len(lanes)} points, {rounds} rounds: {summary}", flush=True)


class Kept:
    """The directory of a search: trials, and the states of the points that continue.

    Args:
      folder: the directory; None: nothing is written.
      settings: settings of the search, a JSON object.

    Raises:
      FileExistsError: the directory has another search.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any]):
        self._folder = None if folder is None else Path(folder)
        text = json.dumps(settings, sort_keys=True, default=str)
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        self._done: dict[str, Any] = {}
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / TRIALS
        if not file.exists():
            return
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.get("search") != self._digest:
            raise FileExistsError(
                f"run_dir {str(self._folder)!r} holds another search: other methods, spaces, data, "
                "rounds, seeds or versions. Choose another directory."
            )
        self._done = found["methods"]

    def load(self, name: str) -> tuple[int, list[Lane], list[Trial]]:
        """Load (number of finished rungs, lanes that continue, trials) of a method.

        Args:
          name: name of the method.
        """
        if self._folder is None or name not in self._done:
            return 0, [], []
        found = self._done[name]
        lanes = [Lane(**lane) for lane in found["lanes"]]
        if lanes:
            with np.load(self._file(name), allow_pickle=False) as file:
                leaves = [file[f"leaf{i}"] for i in range(len(file.files))]
            for i, lane in enumerate(lanes):
                lane.leaves = [leaf[i] for leaf in leaves]
        return found["rungs"], lanes, [Trial(*trial) for trial in found["trials"]]

    def save(self, name: str, rungs: int, lanes: Sequence[Lane], trials: Sequence[Trial]) -> None:
        """Store a method's search after a rung.

        Args:
          name: name of the method.
          rungs: number of finished rungs.
          lanes: lanes that continue.
          trials: all trials so far.
        """
        if self._folder is None:
            return
        if lanes:
            leaves = zip(*(lane.leaves or [] for lane in lanes), strict=True)
            arrays: Any = {f"leaf{i}": np.stack(leaf) for i, leaf in enumerate(leaves)}
            with write_atomically(self._file(name), "wb") as file:
                np.savez(file, **arrays)
        said = [dataclasses.asdict(dataclasses.replace(lane, leaves=None)) for lane in lanes]
        self._done[name] = {"rungs": rungs, "lanes": said, "trials": [list(t) for t in trials]}
        write_json(self._folder / TRIALS, {"search": self._digest, "methods": self._done})

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.npz"
