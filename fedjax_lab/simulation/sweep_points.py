"""The points and seeds of a sweep, and the method of each point."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import LAST_SEED, check_choice, check_int
from fedjax_lab.round import Algorithm
from fedjax_lab.storage.fingerprint import are_the_same

Point = dict[str, float]


def list_points(
    points: Mapping[str, Sequence[float]] | Sequence[Mapping[str, float]],
) -> list[Point]:
    """List all combinations of a mapping's values, the last name varying fastest.

    Raises:
      TypeError: a value is no number; strings and functions would change the program itself.
      ValueError: there are no points, or a list's points have different names.
    """
    if isinstance(points, Mapping):
        axes = {name: _values(name, values) for name, values in points.items()}
        return [
            dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())
        ]
    if isinstance(points, str) or not all(isinstance(point, Mapping) for point in points):
        raise TypeError(
            f"points is {points!r}; it must map names to lists of floats, such as "
            '{"client_lr": [0.1, 0.2]}, or be a list of such dicts with a float for each name.'
        )
    listed = [{name: _number(name, value) for name, value in point.items()} for point in points]
    if not listed:
        raise ValueError("points is empty; it must have at least one point, such as {}.")
    for point in listed:
        if point.keys() != listed[0].keys():
            raise ValueError(
                f"points has a point with {sorted(point)} and one with {sorted(listed[0])}; all "
                "must have the same names."
            )
    return [{name: point[name] for name in listed[0]} for point in listed]


def check_seeds(seeds: Sequence[int]) -> list[int]:
    """Check the seeds and return them as a list.

    Raises:
      TypeError: a seed is not an integer.
      ValueError: there are none, one is out of range, or one occurs twice.
    """
    if isinstance(seeds, (int, np.integer)):
        raise TypeError(f"seeds is {seeds}; it must be a sequence, such as range({seeds}).")
    listed = [check_int("seeds", seed, minimum=0, maximum=LAST_SEED) for seed in seeds]
    if not listed or len(set(listed)) < len(listed):
        raise ValueError(f"seeds is {listed}; it must have at least one seed, and none twice.")
    return listed


def build_all(build: Callable[..., Algorithm], points: Sequence[Point]) -> list[Algorithm]:
    """Build the method of each point, which checks the names and the values.

    Raises:
      TypeError: ``build`` returns no ``Algorithm``, a hyperparameter cannot be a float, or
        ``build`` depends on a value in a way that JAX cannot trace.
      ValueError: ``build`` does not accept a name, or needs another one; a value is out of range;
        or points have different frozen weights.
    """
    if isinstance(build, Algorithm):
        raise TypeError(
            f"build is the Algorithm {build.name}; it must be a function that makes an Algorithm "
            "from a point's values, such as functools.partial(algorithms.fedavg, loss_fn)."
        )
    parameters = inspect.signature(build).parameters.values()
    accepted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in points[0]:
            check_choice("a name in points", name, accepted)
    needed = {p.name for p in parameters if p.name in accepted and p.default is p.empty}
    if missing := needed - points[0].keys():
        raise ValueError(f"points lacks {', '.join(sorted(missing))}, which build needs.")
    algorithms = [build(**point) for point in points]
    for algorithm in algorithms:
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                f"build returned a {type(algorithm).__name__}; it must return an Algorithm."
            )
        if not are_the_same(algorithm.frozen, algorithms[0].frozen):
            raise ValueError(
                "build returned different frozen weights for two points; all runs of a sweep "
                "share them."
            )
    check_traced("build", build, points[0])
    return algorithms


def check_traced(argument: str, build: Callable[..., Algorithm], point: Point) -> None:
    """Check that a function builds its method from traced values.

    Args:
      build: a point's values -> ``Algorithm``; it accepts this point's floats.

    Raises:
      TypeError: the function needs to know a value.
    """

    def traced(values):
        build(**values)

    try:
        jax.eval_shape(traced, dict.fromkeys(point, jnp.zeros((), jnp.result_type(float))))
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"{argument} needs to know a value, as `if` and float() do; the values of "
            f"{', '.join(point)} are traced, so that one program serves all points: use jnp.where, "
            f"or a method for each case. {error}"
        ) from error


def _values(name: str, values: Any) -> list[float]:
    if np.ndim(values) != 1 or not len(values):
        raise ValueError(
            f"points[{name!r}] is {values!r}; it must be a list of at least one float."
        )
    return [_number(name, value) for value in values]


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_scalar = (
        hasattr(value, "dtype")
        and np.ndim(value) == 0
        and jnp.issubdtype(value.dtype, jnp.number)
        and not jnp.issubdtype(value.dtype, jnp.complexfloating)
    )
    if not (is_number or is_scalar):
        raise TypeError(
            f"points has {value!r} for {name}; it must be a number, such as 1.0. Options that "
            "change the program itself (a number of slots, text, a function) belong in build."
        )
    return float(value)
