"""The README's Python blocks run one after the other, with fewer rounds; its tables."""

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


def test_the_method_tables_are_those_of_the_code():
    readme, build = ((ROOT / name).read_text() for name in ("README.md", "BUILD.md"))
    assert set(catalogue.SOURCES) == set(algorithms.ALGORITHMS)
    table = readme.split("<!-- methods -->\n")[1].split("\n<!-- /methods -->")[0]
    assert table == catalogue.table(options=False)
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert page == catalogue.page()
    for path in (ROOT / "fedjax_lab" / "algorithms").glob("*.py"):
        if path.stem not in ("__init__", "factory", "hyper"):
            assert f"`{path.name}`" in build, path.name
