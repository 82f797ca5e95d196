"""Every recipe runs as it stands, and says something that is a number."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from experiments import recipes

NAMES = sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def test_the_guide_lists_them():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "how_do_i.md").read_text()
    assert sorted(re.findall(r"\| `(\w+)` \|$", page, re.M)) == NAMES


@pytest.mark.example
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = importlib.import_module(f"experiments.recipes.{name}")
    assert f"python -m experiments.recipes.{name}" in recipe.__doc__
    recipe.main()
    shown = capsys.readouterr().out
    assert re.search(r"\d\.\d", shown)
    assert not re.search(r"\b(nan|inf)\b", shown, re.I)
