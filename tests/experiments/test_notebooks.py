"""The notebooks are what their Python files say, without outputs. `make notebooks` runs them."""

import json
import os
import re

import pytest

from experiments.notebooks import install, run
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
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NAMES, "__init__", "install", "run"}
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.ipynb)" in readme for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_pair_agrees_and_has_no_outputs(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    written = read_percent((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert written.count(("code", run.INSTALL)) == 1
    code = ("code", run.installing())  # a runtime that lacks the package gets it
    assert cells == [code if cell == ("code", run.INSTALL) else cell for cell in written]
    assert cells[0][1].startswith("# ")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


def test_what_is_installed(tmp_path, monkeypatch):
    find_source = install.find_source
    nothing, folder, checkout = (tmp_path / name for name in ("a/b", "packed", "checkout"))
    for path in (nothing, folder, checkout / "fedjax_lab", checkout / "experiments"):
        path.mkdir(parents=True)
    monkeypatch.chdir(nothing)
    for source in ("", "fedjax_lab", "fedjax-lab==1.0", "http://a.host/x.whl", str(nothing)):
        with pytest.raises(FileNotFoundError, match=r"checkout's folder; a wheel or a zip .*git\+"):
            find_source(source)  # above all no name, which anyone could have registered
    (checkout / "fedjax_lab" / "__init__.py").touch()
    (checkout / "pyproject.toml").touch()
    older, newer = folder / "fedjax_lab-1-py3-none-any.whl", folder / "fedjax_lab-main.zip"
    for time, path in enumerate((older, newer)):
        path.touch()
        os.utime(path, (time, time))
    assert find_source(str(folder)) == str(newer)
    assert find_source(str(older)) == str(older)
    assert find_source(str(checkout)) == str(checkout)
    monkeypatch.chdir(checkout / "experiments")
    assert find_source("") == str(checkout)
    url = "git+https://a.host/owner/repository"
    assert find_source(url) == url
    monkeypatch.setattr(install, "TOKEN", "secret")
    assert find_source(url) == "git+https://secret@a.host/owner/repository"
