"""Hyperparameter search for several methods, each with the same budget of gradients.

The search is successive halving, after Jamieson, Talwalkar: Non-stochastic Best Arm Identification
and Hyperparameter Optimization. AISTATS 2016. The points of a method are batched in one compiled
program, as in ``sweep``. After a ninth of the rounds the best third of the points continues, and
after a third of the rounds the finalists do. Diverged points are stopped.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_choice, check_int
from fedjax_lab.clients.metrics import with_frozen_weights
from fedjax_lab.data import FederatedArrays, split_clients, split_examples
from fedjax_lab.data.cohort import Schedule, ScheduleOptions, scheduled
from fedjax_lab.data.streams import check_resident
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.round import Algorithm, check_algorithm
from fedjax_lab.simulation.debugging import debuggable
from fedjax_lab.simulation.evaluate import build_evaluation
from fedjax_lab.simulation.stop import check_not_ended
from fedjax_lab.simulation.sweep_result import check_seeds
from fedjax_lab.storage.fingerprint import hash_arrays, hash_function
from fedjax_lab.storage.run_dir import versions
from fedjax_lab.tuning.found import Found, Trial
from fedjax_lab.tuning.halving import equal_budgets
from fedjax_lab.tuning.kept import Kept
from fedjax_lab.tuning.lanes import Lanes
from fedjax_lab.tuning.proposals import (
    Even,
    Proposals,
    Sampled,
    Sampler,
    check_sampler,
    import_optuna,
)
from fedjax_lab.tuning.search import Search
from fedjax_lab.tuning.space import Build, Range, Space, check_tune, read_space
from fedjax_lab.types import Params, PyTree

# (params, examples [B, ...]) -> a score of each example, [B]
ScoreFn = Callable[[Params, PyTree], jax.Array]


@scheduled
@debuggable
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
    average: int = 1,
    sampler: Sampler | None = None,
    run_dir: str | Path | None = None,
    progress: bool = False,
    **schedule: Unpack[ScheduleOptions],
) -> Found:
    """Tune the hyperparameters of methods on validation data of the clients, without a test set.

    All methods spend the same number of gradients. A quarter of the points is reserved: if the best
    point lies at an end of a range, these points extend the range; otherwise they refine the
    neighbourhood of the best point.

    With ``run_dir``, trials and the states of the remaining points are stored after each rung, and
    after each batch of the first one. The same call resumes the search.

    Args:
      methods: name -> function that makes the method from hyperparameters as keyword arguments. It
        gets traced scalars, as in ``sweep``.
      space: hyperparameter -> (low, high), searched log-uniformly, or a list of values, for all
        methods that have it. Method -> such a mapping: only for this method.
      params: the initial global model.
      clients: the clients' training data.
      rounds: number of rounds of a full run, at least 2.
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
      average: number of evaluations whose mean is a point's score. The global model is evaluated
        after each ninth of the rounds. 3 is better than 1 if scores vary from round to round.
      sampler: what proposes the points. None: a lattice that fills the space evenly. "tpe" or
        "random": this sampler of optuna, in four batches; or a function from a seed to another
        sampler, such as ``lambda seed: optuna.samplers.GPSampler(seed=seed)``.
      run_dir: directory for the search; None: nothing is written.
      progress: show progress on stderr.

    Returns:
      ``Found``: ``best``, ``trials``, ``edges``, ``table()``.

    Raises:
      TypeError: an argument has the wrong type, or a method has no such hyperparameter.
      ValueError: an argument is out of range, ``score`` is None and a method has no loss, or
        ``jax_disable_jit`` is set.
      FloatingPointError: as ``sweep``.
      FileExistsError: ``run_dir`` has another search.
      ImportError: ``sampler`` is set, and optuna is missing.
      RuntimeError: all points of a method diverged.
      KeyboardInterrupt: Ctrl-C; or a signal has ended an earlier run of this process (see
        ``fedjax_lab.forget_signal``).
    """
    check_not_ended()
    check_tune(methods, validation)
    check_int("rounds", rounds, minimum=2)
    check_int("budget", budget, minimum=1)
    check_int("finalists", finalists, minimum=1, maximum=budget)
    check_choice("hold_out", hold_out, ("clients", "examples"))
    check_choice("mode", mode, ("max", "min"))
    check_int("average", average, minimum=1)
    check_sampler(sampler)
    check_resident(clients, "tune")
    keep_by_default()
    seeds = check_seeds(seeds)
    spaces = read_space(space, methods)
    firsts = {name: _first(name, build, spaces[name]) for name, build in methods.items()}
    train, held = _divided(clients, validation, hold_out, seeds[0])
    how = Schedule.of("tune", schedule)
    settings = _settings(spaces, firsts, params, (train, held), how, seeds, score)
    settings |= {"rounds": rounds, "budget": budget, "finalists": finalists, "mode": mode}
    settings |= {"average": average, "sampler": _sampler_record(sampler)}
    kept = Kept(run_dir, settings)
    plans = equal_budgets(
        [a.gradients_per_step for a in firsts.values()], rounds, budget, finalists, len(seeds)
    )
    trials: list[Trial] = []
    step = plans[0].rounds[0]  # divides all rungs, so that one program is enough
    common = (params, seeds, mode, step, average)
    for (name, build), plan in zip(methods.items(), plans, strict=True):
        count_fn = _score_of(firsts[name], score)
        evaluate = build_evaluation(count_fn, held)
        lanes = Lanes(build, how, evaluate, train, firsts[name], common)
        proposals = _proposals(spaces[name], seeds[0], sampler, plan.points[0])
        search = Search(name, spaces[name], plan, lanes, proposals, kept, progress)
        trials += search.run()
    return Found(trials, rounds, mode, spaces)


def _first(name: str, build: Build, space: Space) -> Algorithm:
    """Build the method at the middle of its space, to check the function."""
    algorithm = build(**{key: axis.at(0.5) for key, axis in space.items()})
    check_algorithm(algorithm, f"methods[{name!r}](...)")
    if algorithm.personal is not None:
        warnings.warn(
            f"{name!r} has a model for each client; tune scores its global model.", stacklevel=4
        )
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


def _proposals(space: Space, seed: int, sampler: Sampler | None, count: int) -> Proposals:
    return Even(space, seed) if sampler is None else Sampled(space, seed, sampler, count)


def _sampler_record(sampler: Sampler | None) -> list[str | None] | None:
    if sampler is None:
        return None
    chosen = sampler if isinstance(sampler, str) else hash_function(sampler)
    return [chosen, import_optuna().__version__]


def _ends(axis: Any) -> Sequence[float]:
    return axis if isinstance(axis, Range) else axis.values
