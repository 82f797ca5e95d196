"""Hyperparameter search for several methods, each with the same budget of gradients.

The search is successive halving, after Jamieson, Talwalkar: Non-stochastic Best Arm Identification
and Hyperparameter Optimization. AISTATS 2016. The points of a method are batched in one compiled
program, as in ``sweep``. After a ninth of the rounds the best third of the points continues, and
after a third of the rounds the finalists do. Diverged points are stopped.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_choice, check_int, warn
from fedjax_lab.data import ClientTimes, FederatedArrays, split_clients, split_examples
from fedjax_lab.data.client_sampling import check_cohorts
from fedjax_lab.data.clients import held_out_clients
from fedjax_lab.data.cohort import Schedule, ScheduleOptions, scheduled
from fedjax_lab.data.streams import check_resident, replace_index
from fedjax_lab.machine.keys import seeded
from fedjax_lab.machine.program_cache import keep_by_default
from fedjax_lab.round import Algorithm, check_algorithm
from fedjax_lab.simulation.arguments import check_model, check_simulate
from fedjax_lab.simulation.client_data import record_times
from fedjax_lab.simulation.debugging import debuggable
from fedjax_lab.simulation.evaluate import build_evaluation
from fedjax_lab.simulation.prepare import computation_of
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.stop import check_not_ended
from fedjax_lab.simulation.sweep_points import Point, check_seeds, check_traced
from fedjax_lab.storage.fingerprint import hash_arrays, hash_function
from fedjax_lab.storage.lock import one_writer
from fedjax_lab.storage.run_dir import versions
from fedjax_lab.tuning.candidates import Candidates
from fedjax_lab.tuning.halving import equal_budgets
from fedjax_lab.tuning.proposals import Sampler, check_sampler, proposals_of, record_sampler
from fedjax_lab.tuning.score import ScoreFn, by_loss, by_score, check_score, evaluation_key
from fedjax_lab.tuning.search import Search
from fedjax_lab.tuning.search_log import SearchLog
from fedjax_lab.tuning.search_result import SearchResult, Trial
from fedjax_lab.tuning.space import Build, Space, check_tune, read_space, read_start_points
from fedjax_lab.types import Params, PyTree


@scheduled
@debuggable
def tune(
    methods: Mapping[str, Build],
    space: Mapping[str, Any],
    params: Params,
    clients: FederatedArrays,
    *,
    rounds: int,
    times: ClientTimes | None = None,
    validation: float | FederatedArrays = 0.2,
    hold_out: str = "examples",
    budget: int = 24,
    finalists: int = 2,
    start_points: Mapping[str, Sequence[Point]] | None = None,
    seeds: Sequence[int] = (0, 1),
    score: ScoreFn | None = None,
    mode: str = "min",
    average: int = 1,
    sampler: Sampler | None = None,
    run_dir: str | Path | None = None,
    progress: bool = False,
    lowering: str = "auto",
    **schedule: Unpack[ScheduleOptions],
) -> SearchResult:
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
      times: as in ``simulate``, with an entry for each of ``clients``; a method's message sizes are
        those at the middle of its space.
      validation: share of each client's examples (with ``hold_out="clients"``, of the clients) that
        is held out for validation; or a separate federation.
      hold_out: what to hold out, "examples" or "clients". With "clients", the others are numbered
        anew; what ``devices``, ``times`` and arrays [N] say of a client still holds for it.
      budget: number of initial points of the method with the most gradients in a local step; other
        methods get more points for the same number of gradients.
      finalists: number of points of each method that run to the end, with all seeds.
      start_points: method -> points that are known to be good, such as a paper's, each with a value
        for every hyperparameter of the method's space, inside or outside. They are among the first
        points and the finalists, so that the search ends with none that is worse on validation.
      seeds: seeds of the runs; the first one is used before the last rung.
      score: (params, examples [B, ...]) -> float [B], a score of each example. A point's score is
        the mean over all validation examples. None: the loss of the methods as ``evaluate`` has it,
        without dropout and augmentation: it is called with the key None, which the losses of
        ``models`` take. A loss function of your own that fails with None, or draws numbers even
        then, is scored as in training, with a fixed key; a warning says so if it uses the key.
      mode: "min" if a small score is good, "max" if a large one is.
      average: number of evaluations whose mean is a point's score. The global model is evaluated
        after each ninth of the rounds. 3 is better than 1 if scores vary from round to round.
      sampler: what proposes the points. None: a Latin hypercube in the order of a scrambled Halton
        sequence, which spaces the values of every hyperparameter evenly. "tpe" or "random": this
        sampler of optuna, in four batches; or a function from a seed to another sampler, such as
        ``lambda seed: optuna.samplers.GPSampler(seed=seed)``.
      run_dir: directory for the search; None: nothing is written.
      progress: show progress on stderr.
      lowering: as in ``simulate``, of the rounds and of the score.

    Returns:
      ``SearchResult``: ``best``, ``trials``, ``edges``, ``table()``.

    Raises:
      TypeError: an argument has the wrong type, or a method's own space has a name that it does not
        take.
      ValueError: an argument is out of range, no method takes a name of ``space``, or a method has
        an empty space; ``times`` is for another number of clients, ``score`` is None and a method
        has no loss, ``jax_disable_jit`` is set, or there are several processes; or ``simulate``
        would refuse ``sample_cohort``, or a private method with this sampling. ``sample_cohort``
        and ``hold_out="clients"`` exclude each other.
      FloatingPointError: as ``sweep``.
      FileExistsError: ``run_dir`` has another search.
      BlockingIOError: another process is writing to ``run_dir``.
      ImportError: ``sampler`` is set, and optuna is missing.
      RuntimeError: all points of a method diverged.
      KeyboardInterrupt: Ctrl-C; or a signal has ended an earlier run of this process (see
        ``fedjax_lab.forget_signal``).
    """
    check_not_ended()
    Processes.here().check_single("tune")
    check_tune(methods, validation)
    check_int("rounds", rounds, minimum=2)
    check_int("budget", budget, minimum=1)
    check_int("finalists", finalists, minimum=1, maximum=budget)
    check_choice("hold_out", hold_out, ("clients", "examples"))
    check_score(score, mode)
    check_int("average", average, minimum=1)
    check_sampler(sampler)
    check_resident(clients, "tune")
    keep_by_default()
    seeds = check_seeds(seeds)
    spaces = read_space(space, methods)
    starts = read_start_points(start_points, spaces, finalists)
    firsts = {
        name: _first(name, build, spaces[name], starts[name]) for name, build in methods.items()
    }
    check_simulate(next(iter(firsts.values())), params, clients)

    # What is computed.
    given = Schedule.of("tune", schedule)
    train, held, seen = divided(clients, validation, hold_out, seeds[0])
    if seen is not None:
        if given.sample_cohort is not None:
            raise ValueError(
                "hold_out is 'clients', which numbers the training clients anew, and sample_cohort "
                "returns numbers: use hold_out='examples', or give a federation as validation."
            )
        given = given.of_clients(seen, clients.num_clients)
        train = replace_index(train, numbers=jnp.asarray(seen, jnp.int32))
        times = times.take(seen, clients.num_clients) if isinstance(times, ClientTimes) else times
    how, train = given.bind(train)
    counts = _counts(firsts, score, params, held.examples)
    if how.sample_cohort is not None:
        check_cohorts(how.sample_cohort, train, seeded(seeds[0]), how.cohort_size, rounds)
    gradients = [first.gradients_per_step for first in firsts.values()]
    of_methods = equal_budgets(gradients, rounds, budget, finalists, len(seeds))
    step = of_methods[0].rounds[0]  # chunks of all rungs: one program, but for remainders
    entrants = {}
    for (name, first), rungs in zip(firsts.items(), of_methods, strict=True):
        run, timed = computation_of(
            first, params, train, how, times, eval_every=step, lowering=lowering
        )
        run.shapes(timed)  # a method that cannot start is refused before the first trial
        run.guarantees(timed)  # and what no run could account for
        check_model(run, timed)
        entrants[name] = rungs, run, timed

    settings = _settings(spaces, firsts, params, (train, held), how, seeds, score)
    if times is not None:
        settings["times"] = {name: record_times(timed) for name, (*_, timed) in entrants.items()}
    settings |= {"rounds": rounds, "budget": budget, "finalists": finalists, "mode": mode}
    settings |= {"average": average, "sampler": record_sampler(sampler)}
    settings |= {"start_points": starts} if start_points else {}
    settings |= {} if lowering == "auto" else {"lowering": lowering}
    trials: list[Trial] = []
    with one_writer(run_dir):
        search_log = SearchLog(run_dir, settings)
        for name, (rungs, run, timed) in entrants.items():
            evaluate = build_evaluation(counts[name], held, lowering=lowering)
            candidates = Candidates(methods[name], run, timed, evaluate, average)
            proposals = proposals_of(spaces[name], seeds[0], sampler, rungs.points[0])
            search = Search(
                name,
                spaces[name],
                rungs,
                candidates,
                proposals,
                search_log,
                starts[name],
                seeds=seeds,
                mode=mode,
                progress=progress,
            )
            trials += search.run()
    return SearchResult(trials, rounds, mode, spaces)


