"""What a run computes, as hashes: of its arrays, of its compiled program, of its functions.

Names do not tell two losses apart that are both called ``loss_fn``; their contents do.
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

from fedjax_lab.types import PyTree

_LENGTH = 16  # hexadecimal digits that are kept
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def add_array(digest: Any, name: str, leaf: Any) -> None:
    """Add an array's name, shape, dtype and bits to a hash.

    Args:
      digest: of ``hashlib``.
      name: what the array is called.
      leaf: an array, or keys of ``jax.random``.
    """
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    leaf = np.ascontiguousarray(leaf)  # a scalar has the shape [1]
    digest.update(json.dumps([name, leaf.shape, str(leaf.dtype)]).encode())
    add_bits(digest, leaf)


def add_bits(digest: Any, array: np.ndarray) -> None:
    """Add an array's bits alone to a hash, in the order of its elements.

    Args:
      digest: of ``hashlib``.
      array: [...].
    """
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)


def hash_arrays(tree: PyTree) -> str:
    """A hash of all leaves: paths, shapes, dtypes and bits.

    Args:
      tree: pytree of arrays.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        add_array(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()[:_LENGTH]


def are_the_same(one: PyTree, other: PyTree) -> bool:
    """Whether two trees hold the same arrays, bit for bit, at the same paths.

    Args:
      one, other: pytrees of arrays.
    """
    leaves, others = (jax.tree_util.tree_leaves_with_path(tree) for tree in (one, other))
    if len(leaves) == len(others) and all(
        path == there and leaf is found
        for (path, leaf), (there, found) in zip(leaves, others, strict=True)
    ):
        return True  # without a look at the values
    return hash_arrays(one) == hash_arrays(other)


def hash_program(lowered: jax.stages.Lowered) -> str:
    """A hash of a lowered program: its operations and constants, not where they were written.

    Args:
      lowered: what ``jax.jit(function).lower(...)`` returns.
    """
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:_LENGTH]


def hash_function(function: Any) -> str | None:
    """A hash of what a function does: its code and the values that it closes over.

    The function is not called. Globals count by which it, or code inside of it (an inner function,
    a lambda, a generator), has names: data, functions, and the methods of classes. Of a value that
    is no array, number, text, container, function, class or dataclass, the type's name counts
    alone.

    Args:
      function: any callable; None gives None.
    """
    if function is None:
        return None
    digest = hashlib.sha256()
    _add(digest, function, {})
    return digest.hexdigest()[:_LENGTH]


def _add(digest: Any, value: Any, seen: dict[int, Any]) -> None:
    """Add a value's content; what was met before (a function in its own closure) is not again.

    ``seen`` holds the values, so that no other one gets the id of one that is gone.
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
    """What a container, a function or a dataclass consists of."""
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
    if isinstance(value, types.FunctionType):
        return [value.__code__, _closure(value), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, type):
        return _methods(value)
    if hasattr(value, "__wrapped__"):  # such as what jax.jit makes of a function
        return [value.__wrapped__]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if callable(value) and hasattr(type(value).__call__, "__code__"):
        return [type(value).__call__, vars(value) if hasattr(value, "__dict__") else None]
    return []


def _closure(function: types.FunctionType) -> list[Any]:
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not filled yet
            values.append(None)
    used = [name for name in _names(function.__code__) if name in function.__globals__]
    own = [function.__globals__[name] for name in used]
    # What a module offers does not change between runs; functions of the user's own may.
    root = _root(function)
    return values + [v for v in own if not isinstance(v, types.ModuleType) and _is_own(v, root)]


def _names(code: types.CodeType) -> list[str]:
    """The names in a function's code and in all code that is nested in it, each once, in order."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for part in inner for name in _names(part))]))


def _methods(cls: type) -> list[Any]:
    """The methods of a class and of those classes of the same package that it inherits from."""
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
    """The package that a function or a class is of."""
    return (value.__module__ or "").partition(".")[0]


def _is_own(value: Any, root: str) -> bool:
    """Whether a global is data, or code of the package that uses it."""
    module = getattr(value, "__module__", None)
    return module is None or module.partition(".")[0] == root
