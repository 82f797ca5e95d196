"""The README's Python blocks run one after the other, with fewer rounds; the page of methods."""

import re
from pathlib import Path

import numpy as np
import pytest

from fedjax_lab import algorithms
from fedjax_lab.command import catalogue

ROOT = Path(__file__).parents[2]


@pytest.mark.example
def test_the_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    assert "rounds=50" in blocks[0]
    namespace = {}
    for block in blocks:
        # One device, of the tests' eight, is soonest compiled for.
        exec(block.replace("rounds=50", 'rounds=20, client_map="scan"'), namespace)
    assert 0 < float(capsys.readouterr().out) < 2.0  # the printed loss; 2.3 is chance
    assert np.isfinite(namespace["metrics"]["loss"])


def test_the_methods_page_is_written_from_the_code():
    assert set(catalogue.SOURCES) == set(algorithms.ALGORITHMS)
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert page == catalogue.page()
