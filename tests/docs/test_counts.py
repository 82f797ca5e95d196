"""How many methods the pages say that a wrapper takes, counted."""

from pathlib import Path

import pytest

from fedjax_lab import algorithms, with_dp, with_robust_aggregation
from tests.algorithms.cases import CASES

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
MAIN = [case for case in CASES if case.main]


def is_taken(case, wrap):
    try:
        wrap(case.build(case.problem.loss)).init(case.problem.initial_params(), 4)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("page", "wrap"),
    [
        ("privacy.md", lambda method: with_dp(method, clip_norm=1.0, noise_multiplier=1.0)),
        ("robustness.md", lambda method: with_robust_aggregation(method, "median")),
    ],
)
@pytest.mark.methods
def test_a_page_counts_the_methods(page, wrap):
    taken = sum(is_taken(case, wrap) for case in MAIN)
    assert len(MAIN) == len(algorithms.ALGORITHMS)
    assert f"{taken} of the {len(MAIN)}" in (GUIDES / page).read_text(encoding="utf-8")
