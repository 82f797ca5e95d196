"""Argument checks: each error names the argument, the value, and what is allowed.

Checks run on concrete Python and NumPy values, at construction or trace time. A traced
value is not checked, because it is unknown before the program runs.
"""

import collections
import contextlib
import difflib
import functools
import math
import os
import sys
import warnings
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAST_SEED = 2**32 - 1
# Files between a caller and a warning: this package, JAX, and what calls through.
_INSIDE = (
    os.path.join(os.path.dirname(__file__), ""),
    os.path.join(os.path.dirname(jax.__file__), ""),
    contextlib.__file__,
    functools.__file__,
)
MOST_ROUNDS = LARGEST_INT = 2**31 - 1  # what an int32 counts
# What JAX raises where a traced function needs the value of an argument.
NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def is_traced(value: Any) -> bool:
    """Return True if ``value`` or one of its leaves is a tracer, whose numbers are not known yet.

    Args:
      value: any pytree.
    """
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def no_real_number(value: Any) -> str:
    """Name the kind of a value that is no real number, nor an array of such; "" for one that is.

    Args:
      value: anything, traced or not.
    """
    kind = type(value).__name__
    try:
        dtype = jnp.asarray(value).dtype
    except (TypeError, ValueError):
        return kind
    is_real = any(jnp.issubdtype(dtype, of) for of in (jnp.floating, jnp.integer, jnp.bool_))
    return "" if is_real else f"{kind} of {dtype}"


class KnownArrays:
    """What is known of the values of some arrays, so that nobody waits until they are computed.

    An array of JAX cannot be changed; it is known until it is freed.
    """

    def __init__(self) -> None:
        """Know no array yet."""
        self._of: dict[int, tuple[weakref.ref[jax.Array], Any]] = {}

    def add(self, array: jax.Array, fact: Any) -> None:
        """Remember a fact about an array.

        Args:
          array: array [...] of JAX.
          fact: its value, or what its values are in range of; not None.
        """
        number = id(array)
        reference = weakref.ref(array, lambda _: self._of.pop(number, None))
        self._of[number] = reference, fact

    def get(self, array: Any) -> Any:
        """Return the fact about an array; None: nothing is known.

        Args:
          array: any value.
        """
        reference, fact = self._of.get(id(array), (None, None))
        return fact if reference is not None and reference() is array else None


# N of states that rounds return, and of drawn batches what their values are valid for. Reading the
# values would wait for the round before.
KNOWN = KnownArrays()


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller's code: the nearest outside of this package and of JAX.

    Args:
      message: what the caller should know.
      category: class of the warning.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@contextlib.contextmanager
def errors_about(what: str, kinds: Any = Exception) -> Iterator[None]:
    """Turn errors into a ``ValueError`` that says what they are about.

    Args:
      what: what is wrong, and where, such as "a.npz: damaged zip archive".
      kinds: classes of errors; a library may raise any for a damaged file.

    Raises:
      ValueError: an error of these classes was raised.
    """
    try:
        yield
    except kinds as error:
        raise ValueError(f"{what}: {error}") from error


