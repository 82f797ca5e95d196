"""Verdicts on claims: from the rule alone, on differences whose intervals are known."""

import importlib
from pathlib import Path

import pytest
from scipy import stats

from experiments.studies import claims, summary
from experiments.studies.claims import FAILS, OPEN, SHOWS, Claim, decide, verdict
from experiments.studies.summary import PAPERS
from fedjax_lab.estimates import NOTHING
from fedjax_lab.report.runs import Group, Run


def group(method, accuracies):
    """Runs of seeds 11, 12, ... with these top accuracies in percent."""
    runs = []
    for seed, accuracy in enumerate(accuracies, start=11):
        rows = [{"round": t, "accuracy": a / 100} for t, a in ((1, accuracy), (2, accuracy - 5))]
        config = {"rounds": 2, "partition": {"hash": str(seed)}}
        runs.append(Run(Path(), method, seed, {}, rows, config, {}, {}, {}))
    return Group(method, runs, "")


def groups(**accuracies):
    return {name: group(name, values) for name, values in accuracies.items()}


def claim(ahead="A", of=("B",), **more):
    return Claim("A is ahead", "study", "column", ahead, of, **more)


def test_a_difference_shows_where_its_interval_lies_above_zero():
    half = stats.t.ppf(0.975, 2) * 0.5 / 3**0.5  # of differences with standard deviation 0.5
    for mean, expected in ((half + 0.01, SHOWS), (half - 0.01, OPEN), (-0.01, FAILS)):
        found = groups(A=[80 + mean - 0.5, 70 + mean, 60 + mean + 0.5], B=[80, 70, 60])
        said, difference = decide(claim(), found)
        assert said == expected
        assert difference.estimate.mean == pytest.approx(mean)
        assert difference.estimate.half_width == pytest.approx(half)


def test_the_best_rival_counts():
    found = groups(A=[80, 80.1, 80.2], B=[70, 70, 70], C=[85, 85, 85])
    assert decide(claim(of=("B",)), found)[0] == SHOWS
    assert decide(claim(of=("B", "C")), found)[0] == FAILS
    assert decide(claim(of=("B", "not run")), found)[0] == SHOWS
    assert decide(claim(of=("not run",)), found)[0] == NOTHING
    assert decide(claim("not run"), found)[0] == NOTHING


def test_a_gap_must_be_as_large_as_it_is_said_to_be():
    found = groups(A=[80, 81, 82], B=[70, 71, 72])
    assert decide(claim(by=9.0), found)[0] == SHOWS
    assert decide(claim(by=11.0), found)[0] == FAILS


def test_alike_is_within_a_point():
    for offsets, expected in (
        ((0.9, 0.9, 0.9), SHOWS),
        ((-3, 0, 0.5), SHOWS),
        ((3, 3.1, 3.2), FAILS),
        ((6, 0, 0), OPEN),
    ):
        found = groups(A=[70 + offset for offset in offsets], B=[70, 70, 70])
        assert decide(claim(alike=True), found)[0] == expected


def test_a_change_is_counted_from_another_column():
    now = groups(A=[70, 71, 72], B=[80, 81, 82])
    before = groups(A=[71, 72.1, 73], B=[85, 86, 87.2])
    said, difference = decide(claim(), now, before)
    assert said == SHOWS
    assert difference.estimate.mean == pytest.approx((4 + 3.9 + 4.2) / 3)


def test_a_run_that_diverged_leaves_no_verdict():
    assert decide(claim(), groups(A=[80, float("nan"), 80], B=[70, 70, 70]))[0] == NOTHING


@pytest.mark.parametrize(
    ("written", "published", "both"),
    [
        (SHOWS, NOTHING, SHOWS),
        (FAILS, SHOWS, f"{SHOWS} only as published"),
        (SHOWS, OPEN, f"{SHOWS} only as written"),
        (FAILS, FAILS, FAILS),
        (OPEN, FAILS, OPEN),
    ],
)
def test_both_ways_make_one_verdict(written, published, both):
    assert verdict(written, published) == both


@pytest.mark.parametrize("paper", PAPERS)
def test_claims_are_about_what_the_studies_run(paper):
    studies = importlib.import_module(f"experiments.{paper}.__main__").STUDIES
    by_name = {study.short: study for study in studies}
    for one in importlib.import_module(f"experiments.{paper}.claims").CLAIMS:
        study = by_name[one.study]
        column = study.scales["machine"].columns[one.column]
        assert {one.ahead, *one.of} <= set(study.methods)
        assert {one.ahead, *one.of} <= set(column.methods or study.methods)
        assert not one.since or one.since in study.scales["machine"].columns


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
