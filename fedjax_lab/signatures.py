"""Keyword arguments that many functions share: defined once, spelled out in signatures and help.

A function takes them as ``**options: Unpack[Options]``, where ``Options`` is a ``TypedDict`` whose
docstring describes each of them under ``Attributes``.
"""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints


def spell_out(
    own: inspect.Signature, name: str, options: Any, defaults: Mapping[str, Any]
) -> inspect.Signature:
    """Replace ``**name`` of a signature by the options: required ones first, the others last.

    Args:
      own: a signature with a parameter ``**name``.
      name: of that parameter.
      options: a ``TypedDict``.
      defaults: of the options that have one.
    """
    keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    shared = [
        inspect.Parameter(option, keyword, default=defaults.get(option, empty), annotation=kind)
        for option, kind in get_type_hints(options).items()
    ]
    parameters = [p for other, p in own.parameters.items() if other != name]
    return own.replace(
        parameters=[
            *(p for p in parameters if p.kind is not keyword),
            *(p for p in shared if p.default is empty),
            *(p for p in parameters if p.kind is keyword),
            *(p for p in shared if p.default is not empty),
        ]
    )


def show(function: Callable[..., Any], signature: inspect.Signature) -> None:
    """Make ``help`` and type hints show a signature.

    Args:
      function: what is shown.
      signature: with annotations.
    """
    function.__signature__ = signature  # type: ignore[attr-defined]
    hints = {name: p.annotation for name, p in signature.parameters.items()}
    hints["return"] = signature.return_annotation
    function.__annotations__ = {k: v for k, v in hints.items() if v is not inspect.Signature.empty}


def complete_doc(
    doc: str,
    signature: inspect.Signature,
    shared: Mapping[str, str],
    raises: str | None = None,
) -> str:
    """Describe all arguments of a signature in a docstring, in their order.

    Args:
      doc: the docstring; what it says of an argument replaces the shared text.
      signature: says which arguments there are.
      shared: argument -> its lines under ``Args``.
      raises: the section ``Raises`` of a docstring that has none.
    """
    sections = _sections(inspect.cleandoc(doc))
    entries = {**shared, **_entries(sections.pop("Args", ""))}
    # Once where an entry describes several arguments.
    args = dict.fromkeys(entries[name] for name in signature.parameters if name in entries)
    text = sections.pop("")
    if raises is not None:
        sections.setdefault("Raises", raises)
    sections = {"Args": textwrap.indent("\n".join(args), "  "), **sections}
    return "\n\n".join([text, *(f"{title}:\n{body}" for title, body in sections.items())])


def described(options: Any) -> dict[str, str]:
    """Option -> its lines in the docstring of a ``TypedDict``.

    Args:
      options: the ``TypedDict``.
    """
    return _entries(_sections(inspect.getdoc(options) or "").get("Attributes", ""))


def unknown(function: str, name: str, allowed: Iterable[str]) -> TypeError:
    """The error for an unknown keyword argument, with the nearest known one.

    Args:
      function: whose argument it is meant to be.
      name: what was given.
      allowed: the names that the function takes.
    """
    near = difflib.get_close_matches(name, list(allowed), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def _sections(doc: str) -> dict[str, str]:
    """Title -> text of a docstring's sections; the title of what stands before them is ""."""
    text, *parts = re.split(r"\n\n([A-Z]\w*):\n", doc)
    return {"": text, **dict(zip(parts[::2], parts[1::2], strict=True))}


def _entries(section: str) -> dict[str, str]:
    """Name -> its lines in a section, without their indentation."""
    entries = {}
    for entry in re.split(r"\n+(?=\w)", textwrap.dedent(section).strip()):
        names = entry.partition(":")[0].split(",")
        entries.update({name.strip(): entry for name in names})
    return entries