def _first(name: str, build: Build, space: Space, start_points: Sequence[Point]) -> Algorithm:
    """Build the method at the middle of its space, to check it, at all limits and start points."""
    middle = {key: axis.at(0.5) for key, axis in space.items()}
    algorithm = build(**middle)
    check_algorithm(algorithm, f"methods[{name!r}](...)")
    if algorithm.personal is not None:
        warn(f"{name!r} has a model for each client; tune scores its global model.")
    for key, axis in space.items():
        for value in axis:
            build(**{**middle, key: value})
    for point in start_points:
        build(**point)
    check_traced(f"methods[{name!r}]", build, middle)
    return algorithm


def divided(
    clients: FederatedArrays, validation: float | FederatedArrays, hold_out: str, seed: int
) -> tuple[FederatedArrays, FederatedArrays, np.ndarray | None]:
    """Return (training data, validation data, numbers of the training clients; None: all).

    Args:
      clients, validation, hold_out: as in ``tune``.
      seed: the first one of the search.

    Raises:
      TypeError, ValueError: as ``split_examples`` and ``split_clients``.
    """
    if isinstance(validation, FederatedArrays):
        return clients, validation, None
    if not isinstance(validation, (int, float, np.number)):
        raise TypeError(
            f"validation is {type(validation).__name__}; it must be a share of the training data, "
            "or FederatedArrays, such as data.partition returns."
        )
    share: Any = validation
    if hold_out == "clients":
        seen, _ = held_out_clients(clients.num_clients, share, seed)
        return *split_clients(clients, share, seed), seen
    return *split_examples(clients, share, seed), None


