"""Describes functions, optax transforms and models by name and arguments, as JSON values.

A schedule, a transform or a loss is a closure; its free variables are the arguments that it was
made with. So ``optax.exponential_decay(0.1, 1, 0.9)`` becomes ::

    {"function": "optax.exponential_decay", "arguments": {"decay_rate": 0.9, ...}}

The same value has the same description in every process. Code of no published package is hashed.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import json
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

FUNCTION, TYPE, ARGUMENTS, CODE, ARRAY = "function", "type", "arguments", "code", "array"
_DIGITS = 16  # hexadecimal ones of a hash
_MOST = 64  # elements of an array or a list that are listed
_DEEPEST = 16  # values inside each other
# Packages whose functions have a name and a version; the code of all others is hashed.
_PUBLISHED = ("fedjax_lab", "jax", "jaxlib", "numpy", "optax", "flax", "chex", "functools")
_PLACE = ("parent", "name")  # fields of a flax module that say where it stands in another one


def describe(value: Any) -> Any:
    """Describe a value by a JSON value: numbers, text and None as they are, the rest by its parts.

    - A function is ``{"function": name, "arguments": {name: description}}``. The arguments are the
      variables that it closes over and those of ``functools.partial``; of a function that belongs
      to no published package, also its defaults, the globals that it reads, and a hash, ``"code"``.
    - An optax transform is described like the function that made it; ``optax.chain`` has a list.
    - An object is ``{"type": name, "arguments": {field: description}}``.
    - An array of more than 64 numbers is ``{"array": "float32[100]", "hash": ...}``.
    - A tracer is "traced"; infinities, NaN and complex numbers are text.

    Args:
      value: any value. It is not called.
    """
    return _described(value, ())


def format_value(value: Any) -> str:
    """Format a value for display after ``name=``.

    Args:
      value: a number, a bool, None, text, or a tuple of these.
    """
    if isinstance(value, (tuple, list)):
        return ",".join(map(format_value, value)) + ("," if len(value) < 2 else "")
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def text_of(description: Any) -> str:
    """Format a description as one line, such as ``exponential_decay(decay_rate=0.9)``.

    Args:
      description: result of ``describe``, or any JSON value.
    """
    if isinstance(description, Mapping):
        if ARRAY in description:
            return str(description[ARRAY])
        name = description.get(FUNCTION, description.get(TYPE))
        parts = description.get(ARGUMENTS, {}) if name is not None else description
        if isinstance(parts, Mapping):
            between = ": " if name is None else "="
            shown = [f"{key}{between}{text_of(part)}" for key, part in parts.items()]
        else:
            shown = list(map(text_of, parts))
        inner = ", ".join(shown)
        if name is None:
            return f"{{{inner}}}"
        return _called(description) + (f"({inner})" if inner else "")
    if isinstance(description, (list, tuple)):
        return f"[{', '.join(map(text_of, description))}]"
    return f"{description:.6g}" if isinstance(description, float) else format_value(description)


def flat(description: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a description's parts, such as ("client_lr.decay_rate", 0.9).

    Args:
      description: result of ``describe``.
      name: name of the whole.
    """
    if isinstance(description, Mapping) and not {FUNCTION, TYPE}.isdisjoint(description):
        yield name, _called(description)
        parts = description.get(ARGUMENTS, {})
        for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
            yield from flat(part, f"{name}.{key}")
    else:
        yield name, text_of(description) if isinstance(description, Mapping) else description


def _called(description: Mapping[str, Any]) -> str:
    """Return the name of a described function or object, with the hash of its code."""
    name = _last_of(description.get(FUNCTION, description.get(TYPE)))
    return f"{name}#{description[CODE][:6]}" if CODE in description else name


def may_agree(there: Any, now: Any) -> bool:
    """Return whether two descriptions may be of the same value, perhaps by different versions.

    Only what both have is compared, and no hashes of code, which depend on the version of Python. A
    text is a description before version 0.5, which has the function's name at most.

    Args:
      there: description from a file.
      now: description of a value.
    """
    if isinstance(there, str) and isinstance(now, Mapping):
        return not there.startswith("function ") or _last_of(now.get(FUNCTION, there)) in there
    if isinstance(there, Mapping) and isinstance(now, Mapping):
        both = (there.keys() & now.keys()) - {CODE}
        return all(may_agree(there[key], now[key]) for key in both)
    if isinstance(there, list) and isinstance(now, list):
        return len(there) == len(now) and all(map(may_agree, there, now))
    return bool(there == now)


