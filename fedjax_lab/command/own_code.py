"""The source code of a config's own methods, models and data sets: its files and their hashes."""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fedjax_lab.command.factories import BUILT_IN, find, is_own
from fedjax_lab.storage.run_dir import CONFIG, read_config

_LENGTH = 16  # hexadecimal digits of a hash


def sources(config: Any) -> dict[str, str]:
    """Hash the source files of the custom code in a config: file -> hash.

    The files are the modules of the named functions, and the modules that these import from the
    same package (or, for a single file, from the same folder).
    """
    found: dict[str, str] = {}
    settings = config.settings()
    for setting in BUILT_IN:
        name = settings[setting]
        if is_own(setting, name):
            module = sys.modules[find(setting, name).__module__]
            found |= {
                shown: hashlib.sha256(file.read_bytes()).hexdigest()[:_LENGTH]
                for shown, file in _files(module)
            }
    return dict(sorted(found.items()))


def own_sources(config: Any, path: Path) -> dict[str, Any]:
    """Return the entries of config.json about custom code, and compare them with earlier ones.

    Raises:
      FileExistsError: the directory has a run of other source code.
    """
    now = sources(config)
    if not now:
        return {}
    if (path / CONFIG).exists():
        before = read_config(path).get("own_code", {})
        changed = sorted(n for n in now.keys() | before.keys() if now.get(n) != before.get(n))
        if before and changed:
            raise FileExistsError(
                f"run_dir is {str(path)!r}, whose run used other versions of the files "
                f"{', '.join(changed)}. Choose another directory, or restore the files."
            )
    return {"own_code": now}


def _files(module: ModuleType) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of a module and of its imports from the same package or folder."""
    root = module.__name__.partition(".")[0]
    package = hasattr(sys.modules[root], "__path__")
    folder = None if module.__file__ is None else Path(module.__file__).parent
    waiting, met = [module.__name__], set()
    while waiting:
        name = waiting.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in met or file is None or not Path(file).is_file():
            continue
        met.add(name)
        if name.partition(".")[0] != root if package else Path(file).parent != folder:
            continue
        yield f"{name.replace('.', '/')}{Path(file).suffix}", Path(file)
        waiting += [name.rpartition(".")[0], *_imports(sys.modules[name], Path(file))]


def _imports(module: ModuleType, file: Path) -> Iterator[str]:
    """Yield the names of the modules that a file may import."""
    if file.suffix != ".py":
        return
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if node.level:
                base = importlib.util.resolve_name(base, module.__package__)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
