"""Hashes of a run's content: its arrays, its compiled program, its functions.

Two losses may have the same name ``loss_fn``; a hash of their content distinguishes them.
"""

import dataclasses
import functools
import hashlib
import json
import re
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_lab.descriptions import closed_over, is_published
from fedjax_lab.machine.keys import is_key
from fedjax_lab.types import PyTree

_LENGTH = 16  # hexadecimal digits that are kept
# Before the hash of a function. Until version 0.4 there was none, and library code was hashed, too.
_SCHEME = "2:"
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def add_array(digest: Any, name: str, leaf: Any) -> None:
    """Add an array's name, shape, dtype and bits to a hash."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    leaf = np.ascontiguousarray(leaf)  # a scalar has the shape [1]
    digest.update(json.dumps([name, leaf.shape, str(leaf.dtype)]).encode())
    add_bits(digest, leaf)


def add_bits(digest: Any, array: np.ndarray) -> None:
    """Add an array's bits alone to a hash, in the order of its elements."""
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)


def hash_arrays(tree: PyTree) -> str:
    """Hash all leaves: paths, shapes, dtypes and bits."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        add_array(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()[:_LENGTH]


def are_the_same(one: PyTree, other: PyTree) -> bool:
    """Return True if two trees have the same arrays, bit for bit, at the same paths."""
    leaves, others = (jax.tree_util.tree_leaves_with_path(tree) for tree in (one, other))
    if len(leaves) == len(others) and all(
        path == there and leaf is found
        for (path, leaf), (there, found) in zip(leaves, others, strict=True)
    ):
        return True  # without a look at the values
    return hash_arrays(one) == hash_arrays(other)


def hash_program(lowered: jax.stages.Lowered) -> str:
    """Hash a lowered program: its operations and constants, without source locations."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:_LENGTH]


def hash_function(function: Any) -> str | None:
    """Hash a function's code and the values that it closes over.

    The function is not called. The hash includes the globals that it, or code inside it (an inner
    function, a lambda, a generator), refers to: data, functions, and the methods of classes. For a
    value that is not an array, number, text, container, function, class or dataclass, only the
    type's name is hashed.

    A function or class of a published package counts by its name, and a function also by its
    attribute ``made_of`` or else by what it closes over. The versions of packages are recorded
    apart, so a run can go on with another version of this one.

    Args:
      function: any callable; None gives None.
    """
    if function is None:
        return None
    digest = hashlib.sha256()
    _add(digest, function, {})
    return _SCHEME + digest.hexdigest()[:_LENGTH]


def has_old_scheme(hashed: Any) -> bool:
    """Return True for a function's hash by version 0.4 or before, to compare with none of now."""
    return isinstance(hashed, str) and not hashed.startswith(_SCHEME)


def _add(digest: Any, value: Any, seen: dict[int, Any]) -> None:
    """Add a value's content, unless it was added before (a function in its own closure).

    ``seen`` keeps the values alive, so that no id is reused.
    """
    if id(value) in seen:
        return
    digest.update(type(value).__qualname__.encode())
    if isinstance(value, (jax.Array, np.ndarray, np.generic)) and value.dtype != object:
        add_array(digest, "", value)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        digest.update(repr(value).encode())
    elif isinstance(value, types.CodeType):
        digest.update(value.co_code)
        for part in (value.co_names, value.co_consts):
            _add(digest, part, seen)
    else:
        seen[id(value)] = value
        for part in _parts(value):
            _add(digest, part, seen)


def _parts(value: Any) -> list[Any]:
    """Return the parts of a container, a function or a dataclass."""
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, (set, frozenset)):
        return sorted(_ADDRESS.sub("", repr(part)) for part in value)
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, np.ndarray):  # of objects
        return value.ravel().tolist()
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, jax.sharding.Mesh):  # of its other attributes, some come when it is used
        return [value.axis_names, value.devices.shape]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType) and is_published(value.__globals__["__name__"]):
        made_of = getattr(value, "made_of", None) or list(closed_over(value).values())
        return [value.__globals__["__name__"], value.__code__.co_qualname, made_of]
    if isinstance(value, types.FunctionType):
        return [value.__code__, _closure(value), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, type):
        return [value.__name__] if is_published(value.__module__) else _methods(value)
    if hasattr(value, "__wrapped__"):  # such as what jax.jit makes of a function
        return [value.__wrapped__]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if callable(value) and hasattr(type(value).__call__, "__code__"):
        return [type(value).__call__, vars(value) if hasattr(value, "__dict__") else None]
    return []


def _closure(function: types.FunctionType) -> list[Any]:
    used = [name for name in _names(function.__code__) if name in function.__globals__]
    own = [function.__globals__[name] for name in used]
    # What a module offers does not change between runs; functions of the user's own may.
    root = _root(function)
    return [
        *closed_over(function).values(),
        *(v for v in own if not isinstance(v, types.ModuleType) and _is_own(v, root)),
    ]


def _names(code: types.CodeType) -> list[str]:
    """Return the names in a function's code and in nested code, each once, in order."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for part in inner for name in _names(part))]))


def _methods(cls: type) -> list[Any]:
    """Return the methods of a class and of its base classes in the same package."""
    kinds = (types.FunctionType, staticmethod, classmethod, property)
    return [
        part
        for base in cls.__mro__
        if _root(base) == _root(cls)
        for name, value in sorted(vars(base).items())
        if isinstance(value, kinds)
        for part in (name, value)
    ]


def _root(value: Any) -> str:
    """Return the package of a function or a class."""
    return (value.__module__ or "").partition(".")[0]


def _is_own(value: Any, root: str) -> bool:
    """Return True if a global is data, or code of the same package."""
    module = getattr(value, "__module__", None)
    return module is None or module.partition(".")[0] == root
