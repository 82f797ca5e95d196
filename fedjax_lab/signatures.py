"""Keyword arguments that many functions share: defined once, spelled out in signatures and help.

A function takes them as ``**options: Unpack[Options]``, where ``Options`` is a ``TypedDict`` whose
docstring describes each of them under ``Attributes``.
"""

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

from fedjax_lab.checks import check_flag, nearest

Function = TypeVar("Function", bound=Callable[..., Any])

# Names of arguments in other libraries and papers -> their names here.
SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "learning_rate", "step_size"), ("client_lr",)),
    **dict.fromkeys(("local_lr", "lr_local", "client_learning_rate"), ("client_lr",)),
    **dict.fromkeys(("global_lr", "lr_global", "server_learning_rate"), ("server_lr",)),
    **dict.fromkeys(("num_rounds", "n_rounds", "global_rounds", "comm_rounds"), ("rounds",)),
    **dict.fromkeys(("clients_per_round", "num_participants", "fraction_fit"), ("cohort_size",)),
    **dict.fromkeys(("epochs", "num_epochs"), ("local_epochs",)),
    **dict.fromkeys(("steps", "num_steps", "local_updates"), ("local_steps",)),
    **dict.fromkeys(("random_state", "random_seed", "rng", "key"), ("seed", "seeds")),
    **dict.fromkeys(("n_clients", "client_num", "num_users"), ("num_clients",)),
    **dict.fromkeys(("sigma", "noise", "noise_scale"), ("noise_multiplier",)),
    **dict.fromkeys(("max_grad_norm", "l2_norm_clip", "clip"), ("clip_norm", "example_clip")),
    **dict.fromkeys(("user", "user_id", "client_id", "client_column", "by"), ("client",)),
    **dict.fromkeys(("features", "inputs", "input"), ("x",)),
    **dict.fromkeys(("target", "targets", "label", "labels"), ("y",)),
    **dict.fromkeys(("eval_fn", "test_fn"), ("evaluate",)),
    **dict.fromkeys(("optimizer", "server_opt"), ("server_optimizer",)),
    **dict.fromkeys(("classes", "n_classes", "output_dim"), ("num_classes",)),
    **dict.fromkeys(("k", "ratio", "sparsity", "fraction"), ("comp", "fraction")),
    **dict.fromkeys(("path", "save_dir", "output_dir", "log_dir"), ("run_dir",)),
}


