"""The search on scores that are computed at once: batches, samplers, interruptions, budgets."""

import functools
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab.tuning import search_log as search_log_module
from fedjax_lab.tuning.candidates import Candidate
from fedjax_lab.tuning.halving import equal_budgets, rungs
from fedjax_lab.tuning.proposals import Even, check_sampler, proposals_of
from fedjax_lab.tuning.search import Search
from fedjax_lab.tuning.search_log import SearchLog
from fedjax_lab.tuning.search_result import SearchResult, Trial
from fedjax_lab.tuning.space import Range, Values
from tests.tiers import few

SPACE = {"client_lr": Range(1e-3, 10.0), "momentum": Values((0.0, 0.5, 0.9))}
PLAN = rungs(90, 24, 2, 2)
SAMPLERS = (None, "random", "tpe")


class FakeCandidates:
    """Runs whose state is (seed, finished rounds) and whose score has its minimum at 0.1, 0.5."""

    def __init__(self, diverges_above=np.inf, late=lambda candidate: False, mode="min"):
        self._late = late
        self.mode, self.gradients_per_step = mode, 1
        self.rounds_run, self._limit = 0, diverges_above

    def accepts(self, point):
        return True

    def advance(self, candidates, rounds):
        for candidate in candidates:
            if candidate.rounds:  # continues from its own state
                assert candidate.leaves[0].tolist() == [
                    candidate.seed,
                    candidate.rounds,
                    candidate.point["client_lr"],
                ]
            self.rounds_run += rounds - candidate.rounds
            candidate.rounds = rounds
            candidate.leaves = [np.array([candidate.seed, rounds, candidate.point["client_lr"]])]
            distance = np.log10(candidate.point["client_lr"] / 0.1) ** 2
            distance += (candidate.point.get("momentum", 0.5) - 0.5) ** 2
            lost = candidate.point["client_lr"] > self._limit or self._late(candidate)
            distance = distance if self.mode == "min" else -distance
            candidate.score = float("nan") if lost else float(distance + 0.01 * candidate.seed)


def search(folder=None, sampler=None, space=SPACE, plan=PLAN, candidates=None, start_points=()):
    if sampler is not None:
        pytest.importorskip("optuna")
    proposals = proposals_of(space, 0, sampler, plan.points[0])
    candidates = candidates or FakeCandidates()
    parts = (candidates, proposals, SearchLog(folder, {}), start_points)
    return Search("m", space, plan, *parts, seeds=[0, 1], mode=candidates.mode)


def points_of(trials, rounds=PLAN.rounds[0]):
    return [tuple(trial.point.values()) for trial in trials if trial.rounds == rounds]


def shown(trials):
    """NaN is not equal to itself."""
    return list(map(str, trials))


def test_states_of_any_dtype_are_read_as_they_were(tmp_path):
    leaves = [np.arange(6.0).reshape(2, 3).astype(jnp.bfloat16), np.float32(0.1), np.ones(2, bool)]
    there = Candidate({"client_lr": 0.1}, 0, rounds=3, score=1.0, leaves=[*map(np.array, leaves)])
    SearchLog(tmp_path, {}).save("m", 1, [Candidate({"client_lr": 0.2}, 0), there], [])
    rungs_done, (_, read), _ = SearchLog(tmp_path, {}).load("m")
    assert rungs_done == 1
    for leaf, expected in zip(read.leaves, leaves, strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(jnp.asarray(leaf), jnp.asarray(expected))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_all_samplers_spend_the_same(sampler):
    trials = search(sampler=sampler).run()
    assert [len(points_of(trials, rounds)) for rounds in PLAN.rounds] == [24, 8, 4]
    assert sum(trial.gradients for trial in trials) == PLAN.run_rounds
    assert len(set(points_of(trials))) == 24
    assert search(sampler=sampler).run() == trials


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_large_scores_are_sought_as_small_ones_are(sampler):
    small, large = (
        search(sampler=sampler, candidates=FakeCandidates(mode=mode)).run()
        for mode in ("min", "max")
    )
    assert [trial.point for trial in small] == [trial.point for trial in large]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "start", [{"client_lr": 9.9, "momentum": 0.9}, {"client_lr": 50.0, "momentum": 0.1}]
)
def test_a_start_point_runs_to_the_end_at_no_further_cost(sampler, start):
    """The first one is among the worst of the space, and the second lies outside."""
    candidates, usual = FakeCandidates(), FakeCandidates()
    trials = search(sampler=sampler, candidates=candidates, start_points=[start]).run()
    without = search(sampler=sampler, candidates=usual).run()
    assert [t.seed for t in trials if t.point == start and t.rounds == PLAN.rounds[-1]] == [0, 1]
    assert trials[0].point == start
    assert candidates.rounds_run == usual.rounds_run
    first = points_of(trials)
    assert len(first) == len({*first}) == PLAN.points[0]
    ends = [t for t in trials if t.rounds == PLAN.rounds[-1] and t.seed == 0]
    others = [t for t in trials if t.rounds == PLAN.rounds[1] and t.point != start]
    assert [t.point for t in ends] == [start, min(others, key=lambda t: t.score).point]
    assert {*points_of(without)} != {*first}


