"""Options as text: ``--option name=value`` for each method and model."""

import difflib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from fedjax_lab.algorithms import PUBLISHED
from fedjax_lab.algorithms.factory import Common
from fedjax_lab.algorithms.hyper import OfRounds
from fedjax_lab.checks import check_choice, check_number
from fedjax_lab.command.factories import check_hints, check_known, find, is_own
from fedjax_lab.descriptions import format_value
from fedjax_lab.types import ScalarOrSchedule

REQUIRED = inspect.Parameter.empty
_MAX_MEMORY = 100  # GradMA's own m
# What clipping and weight decay act on -> the argument of a factory.
CLIPS = {"gradient": "gradient_transform", "step": "step_transform"}

# Arguments of a factory that have a flag of their own, or that the runner makes.
_NOT_OPTIONS = ("loss_fn", "model", "preprocess", "server_lr", *Common.__annotations__)


def parse_options(texts: Iterable[str], argument: str = "option") -> dict[str, Any]:
    """Parse "name=value" texts into {name: value}; the last of equal names wins.

    A value becomes an int, a float, true, false or none, a tuple of these (with commas), or else
    text.

    Args:
      texts: such as "margin=0.1".
      argument: the argument's name, for the error.

    Raises:
      ValueError: a text does not have the form name=value.
    """
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier() or not value.strip():
            raise ValueError(f"{argument} is {text!r}; it must be of the form name=value.")
        options[name.strip()] = _parse_value(value.strip())
    return options


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


_WORDS = {"true": True, "false": False, "none": None}


def format_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Format options, the inverse of ``parse_options``.

    Args:
      options: {name: value}.
    """
    return tuple(f"{name}={format_value(value)}" for name, value in options.items())


def algorithm_options(algorithm: str, server_optimizer: Any = None) -> dict[str, Any]:
    """Return a method's hyperparameters and their defaults, ``REQUIRED`` without a default.

    Args:
      algorithm: a key of ``ALGORITHMS``.
      server_optimizer: for fedopt, a key of ``SERVER_OPTIMIZERS``; the server optimizer's
        hyperparameters are then options. None: adam.

    Raises:
      ValueError: one of the names is unknown.
    """
    check_known("algorithm", algorithm)
    factory = find("algorithm", algorithm)
    options = defaults_of(factory, leave_out=_NOT_OPTIONS)
    if "server_optimizer" in options:
        name = DEFAULT_OPTIMIZER if server_optimizer is None else server_optimizer
        optimizer = SERVER_OPTIMIZERS[check_choice("server_optimizer", name, SERVER_OPTIMIZERS)]
        own = defaults_of(optimizer, leave_out=("learning_rate",))
        numbers = {key: value for key, value in own.items() if isinstance(value, (bool, float))}
        options = {**options, "server_optimizer": DEFAULT_OPTIMIZER, **numbers}
    return options


def float_options(algorithm: str, server_optimizer: Any = None) -> list[str]:
    """Return the float hyperparameters of a method, which a sweep can vary.

    Args:
      algorithm, server_optimizer: as in ``algorithm_options``.

    Raises:
      ValueError: one of the names is unknown.
    """
    options = algorithm_options(algorithm, server_optimizer)
    parameters = inspect.signature(find("algorithm", algorithm)).parameters

    def is_float(name: str, default: Any) -> bool:
        if name not in parameters:  # the server optimizer's own
            return isinstance(default, float)
        hint = parameters[name].annotation
        return float in (hint, *typing.get_args(hint))

    return [name for name, default in options.items() if is_float(name, default)]


def model_defaults(model: str) -> dict[str, Any]:
    """Return the options of a model and their defaults.

    Args:
      model: a model.

    Raises:
      ValueError: no model has this name.
    """
    check_known("model", model)
    return defaults_of(find("model", model), leave_out=("num_classes",))


def typed_options(setting: str, name: str, given: Iterable[str]) -> dict[str, Any]:
    """Parse the options of a model or a data set, and check them against its function.

    Args:
      setting: "model" or "dataset".
      name: its value.
      given: such as "hidden=64,32".

    Raises:
      ValueError: an option is unknown, missing, or of another type.
    """
    options, owner = parse_options(given, f"{setting}_option"), f"the {setting} {name}"
    own = is_own(setting, name)
    if setting == "dataset" and not own:
        check_option_names(owner, options, {})
        return {}
    function = find(setting, name)
    left_out = ("num_classes",) if setting == "model" else ()
    allowed = defaults_of(function, leave_out=left_out)
    check_option_names(owner, options, allowed, setting)
    options = convert_options(owner, options, allowed)
    if own:
        check_hints(owner, function, options)
    return options


def derived_options(algorithm: str, num_clients: int | None) -> dict[str, Any]:
    """Return defaults for required arguments of a factory, if there is a suggestion.

    Args:
      algorithm: a method.
      num_clients: N; None: not known yet.
    """
    options = defaults_of(find("algorithm", algorithm), leave_out=())
    derived: dict[str, Any] = {}
    if options.get("memory_size", 0) is REQUIRED and num_clients is not None:
        derived["memory_size"] = min(num_clients, _MAX_MEMORY)
    if "server_optimizer" in options:
        derived["server_optimizer"] = DEFAULT_OPTIMIZER
    return derived


def defaults_of(function: Callable[..., Any], leave_out: Iterable[str]) -> dict[str, Any]:
    """Return a function's arguments and their defaults, ``REQUIRED`` without a default.

    Args:
      function: any function.
      leave_out: arguments to omit.
    """
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


def check_option_names(
    owner: str, given: Mapping[str, Any], allowed: Mapping[str, Any], setting: str = ""
) -> None:
    """Check that given options exist and that required options are given.

    Args:
      owner: whose options they are, for the error.
      given: {name: value}.
      allowed: {name: default}, ``REQUIRED`` where there is none.
      setting: whose flag --SETTING-option gives them; "": --option.

    Raises:
      ValueError: an option is unknown or missing.
    """
    for name in given:
        if name not in allowed:
            raise ValueError(
                f"{name} is not an option of {owner}.{did_you_mean(name, allowed)} Allowed: "
                f"{describe_options(allowed) or 'none'}."
            )
    missing = [name for name, default in allowed.items() if default is REQUIRED]
    missing = [name for name in missing if name not in given]
    if missing:
        flag = f"--{setting}-option" if setting else "--option"
        raise ValueError(f"{owner} needs {missing[0]}: give {flag} {missing[0]}=VALUE.")


def convert_options(
    owner: str, given: Mapping[str, Any], allowed: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert options to the types of their defaults; a number can stand for a tuple of one.

    Args:
      owner: whose options they are, for the error.
      given: {name: value}, from ``parse_options``.
      allowed: {name: default}.

    Raises:
      ValueError: a value has another type.
    """
    return {name: _converted(owner, name, v, allowed[name]) for name, v in given.items()}


