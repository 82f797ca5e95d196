"""The plan of the house: which room may import from which, and how large files may grow."""

import ast
import graphlib
from pathlib import Path

import pytest

import fedjax_lab

ROOT = Path(fedjax_lab.__file__).parent
# Each room may import from itself and from those before it.
ORDER = (
    *("types", "version", "checks", "signatures", "tree", "estimates"),
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
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        back.append(" imports ".join(error.args[1]))
    return back


def test_no_import_turns_back():
    assert turning_back(ROOT) == []


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


def docstrings(node):
    """The nodes of all docstrings below a node."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for inner in ast.walk(node):
        if isinstance(inner, holders) and ast.get_docstring(inner, clean=False) is not None:
            yield inner.body[0]


def code_lines(text):
    """How many lines of a file are code: no docstring, no comment, not blank."""
    told = {n for d in docstrings(ast.parse(text)) for n in range(d.lineno, d.end_lineno + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(n not in told and line.strip()[:1] not in ("", "#") for n, line in lines)


def long_functions(text, limit):
    """The functions of a file whose bodies, docstrings apart, have more lines than that."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            if body and body[-1].end_lineno - body[0].lineno + 1 > limit:
                yield node.name


def test_files_functions_and_rooms_stay_small():
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules(ROOT).items()}
    assert [name for name, text in texts.items() if code_lines(text) > 300] == []
    assert [(n, f) for n, text in texts.items() for f in long_functions(text, 80)] == []
    assert len(list(ROOT.glob("*.py"))) <= 9
    assert len(list((ROOT / "simulation").glob("*.py"))) <= 24


def test_lines_of_code_are_counted():
    text = (
        '"""A docstring\nof two lines."""\n\n# a comment\ndef f():\n    """One."""\n    return 1\n'
    )
    assert code_lines(text) == 2
    assert list(long_functions(text, 0)) == ["f"]
    assert list(long_functions(text, 1)) == []