def _counts(
    firsts: Mapping[str, Algorithm], score: ScoreFn | None, params: Params, examples: PyTree
) -> dict[str, Callable[..., Any]]:
    """Build each method's evaluation; one warning for all losses that stay as in training."""
    if score is not None:
        return dict.fromkeys(firsts, by_score(score))
    counts, as_in_training = {}, []
    for name, algorithm in firsts.items():
        key, is_evaluation = evaluation_key(algorithm, params, examples)
        counts[name] = by_loss(algorithm, key)
        as_in_training += [name] * (not is_evaluation)
    if as_in_training:
        warn(
            f"the loss function of {', '.join(as_in_training)} draws numbers with its key, and not "
            "without one: tune scores points with dropout and augmentation as in training. Give "
            "score=, or a loss function that takes the key None, as models.classification_loss "
            "does."
        )
    return counts


def _settings(spaces, firsts, params, data, how, seeds, score) -> dict[str, Any]:
    """Collect the settings of a search for its directory."""
    return {
        "spaces": {name: {k: list(v) for k, v in s.items()} for name, s in spaces.items()},
        "methods": {name: {**a.hyperparameters, "name": a.name} for name, a in firsts.items()},
        "losses": {name: hash_function(a.loss_fn) for name, a in firsts.items()},
        "params": hash_arrays(params),
        "data": [hash_arrays(_arrays_of(part)) for part in data],
        "schedule": how.record(),
        "sample_cohort": hash_function(how.sample_cohort),
        "score": "the loss of evaluation" if score is None else hash_function(score),
        "seeds": list(seeds),
        "versions": versions(),
    }


def _arrays_of(clients: FederatedArrays) -> Any:
    return (
        *(clients.examples, clients.indices, clients.sizes),
        *(clients.local_steps, clients.constants, clients.weights),
    )