def test_a_start_point_that_diverges_goes_no_further():
    start = {"client_lr": 50.0, "momentum": 0.5}
    trials = search(candidates=FakeCandidates(1.0), start_points=[start]).run()
    assert [t.rounds for t in trials if t.point == start] == [PLAN.rounds[0]]
    ends = [t for t in trials if t.rounds == PLAN.rounds[-1] and t.seed == 0]
    assert len(ends) == PLAN.points[-1]


def test_a_sampler_learns_from_a_start_point():
    optuna = pytest.importorskip("optuna")
    seen = []

    class Watching(optuna.samplers.RandomSampler):
        def after_trial(self, study, trial, state, values):
            seen.append((dict(trial.params), values))

    start = {"client_lr": 0.2, "momentum": 0.9}
    outside = {"client_lr": 50.0, "momentum": 0.9}
    chosen = lambda seed: Watching(seed=seed)  # noqa: E731
    trials = search(sampler=chosen, start_points=[outside, start]).run()
    score = next(t.score for t in trials if t.point == start)
    assert seen[0] == ({"client_lr": 0.2, "momentum": 2}, [score])
    assert all(params["client_lr"] <= 10.0 for params, _ in seen)


def test_the_best_point_has_the_best_mean_over_the_seeds_and_none_that_diverged():
    scores = {0.1: (0.1, 0.9), 0.2: (0.3, 0.4), 0.3: (0.0, float("nan"))}
    trials = [
        Trial("m", {"client_lr": rate}, seed, 90, score)
        for rate, both in scores.items()
        for seed, score in enumerate(both)
    ]
    for mode, best in (("min", 0.2), ("max", 0.1)):
        found = SearchResult(trials, 90, mode, {"m": SPACE})
        assert found.best == {"m": {"client_lr": best}}
        assert found.scores["m"] == list(scores[best])


@pytest.mark.parametrize(
    ("sampler", "start_points"),
    few(1, [(None, [{"client_lr": 0.7, "momentum": 0.0}]), ("tpe", [])]),
)
def test_a_search_that_is_interrupted_anywhere_goes_on_to_the_same_trials(
    sampler, start_points, tmp_path, monkeypatch
):
    begin = functools.partial(search, sampler=sampler, start_points=start_points)
    whole = shown(begin(candidates=FakeCandidates(1.0)).run())
    saves, rounds_run = [], []
    for moment in ("before", "after"):
        for allowed in range(8):
            folder = tmp_path / f"{moment}{allowed}"
            with monkeypatch.context() as patch:
                left = [allowed]
                write = search_log_module.write_json

                def limited(path, value, left=left, moment=moment, write=write):
                    left[0] -= 1
                    if left[0] < 0 and moment == "before":  # the states are written
                        raise KeyboardInterrupt
                    write(path, value)
                    if left[0] < 0:
                        raise KeyboardInterrupt

                patch.setattr(search_log_module, "write_json", limited)
                first = FakeCandidates(1.0)
                try:
                    begin(folder, candidates=first).run()
                except KeyboardInterrupt:
                    saves.append(allowed)
            again = FakeCandidates(1.0)
            assert shown(begin(folder, candidates=again).run()) == whole
            if allowed in saves and moment == "after":
                rounds_run.append(first.rounds_run + again.rounds_run)
                assert len(list(folder.glob("*.npz"))) <= 1
    assert any("nan" in trial for trial in whole)
    assert len(saves) >= 2 * 5  # all batches and rungs were interrupted
    assert set(rounds_run) == {PLAN.run_rounds}  # nothing is run twice


def test_a_number_of_numpy_is_the_same_setting(tmp_path):
    SearchLog(tmp_path, {"rounds": np.int64(4)}).save("m", 1, [], [])
    assert SearchLog(tmp_path, {"rounds": 4}).load("m")[0] == 1
    with pytest.raises(FileExistsError, match="holds another search"):
        SearchLog(tmp_path, {"rounds": 5})


def test_a_damaged_file_of_trials_is_named_with_the_remedy(tmp_path):
    (tmp_path / search_log_module.TRIALS).write_text('{"search": ')
    with pytest.raises(ValueError, match=r"trials\.json cannot be read as JSON .*another run_dir"):
        search(tmp_path).run()


