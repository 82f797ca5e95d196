"""Imports packages that only some functions need, and says how to install those that are missing.

The commands name the packages themselves, in the versions that are tested, so that they do not
depend on how this library was installed.
"""

import importlib
import re
from importlib import metadata
from typing import Any


def imported(module: str, sentence: str, extra: str) -> Any:
    """Import a module that only some functions need.

    Raises:
      ImportError: it is missing; the error says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        packages = [name for name, of in _requirements() if of == extra]
        install = _install(packages or [f".[{extra}]"])
        raise ImportError(f"{sentence}: `{install}`.") from error


def install_missing() -> str:
    """Return the command that installs those of this library's dependencies that are missing."""
    needed = [name for name, extra in _requirements() if extra is None and not _is_installed(name)]
    return _install(needed or ["."])


def _install(packages: list[str]) -> str:
    return f"pip install {' '.join(map(repr, packages))}"


def _requirements() -> list[tuple[str, str | None]]:
    """Requirements, such as "tyro>=1.0,<2", each with its extra."""
    try:
        required = metadata.requires("fedjax_lab") or []
    except metadata.PackageNotFoundError:  # imported from a folder
        return []
    parts = (text.partition(";") for text in required)
    extras = re.compile(r"extra == ['\"]([^'\"]+)")
    found = ((name.strip(), extras.search(when)) for name, _, when in parts)
    return [(name, match and match[1]) for name, match in found]


def _is_installed(requirement: str) -> bool:
    try:
        metadata.version(re.split(r"[\s<>=!~\[]", requirement)[0])
    except metadata.PackageNotFoundError:
        return False
    return True