def clip_norm_of(transform: Any) -> Any:
    """Return the norm to which a transformation first clips: ``optax.clip_by_global_norm``.

    Args:
      transform: an optax transformation, or None.

    Returns:
      Its ``max_norm``, a number or a traced scalar; None if it does not begin with this clipping.
    """
    update = getattr(transform, "update", None)
    while isinstance(update, types.FunctionType):
        known, factory = closed_over(update), _factory_of(update)
        if factory == "optax.clip_by_global_norm":
            return known["max_norm"]
        if factory == "optax.chain":
            update = known["update_fns"][0]
        else:
            wraps = factory == "optax.with_extra_args_support"
            update = getattr(known.get("tx"), "update", None) if wraps else None
    return None


def _described(value: Any, outer: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, jax.core.Tracer):
        return "traced"
    if isinstance(value, (enum.Enum, np.dtype)):
        return str(value)
    if isinstance(value, np.generic):
        return _described(value.item(), outer)
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (complex, bytes)):
        return repr(value)
    if isinstance(value, (jax.Array, np.ndarray)):
        return _array(value)
    if id(value) in outer or len(outer) == _DEEPEST:
        return {TYPE: _name(type(value))}
    inner = functools.partial(_described, outer=(*outer, id(value)))
    if isinstance(value, Mapping):
        return {str(key): inner(part) for key, part in value.items()}
    if _is_transform(value):
        return _transform(value.init, value.update, inner)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return _listed([inner(part) for part in value])
    if isinstance(value, (set, frozenset)):
        return _listed(sorted((inner(part) for part in value), key=json.dumps))
    if isinstance(value, type):
        return str(np.dtype(value)) if issubclass(value, np.generic) else {TYPE: _name(value)}
    if callable(value):
        return _function(value, inner)
    return _object(value, inner)


def _function(function: Any, inner: Callable[[Any], Any]) -> Any:
    """Describe a callable."""
    if isinstance(function, functools.partial):
        try:
            given = inspect.signature(function.func).bind_partial(*function.args).arguments
        except (TypeError, ValueError):  # some built-in functions have no signature
            given = {str(place): part for place, part in enumerate(function.args)}
        return _bound(inner(function.func), {**given, **function.keywords}, inner)
    if isinstance(function, types.MethodType):
        return _bound(inner(function.__func__), {"self": function.__self__}, inner)
    if isinstance(function, types.FunctionType):
        return _made(function.__qualname__, (function,), inner)
    if dataclasses.is_dataclass(function) or hasattr(function, "_fields"):
        return _object(function, inner)
    if hasattr(function, "__wrapped__"):  # such as what jax.jit makes of a function
        return inner(function.__wrapped__)
    if hasattr(function, "__name__"):  # such as a built-in function
        return {FUNCTION: _name(function)}
    return _object(function, inner)


def _bound(made: Any, arguments: Mapping[str, Any], inner: Callable[[Any], Any]) -> dict[str, Any]:
    """Add arguments to the description of a function."""
    found: dict[str, Any] = made if isinstance(made, dict) else {FUNCTION: text_of(made)}
    bound = {name: inner(part) for name, part in arguments.items()}
    return {**found, ARGUMENTS: {**found.get(ARGUMENTS, {}), **bound}}


def _transform(init: Any, update: Any, inner: Callable[[Any], Any]) -> Any:
    """Describe an optax transform, (init, update)."""
    if isinstance(update, types.MethodType):  # of an object, such as optax.MultiSteps
        return inner(update.__self__)
    if not isinstance(update, types.FunctionType):
        return inner(update)
    known = closed_over(update)
    if _factory_of(update) == "optax.with_extra_args_support" and _is_transform(known.get("tx")):
        return _transform(known["tx"].init, known["tx"].update, inner)
    if _factory_of(update) == "optax.chain" and isinstance(init, types.FunctionType):
        pairs = zip(closed_over(init)["init_fns"], known["update_fns"], strict=True)
        parts = [_transform(*pair, inner) for pair in pairs]
        return {FUNCTION: "optax.chain", ARGUMENTS: parts}
    functions = (init, update) if isinstance(init, types.FunctionType) else (update,)
    return _made(update.__qualname__, functions, inner)