def check_choice(argument: str, value: str, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``; otherwise name the nearest valid ones.

    Args:
      argument: the argument's name, for the error.
      value: what was given.
      choices: what is allowed.

    Raises:
      ValueError: ``value`` is not among ``choices``.
    """
    names = sorted(choices)
    if isinstance(value, str) and value in names:  # an array has no one answer to ``in``
        return value
    hint = did_you_mean(str(value), names)
    raise ValueError(f"{argument} is {value!r}; it must be one of {', '.join(names)}.{hint}")


def nearest(name: str, names: Iterable[str], synonyms: Iterable[str] = ()) -> list[str]:
    """Return the known names that were probably meant: those of the same meaning, or alike.

    Args:
      name: the given name.
      names: the known names.
      synonyms: names with the same meaning.
    """
    known = list(names)
    same = [other for other in synonyms if other in known]
    return same or difflib.get_close_matches(name, known, n=3, cutoff=0.5)


def did_you_mean(name: str, names: Iterable[str], synonyms: Iterable[str] = ()) -> str:
    """Return a hint with the nearest names, or an empty text.

    Args:
      name, names, synonyms: as in ``nearest``.
    """
    near = nearest(name, names, synonyms)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def check_tilde(argument: str, path: str | os.PathLike[str] | None) -> None:
    """Check that a path to write to needs no home in place of a ~, which shells alone replace.

    Args:
      path: what was given; None: nothing is written.

    Raises:
      ValueError: it does, and no file or folder has this name.
    """
    if path is None:
        return
    home, there = os.path.expanduser(path), os.path.abspath(path)
    if home != os.fspath(path) and not os.path.exists(there):
        raise ValueError(
            f"{argument} is {os.fspath(path)!r}, in which only shells replace the ~. Write "
            f"{home!r}, or {there!r} if a folder has this name."
        )


def check_int(argument: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` as an int within [minimum, maximum].

    Args:
      argument: the argument's name, for the error.
      value: what was given.
      minimum: least value allowed.
      maximum: largest value allowed; None: any.

    Raises:
      TypeError: ``value`` is no integer.
      ValueError: ``value`` lies outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{argument} is {value!r}; it must be an integer.")
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{argument} is {value}; it must be {allowed}.")
    return int(value)


def check_flag(argument: str, value: Any) -> bool:
    """Return ``value`` if it is True or False, and not a word, which Python takes for true.

    Args:
      argument: the argument's name, for the error.
      value: what was given.

    Raises:
      TypeError: ``value`` is neither.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{argument} is {value!r}; it must be True or False.")
    return bool(value)


def check_counts(argument: str, values: Any, length: int) -> np.ndarray:
    """Return an array of one count for each client, as int32 [N].

    Args:
      argument: the argument's name, for the error.
      values: what was given.
      length: N.

    Raises:
      TypeError: the values are traced, or not integers.
      ValueError: there are not N values, one is negative or above 2^31 - 1, or all are 0.
    """
    allowed = f"{length} integers from 0 to {LARGEST_INT}, one for each client"
    if is_traced(values):
        raise TypeError(
            f"{argument} is an array that is traced; its largest value must be known when the "
            f"function is traced: pass a NumPy array of {allowed}."
        )
    try:
        array = np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{argument} is no array; it must have {allowed}.") from error
    if array.dtype.kind not in "iu":
        raise TypeError(f"{argument} has dtype {array.dtype}; it must have {allowed}.")
    if array.shape != (length,):
        raise ValueError(f"{argument} has shape {array.shape}; it must have {allowed}.")
    wrong = np.flatnonzero((array < 0) | (array > LARGEST_INT))
    if wrong.size:
        raise ValueError(f"{argument}[{wrong[0]}] is {array[wrong[0]]}; it must have {allowed}.")
    if not array.any():
        raise ValueError(f"{argument} is 0 for all clients; at least one must be above 0.")
    return array.astype(np.int32)


def check_number(
    argument: str,
    value: Any,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    exclusive_minimum: bool = False,
    exclusive_maximum: bool = False,
) -> Any:
    """Return ``value`` if it is a finite number in range; tracers pass unchecked.

    Args:
      argument: the argument's name, for the error.
      value: what was given.
      minimum: least value allowed.
      maximum: largest value allowed.
      exclusive_minimum: ``minimum`` itself is not allowed.
      exclusive_maximum: ``maximum`` itself is not allowed.

    Raises:
      TypeError: ``value`` is no real scalar: text and truth values are none.
      ValueError: ``value`` is not finite or lies outside the range.
    """
    if is_traced(value):
        return value
    # float() would also accept text, True and [0.1], which are mistakes.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
    try:
        if is_bool or isinstance(value, (str, bytes)) or np.ndim(value):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(f"{argument} is {value!r}; it must be a number.") from error
    too_small = number <= minimum if exclusive_minimum else number < minimum
    too_large = number >= maximum if exclusive_maximum else number > maximum
    if not math.isfinite(number) or too_small or too_large:
        parts = ["finite"]
        if minimum > -math.inf:
            relation = "greater than" if exclusive_minimum else "at least"
            parts.append(f"{relation} {minimum:g}")
        if maximum < math.inf:
            parts.append(f"{'less than' if exclusive_maximum else 'at most'} {maximum:g}")
        raise ValueError(f"{argument} is {value}; it must be {' and '.join(parts)}.")
    return value


def check_share(argument: str, value: Any) -> Any:
    """Return ``value`` if it is a number in (0, 1); tracers pass unchecked.

    Args:
      argument: the argument's name, for the error.
      value: what was given.

    Raises:
      TypeError, ValueError: as ``check_number``.
    """
    return check_number(
        argument, value, minimum=0, maximum=1, exclusive_minimum=True, exclusive_maximum=True
    )


def repeated(values: Iterable[Hashable]) -> Any:
    """Return the first of several values that occurs more than once; None: all are distinct.

    Args:
      values: none of them is None.
    """
    return next((value for value, n in collections.Counter(values).items() if n > 1), None)


def check_channels_last(argument: str, shape: tuple[int, ...]) -> None:
    """Check that images are [..., H, W, C], not [..., C, H, W] as in PyTorch.

    They count as channels first if the third last axis has 1, 3 or 4 entries, the last one more
    than 4, and height and width would be alike: equal, or at least 16 and within a factor of two.

    Args:
      argument: the argument's name, for the error.
      shape: of the images; of rank 4 or more, others pass.

    Raises:
      ValueError: images are channels first.
    """
    if len(shape) < 4:
        return
    channels, height, width = shape[-3:]
    low, high = min(height, width), max(height, width)
    is_square = low == high or (low >= 16 and high <= 2 * low)
    if channels in (1, 3, 4) and width > 4 and is_square:
        first = len(shape) - 3
        axes = ", ".join(map(str, (*range(first), first + 1, first + 2, first)))
        raise ValueError(
            f"{argument} has shape {shape}, which looks like images with {channels} "
            f"channel{'s' * (channels > 1)} first, as in PyTorch; here channels are last: "
            f"transpose them, x.transpose({axes})."
        )


def check_scalar_or_schedule(
    argument: str,
    value: Any,
    *,
    minimum: float = 0.0,
    maximum: float = math.inf,
    exclusive_minimum: bool = False,
) -> Any:
    """Check a hyperparameter that may be a number, a traced scalar, or a schedule.

    A schedule is any function of the round that JAX can trace, such as optax's; it must return a
    number. Its values are not known here.

    Args:
      argument: the argument's name, for the error.
      value: what was given.
      minimum: least value of a number.
      maximum: largest value of a number.
      exclusive_minimum: a number must be greater than ``minimum``.

    Raises:
      TypeError, ValueError: as ``check_number``, or a schedule returns no number.
    """
    if not callable(value):
        try:
            return check_number(
                argument,
                value,
                minimum=minimum,
                maximum=maximum,
                exclusive_minimum=exclusive_minimum,
            )
        except TypeError as error:
            raise TypeError(
                f"{argument} is {value!r}; it must be a number, or a schedule: a function of the "
                "round, such as optax's."
            ) from error
    what = f"{argument} is {getattr(value, '__name__', repr(value))}, a schedule"
    try:
        found = jax.eval_shape(value, jax.ShapeDtypeStruct((), np.int32))
    except NEEDS_VALUE as error:
        raise TypeError(
            f"{what} that decides by the value of the round, which is traced: use "
            "jnp.where(round < 10, 0.1, 0.01), jnp.asarray(rates)[round], or optax's schedules."
        ) from error
    except TypeError as error:
        raise TypeError(f"{what} that returns no number: {error}") from error
    if not isinstance(found, jax.ShapeDtypeStruct) or found.shape != ():
        raise TypeError(f"{what} that returns {found}; it must return one number.")
    return value
