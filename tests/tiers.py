"""Which cases of a test run in ``make test``, and which have the mark ``methods``."""

from collections.abc import Iterable
from typing import Any

import pytest


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
