"""Verdicts on claims: from the rules alone, on differences whose intervals are known."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.studies import claims, measures, summary
from experiments.studies.claims import Claim, decide
from experiments.studies.summary import PAPERS
from experiments.studies.verdicts import (
    CONTRADICTED,
    DEPENDS,
    SHOWS,
    UNDECIDED,
    ahead,
    alike,
    both_measures,
    both_ways,
    seeds_needed,
)
from fedjax_lab.estimates import NOTHING, estimate
from fedjax_lab.report.runs import Group, Run

ROUNDS = 20  # of which the last two are the tail


def group(method, tops, tails=None, **config):
    """Runs of seeds 11, 12, ... with these accuracies in percent, at their best and at the end."""
    runs = []
    ends = [top - 5 for top in tops] if tails is None else tails
    for seed, (top, end) in enumerate(zip(tops, ends, strict=True), start=11):
        rows = [
            {"round": t, "accuracy": a / 100} for t, a in ((10, top), (19, end - 1), (20, end + 1))
        ]
        config = {"rounds": ROUNDS, "partition": {"hash": str(seed)}}
        runs.append(Run(Path(), method, seed, {}, rows, config, {}, {}, {}))
    return Group(method, runs, "")


def groups(**accuracies):
    return {name: group(name, values) for name, values in accuracies.items()}


def claim(ahead="A", of=("B",), **more):
    return Claim("A is ahead", "study", "column", ahead, of, **more)


def verdict(*arguments):
    return decide(*arguments)[0].verdict


def test_a_difference_is_decided_where_its_interval_leaves_zero_out():
    half = stats.t.ppf(0.975, 2) * 0.5 / 3**0.5  # of differences with standard deviation 0.5
    for mean, expected in (
        (half + 0.01, SHOWS),
        (half - 0.01, UNDECIDED),
        (-half + 0.01, UNDECIDED),
        (-half - 0.01, CONTRADICTED),
    ):
        found = groups(A=[80 + mean - 0.5, 70 + mean, 60 + mean + 0.5], B=[80, 70, 60])
        decision = decide(claim(), found)[0]
        assert decision.verdict == expected
        assert decision.estimate.mean == pytest.approx(mean)
        assert decision.estimate.half_width == pytest.approx(half)


def test_top_and_tail_are_decided_apart():
    found = {
        "A": group("A", [80, 81, 82], tails=[50, 60, 70]),
        "B": group("B", [70, 71, 72], tails=[50.1, 59.8, 70.2]),
    }
    top, tail = decide(claim(), found)
    assert (top.verdict, tail.verdict) == (SHOWS, UNDECIDED)
    assert tail.estimate.mean == pytest.approx(-0.1 / 3)
    assert both_measures(top.verdict, tail.verdict) == DEPENDS
    assert both_measures(SHOWS, NOTHING) == both_measures(SHOWS, SHOWS) == SHOWS


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
    decision = decide(claim(), now, before)[0]
    assert decision.verdict == SHOWS
    assert decision.estimate.mean == pytest.approx((4 + 3.9 + 4.2) / 3)


def test_a_run_that_ended_early_leaves_no_verdict():
    found = groups(A=[80, 80, 80], B=[70, 70, 70])
    found["A"].runs[1].rows.pop()
    assert [one.verdict for one in decide(claim(), found)] == [NOTHING, NOTHING]
    lost = claim(measure=measures.LOST)
    assert decide(lost, found)[0].verdict == NOTHING


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


@pytest.mark.parametrize("paper", PAPERS)
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
    decisions = (*decide(about, found), *decide(about, {}))
    said = both_measures(decisions[0].verdict, decisions[1].verdict)
    judged = claims.Judged(about, decisions, said, marked=False)
    assert judged.is_level is expected
    assert expected == (said == UNDECIDED and max(sides) < 0.05)
    assert ("within a point" in claims.claims_section([judged])[3]) is expected
    assert claims.level_note([judged]).count(", 1 compare") == expected


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
