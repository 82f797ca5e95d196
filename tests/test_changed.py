"""What ``make check`` runs for a changed file."""

import re

import pytest

from fedjax_lab.algorithms import ALGORITHMS
from tests import changed
from tests.changed import COVERS, ROOT, SHARED

STUDIES = [f"tests/experiments/test_studies{end}.py" for end in ("", "_report")]
MODULES = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "fedjax_lab").rglob("*.py"))]


def test_the_table_names_files_that_are_there():
    for tests, modules in COVERS.items():
        assert (ROOT / "tests" / f"{tests}.py").is_file(), tests
        for module in modules.split():
            assert [*(ROOT / "fedjax_lab").glob(f"{module}.py")], module
    shared = {file.stem for folder in ("fedjax_lab", "tests") for file in files_of_methods(folder)}
    assert SHARED.keys() <= shared
    assert {name for names in SHARED.values() for name in names} <= ALGORITHMS.keys()


def files_of_methods(folder):
    return (ROOT / folder / "algorithms").rglob("*.py")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("fedjax_lab/data/cohort.py", ["tests/data/test_cohort.py"]),
        ("fedjax_lab/data/schemes.py", ["tests/data/test_partition.py"]),
        ("fedjax_lab/machine/compiler.py", ["tests/machine/test_compiler.py"]),
        ("tests/qp/test_project.py", ["tests/qp/test_project.py"]),
        ("docs/speed.md", ["tests/docs/test_pages.py"]),
        ("experiments/benchmarks/zoo.py", ["tests/experiments/test_zoo.py"]),
        ("experiments/privacy/report.py", ["tests/experiments/test_privacy.py"]),
        ("experiments/studies/runs.py", STUDIES),
        ("experiments/gradma/figure_5.py", STUDIES),
    ],
)
def test_which_tests_a_file_asks_for(path, expected):
    assert changed.tests_for(path) == (expected, [])


@pytest.mark.parametrize(
    ("path", "files", "methods"),
    [
        ("fedjax_lab/algorithms/stem.py", ["tests/algorithms/test_stem.py"], ["stem"]),
        ("fedjax_lab/algorithms/first_estimates.py", [], ["fafed", "stem"]),
        ("tests/algorithms/cases/fedspeed.py", None, ["fedspeed", "fedspeed_ing"]),
        ("tests/reference/fednova_numpy.py", ["tests/reference"], ["fednova"]),
        ("tests/reference/base.py", ["tests/reference"], []),
        ("tests/reference/test_twins.py", ["tests/reference"], []),
    ],
)
def test_a_methods_file_asks_for_its_methods(path, files, methods):
    own = ["tests/algorithms/test_fedspeed.py"] if files is None else files
    assert changed.tests_for(path) == (own, methods)


def test_every_module_asks_for_files_of_tests_and_few_of_them():
    """Whole folders take minutes."""
    for path in MODULES:
        files, methods = changed.tests_for(path)
        assert files or methods, path
        assert all((ROOT / file).is_file() for file in files), path
        assert len(files) + len(methods) <= 7, path


def test_the_makefile_names_tests_that_are_there():
    named = re.findall(r"\btests/[\w/]+\.py|\btests/\w+\b(?!/|\.)", (ROOT / "Makefile").read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
