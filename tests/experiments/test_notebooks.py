"""The notebooks are what their Python files say, without outputs. `make notebooks` runs them."""

import json
import re

import pytest

from experiments.notebooks.run import FOLDER, NAMES

CELL = re.compile(r"^# %%( \[markdown\])?\n", re.M)


def read_percent(text: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a Python file in the percent format."""
    cells, pieces = [], CELL.split(text)[1:]  # what precedes the first cell is the header
    for marker, body in zip(pieces[::2], pieces[1::2], strict=True):
        if marker:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().split("\n")]
            cells.append(("markdown", "\n".join(lines)))
        else:
            magic = re.sub(r"^# (?=%\w)", "", body, flags=re.M)  # such as %matplotlib
            cells.append(("code", magic.strip("\n")))
    return cells


def test_every_notebook_has_both_files():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NAMES, "__init__", "run"}
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.ipynb)" in readme for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_pair_agrees_and_has_no_outputs(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == read_percent((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert cells[0][1].startswith("# ")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    installs = [source for kind, source in cells if kind == "code" and "SOURCE" in source]
    assert installs  # a runtime that lacks the package gets it
    assert "QUICK" in installs[0]