def _made(
    qualname: str, functions: tuple[types.FunctionType, ...], inner: Callable[[Any], Any]
) -> dict[str, Any]:
    """Describe functions that were made together, by the variables that they close over."""
    last, found = functions[-1], {}
    siblings = qualname.rpartition(".")[0]
    for function in functions:
        for name, part in {**closed_over(function), **_read(function)}.items():
            own = getattr(part, "__qualname__", "").rpartition(".")[0]
            if not any(part is made for made in functions) and not (own and own == siblings):
                found[name] = part
    described: dict[str, Any] = {FUNCTION: _factory_of(last)}
    if found:
        described[ARGUMENTS] = {name: inner(found[name]) for name in sorted(found)}
    if not _is_published(last):
        described[CODE] = _hash(*(_parts_of(function.__code__) for function in functions))
    return described


def _object(value: Any, inner: Callable[[Any], Any]) -> dict[str, Any]:
    """Describe an object by its fields."""
    kind = type(value)
    described: dict[str, Any] = {TYPE: _name(kind)}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names = [name for name in names if name not in _PLACE] if "parent" in names else names
    else:
        names = list(getattr(kind, "_fields", getattr(value, "__dict__", ())))
    if {"init", "apply"} <= set(names):  # a model, whose other functions are of the same module
        names = ["apply"]
    if names:
        described[ARGUMENTS] = {name: inner(getattr(value, name, None)) for name in names}
    call = inspect.getattr_static(kind, "__call__", None)
    if isinstance(call, types.FunctionType) and not _is_published(call):
        described[CODE] = _hash(_parts_of(call.__code__))
    return described


def _array(array: Any) -> Any:
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # a sweep builds its methods while it is traced
            array = jax.random.key_data(array)
    kind = f"{array.dtype}{list(array.shape)}"
    try:
        values = np.ascontiguousarray(array)
    except (RuntimeError, jax.errors.TracerArrayConversionError):
        # deleted, in part on another process's devices, or a value of a sweep
        return {ARRAY: kind}
    if values.size <= _MOST:
        return _described(np.asarray(array).tolist(), ())
    return {ARRAY: kind, "hash": _hash(kind, hashlib.sha256(values.tobytes()).hexdigest())}


def _listed(parts: list[Any]) -> Any:
    """Return a list, or the hash of a long one."""
    return parts if len(parts) <= _MOST else {ARRAY: f"list[{len(parts)}]", "hash": _hash(parts)}


def closed_over(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over; one that is not filled yet is None.

    Args:
      function: not called.
    """
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            found[name] = None
    return found


def _read(function: types.FunctionType) -> dict[str, Any]:
    """Return a user's function's defaults, and the globals that it reads."""
    if _is_published(function):
        return {}
    given = inspect.signature(function, follow_wrapped=False).parameters.values()
    defaults = {p.name: p.default for p in given if p.default is not inspect.Parameter.empty}
    found = {
        name: function.__globals__[name]
        for name in sorted(_global_names(function.__code__))
        if name in function.__globals__
    }
    of_packages = (types.ModuleType, type)
    return defaults | {
        name: part
        for name, part in found.items()
        if not isinstance(part, of_packages) and not (callable(part) and _is_published(part))
    }


def _global_names(code: types.CodeType) -> set[str]:
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*map(_global_names, inner))


def _parts_of(code: types.CodeType) -> list[Any]:
    """Return the instructions, names and constants of code, as JSON values."""
    constants = [
        _parts_of(part)
        if isinstance(part, types.CodeType)
        else sorted(map(repr, part))
        if isinstance(part, frozenset)
        else repr(part)
        for part in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_DIGITS]


def _is_transform(value: Any) -> bool:
    return isinstance(value, tuple) and getattr(value, "_fields", ())[:2] == ("init", "update")


def _is_published(value: Any) -> bool:
    return is_published(getattr(value, "__module__", None))


def is_published(module: str | None) -> bool:
    """Return True if a module belongs to a package whose version says what its code does.

    Args:
      module: its name.
    """
    return (module or "").partition(".")[0] in _PUBLISHED


def _factory_of(function: Any) -> str:
    """Return the name of the package's function that made a function, or a user's own name."""
    name = _name(function)
    return name.partition(".<locals>")[0] if _is_published(function) else name


def _name(value: Any) -> str:
    """Return a name such as "optax.adam", or "my.module.schedule"; "schedule" in a script."""
    module = getattr(value, "__module__", None) or ""
    where = module.partition(".")[0] if _is_published(value) else module
    own = getattr(value, "__qualname__", getattr(value, "__name__", type(value).__name__))
    return own if where in ("", "__main__", "builtins") else f"{where}.{own}"


def _last_of(name: str) -> str:
    return name.replace(".<locals>", "").rpartition(".")[2]
