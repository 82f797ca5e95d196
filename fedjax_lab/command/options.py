"""Options as text: ``--option name=value`` for methods, models and data sets."""

import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import optax

from fedjax_lab.algorithms import PUBLISHED
from fedjax_lab.algorithms.factory import Common, hint_of
from fedjax_lab.checks import check_choice, did_you_mean
from fedjax_lab.command.factories import check_known, find, is_own
from fedjax_lab.descriptions import format_value

REQUIRED = inspect.Parameter.empty
# Setting that names a function -> the setting of its options.
OPTIONS = {"algorithm": "option", "model": "model_option", "dataset": "dataset_option"}
_MAX_MEMORY = 100  # GradMA's own m
# What clipping and weight decay act on -> the argument of a factory.
CLIPS = {"gradient": "gradient_transform", "step": "step_transform"}

# Arguments of a factory that have a flag of their own, or that the runner makes.
_NOT_OPTIONS = ("loss_fn", "model", "preprocess", "server_lr", *Common.__annotations__)
_WORDS = {"true": True, "false": False, "none": None}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def parse_options(
    texts: Iterable[str], argument: str = "option", of_text: Mapping[str, bool] | None = None
) -> dict[str, Any]:
    """Parse "name=value" texts into {name: value}; the last of equal names wins.

    A value becomes an int, a float, true, false or none, a tuple of these (with commas), or else
    text.

    Args:
      texts: such as "margin=0.1".
      of_text: {name: may be none} of options whose values stay text.

    Raises:
      ValueError: a text does not have the form name=value.
    """
    options: dict[str, Any] = {}
    of_text = of_text or {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier() or not value.strip():
            raise ValueError(f"{argument} is {text!r}; it must be of the form name=value.")
        name, value = name.strip(), value.strip()
        is_text = name in of_text and not (of_text[name] and value.lower() == "none")
        options[name] = value if is_text else _parse_value(value)
    return options


def parse_options_of(setting: str, name: str, texts: Iterable[str]) -> dict[str, Any]:
    """Parse options like ``parse_options``; those that the function annotates as text stay text.

    Args:
      setting: "algorithm", "model" or "dataset".
      texts: such as "margin=0.1".

    Raises:
      ValueError: a text does not have the form name=value.
    """
    texts = tuple(texts)
    return parse_options(texts, OPTIONS[setting], _of_text(setting, name) if texts else None)


def _of_text(setting: str, name: str) -> dict[str, bool]:
    """Return the options that are annotated as text, and whether each may be none."""
    if setting == "dataset" and not is_own(setting, name):
        return {}
    try:
        function = find(setting, name)
    except (ValueError, TypeError, ImportError):  # a name that is checked elsewhere
        return {}
    plain = (None, types.UnionType, typing.Union, typing.Literal)
    defaults = defaults_of(function)
    return {
        option: _may_be_none(hint, defaults.get(option))
        for option, hint in _hints(function).items()
        if typing.get_origin(hint) in plain
        and _kinds_of(hint) == {str}
        and not isinstance(defaults.get(option), tuple)
    }


def _parse_value(text: str) -> Any:
    if "," in text:
        return tuple(_parse_value(part.strip()) for part in text.split(",") if part.strip())
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def format_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Format options, the inverse of ``parse_options``."""
    return tuple(f"{name}={format_value(value)}" for name, value in options.items())


def algorithm_options(algorithm: str, server_optimizer: Any = None) -> dict[str, Any]:
    """Return a method's hyperparameters and their defaults, ``REQUIRED`` without a default.

    Args:
      server_optimizer: for fedopt, a key of ``SERVER_OPTIMIZERS``; the server optimizer's
        hyperparameters are then options. None: adam.

    Raises:
      ValueError: one of the names is unknown.
    """
    check_known("algorithm", algorithm)
    options = defaults_of(find("algorithm", algorithm), leave_out=_NOT_OPTIONS)
    if "server_optimizer" in options:
        name = DEFAULT_OPTIMIZER if server_optimizer is None else server_optimizer
        optimizer = SERVER_OPTIMIZERS[check_choice("server_optimizer", name, SERVER_OPTIMIZERS)]
        own = defaults_of(optimizer, leave_out=("learning_rate",))
        numbers = {key: value for key, value in own.items() if isinstance(value, (bool, float))}
        options = {**options, "server_optimizer": DEFAULT_OPTIMIZER, **numbers}
    return options


def float_options(algorithm: str, server_optimizer: Any = None) -> list[str]:
    """Return the float hyperparameters of a method, which a sweep can vary.

    Raises:
      ValueError: one of the names is unknown.
    """
    options = algorithm_options(algorithm, server_optimizer)
    hints = _hints(find("algorithm", algorithm))
    return [n for n, default in options.items() if float in _kinds_of(hints.get(n), default)]


def derived_options(algorithm: str, num_clients: int | None) -> dict[str, Any]:
    """Return defaults for required arguments of a factory, if there is a suggestion.

    Args:
      num_clients: N; None: not known yet.
    """
    options = defaults_of(find("algorithm", algorithm))
    derived: dict[str, Any] = {}
    if options.get("memory_size", 0) is REQUIRED and num_clients is not None:
        derived["memory_size"] = min(num_clients, _MAX_MEMORY)
    if "server_optimizer" in options:
        derived["server_optimizer"] = DEFAULT_OPTIMIZER
    return derived


def defaults_of(function: Callable[..., Any], leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return a function's arguments and their defaults, ``REQUIRED`` without a default."""
    parameters = inspect.signature(function).parameters
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: p.default
        for name, p in parameters.items()
        if name not in leave_out and p.kind not in several
    }


