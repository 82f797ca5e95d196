"""The environment of the tests has what they need, so that no package is missing in CI."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def packages_of(extra):
    """The packages of an extra, and of the extras that it names."""
    for text in EXTRAS[extra]:
        found = Requirement(text)
        if canonicalize_name(found.name) == "fedjax-lab":
            for other in found.extras:
                yield from packages_of(other)
        else:
            yield found


def test_the_extra_for_tests_is_installed():
    needed = {canonicalize_name(found.name): found for found in packages_of("test")}
    assert {"datasets", "narwhals", "pandas", "polars", "pyarrow", "tokenizers"} <= set(needed)
    lacking = []
    for name, found in needed.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not found.specifier.contains(version, prereleases=True):
            lacking.append(f"{found} ({version})")
    assert not lacking, f"not installed: {lacking}; `make test` installs them"


def test_constraints_have_an_exact_version_of_each():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    exact = {canonicalize_name(re.split("==", line)[0]) for line in lines}
    extras = ("data", "notebooks", "privacy", "report", "safetensors", "test")
    needed = {canonicalize_name(found.name) for name in extras for found in packages_of(name)}
    assert needed <= exact
