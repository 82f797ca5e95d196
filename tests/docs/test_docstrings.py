"""Every name on a reference page says what it takes, in which shapes, and which errors it raises.

Public is what a page of docs/reference/ shows and what the packages export; all of the latter must
be among the former. What users neither call nor read is on no page. The source is read, not
imported.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
ARRAY = re.compile(r"jax\.Array|np\.ndarray|\bArray\b")
SHAPE = re.compile(r"\[[^\]]*\]|scalar")
ERRORS = ("ValueError", "TypeError")
COMMON = "common: Unpack[Common]"
SCHEDULE = "schedule: Unpack[ScheduleOptions]"  # described by ``scheduled``


def source_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def read_pages() -> dict[str, set[str] | None]:
    """Module -> the names that its page shows; None: all that are public."""
    shown: dict[str, set[str] | None] = {}
    directive = r"\.\. automodule:: (\S+)\n   :members:(.*)\n"
    for page in sorted(PAGES.glob("*.md")):
        for module, members in re.findall(directive, page.read_text(encoding="utf-8")):
            assert module not in shown, f"{module} stands on two pages"
            shown[module] = (
                {name.strip() for name in members.split(",")} if members.strip() else None
            )
    return shown


def definitions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    return {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def own_nodes(node: ast.AST):
    """The nodes of a function that run when it is called, without functions inside it.

    What stands in a ``try`` that catches ValueError is left out, too.
    """
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Try):
        caught = " ".join(ast.unparse(h.type) for h in node.handlers if h.type is not None)
        children = children[len(node.body) :] if "ValueError" in caught else children
    for child in children:
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


def raises(function: ast.FunctionDef, local: dict, seen: frozenset = frozenset()) -> bool:
    """Whether it raises or checks, itself or through functions of its module."""
    seen |= {function.name}
    for node in own_nodes(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if getattr(node.exc.func, "id", None) in ERRORS:
                return True
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            if name.startswith("check_") or getattr(node.func, "attr", "").startswith("check_"):
                return True
            helper = None if name in seen else local.get(name)
            if isinstance(helper, ast.FunctionDef) and raises(helper, local, seen):
                return True
    return False


def shared_arguments() -> set[str]:
    """What ``@factory`` describes where the docstring of a method does not."""
    tree = ast.parse(source_of("fedjax_lab.algorithms.factory").read_text(encoding="utf-8"))
    fields = definitions(tree)["Common"].body
    common = {node.target.id for node in fields if isinstance(node, ast.AnnAssign)}
    return {"loss_fn", "mean_from", "server_lr", *common}


SHARED = shared_arguments()


def gaps_of(function: ast.FunctionDef, local: dict) -> list[str]:
    """What the docstring of a function or a method lacks."""
    doc = ast.get_docstring(function)
    if not doc:
        return ["has no docstring"]
    found = []
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    parameters = [p for p in parameters if p is not None and p.arg not in ("self", "cls")]
    names = {p.arg for p in parameters}
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", doc, re.M)
    heads = re.findall(r"^  (\S.*?):", section[1], re.M) if section else []
    listed = {name.strip().lstrip("*") for head in heads for name in head.split(",")}
    names -= (
        {"schedule"} if given.kwarg is not None and ast.unparse(given.kwarg) == SCHEDULE else set()
    )
    takes_common = given.kwarg is not None and ast.unparse(given.kwarg) == COMMON
    if takes_common:
        names = names - {"common"} - SHARED | listed & SHARED
    if names != listed:
        found.append(f"has the arguments {sorted(names)} and describes {sorted(listed)}")
    annotations = [p.annotation for p in parameters] + [function.returns]
    types = [ast.unparse(annotation) for annotation in annotations if annotation is not None]
    if any(map(ARRAY.search, types)) and not SHAPE.search(doc):
        found.append("takes or returns arrays and gives no shape")
    is_property = any(ast.unparse(d).endswith("property") for d in function.decorator_list)
    if not (is_property or takes_common) and raises(function, local) and "Raises:" not in doc:
        found.append("raises errors and does not say which")
    return found


def gaps_in(module: str, names: set[str] | None) -> list[str]:
    """'module.name lacks something' for all public definitions that a page shows."""
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    local = definitions(tree)
    gaps = [] if ast.get_docstring(tree) else [f"{module} has no docstring"]
    unknown = [] if names is None else sorted(names - local.keys())
    gaps += [f"{module} has no {name}" for name in unknown]
    for name, node in local.items():
        if name.startswith("_") or (names is not None and name not in names):
            continue
        functions = {name: node}
        if isinstance(node, ast.ClassDef):
            if not ast.get_docstring(node):
                gaps.append(f"{module}.{name} has no docstring")
            functions = {
                f"{name}.{method}": inner
                for method, inner in definitions(node).items()
                if not method.startswith("_")
            }
        for where, function in functions.items():
            if isinstance(function, ast.FunctionDef):
                gaps += [f"{module}.{where} {gap}" for gap in gaps_of(function, local)]
    return gaps


def exports(package: str) -> dict[str, str]:
    """Exported name -> the module that defines it."""
    tree = ast.parse(source_of(package).read_text(encoding="utf-8"))
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    origin = {
        alias.asname or alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {name: origin.get(name, package) for name in names}


def test_nothing_public_is_undescribed():
    gaps = [gap for module, names in read_pages().items() for gap in gaps_in(module, names)]
    assert not gaps, f"{len(gaps)} gaps:\n" + "\n".join(gaps)


def test_what_is_exported_stands_on_a_page():
    shown = read_pages()
    packages = ["fedjax_lab"]
    packages += [
        f"fedjax_lab.{name}" for name in ("algorithms", "compressors", "data", "models", "qp")
    ]
    missing = []
    for package in [*packages, "fedjax_lab.report"]:
        for name, module in exports(package).items():
            defined = definitions(ast.parse(source_of(module).read_text(encoding="utf-8")))
            if name in defined and not (module in shown and name in (shown[module] or {name})):
                missing.append(f"{package}.{name} of {module}")
    assert not missing, missing


def test_a_gap_is_found():
    source = '''
def f(x: jax.Array, y):
    """Short.

    Args:
      x: something.
      z: gone.
    """
    check_int("y", y)
'''
    tree = ast.parse(source)
    first, *others = gaps_of(tree.body[0], definitions(tree))
    assert "['x', 'y']" in first
    assert "['x', 'z']" in first
    assert others == [
        "takes or returns arrays and gives no shape",
        "raises errors and does not say which",
    ]


def test_common_arguments_count_as_described():
    source = '''
@factory
def method(loss_fn, *, decay=0.9, **common: Unpack[Common]):
    """Short.

    Args:
      client_lr: as this method takes it.
      decay: in [0, 1].
    """
    check_number("decay", decay)
'''
    (method,) = ast.parse(source).body
    assert gaps_of(method, {}) == []
    (method,) = ast.parse(source.replace("decay: in", "momentum: in")).body
    (gap,) = gaps_of(method, {})
    assert "['client_lr', 'decay'] and describes ['client_lr', 'momentum']" in gap