def _momentum(learning_rate: float, momentum: float = 0.9, nesterov: bool = False):
    return optax.sgd(learning_rate, momentum, nesterov)


def _sgd(learning_rate: float):
    return optax.sgd(learning_rate)


DEFAULT_OPTIMIZER = "adam"
# What `--algorithm fedopt --option server_optimizer=NAME` offers; in Python any optax will do.
SERVER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adagrad": optax.adagrad,
    "adam": optax.adam,
    "momentum": _momentum,
    "sgd": _sgd,
    "yogi": optax.yogi,
}


def check_options(setting: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check options against the function that takes them; a number can stand for a tuple of one.

    Args:
      setting: "algorithm", "model" or "dataset".

    Returns:
      The options, with the types of the function's arguments.

    Raises:
      ValueError: an option is unknown, missing, of another type, or not finite.
    """
    is_method = setting == "algorithm"
    owner = name if is_method else f"the {setting} {name}"
    if setting == "dataset" and not is_own(setting, name):
        function, allowed = None, {}
    else:
        function = find(setting, name)
        allowed = defaults_of(function, leave_out=("num_classes",) if setting == "model" else ())
    if is_method:
        allowed = algorithm_options(name, given.get("server_optimizer"))
    for option in given:
        if option not in allowed:
            hint = None
            if is_method and function is not None:
                hint = hint_of(function, option, defaults_of(function))
            raise ValueError(
                f"{option} is not an option of {owner}"
                f"{f'; {hint}' if hint else f'.{did_you_mean(option, allowed)}'} Allowed: "
                f"{describe_options(allowed) or 'none'}."
            )
    for option, default in allowed.items():
        if default is REQUIRED and option not in given:
            flag = OPTIONS[setting].replace("_", "-")
            raise ValueError(f"{owner} needs {option}: give --{flag} {option}=VALUE.")
    hints = {} if function is None else _hints(function)
    return {
        option: _typed(f"{option} of {owner}", value, allowed[option], hints.get(option))
        for option, value in given.items()
    }


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (NameError, TypeError):  # of names that are there for type checkers only
        return {}


def _choices_of(hint: Any) -> tuple[Any, ...]:
    """Return the values that an annotation allows by ``Literal``; () if it allows others, too."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return ()
    parts = [(None,) if part is type(None) else _choices_of(part) for part in typing.get_args(hint)]
    return tuple(value for part in parts for value in part) if all(parts) else ()


def _kinds_of(hint: Any, default: Any = None) -> set[type]:
    """Return the plain types that an annotation names, or else that of the default."""
    parts = {hint, *typing.get_args(hint), *map(type, _choices_of(hint))}
    named = {kind for kind in parts if isinstance(kind, type) and kind in _KINDS}
    return named or {type(default)} & _KINDS.keys()


def _may_be_none(hint: Any, default: Any) -> bool:
    return default is None or type(None) in typing.get_args(hint)


def fits(value: Any, kinds: Collection[type]) -> bool:
    """Return True if a value is of one of some plain types; an int stands for a float.

    Args:
      kinds: some of bool, int, float and str.
    """
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, tuple(kinds)) or (float in kinds and isinstance(value, int))