def _converted(owner: str, name: str, value: Any, default: Any) -> Any:
    numbers = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits, words = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, words = numbers and isinstance(value, int), "an integer"
    elif isinstance(default, float):
        fits, words = numbers, "a number"
    elif isinstance(default, str):
        fits, words = isinstance(value, str), "text"
    elif isinstance(default, tuple):
        value = (value,) if not isinstance(value, tuple) else value
        kinds = {type(part) for part in default} or {int}
        fits, words = all(type(part) in kinds for part in value), "a tuple like 64,32"
    elif default is REQUIRED:
        fits, words = not isinstance(value, bool), "a number or text"
    else:
        fits, words = True, ""
    if not fits:
        raise ValueError(
            f"{name} of {owner} is {format_value(value)}; it must be {words}, such as "
            f"{'0.1' if default is REQUIRED else format_value(default)}."
        )
    return value


def server_lr_of(algorithm: str) -> str:
    """Return a method's default server learning rate, or "required", or "none taken".

    Args:
      algorithm: a method.
    """
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
      algorithm: a key of ``ALGORITHMS``.
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

    Args:
      algorithm: a method.

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


def check_clip(clip: str, as_published: bool, has_effect: bool) -> None:
    """Check where clipping and weight decay act.

    Args:
      clip: a key of ``CLIPS``.
      as_published: whether the published code decides.
      has_effect: whether there is clipping or weight decay.

    Raises:
      ValueError: ``clip`` is unknown, already decided, or has no effect.
    """
    check_choice("clip", clip, CLIPS)
    if as_published:
        raise ValueError(f"clip is {clip!r}; with as_published, the published code decides that.")
    if not has_effect:
        raise ValueError(
            f"clip is {clip!r} without clip_norm or weight_decay; give one of them, which clip "
            "applies to."
        )


def describe_options(options: Mapping[str, Any]) -> str:
    """Format options and defaults in one line.

    Args:
      options: {name: default}, ``REQUIRED`` where there is none.
    """
    derived = {"memory_size": "num_clients, at most 100"}
    return ", ".join(
        f"{name} ({derived.get(name, 'required')})"
        if default is REQUIRED
        else f"{name}={format_value(default)}"
        for name, default in options.items()
    )


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint with the nearest names, or an empty text.

    Args:
      name: the given name.
      names: the known names.
    """
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def client_schedule(text: str, client_lr: Any, rounds: int) -> ScalarOrSchedule:
    """Build the client learning rate for a factory, which is of the rounds in every method.

    Args:
      text: constant, cosine, or exponential:FACTOR.
      client_lr: learning rate of round 0, a number or traced.
      rounds: total number of rounds.

    Raises:
      ValueError: ``text`` has another form.
    """
    kind, _, factor = text.partition(":")
    if kind == "constant" and not factor:
        return client_lr
    if kind == "cosine" and not factor:
        return OfRounds(optax.cosine_decay_schedule(client_lr, rounds))
    if kind == "exponential":
        try:
            decay = check_number("its factor", float(factor), minimum=0.0, exclusive_minimum=True)
        except ValueError:
            pass
        else:
            return OfRounds(optax.exponential_decay(client_lr, 1, decay))
    raise ValueError(
        f"client_lr_schedule is {text!r}; it must be constant, cosine or "
        "exponential:FACTOR, such as exponential:0.998."
    )
