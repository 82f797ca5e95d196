"""The plan of the house: which room may import from which, and what is handed on by context."""

import ast
import dataclasses
import graphlib
from pathlib import Path

import pytest

import fedjax_lab
from fedjax_lab import Algorithm, Phase

ROOT = Path(fedjax_lab.__file__).parent
EXPERIMENTS = ROOT.parent / "experiments"
# Each room may import from itself and from those before it.
ORDER = (
    *("types", "version", "checks", "signatures", "tree", "estimates", "markdown", "descriptions"),
    *(
        "machine",
        "data",
        "models",
        "clients",
        "round",
        "compressors",
        "qp",
        "wrappers",
        "algorithms",
        "method",
    ),
    *("storage", "simulation", "tuning", "report", "command", "__init__", "recipes", "__main__"),
)


def modules(root):
    """Dotted name -> file, of all modules below the package at ``root``."""
    return {
        ".".join((root.name, *path.relative_to(root).with_suffix("").parts)): path
        for path in sorted(root.rglob("*.py"))
    }


def imported(path, known, package):
    """The modules of the package that a file imports, anywhere in it; of a room, its __init__."""

    def resolve(name):
        return name if name in known else f"{name}.__init__"

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if resolve(n) in known else node.module for n in inner]
        else:
            continue
        yield from (resolve(n) for n in names if n.split(".")[0] == package)


def turning_back(root, order=ORDER):
    """The imports that lead to a later room, and those that lead round in a circle."""
    known = modules(root)
    graph = {name: set(imported(path, known, root.name)) for name, path in known.items()}
    room = {name: name.split(".")[1] for name in known}
    back = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in sorted(others)
        if order.index(room[other]) > order.index(room[name])
        # What lives in a room does not look at it from the street.
        or (other == f"{root.name}.{room[name]}.__init__" and name != other)
    ]
    return back + circles(graph)


def circles(graph):
    """The first circle of imports, in words."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" imports ".join(error.args[1])]
    return []


def private_names(path, package):
    """The private names of a package that a file imports, or takes from what it imports of it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found, bound = [], set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            found += [alias.name for alias in node.names if alias.name.startswith("_")]
            bound |= {alias.asname or alias.name for alias in node.names}
    taken = [node for node in nodes if isinstance(node, ast.Attribute)]
    return found + [
        f"{node.value.id}.{node.attr}"
        for node in taken
        if isinstance(node.value, ast.Name) and node.value.id in bound
        if node.attr.startswith("_") and not node.attr.endswith("__")
    ]


def test_no_import_turns_back():
    assert turning_back(ROOT) == []


def test_experiments_import_in_one_direction_and_no_private_names():
    known = modules(EXPERIMENTS)
    # What ``python -m`` runs has two names, and may import itself by the other one.
    graph = {
        name: set(imported(path, known, "experiments")) - {name} for name, path in known.items()
    }
    assert circles(graph) == []
    found = {name: private_names(path, "fedjax_lab") for name, path in known.items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_circles_and_private_names_are_found(tmp_path):
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert sorted(circles({"a": {"b"}, "b": {"a"}})[0].split(" imports ")[:2]) == ["a", "b"]
    text = "from pkg.a import b, _c as d\nfrom other import _e, f\nb._g + b.h + b.__doc__ + f._i"
    (tmp_path / "x.py").write_text(text)
    assert private_names(tmp_path / "x.py", "pkg") == ["_c", "b._g"]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"data/a.py": "def f():\n    from pkg.round import g", "round.py": ""}, "pkg.round"),
        ({"data/a.py": "import pkg.data.b", "data/b.py": "from pkg.data import a"}, "pkg.data.a"),
        ({"data/__init__.py": "from pkg.data.a import f", "data/a.py": "import pkg.data"}, "a"),
    ],
)
def test_an_import_that_turns_back_is_found(tmp_path, files, found):
    for name, text in files.items():
        (tmp_path / "pkg" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pkg" / name).write_text(text)
    assert found in " ".join(turning_back(tmp_path / "pkg"))


# What methods are written with: the ground, and the round with its parts.
OF_METHODS = {
    *("types", "checks", "signatures", "tree", "descriptions", "machine"),
    *("clients", "round", "algorithms"),
}
# Methods that are made of more: their papers compress, solve programs, or look into a model.
MADE_OF = {
    "cfedavg": {"compressors", "wrappers"},
    **{name: {"qp"} for name in ("gradma", "gradma_correction", "gradma_memory")},
    "representation": {"models"},
}


def test_methods_import_the_round_the_ground_and_each_other():
    known = modules(ROOT)
    outside = {}
    for path in sorted((ROOT / "algorithms").glob("*.py")):
        rooms = {name.split(".")[1] for name in imported(path, known, ROOT.name)} - OF_METHODS
        if rooms:
            outside[path.stem] = rooms
    assert outside == MADE_OF


def test_phase_and_algorithm_have_few_fields():
    assert len(Phase._fields) <= 9
    assert len(dataclasses.fields(Algorithm)) <= 9


def context_variables(text):
    """How many values a file hands on beside arguments and results."""
    made = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = [f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in made]
    return sum(name in ("ContextVar", "make_user_context") for name in names)


def test_two_values_are_handed_on_by_context():
    """The layout of a model that devices divide, and what a program is traced for."""
    found = {name: context_variables(path.read_text()) for name, path in modules(ROOT).items()}
    assert {name.split(".")[-1] for name, number in found.items() if number} == {
        "model_axis",
        "target",
    }
    assert sum(found.values()) == 2
