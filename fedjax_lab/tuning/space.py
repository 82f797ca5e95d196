"""Search spaces: ranges that are searched log-uniformly, and lists of values."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import check_share
from fedjax_lab.round import Algorithm
from fedjax_lab.signatures import unknown
from fedjax_lab.simulation.sweep_points import Point

Build = Callable[..., Algorithm]


class Range(NamedTuple):
    """A range of positive numbers, searched log-uniformly.

    Attributes:
      low, high: the ends, which are included.
    """

    low: float
    high: float

    def at(self, share: float) -> float:
        """Return the number at a position between ``low`` and ``high`` on a logarithmic scale.

        Args:
          share: position, from 0 to 1; other values extend the range.
        """
        return float(self.low * (self.high / self.low) ** share)

    def holds(self, value: float) -> bool:
        """Return whether a number lies in the range."""
        return self.low <= value <= self.high


class Values(tuple[float, ...]):
    """A list of numbers, in their order."""

    def at(self, share: float) -> float:
        """Return the value at a position in the list.

        Args:
          share: position, from 0 to 1.
        """
        return self[min(int(share * len(self)), len(self) - 1)]

    def holds(self, value: float) -> bool:
        """Return whether a number is in the list."""
        return value in self


Space = dict[str, Range | Values]


def read_space(space: Mapping[str, Any], builds: Mapping[str, Build]) -> dict[str, Space]:
    """Read the search space of each method.

    Args:
      space: hyperparameter -> (low, high) or a list, for all methods that have it; or method ->
        such a mapping, for one method, which takes precedence.
      builds: method -> function of hyperparameters.

    Raises:
      TypeError: a value is neither a pair nor a list, or a method does not take a name.
      ValueError: a range is empty or not positive, or no method takes a name.
    """
    if not isinstance(space, Mapping):
        raise TypeError(
            f"space is {space!r}; it must map a hyperparameter to a pair (low, high) or to a list."
        )
    own = {name: value for name, value in space.items() if name in builds}
    shared = {name: _read(name, v) for name, v in space.items() if name not in builds}
    accepted = {name: _accepted(build) for name, build in builds.items()}
    for name in shared:
        if not any(names is None or name in names for names in accepted.values()):
            known = dict.fromkeys(n for names in accepted.values() for n in names or ())
            raise ValueError(
                f"space has {name!r}, which none of {', '.join(builds)} takes; they take "
                f"{', '.join(known)}."
            )
    found: dict[str, Space] = {}
    for method, names in accepted.items():
        mine = own.get(method, {})
        if not isinstance(mine, Mapping):
            raise TypeError(
                f"space[{method!r}] is {mine!r}; it must be a dict of ranges and lists."
            )
        for name in mine:
            if names is not None and name not in names:
                raise unknown(method, name, names)
        taken = {n: v for n, v in shared.items() if names is None or n in names}
        found[method] = {**taken, **{n: _read(n, v) for n, v in mine.items()}}
        if not found[method]:
            raise ValueError(f"space is empty for {method!r}; it must have a range or a list.")
    return found


def read_start_points(
    start_points: Mapping[str, Sequence[Point]] | None,
    spaces: Mapping[str, Space],
    finalists: int,
) -> dict[str, list[Point]]:
    """Read the points that a search begins with.

    Args:
      start_points: method -> points, which may lie outside the space; None: none.
      spaces: search space of each method.
      finalists: number of points of each method that run to the end.

    Raises:
      TypeError: not a mapping from methods to lists of points, or a value is no number.
      ValueError: a method is unknown, a point has other names than the method's space, one stands
        twice, or there are as many as finalists.
    """
    form = 'it must map a method to a list of points, such as {"fedavg": [{"client_lr": 0.1}]}.'
    if not isinstance(start_points, Mapping | None):
        raise TypeError(f"start_points is {start_points!r}; {form}")
    found: dict[str, list[Point]] = {name: [] for name in spaces}
    for method, points in (start_points or {}).items():
        given = f"start_points[{method!r}] is {points!r}"
        if method not in spaces:
            raise ValueError(f"start_points has {method!r}; there are {', '.join(spaces)}.")
        if not isinstance(points, (list, tuple)) or not all(
            isinstance(point, Mapping) and all(map(_is_number, point.values())) for point in points
        ):
            raise TypeError(f"{given}; {form}")
        for point in points:
            if {*point} != {*spaces[method]}:
                raise ValueError(
                    f"{given}; a point must have a value for each of {', '.join(spaces[method])}."
                )
            ordered = {name: float(point[name]) for name in spaces[method]}
            if ordered in found[method]:
                raise ValueError(f"{given}; it has a point twice.")
            found[method].append(ordered)
        if len(points) >= finalists:
            raise ValueError(
                f"{given}; start points run to the end, so there must be more finalists than start "
                f"points: finalists is {finalists}."
            )
    return found


def check_tune(methods: Any, validation: Any) -> None:
    """Check the arguments ``methods`` and ``validation`` of ``tune``.

    Raises:
      TypeError: ``methods`` is not a mapping from names to functions.
      ValueError: ``methods`` is empty, or ``validation`` is a number outside (0, 1).
    """
    if isinstance(validation, (float, np.floating)):
        check_share("validation", validation)
    if not isinstance(methods, Mapping) or any(
        isinstance(build, Algorithm) or not callable(build) for build in methods.values()
    ):
        raise TypeError(
            f"methods is of the type {type(methods).__name__}; it must be a mapping from a name to "
            "a function that makes an Algorithm, such as "
            '{"fedavg": functools.partial(algorithms.fedavg, loss_fn)}.'
        )
    if not methods:
        raise ValueError("methods is empty; it must have at least one method.")


def spread(space: Space, count: int, seed: int, tried: Sequence[Point] = ()) -> list[Point]:
    """Choose new points that fill a space evenly; fewer if lists have no more.

    Every hyperparameter is spaced evenly, for any number of points: its values are the ranks of a
    scrambled Halton sequence, in the middles of as many equal parts of the range (a Latin
    hypercube). The sequence keeps the combinations even, too. A single range is divided evenly,
    with its ends.

    Source: Owen: A randomized Halton algorithm in R. arXiv 1706.02808, as in scipy.

    Args:
      tried: points that have been chosen before; the new ones lie between them.
    """
    total = len(tried) + count
    are_lists = all(isinstance(axis, Values) for axis in space.values())
    if are_lists and math.prod(map(len, space.values())) <= total:
        whole = itertools.product(*space.values())
        return _distinct([dict(zip(space, values, strict=True)) for values in whole], tried)
    if len(space) == 1:
        [(name, axis)] = space.items()
        shares = np.linspace(0, 1, total) if total > 1 else np.array([0.5])
        if isinstance(axis, Values):
            shares = (np.arange(total) + 0.5) / total
        new = _distinct([{name: axis.at(share)} for share in shares], tried)
        places = np.linspace(0, len(new) - 1, min(count, len(new))).round().astype(int)
        return [new[place] for place in places]
    new, size = [], total
    while len(new) < count:
        points = [
            {name: axis.at(share) for (name, axis), share in zip(space.items(), row, strict=True)}
            for row in _hypercube(size, len(space), seed)[len(tried) :]
        ]
        new = _distinct(points, tried)[:count]
        size += 1 + size // 8  # points of lists may coincide
    return new


def _hypercube(count: int, dimensions: int, seed: int) -> np.ndarray:
    """Return a Latin hypercube [count, dimensions] in the order of a scrambled Halton sequence."""
    from scipy.stats import qmc  # takes long to import

    sequence = qmc.Halton(dimensions, rng=np.random.default_rng(seed)).random(count)
    return (sequence.argsort(axis=0).argsort(axis=0) + 0.5) / count


def _distinct(points: Iterable[Point], tried: Sequence[Point]) -> list[Point]:
    seen = {tuple(point.items()) for point in tried}
    found = {tuple(point.items()): point for point in points}
    return [point for values, point in found.items() if values not in seen]


def _accepted(build: Build) -> list[str] | None:
    """Return the keywords that a function accepts; None: any."""
    parameters = inspect.signature(build).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _read(name: str, value: Any) -> Range | Values:
    if isinstance(value, tuple):
        if len(value) != 2 or not all(_is_number(end) for end in value):
            raise TypeError(f"space[{name!r}] is {value!r}; a range is a pair (low, high).")
        low, high = map(float, value)
        if not 0 < low < high < math.inf:
            raise ValueError(f"space[{name!r}] is {value!r}; it must be 0 < low < high.")
        return Range(low, high)
    if isinstance(value, (list, np.ndarray)) and len(value):
        if not all(_is_number(number) for number in value):
            raise TypeError(
                f"space[{name!r}] is {value!r}; its values must be numbers. For options that "
                "change the program itself, add another entry to methods."
            )
        return Values(tuple(dict.fromkeys(map(float, value))))  # a value twice is no further point
    raise TypeError(
        f"space[{name!r}] is {value!r}; it must be a pair (low, high) or a list of numbers."
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
