"""What ``make check`` runs for a changed file."""

import pytest

from tests import changed
from tests.changed import ELSEWHERE, ROOT

STUDIES = [f"tests/experiments/test_studies{end}.py" for end in ("", "_report")]
MODULES = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "fedjax_lab").glob("*/*.py"))]


def test_tests_under_another_name_are_there():
    for path, files in ELSEWHERE.items():
        stem = path.rpartition("/")[2].removesuffix(".py")
        assert (ROOT / path).is_file(), path
        assert all((ROOT / file).exists() for file in files), path
        own = ROOT.joinpath("tests", *path.split("/")[1:-1], f"test_{stem}.py")
        # Tests of a module's own name would not be run.
        assert str(own.relative_to(ROOT)) in files or not own.exists(), path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("fedjax_lab/data/cohort.py", ["tests/data/test_cohort.py"]),
        ("fedjax_lab/data/schemes.py", ["tests/data/test_partition.py"]),
        ("fedjax_lab/machine/arithmetic.py", ["tests/machine"]),
        ("tests/qp/test_project.py", ["tests/qp/test_project.py"]),
        ("docs/speed.md", ["tests/docs/test_pages.py"]),
        ("experiments/benchmarks/traffic.py", ["tests/experiments/test_traffic.py"]),
        ("experiments/privacy/report.py", ["tests/experiments/test_privacy.py"]),
        ("experiments/studies/runs.py", STUDIES),
        ("experiments/gradma/figure_5.py", STUDIES),
    ],
)
def test_which_tests_a_file_asks_for(path, expected):
    assert changed.tests_for(path) == (expected, [])


def test_a_methods_file_asks_for_its_methods():
    files, methods = changed.tests_for("fedjax_lab/algorithms/stem.py")
    assert (files, methods) == (["tests/algorithms/test_stem.py"], ["stem"])


def test_every_module_asks_for_tests_that_are_there():
    for path in MODULES:
        files, _ = changed.tests_for(path)
        found = [file for file in files if (ROOT / file).exists()]
        assert found == files, path
        in_no_room = path.startswith(("fedjax_lab/algorithms/", "fedjax_lab/method/"))
        assert files or in_no_room, path
