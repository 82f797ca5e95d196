"""Methods, models and data sets by name: built-in, from installed packages, or custom code.

``package.module:name`` is imported, also from the current folder. Installed packages add names by
entry points of the groups fedjax_lab.algorithms, fedjax_lab.models and fedjax_lab.datasets.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import flax.linen as nn

from fedjax_lab.algorithms import ALGORITHMS
from fedjax_lab.checks import check_choice, did_you_mean
from fedjax_lab.data import DATASETS
from fedjax_lab.data.sources import SCHEMES, TABLES
from fedjax_lab.models import MODELS, Model, from_linen

_TABLES = {
    "csv:FILE": "a table, with --target and --client, the columns of targets and of clients' ids",
    "parquet:FILE": "the same of a Parquet file",
}
# Setting -> its names in this package.
BUILT_IN: dict[str, Mapping[str, Any]]
BUILT_IN = {"algorithm": ALGORITHMS, "model": MODELS, "dataset": {**DATASETS, **_TABLES}}


def is_own(setting: str, name: str) -> bool:
    """Return True if a name belongs to code outside the package."""
    if name in BUILT_IN[setting]:
        return False
    if setting == "dataset" and name.partition(":")[0] in (*SCHEMES, *TABLES):
        return False
    module, _, attribute = name.partition(":")
    is_path = all(part.isidentifier() for part in (*module.split("."), attribute))
    return is_path or name in offered(setting)


@functools.cache
def offered(setting: str) -> dict[str, metadata.EntryPoint]:
    """Return name -> entry point for the installed packages."""
    return {point.name: point for point in metadata.entry_points(group=f"fedjax_lab.{setting}s")}


def check_known(setting: str, name: str, argument: str | None = None) -> None:
    """Check that a method, model or data set exists; code outside the package is imported.

    Args:
      argument: name of the argument in errors; None: ``setting``.

    Raises:
      ValueError: no method, model or data set has this name.
      ImportError: it cannot be imported.
      TypeError: it is no function.
    """
    if is_own(setting, name):
        find(setting, name)
        return
    check_choice(argument or setting, name, (*BUILT_IN[setting], *offered(setting)))


def find(setting: str, name: str) -> Callable[..., Any]:
    """Return the factory of a method or a model, or the function that loads a data set.

    Raises:
      ImportError, TypeError: as ``check_known``.
    """
    built_in: Any = BUILT_IN[setting].get(name)
    if callable(built_in):
        return built_in
    point = offered(setting).get(name)
    found = _imported(setting, name) if point is None else point.load()
    if not callable(found):
        raise TypeError(
            f"{setting} is {name!r}, which is a {type(found).__name__}; it must be a function."
        )
    return found


def _imported(setting: str, name: str) -> Any:
    path, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # an installed program does not look there
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise ImportError(
            f"{setting} is {name!r}; the module {path} cannot be imported ({error}). It must be "
            f"installed, or below {os.getcwd()}."
        ) from error
    if not hasattr(module, attribute):
        package = path.partition(".")[0]
        functions = [
            n
            for n, value in vars(module).items()
            if callable(value)
            and not n.startswith("_")
            # not what it imports from elsewhere, such as fedjax_lab.method
            and str(getattr(value, "__module__", "")).partition(".")[0] == package
        ]
        raise ImportError(
            f"{setting} is {name!r}; {path} has no {attribute}."
            f"{did_you_mean(attribute, functions)} It has "
            f"{', '.join(sorted(functions)) or 'no function'}."
        )
    return getattr(module, attribute)


def build_model(name: str, outputs: int, options: Mapping[str, Any]) -> Model:
    """Build a model from its factory.

    Args:
      outputs: number of outputs for an example; passed as ``num_classes`` if the factory has this
        argument.

    Raises:
      TypeError: the factory returns neither a ``Model`` nor a module of flax linen.
    """
    factory = find("model", name)
    taken = inspect.signature(factory).parameters
    made = factory(**({"num_classes": outputs} if "num_classes" in taken else {}), **options)
    if isinstance(made, nn.Module):
        made = from_linen(made)
    if not isinstance(made, Model):
        raise TypeError(
            f"model is {name!r}, which returned a {type(made).__name__}; it must return a "
            "models.Model or a flax.linen.Module."
        )
    return made


def describe_offered(setting: str) -> list[tuple[str, str, Callable[..., Any] | None]]:
    """Return (name, origin, function) for the names that installed packages add."""
    rows: list[tuple[str, str, Callable[..., Any] | None]] = []
    for name, point in sorted(offered(setting).items()):
        where = f"{point.value}, of {point.dist.name}" if point.dist else point.value
        try:
            rows.append((name, where, find(setting, name)))
        except Exception as error:  # a package that is broken hides no other
            rows.append((name, f"{where}: cannot be imported ({error})", None))
    return rows