def test_tpe_searches_where_scores_are_good_and_avoids_what_diverges():
    plan = rungs(90, 80, 2, 2)
    trials = search(sampler="tpe", plan=plan, candidates=FakeCandidates(diverges_above=1.0)).run()
    rates = np.array([rate for rate, _ in points_of(trials)])
    drawn, proposed = rates[:40], rates[40:60]  # the others refine or extend
    assert (drawn > 1).sum() >= 10  # or the rest says nothing
    assert (proposed > 1).sum() <= 2
    median = [np.median(np.abs(np.log10(part / 0.1))) for part in (drawn, proposed)]
    assert median[1] < 0.6 * median[0]
    with pytest.raises(RuntimeError, match="all points of 'm' diverged within 10 rounds"):
        search(sampler="tpe", candidates=FakeCandidates(diverges_above=0)).run()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_next_best_points_replace_finalists_that_all_diverge(seed, tmp_path):
    def late(candidate):
        return (
            candidate.seed == seed
            and candidate.rounds == 90
            and 0.09 < candidate.point["client_lr"] < 0.11
        )

    usual = SearchResult(search().run(), 90, "min", {"m": SPACE})
    assert 0.09 < usual.best["m"]["client_lr"] < 0.11
    trials = search(tmp_path, candidates=FakeCandidates(late=late)).run()
    found = SearchResult(trials, 90, "min", {"m": SPACE})
    assert not 0.09 < found.best["m"]["client_lr"] < 0.11
    finals = [trial.point for trial in trials if (trial.rounds, trial.seed) == (90, 0)]
    third = sorted((t for t in trials if t.rounds == 30), key=lambda t: t.score)
    assert finals == [trial.point for trial in third[: len(finals)]]
    assert shown(search(tmp_path).run()) == shown(trials)


def test_a_best_value_at_an_end_is_followed_with_a_sampler_as_well():
    trials = search(sampler="tpe", space={"client_lr": Range(1e-4, 1e-3)}).run()
    assert max(rate for (rate,) in points_of(trials)) > 1.4e-3


def test_a_function_gives_any_sampler():
    optuna = pytest.importorskip("optuna")
    seeds = []

    def quasi_random(seed):
        seeds.append(seed)
        return optuna.samplers.RandomSampler(seed=seed + 1)

    found = points_of(search(sampler=quasi_random).run())
    assert seeds == [0]
    assert found != points_of(search(sampler="random").run())
    with pytest.raises(TypeError, match="sampler\\(seed\\) returned int; it must return a sampler"):
        search(sampler=lambda seed: seed)


def test_a_list_is_tried_whole_if_the_budget_allows_it():
    values = Values(tuple(float(x) for x in range(1, 9)))
    for sampler in SAMPLERS[:2]:
        plan = rungs(90, 8 if sampler is None else 40, 2, 2)
        trials = search(sampler=sampler, space={"client_lr": values}, plan=plan).run()
        assert len(set(points_of(trials))) == 8
        assert len(points_of(trials)) == 8


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        ("tpa", ValueError, "sampler is 'tpa'; it must be one of random, tpe. Did you mean 'tpe'"),
        (3, TypeError, "sampler is 3; it must be None, one of random, tpe, or a function"),
    ],
)
def test_an_unknown_sampler_is_refused(sampler, error, message):
    with pytest.raises(error, match=message):
        check_sampler(sampler)


def test_without_optuna_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    check_sampler(None)
    with pytest.raises(ImportError, match=r"pip install 'optuna[<>]"):
        check_sampler("tpe")


def test_only_states_that_can_continue_are_stored(tmp_path):
    done = []

    class Stopping(SearchLog):
        def save(self, *arguments):
            super().save(*arguments)
            done.append(None)
            raise KeyboardInterrupt

    candidates = FakeCandidates()
    parts = (candidates, Even(SPACE, 0), Stopping(tmp_path, {}))
    with pytest.raises(KeyboardInterrupt):
        Search("m", SPACE, PLAN, *parts, seeds=[0, 1], mode="min").run()
    stored = json.loads((tmp_path / "trials.json").read_text())["methods"]["m"]
    scores = [candidate["score"] for candidate in stored["lanes"]]
    assert len(scores) == 18
    assert sorted(scores)[:8] == sorted(scores[place] for place in stored["held"])


def test_budgets_are_equal_whatever_a_step_costs():
    plans = equal_budgets([1, 2, 3], 90, 12, 2, 2)
    costs = [g * plan.run_rounds for g, plan in zip([1, 2, 3], plans, strict=True)]
    assert max(costs) <= 1.03 * min(costs)
    assert plans[2] == rungs(90, 12, 2, 2)
