"""The list of long cases names tests that exist, and is written from a report."""

from pathlib import Path

from tests import tiers

ROOT = Path(__file__).parents[1]


def test_listed_cases_are_tests_that_exist():
    stale = []
    for case in tiers.long_cases():
        file, _, name = case.partition("::")
        path = ROOT / file
        if not path.is_file() or f"def {name.partition('[')[0]}(" not in path.read_text():
            stale.append(case)
    assert not stale


def test_the_list_has_what_took_long_but_for_what_always_runs(tmp_path):
    report = tmp_path / "report.xml"
    cases = [("tests.test_tree", "test_a", 0.9), ("tests.test_tree", "test_b[x y-1]", 0.6)]
    cases += [("tests.test_tree", "test_quick", 0.1), ("tests.test_house", "test_c", 9.0)]
    lines = [f'<testcase classname="{c}" name="{n}" time="{t}" />' for c, n, t in cases]
    report.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    expected = ["tests/test_tree.py::test_a", "tests/test_tree.py::test_b[x y-1]"]
    assert tiers.long_of(str(report)) == expected
