"""Every recipe runs as it stands, and says something that is a number."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from fedjax_lab import recipes
from fedjax_lab.command.cli import main
from fedjax_lab.recipes import personal_methods

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
NAMES = sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def test_the_guide_lists_them():
    page = (GUIDES / "how_do_i.md").read_text()
    assert sorted(re.findall(r"\| `(\w+)` \|$", page, re.M)) == NAMES


@pytest.mark.example
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = importlib.import_module(f"fedjax_lab.recipes.{name}")
    assert f"python -m fedjax_lab.recipes.{name}" in recipe.__doc__
    recipe.main()
    shown = capsys.readouterr().out
    assert re.search(r"\d\.\d", shown)
    assert not re.search(r"\b(nan|inf)\b", shown, re.I)


def test_all_personal_methods_of_a_recipe_can_be_made():
    assert {*personal_methods.SOME} < {*personal_methods.METHODS}
    for build in personal_methods.METHODS.values():
        assert build(lambda params, examples, key: examples.y).loss_fn is not None


def test_the_command_lists_them(capsys):
    assert main(["recipe"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == NAMES
    assert all(len(line.split()) > 3 for line in shown)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_writes_one_out(name, capsys):
    assert main(["recipe", name]) == 0
    source = Path(recipes.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    assert capsys.readouterr().out == source
    compile(source, name, "exec")
    # It runs wherever it is put: nothing of it is relative to the folder of the recipes.
    assert "fedjax_lab.recipes" not in source.replace(f"python -m fedjax_lab.recipes.{name}", "")


def test_a_recipe_that_is_none(capsys):
    assert main(["recipe", "dito"]) == 2
    assert "name is 'dito'; it must be one of" in (error := capsys.readouterr().err)
    assert "Did you mean 'ditto'" in error
