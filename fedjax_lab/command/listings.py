"""The lists that the command line prints: methods, compressors, models and others."""

import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from fedjax_lab.algorithms import ALGORITHMS, PUBLISHED
from fedjax_lab.command import catalogue
from fedjax_lab.command.options import (
    SERVER_OPTIMIZERS,
    describe_options,
    model_defaults,
    server_lr_of,
)
from fedjax_lab.compressors.catalogue import COMPRESSORS, describe
from fedjax_lab.models import MODELS

TABLES = {
    "csv:FILE": "a table, with --target and --client, the columns of targets and of clients' ids",
    "parquet:FILE": "the same of a Parquet file",
}


def algorithms() -> str:
    """List every method: paper, traffic, client state, gradients, options and defaults."""
    entries = []
    for name in catalogue.SOURCES:
        factory, row = ALGORITHMS[name], catalogue.entry(name)
        up, down, state = catalogue.traffic(row)
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
    return "\n".join(entries)


def published() -> str:
    """List every method with a published code, and the settings of that code."""
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
    """List every compressor: spelling, arguments, bytes of its messages."""
    head = "--compressor and --downlink-compressor take these as text. d: numbers of the message."
    entries = [_entry(name, factory, *describe(name)) for name, factory in COMPRESSORS.items()]
    return "\n".join([head, *entries])


def models() -> str:
    """List every model with its options and their defaults."""
    return "\n".join(
        _entry(name, factory, f"options: {describe_options(model_defaults(name)) or 'none'}")
        for name, factory in MODELS.items()
    )


def _entry(name: str, factory: Any, *lines: str) -> str:
    """Format a name with the first sentence of its docstring, and further lines below it."""
    first = (inspect.getdoc(factory) or "").split("\n\n")[0].replace("\n", " ")
    first = first.replace("``", "")
    text = [textwrap.fill(first, 96, initial_indent="    ", subsequent_indent="    ")]
    text += [
        textwrap.fill(line, 96, initial_indent="    ", subsequent_indent=" " * 8) for line in lines
    ]
    return "\n".join([name, *text])


def pairs(descriptions: Mapping[str, str]) -> str:
    """Format names and descriptions in two columns."""
    width = max(map(len, descriptions))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in descriptions.items())