def spell_out(
    own: inspect.Signature, name: str, options: Any, defaults: Mapping[str, Any]
) -> inspect.Signature:
    """Replace ``**name`` in a signature by the options: required ones first, the others last.

    Args:
      own: a signature with a parameter ``**name``.
      name: name of that parameter.
      options: a ``TypedDict``.
      defaults: option -> its default; options without a default are required.
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


def show(
    function: Callable[..., Any],
    signature: inspect.Signature,
    shared: Mapping[str, str],
    raises: str | None = None,
) -> None:
    """Set the signature that ``help`` and type hints show for a function, and complete its help.

    The section ``Args`` of its docstring, if it has one, gets all arguments of the signature, in
    order.

    Args:
      function: the function; its own description of an argument takes precedence.
      signature: the signature, with annotations.
      shared: argument -> its lines under ``Args``.
      raises: the section ``Raises`` for a docstring that has none.
    """
    function.__signature__ = signature  # type: ignore[attr-defined]
    hints = {name: p.annotation for name, p in signature.parameters.items()}
    hints["return"] = signature.return_annotation
    function.__annotations__ = {k: v for k, v in hints.items() if v is not inspect.Signature.empty}
    if not function.__doc__:
        return
    sections = _sections(inspect.cleandoc(function.__doc__))
    entries = {**shared, **_entries(sections.pop("Args", ""))}
    # One entry may describe several arguments; it appears once.
    args = dict.fromkeys(entries[name] for name in signature.parameters if name in entries)
    text = sections.pop("")
    if raises is not None:
        sections.setdefault("Raises", raises)
    sections = {"Args": textwrap.indent("\n".join(args), "  "), **sections}
    parts = [text, *(f"{title}:\n{body}" for title, body in sections.items())]
    function.__doc__ = "\n\n".join(parts)


def described(options: Any) -> dict[str, str]:
    """Return option -> its lines in the docstring of a ``TypedDict``.

    Args:
      options: the ``TypedDict``.
    """
    return _entries(_sections(inspect.getdoc(options) or "").get("Attributes", ""))


def unknown(function: str, name: str, allowed: Iterable[str], hint: str | None = None) -> TypeError:
    """Create the error for an unknown keyword argument; it suggests the nearest known one.

    Args:
      function: name of the function that was called.
      name: the unknown keyword.
      allowed: keywords that the function accepts.
      hint: text to use in place of the nearest name.
    """
    names = list(allowed)
    near = nearest(name, names, SYNONYMS.get(name, ()))
    if hint is None and near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    return TypeError(
        f"{function}() got an unexpected keyword argument {name!r}{f'; {hint}' if hint else '.'} "
        f"It takes {', '.join(names) or 'no keyword'}."
    )


def check_flags(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    """Check that keywords whose default is True or False are truth values.

    Args:
      parameters: of a function.
      given: its keywords.

    Raises:
      TypeError: one is none, such as the text "no", which Python takes for true.
    """
    for name, value in given.items():
        if isinstance(parameters[name].default, bool):
            check_flag(name, value)


def suggest_keywords(function: Function) -> Function:
    """Make a function or a class reject an unknown keyword with a list of the known ones.

    Keywords whose default is True or False must be truth values.

    Args:
      function: a function or a class with an inspectable signature.
    """
    if inspect.isclass(function):
        function.__init__ = suggest_keywords(function.__init__)  # type: ignore[method-assign]
        return function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - known.keys():
            raise unknown(shown, name, known)
        check_flags(known, kwargs)
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    of_class = function.__name__ == "__init__"
    shown = function.__qualname__.split(".")[-2] if of_class else function.__name__
    known = dict(list(signature.parameters.items())[of_class:])
    kinds = {parameter.kind for parameter in known.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        raise TypeError(f"{shown} takes any keyword.")
    return checked  # type: ignore[return-value]


def parameter_of(function: Callable[..., Any], name: str) -> inspect.Parameter | None:
    """Return the parameter of a function that a keyword argument sets; None if it has none.

    Args:
      function: any callable.
      name: the keyword. The keywords that a ``functools.partial`` sets already do not count.
    """
    if isinstance(function, functools.partial) and name in function.keywords:
        return None
    try:
        named = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return None
    has_keyword = named is not None and named.kind in (
        named.POSITIONAL_OR_KEYWORD,
        named.KEYWORD_ONLY,
    )
    return named if has_keyword else None


def other_arguments(function: Callable[..., Any], count: int, *named: str) -> str | None:
    """Return the arguments of a function that cannot be called as it will be; None if it can.

    Args:
      function: any callable.
      count: number of positional arguments.
      *named: keywords that it may have.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return None
    keywords = [name for name in named if parameter_of(function, name)]
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError:
        return ", ".join(str(p).partition(":")[0] for p in signature.parameters.values())
    return None


def _sections(doc: str) -> dict[str, str]:
    """Return title -> text of a docstring's sections; the text before them has the title ""."""
    text, *parts = re.split(r"\n\n([A-Z]\w*):\n", doc)
    return {"": text, **dict(zip(parts[::2], parts[1::2], strict=True))}


def _entries(section: str) -> dict[str, str]:
    """Return name -> its lines in a section, without indentation."""
    entries = {}
    for entry in re.split(r"\n+(?=\w)", textwrap.dedent(section).strip()):
        names = entry.partition(":")[0].split(",")
        entries.update({name.strip(): entry for name in names})
    return entries
