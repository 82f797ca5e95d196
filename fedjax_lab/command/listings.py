"""The lists that the command line prints: methods, compressors, models and others."""

import importlib.resources
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from fedjax_lab.algorithms import ALGORITHMS, PUBLISHED
from fedjax_lab.algorithms.factory import Common
from fedjax_lab.checks import check_choice
from fedjax_lab.command import catalogue
from fedjax_lab.command.factories import BUILT_IN, describe_offered
from fedjax_lab.command.options import (
    SERVER_OPTIMIZERS,
    defaults_of,
    describe_options,
    server_lr_of,
)
from fedjax_lab.command.settings import NATURAL
from fedjax_lab.compressors.by_name import COMPRESSORS, describe
from fedjax_lab.data import PARTITIONS
from fedjax_lab.models import MODELS


def algorithms(*, markdown: bool = False) -> str:
    """List every method: paper, traffic, client state, gradients, options and defaults."""
    if markdown:
        return catalogue.page()
    entries = []
    for name in catalogue.SOURCES:
        factory, row = ALGORITHMS[name], catalogue.entry(name)
        up, down, state = row.traffic
        unit = "d: size of the model" + (
            ", u: of its shared leaves, h: of the others" * (up == "u")
        )
        lines = [f"paper: {row.paper}"]
        lines += [
            f"up {up}, down {down} ({unit}), client state {state}, "
            f"gradients a local step: {row.gradients}"
        ]
        lines += [f"options: {describe_options(row.options) or 'none'}"]
        lines += [f"server_lr: {server_lr_of(name)}"]
        if name == "fedopt":
            names = ", ".join(SERVER_OPTIMIZERS)
            lines += [f"server_optimizer: {names}; the other options are those of the optimizer"]
        entries.append(_entry(name, factory, *lines))
    leave_out = ("loss_fn", "model", *Common.__annotations__)
    return "\n".join([*entries, *_offered("algorithm", leave_out)])


def published() -> str:
    """List the methods that --as-published knows, and how their codes run them."""
    head = (
        "--as-published runs these as their authors' code does; other flags and options override."
    )
    entries = []
    for name, found in PUBLISHED.items():
        lines = [f"options: {describe_options(found.options) or 'the defaults'}"]
        lines += [f"clipping, weight decay: {catalogue.clipping(found)}", f"its runs: {found.also}"]
        entries.append("\n".join([f"{name}, {found.code}", *(f"    {line}" for line in lines)]))
    return "\n".join([head, *entries])


def compressors() -> str:
    """List the compressors: spelling, arguments, and the bytes of a message."""
    head = "--compressor and --downlink-compressor take these as text. d: numbers of the message."
    entries = [_entry(name, factory, *describe(name)) for name, factory in COMPRESSORS.items()]
    return "\n".join([head, *entries])


def models() -> str:
    """List the models, with their options and defaults."""
    given = ("num_classes",)
    entries = [
        _entry(name, factory, f"options: {describe_options(defaults_of(factory, given)) or 'none'}")
        for name, factory in MODELS.items()
    ]
    return "\n".join([*entries, *_offered("model", given)])


def datasets() -> str:
    """List the data sets."""
    rows = dict(BUILT_IN["dataset"])
    for name, where, function in describe_offered("dataset"):
        rows[name] = where if function is None else f"{_first_line(function)} ({where})"
    return _pairs(rows)


def partitions() -> str:
    """List the partitions of data among clients."""
    return _pairs({**PARTITIONS, NATURAL: "the clients' ids: an array [n] of npz:FILE"})


def _offered(setting: str, leave_out: Iterable[str]) -> list[str]:
    """List the entries that installed packages add."""
    entries = []
    for name, where, factory in describe_offered(setting):
        if factory is None:
            entries.append(f"{name}\n    {where}")
            continue
        options = describe_options(defaults_of(factory, leave_out=(*leave_out, "preprocess")))
        entries.append(_entry(name, factory, f"from: {where}", f"options: {options or 'none'}"))
    return entries


def _first_line(function: Any) -> str:
    """Return the first paragraph of a docstring in one line."""
    text = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return text.replace("``", "")


def _entry(name: str, factory: Any, *lines: str) -> str:
    """Format a name with the first sentence of its docstring, and further lines below it."""
    text = [
        textwrap.fill(_first_line(factory), 96, initial_indent="    ", subsequent_indent="    ")
    ]
    text += [
        textwrap.fill(line, 96, initial_indent="    ", subsequent_indent=" " * 8) for line in lines
    ]
    return "\n".join([name, *text])


def recipe(name: str | None) -> str:
    """Return the source of a recipe; without a name, list the first lines of all recipes.

    Raises:
      ValueError: there is no such recipe.
    """
    folder = importlib.resources.files("fedjax_lab") / "recipes"
    texts = {
        file.name.removesuffix(".py"): file.read_text(encoding="utf-8")
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".py") and not file.name.startswith("__")
    }
    if name is not None:
        return texts[check_choice("name", name, texts)].removesuffix("\n")
    return _pairs({name: text.partition("\n")[0].strip('"') for name, text in texts.items()})


def _pairs(descriptions: Mapping[str, str]) -> str:
    """Format names and descriptions in two columns."""
    width = max(map(len, descriptions))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in descriptions.items())
