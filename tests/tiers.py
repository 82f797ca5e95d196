"""Which tests run in ``make test``, and which have the mark ``methods``.

A case that takes more than half a second, compiled anew, is listed in ``long_cases.txt`` and has
the mark; the list is written from a run without kept programs:

    FEDJAX_LAB_TEST_PROGRAMS=off python -m pytest -n 2 -m 'not slow and not example' \
        --junitxml=build/tests.xml
    python -m tests.tiers build/tests.xml
"""

import sys
import xml.etree.ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

LONG_CASES = Path(__file__).with_name("long_cases.txt")
LONG = 0.5  # seconds
# In `make test` whatever they take: the house's rules, and some methods against their twins.
_TWIN = "tests/algorithms/test_contract.py::test_it_agrees_with_its_twin_after_every_round"
SHORT = (
    *("tests/test_house.py", "tests/test_round.py", "tests/docs/test_docstrings.py"),
    *(f"{_TWIN}[{name}]" for name in ("fedavg", "scaffold", "cfedavg", "fafed", "fedspeed")),
    *(f"{_TWIN}[{name}]" for name in ("fedmoswa", "gradma")),
)


def few(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of a test for ``parametrize``, of which the first ones run in ``make test``.

    Args:
      count: how many of them. The others have the mark ``methods``.
      cases: a tuple of arguments each, or one argument that is no tuple; ``zip(shapes)`` makes
        tuples of one argument.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    more = [pytest.param(*each, marks=pytest.mark.methods) for each in values[count:]]
    return [*(pytest.param(*each) for each in values[:count]), *more]


def long_cases() -> frozenset[str]:
    """The cases that are listed."""
    return frozenset(LONG_CASES.read_text(encoding="utf-8").splitlines())


def long_of(report: str) -> list[str]:
    """The cases that took longer than ``LONG``.

    Args:
      report: file of pytest's ``--junitxml``.
    """
    found = []
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        if float(case.attrib["time"]) > LONG and not name.startswith(SHORT):
            found.append(name)
    return sorted(found)


if __name__ == "__main__":
    LONG_CASES.write_text("\n".join([*long_of(sys.argv[1]), ""]), encoding="utf-8")
