"""The README's Python blocks run as they stand, one after the other."""

import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def test_the_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert 0 < float(capsys.readouterr().out) < 2.0  # the printed loss; 2.3 is chance
    assert np.isfinite(namespace["metrics"]["loss"])


def test_the_method_tables_are_complete():
    from fedjax_lab.algorithms import ALGORITHMS

    readme, build = ((ROOT / name).read_text() for name in ("README.md", "BUILD.md"))
    for name in ALGORITHMS:
        assert f"`{name}`" in readme, name
    for path in (ROOT / "fedjax_lab" / "algorithms").glob("*.py"):
        if path.stem not in ("__init__", "hyper"):
            assert f"`{path.name}`" in build, path.name
