"""Verdicts on claims: from the rules alone, on differences whose intervals are known."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.fedswa import larger_rates
from experiments.fedswa.claims import CLAIMS
from experiments.leaderboard import beside
from experiments.leaderboard.cells import RESULTS
from experiments.studies import chance, claims, measures, paper_numbers, summary
from experiments.studies.claims import Claim, decide
from experiments.studies.groups import difference
from experiments.studies.summary import PAPERS
from experiments.studies.verdicts import (
    AT_SCALE,
    CONTRADICTED,
    DEPENDS,
    SHOWS,
    UNDECIDED,
    ahead,
    alike,
    both_ways,
    seeds_needed,
)
from fedjax_lab.estimates import NOTHING, estimate
from fedjax_lab.report.runs import Group, Run

STRONGEST = ("FedACG", "MIFAM", "FedMLBM", "FedAMS", "FedCM")  # of the papers' tables
ROUNDS = 20  # of which the last two are the tail


def group(method, tops, tails=None, **config):
    """Runs of seeds 11, 12, ... with these accuracies in percent, at their best and at the end."""
    runs = []
    ends = [top - 5 for top in tops] if tails is None else tails
    for seed, (top, end) in enumerate(zip(tops, ends, strict=True), start=11):
        rows = [
            {"round": t, "accuracy": a / 100} for t, a in ((10, top), (19, end - 1), (20, end + 1))
        ]
        config = {"rounds": ROUNDS, "partition": {"hash": str(seed)}, "drawn": True, **config}
        runs.append(Run(Path(), method, seed, {}, rows, config, {}, {}, {}))
    return Group(method, runs, "")


def groups(**accuracies):
    return {name: group(name, values) for name, values in accuracies.items()}


def claim(ahead="A", of=("B",), **more):
    return Claim("A is ahead", "study", "column", ahead, of, **more)


def verdict(*arguments):
    return decide(*arguments).top.verdict


def test_a_difference_is_decided_where_its_interval_leaves_zero_out():
    half = stats.t.ppf(0.975, 2) * 0.5 / 3**0.5  # of differences with standard deviation 0.5
    for mean, expected in (
        (half + 0.01, SHOWS),
        (half - 0.01, UNDECIDED),
        (-half + 0.01, UNDECIDED),
        (-half - 0.01, CONTRADICTED),
    ):
        found = groups(A=[80 + mean - 0.5, 70 + mean, 60 + mean + 0.5], B=[80, 70, 60])
        decision = decide(claim(), found).top
        assert decision.verdict == expected
        assert decision.estimate.mean == pytest.approx(mean)
        assert decision.estimate.half_width == pytest.approx(half)


def test_top_and_tail_are_decided_apart():
    found = {
        "A": group("A", [80, 81, 82], tails=[50, 60, 70]),
        "B": group("B", [70, 71, 72], tails=[50.1, 59.8, 70.2]),
    }
    both = decide(claim(), found)
    assert (both.top.verdict, both.tail.verdict) == (SHOWS, UNDECIDED)
    assert both.tail.estimate.mean == pytest.approx(-0.1 / 3)
    assert both.verdict == DEPENDS  # 10 points by top, 0 by tail
    assert both.evaluations == 2
    assert decide(claim(), groups(A=[80, 81, 82], B=[70, 71, 72.1])).verdict == SHOWS


@pytest.mark.parametrize(
    ("tails", "expected"),
    [([75.9, 75.2, 76.3], UNDECIDED), ([74.9, 75.0, 75.15], DEPENDS)],
)
def test_measures_that_differ_by_chance_leave_a_claim_undecided(tails, expected):
    """The top shows and the tail does not, by a difference of the two that may be chance."""
    rivals, ends = [80.0, 80.0, 80.0], [75.0, 75.0, 75.0]
    tops = [81.0, 81.1, 80.9]
    found = {"A": group("A", tops, tails), "B": group("B", rivals, ends)}
    both = decide(claim(), found)
    assert (both.top.verdict, both.tail.verdict) == (SHOWS, UNDECIDED)
    change = np.array(tops) - rivals - (np.array(tails) - ends)
    assert (stats.ttest_1samp(change, 0).pvalue < 0.05) == (expected == DEPENDS)
    assert both.verdict == expected


def test_a_tail_of_one_evaluation_says_so():
    found = groups(A=[80, 81, 82], B=[70, 71, 72.1])
    for each in found.values():
        for run in each.runs:
            del run.rows[1]
    both = decide(claim(), found)
    assert both.evaluations == 1
    assert both.texts[1].endswith(", one evaluation")
    judged = [claims.Judged(claim(), both, claims.Compared(), both.verdict)]
    assert claims.tail_note(judged).startswith("In 1 of the 1 claims that have a tail")


def test_runs_of_versions_that_draw_otherwise_are_not_paired():
    first, second = [80.0, 82.0, 81.0], [75.0, 79.0, 78.0, 74.0]
    found = {"A": group("A", first), "B": group("B", second, drawn=False)}
    decision = decide(claim(), found).top
    welch = stats.ttest_ind(first, second, equal_var=False)
    low, high = welch.confidence_interval(0.95)
    half = decision.estimate.half_width
    assert decision.estimate.mean == pytest.approx((low + high) / 2)
    # Its degrees of freedom are cut to whole ones, which makes the interval wider.
    assert (
        (high - low) / 2
        <= half
        < stats.t.ppf(0.975, int(welch.df)) / stats.t.ppf(0.975, welch.df) * (high - low) / 2 + 1e-9
    )
    assert str(decision).endswith(", not paired")
    assert "not paired" not in str(decide(claim(), groups(A=first, B=second[:3])).top)
    assert difference(found["A"], group("C", [1.0], drawn=False), measures.top) is None


@pytest.mark.parametrize(("rivals", "seeds"), [(1, 3), (1, 10), (2, 3), (5, 10), (13, 10)])
def test_chances_are_those_of_t_tests_against_the_best_of_equal_rivals(rivals, seeds):
    rng, draws = np.random.default_rng(5), 20_000
    own = rng.normal(size=(draws, seeds))
    others = rng.normal(size=(draws, seeds, rivals))
    best = np.take_along_axis(others, others.mean(1).argmax(1)[:, None, None], 2)[..., 0]
    test = stats.ttest_rel(own, best, axis=1)
    significant = test.pvalue < 0.05
    found = chance.of(rivals, seeds)
    for sign, said in zip((1, -1), found, strict=True):
        share = 100 * np.mean(significant & (sign * test.statistic > 0))
        error = 100 * math.sqrt(max(share, 0.1) / 100 / draws)
        assert abs(share - said) < 4 * error
    assert chance.simulate(rivals, seeds, 20_000).contradicted == pytest.approx(
        found.contradicted, rel=0.15
    )


def test_the_chances_of_a_page_add_up_over_its_comparisons():
    found = groups(A=[80, 81, 82], B=[70, 71, 72], C=[60, 61, 62])
    pairs = [
        claims.Judged(one, decide(one, found), claims.Compared(), SHOWS)
        for one in (claim(), claim(of=("B", "C")), claim(alike=True), claim(by=5.0))
    ]
    text = claims.chance_note(pairs)
    contradicted = (2.5 + chance.of(2, 3).contradicted) / 100
    assert "4 claims in 4 comparisons, of which 2 say that a method is ahead" in text
    assert f"and {contradicted:.1f} would be contradicted (against one rival" in text


def test_the_best_rival_counts():
    found = groups(A=[80, 80.1, 80.2], B=[70, 70, 70], C=[85, 85, 85])
    assert verdict(claim(of=("B",)), found) == SHOWS
    assert verdict(claim(of=("B", "C")), found) == CONTRADICTED
    assert verdict(claim(of=("B", "not run")), found) == SHOWS
    assert verdict(claim(of=("not run",)), found) == NOTHING
    assert verdict(claim("not run"), found) == NOTHING


def test_a_gap_must_be_as_large_as_it_is_said_to_be():
    found = groups(A=[80, 81, 82.1], B=[70, 71, 72])
    assert verdict(claim(by=9.0), found) == SHOWS
    assert verdict(claim(by=11.0), found) == CONTRADICTED


@pytest.mark.parametrize("mean", [-1.6, -1.2, -0.6, 0.0, 0.5, 0.9, 1.3, 2.0])
@pytest.mark.parametrize("spread", [0.1, 0.4])
def test_alike_is_two_one_sided_t_tests_as_scipy_has_them(mean, spread):
    values = np.array([mean - spread, mean, mean + spread])
    above, below = (
        stats.ttest_1samp(values, bound, alternative=side).pvalue
        for bound, side in ((-1, "greater"), (1, "less"))
    )
    outside = min(
        stats.ttest_1samp(values, bound, alternative=side).pvalue
        for bound, side in ((-1, "less"), (1, "greater"))
    )
    expected = SHOWS if max(above, below) < 0.05 else CONTRADICTED if outside < 0.05 else UNDECIDED
    assert alike(estimate(list(values))).verdict == expected


def test_an_undecided_difference_says_how_many_seeds_would_decide():
    found = estimate([0.1, 0.5, 0.6])
    needed = ahead(found).seeds
    deviation = np.std([0.1, 0.5, 0.6], ddof=1)

    def half(n):
        return stats.t.ppf(0.975, n - 1) * deviation / math.sqrt(n)

    assert half(needed) < found.mean <= half(needed - 1)
    assert str(ahead(found)) == f"undecided: 0.4 ± 0.7 ({needed} seeds)"
    assert seeds_needed(estimate([-1.0, 0.0, 1.001]), 0.0003, 0.975) is None
    assert "> 1,000 seeds" in str(ahead(estimate([-1.0, 0.0, 1.001])))


def test_a_change_is_counted_from_another_column():
    now = groups(A=[70, 71, 72], B=[80, 81, 82])
    before = groups(A=[71, 72.1, 73], B=[85, 86, 87.2])
    decision = decide(claim(), now, before).top
    assert decision.verdict == SHOWS
    assert decision.estimate.mean == pytest.approx((4 + 3.9 + 4.2) / 3)


def test_a_run_that_ended_early_leaves_no_verdict():
    found = groups(A=[80, 80, 80], B=[70, 70, 70])
    found["A"].runs[1].rows.pop()
    both = decide(claim(), found)
    assert [both.top.verdict, both.tail.verdict] == [NOTHING, NOTHING]
    assert verdict(claim(measure=measures.LOST), found) == NOTHING


def test_against_a_rival_that_diverged_nothing_is_decided():
    found = groups(A=[80, 80, 80], B=[80, 80, 80])
    found["B"].runs[1].rows.pop()
    both = decide(claim(alike=True), found)
    assert (both.verdict, both.rivals, both.top.estimate) == (UNDECIDED, 1, None)
    judged = claims.Judged(claim(alike=True), both, claims.Compared(), both.verdict)
    assert not judged.is_level
    assert decide(claim(of=("not run",)), found).verdict == NOTHING


def test_measures_of_a_run():
    run = group("A", [80], tails=[70]).runs[0]
    run.rows[0]["loss"], run.rows[1]["loss"], run.rows[2]["loss"] = 3.0, 2.0, 1.0
    assert measures.ACCURACY.top(run) == pytest.approx(80)
    assert measures.ACCURACY.tail(run) == pytest.approx(70)
    assert measures.LOST.top(run) == pytest.approx(71 - 80)
    assert measures.SMOOTHNESS.top(run) == pytest.approx(-2)
    assert measures.TRAINING_LOSS.top(run) == pytest.approx(-1.5)
    assert measures.rounds_to(75).top(run) == -10
    assert measures.rounds_to(90).top(run) == -ROUNDS


def test_measures_of_the_memory_of_error_feedback():
    (run,) = group("A", [80]).runs
    # Twenty evaluations: the middle tenth is rounds 10 and 11, the tail rounds 19 and 20.
    errors = {10: 4.0, 11: 6.0, 18: 8.0, 19: 9.0, 20: 10.0}
    rows = [{"round": t, "error_sq": errors.get(t, 1.0), "change_sq": 3.0} for t in range(1, 21)]
    run = run._replace(rows=rows)
    assert measures.ERROR_MEMORY.top(run) == pytest.approx(-9.5 / 3)
    assert measures.ERROR_GROWTH.top(run) == pytest.approx(-90)
    without = [{**row, "error_sq": 0.0} for row in rows]
    assert measures.ERROR_GROWTH.top(run._replace(rows=without)) == 0
    assert measures.ERROR_MEMORY.top(run._replace(rows=without)) == 0
    assert ahead(estimate([0.0, 0.0, 0.0])).verdict == NOTHING  # no run reaches the target


@pytest.mark.parametrize(
    ("written", "published", "both"),
    [
        (SHOWS, NOTHING, SHOWS),
        (CONTRADICTED, SHOWS, f"{SHOWS} only as published"),
        (SHOWS, UNDECIDED, f"{SHOWS} only as written"),
        (CONTRADICTED, CONTRADICTED, CONTRADICTED),
        (UNDECIDED, CONTRADICTED, f"{CONTRADICTED} only as published"),
        (UNDECIDED, DEPENDS, DEPENDS),
        (UNDECIDED, AT_SCALE, AT_SCALE),
        (AT_SCALE, NOTHING, AT_SCALE),
        (CONTRADICTED, AT_SCALE, f"{CONTRADICTED} only as written"),
    ],
)
def test_both_ways_make_one_verdict(written, published, both):
    assert both_ways(written, published) == both


@pytest.mark.parametrize("paper", PAPERS)
def test_claims_are_about_what_the_studies_run(paper):
    studies = importlib.import_module(f"experiments.{paper}.__main__").STUDIES
    by_name = {study.short: study for study in studies}
    for one in importlib.import_module(f"experiments.{paper}.claims").CLAIMS:
        study = by_name[one.study]
        columns = study.scales["machine"].columns
        column = columns.get(one.column) or columns[one.column + claims.AS_PUBLISHED]
        assert {one.ahead, *one.of} <= set(study.methods)
        assert {one.ahead, *one.of} <= set(column.methods or study.methods)
        assert not one.since or one.since in study.scales["machine"].columns


def test_nothing_is_decided_before_all_rivals_have_run(tmp_path):
    """A claim on nine rivals once counted as shown against those five that had run."""
    about = next(one for one in CLAIMS if one.study == "larger_rates" and len(one.of) == 9)
    path = larger_rates.STUDY.result_path(Path(larger_rates.__file__).parent)
    result = json.loads(path.read_text(encoding="utf-8"))
    (tmp_path / "results").mkdir()
    for missing, expected in ((None, CONTRADICTED), ("FedACG", NOTHING)):
        result["columns"][about.column]["methods"].pop(missing, None)
        (tmp_path / "results" / path.name).write_text(json.dumps(result), encoding="utf-8")
        judged = claims.judge([about], [larger_rates.STUDY], tmp_path)
        assert [one.verdict for one in judged] == [expected]


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.methods
def test_what_is_contradicted_has_a_reason_or_says_that_it_is_not_known(paper):
    judged = summary.judged_of(paper)
    for one in judged:
        assert bool(one.claim.why) == (CONTRADICTED in one.verdict), one.claim.text
    text = "\n".join(claims.claims_section(judged))
    assert all(one.claim.why in text for one in judged)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([-0.2, 0.0, 0.3], True),  # undecided, and within a point
        ([-1.0, 0.0, 1.1], False),  # undecided, and wide
        ([0.2, 0.25, 0.3], False),  # it shows
    ],
)
def test_an_undecided_claim_within_a_point_is_marked(differences, expected):
    tops = [80 + value for value in differences]
    found = groups(A=tops, B=[80, 80, 80])
    sides = (stats.ttest_1samp(differences, -1, alternative="greater").pvalue,)
    sides += (stats.ttest_1samp(differences, 1, alternative="less").pvalue,)
    about = claim()
    written = decide(about, found)
    said = written.verdict
    judged = claims.Judged(about, written, decide(about, {}), said, marked=False)
    assert judged.is_level is expected
    assert expected == (said == UNDECIDED and max(sides) < 0.05)
    assert ("within a point" in claims.claims_section([judged])[3]) is expected
    assert claims.level_note([judged]).count(", 1 compare") == expected


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.methods
def test_the_claims_on_a_page_are_those_of_the_results(paper):
    judged = summary.judged_of(paper)
    parts = [*claims.claims_section(judged), *beside.section(one.claim for one in judged)]
    page = summary.PAGE.parents[1] / "experiments" / paper / "RESULTS.md"
    assert "\n\n".join(parts) in page.read_text(encoding="utf-8")


def test_the_summary_on_the_page_is_that_of_the_results():
    page = summary.PAGE.read_text(encoding="utf-8")
    assert page.split(summary.BEGIN)[1].split(summary.END)[0] == summary.summary()


def test_a_claim_of_programs_that_were_not_solved_is_marked():
    found = groups(A=[80, 81, 82], B=[70, 71, 72], C=[60, 61, 62])
    assert not claims._is_marked(claim(of=("B", "not run")), found)
    found["C"].runs[1].rows[0]["client_qp_residual"] = 0.01
    assert claims._is_marked(claim(of=("B", "C")), found)
    assert claims._is_marked(claim("C"), found)
    assert not claims._is_marked(claim(), found)


def test_a_claim_is_contradicted_at_its_scale_where_a_larger_experiment_reverses_it():
    small, large = (
        groups(A=[70, 71, 72.1], B=[80, 81, 82]),
        groups(A=[80, 81, 82], B=[70, 71, 72.1]),
    )
    again = claims.Judged(claim(), decide(claim(), large), claims.Compared(), SHOWS)
    ways = [decide(claim(), small), claims.Compared()]
    assert claims._at_scale(ways, again) == [AT_SCALE, NOTHING]
    assert claims._at_scale(ways, None) == [CONTRADICTED, NOTHING]
    level = claims.Judged(claim(), decide(claim(), small), claims.Compared(), CONTRADICTED)
    assert claims._at_scale(ways, level) == [CONTRADICTED, NOTHING]
    reversing = {
        one.claim.reversed_by: one.verdict
        for paper in PAPERS
        for one in summary.judged_of(paper)
        if one.claim.reversed_by
    }
    assert len(reversing) == 2
    assert AT_SCALE in reversing.values()


@pytest.mark.parametrize("paper", PAPERS)
def test_a_claim_names_its_rivals_and_the_strongest_that_was_not_run(paper):
    """By the accuracies that the paper prints."""
    studies = importlib.import_module(f"experiments.{paper}.__main__").STUDIES
    columns = {s.short: s.scales["machine"].columns for s in studies}
    for one in importlib.import_module(f"experiments.{paper}.claims").CLAIMS:
        assert len(one.of) == 1 or all(name in one.headline for name in one.of)
        assert all(name in one.headline for name in one.left_out)
        column = columns[one.study].get(one.column)
        looked_up = dict(column.paper) if column else {}
        if one.left_out and looked_up:
            family = ("GradMA", "FedMo")  # the paper's own methods and their parts
            printed = paper_numbers.paper_accuracies(
                paper, looked_up, [*STRONGEST, *one.left_out, *one.of]
            )["accuracy"]
            rivals = {n: v for n, v in printed.items() if not n.startswith(family)}
            assert max(rivals, key=rivals.get) == one.left_out[0], one.text


def test_pairs_of_claims_stand_beside_the_leaderboards_cells():
    pair = Claim("", "", "", "FedSpeed", ("FedAvg",))
    head, about, table = beside.section([pair, pair, claim(), claim(alike=True)])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert head == "### Beside the leaderboard"
    assert "`fedspeed all` is the method as its code runs it" in about
    assert [row[0] for row in rows[2:]] == ["fedspeed: fedavg", "fedspeed all: fedavg"]
    for name, row in zip(("fedspeed", "fedspeed_all"), rows[2:], strict=True):
        files = [RESULTS / "skew-0.1" / f"{each}.json" for each in (name, "fedavg")]
        own, other = (json.loads(file.read_text()) for file in files)
        last = [i for i, number in enumerate(own["rounds"]) if number > 0.9 * own["rounds"][-1]]
        tails = [
            [np.mean([run["scores"][i] for i in last]) for run in cell["runs"]]
            for cell in (own, other)
        ]
        low, high = stats.ttest_rel(*tails).confidence_interval(0.95)
        assert row[1] == f"{(low + high) / 2:.2f} ± {(high - low) / 2:.2f}"
    assert beside.section([claim()]) == []


def test_claims_whose_methods_did_not_run_have_no_chances():
    found, one = groups(A=[80, 81]), claim(of=("not run",))
    judged = [claims.Judged(one, decide(one, found), claims.Compared(), NOTHING)] * 2
    assert claims.chance_note(judged) == "2 claims, none of which could be tested."
