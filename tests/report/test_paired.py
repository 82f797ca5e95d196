"""Paired differences against scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from fedjax_lab.report.cells import accuracy_table
from fedjax_lab.report.paired import best_group, p_value, paired_difference, within_noise
from fedjax_lab.report.sections import tail_of
from fedjax_lab.report.tables import top
from tests.report.by_hand import groups_of, write_run

BETTER = {1: 0.80, 2: 0.70, 3: 0.95, 4: 0.60}
WORSE = {2: 0.66, 3: 0.93, 4: 0.55, 5: 0.99}


@pytest.fixture
def groups(tmp_path):
    for name, tops in (("good", BETTER), ("bad", WORSE)):
        for seed, accuracy in tops.items():
            write_run(tmp_path / f"{name}{seed}", [accuracy], seed=seed, algorithm=name)
    return {group.label: group for group in groups_of(tmp_path)}


def test_the_difference_is_over_common_seeds_and_agrees_with_scipy(groups):
    found = paired_difference(groups["good"], groups["bad"], top)
    first, second = (np.array([tops[seed] for seed in (2, 3, 4)]) for tops in (BETTER, WORSE))
    expected = stats.ttest_rel(first, second)
    interval = expected.confidence_interval(0.95)
    mean, half_width, n = found
    assert n == 3
    assert mean - half_width == pytest.approx(interval.low)
    assert mean + half_width == pytest.approx(interval.high)
    assert p_value(found) == pytest.approx(expected.pvalue)
    # An interval of 95 % leaves 0 out just where the test rejects at 5 %.
    assert within_noise(found) == (expected.pvalue > 0.05)


def test_pairing_sees_what_separate_intervals_do_not(groups):
    # Seeds differ by 35 points, methods by 2 to 5 of them at every seed.
    found = paired_difference(groups["good"], groups["bad"], top)
    alone = stats.ttest_ind([0.70, 0.95, 0.60], [0.66, 0.93, 0.55])
    assert p_value(found) < 0.1 < alone.pvalue


def test_the_table_has_the_difference_in_points(groups):
    head, bad, good = accuracy_table([groups["bad"], groups["good"]])
    assert head[-2:] == ["behind the best (points)", "p"]
    assert bad[-2:] == ["best", "-"]  # its mean, over other seeds, is the higher one
    difference = 100 * np.array([0.66 - 0.70, 0.93 - 0.95, 0.55 - 0.60])
    half = stats.t.interval(0.95, 2, scale=stats.sem(difference))[1]
    assert half > abs(difference.mean())
    p = stats.ttest_1samp(difference, 0).pvalue
    assert good[-2:] == [f"{difference.mean():.2f} ± {half:.2f} ≈", f"{p:.3f}"]


def test_the_measure_decides_who_is_best(tmp_path):
    write_run(tmp_path / "a", [0.9, 0.1], algorithm="early")
    write_run(tmp_path / "b", [0.6, 0.6], algorithm="steady")
    groups = groups_of(tmp_path)
    assert best_group(groups, top).label == "early"
    tail = tail_of([run for group in groups for run in group.runs])
    assert best_group(groups, tail.mean).label == "steady"
    cells = {row[0]: row[-2:] for row in accuracy_table(groups, top)[1:]}
    assert cells == {"early": ["best", "-"], "steady": ["30.00", "-"]}  # one seed: no interval


def test_another_partition_is_no_pair(tmp_path):
    other = {"partition": {"spec": "iid", "seed": 9, "hash": "other"}}
    a = write_run(tmp_path / "a", [0.5], algorithm="a")
    b = write_run(tmp_path / "b", [0.4], algorithm="b", **other)
    groups = groups_of(a, b)
    assert paired_difference(*groups, top) is None
    assert accuracy_table(groups)[2][-2:] == ["-", "-"]


@pytest.mark.parametrize(("gap", "p", "noise"), [(0.0, 1.0, True), (0.25, 0.0, False)])
def test_equal_differences_have_no_spread(tmp_path, gap, p, noise):
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", [0.5 + gap], seed=seed, algorithm="a")
        write_run(tmp_path / f"b{seed}", [0.5], seed=seed, algorithm="b")
    found = paired_difference(*groups_of(tmp_path), top)
    assert found == (gap, 0.0, 2)
    assert (p_value(found), within_noise(found)) == (p, noise)


def test_a_run_without_accuracy_is_never_the_best(tmp_path):
    write_run(tmp_path / "a", [None], algorithm="a")
    write_run(tmp_path / "b", [0.1], algorithm="b")
    groups = groups_of(tmp_path)
    assert best_group(groups, top).label == "b"
    assert best_group(groups[:1], top) is None
    assert math.isnan(p_value(paired_difference(groups[1], groups[0], top)))