def in_words(kinds: Collection[type]) -> str:
    """Say what a value must be, such as "an integer or text"."""
    return " or ".join(words for kind, words in _KINDS.items() if kind in kinds)


def as_float(what: str, value: float) -> float:
    """Convert a number to a float.

    Args:
      value: a float or an int.

    Raises:
      ValueError: it is an integer that is too large.
    """
    try:
        return float(value)
    except OverflowError as error:
        digits = len(str(abs(value)))
        raise ValueError(f"{what} is an integer of {digits} digits; it is too large.") from error


def _check_finite(what: str, value: Any) -> None:
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, (int, float)) and not math.isfinite(as_float(what, part)):
            raise ValueError(f"{what} is {format_value(value)}; it must be finite.")


def _typed(what: str, value: Any, default: Any, hint: Any) -> Any:
    """Check that a value has the type of its annotation, or else of its default."""
    if value is None and _may_be_none(hint, default):
        return value
    _check_finite(what, value)
    if isinstance(default, tuple) or typing.get_origin(hint) is tuple:
        value = value if isinstance(value, tuple) else (value,)
        kinds = (
            {type(part) for part in default} if isinstance(default, tuple) and default else {int}
        )
        is_right, words = all(type(part) in kinds for part in value), "a tuple like 64,32"
    else:
        kinds = _kinds_of(hint, default)
        is_right, words = fits(value, kinds), in_words(kinds)
        if not kinds:
            is_right = not (default is REQUIRED and isinstance(value, bool))
            words = "a number or text"
    if not is_right:
        example = "" if default in (REQUIRED, None) else f", such as {format_value(default)}"
        raise ValueError(f"{what} is {format_value(value)}; it must be {words}{example}.")
    choices = _choices_of(hint)
    if choices and (type(value), value) not in [(type(choice), choice) for choice in choices]:
        known = [format_value(choice) for choice in choices]
        shown = format_value(value)
        raise ValueError(
            f"{what} is {shown}; it must be one of {', '.join(known)}.{did_you_mean(shown, known)}"
        )
    return value


def server_lr_of(algorithm: str) -> str:
    """Return a method's default server learning rate, or "required", or "none taken"."""
    parameters = inspect.signature(find("algorithm", algorithm)).parameters
    if algorithm == "fedopt":
        return "required"
    if "server_lr" not in parameters:
        return "none taken"
    default = parameters["server_lr"].default
    return "required" if default is REQUIRED else format_value(default)


def check_server_lr(algorithm: str, server_lr: float | None) -> None:
    """Check that a server learning rate is given if and only if a method takes one.

    Args:
      server_lr: the given value, or None.

    Raises:
      ValueError: it is required and missing, or the method takes none.
    """
    kind = server_lr_of(algorithm)
    if server_lr is None and kind == "required":
        raise ValueError(
            f"{algorithm} needs a server learning rate: give --server-lr, such as 0.01."
        )
    if server_lr is not None and kind == "none taken":
        raise ValueError(f"server_lr is {server_lr}; {algorithm} takes none.")


def published_settings(algorithm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ({setting: value}, {option: value}) of a method's published code.

    Raises:
      ValueError: the method has no known published code.
    """
    found = PUBLISHED[check_choice("as_published: algorithm", algorithm, PUBLISHED)]
    options = dict(found.options)
    settings = {
        "server_lr": options.pop("server_lr", None),
        "clip_norm": found.clip_norm,
        "weight_decay": found.weight_decay,
    }
    return {name: value for name, value in settings.items() if value is not None}, options


def describe_options(options: Mapping[str, Any]) -> str:
    """Format options and defaults in one line."""
    derived = {"memory_size": "num_clients, at most 100"}
    return ", ".join(
        f"{name} ({derived.get(name, 'required')})"
        if default is REQUIRED
        else f"{name}={format_value(default)}"
        for name, default in options.items()
    )
