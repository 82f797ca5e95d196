"""The caller's evaluation functions, and the test that ends a run early."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.recorder import Row
from fedjax_lab.simulation.run import Run
from fedjax_lab.types import FedState, Params


class Scores(NamedTuple):
    """The functions that evaluate a run.

    Attributes:
      evaluate: global model -> dict of scalars, or None.
      diagnose: state -> dict of scalars, or None.
      score_clients: global model -> dict of scalars that are no part of a row, or None.
    """

    evaluate: Callable[[Params], Mapping[str, Any]] | None = None
    diagnose: Callable[[FedState], Mapping[str, Any]] | None = None
    score_clients: Callable[[Params], Mapping[str, Any]] | None = None

    def of(self, chunks: Chunks, taken: set[str]) -> Row:
        """Compute the scores of the current state for a row; all processes call it.

        Args:
          chunks: hold the state.
          taken: reserved names.

        Raises:
          TypeError: a function did not return a dict of numbers.
          ValueError: a name is reserved.
        """
        found = _scores("evaluate", self.evaluate, chunks.params, taken)
        if self.diagnose is None:
            return found
        return found | _scores("diagnose", self.diagnose, chunks.whole_state(), {*taken, *found})

    def of_clients(self, chunks: Chunks) -> Row:
        """Compute what ``score_clients`` says of the global model; all processes call it.

        Args:
          chunks: hold the state.

        Raises:
          TypeError: the function did not return a dict of numbers.
          ValueError: it returned "round".
        """
        return _scores("score_clients", self.score_clients, chunks.params, {"round"})

    def missing(self, run: Run, chunks: Chunks, history: Sequence[Row], taken: set[str]) -> Row:
        """Return NaN under the names of the scores, for a model that is not evaluated.

        The names are those of the last row. Before the first row, they come from ``evaluate`` on
        the initial global model, and from ``diagnose`` if JAX can trace it.

        Args:
          run: has the initial global model.
          chunks: hold a state, of which only the shapes are used.
          history: the rows so far.
          taken: names of a row besides the scores.
        """
        if history:
            known = {name: value for name, value in history[-1].items() if name not in taken}
        else:
            known = _scores("evaluate", self.evaluate, run.params, taken)
            if self.diagnose is not None:
                with suppress(Exception):  # what cannot be traced, or is no dict
                    shapes = jax.eval_shape(self.diagnose, chunks.whole_state())
                    known |= {name: np.zeros(leaf.shape).tolist() for name, leaf in shapes.items()}
        return {name: as_value(np.full(np.shape(value), np.nan)) for name, value in known.items()}


def _scores(argument: str, function: Callable[..., Any] | None, value: Any, taken: set[str]) -> Row:
    """Convert the result of ``evaluate`` or ``diagnose`` for a row."""
    # A copy of the tree, so that a function that changes a dict does not change the run's state.
    found = {} if function is None else function(jax.tree.map(lambda leaf: leaf, value))
    if not isinstance(found, Mapping):
        raise TypeError(f"{argument} returned {type(found).__name__}; it must be a dict.")
    for name in found:
        if name in taken:
            raise ValueError(
                f"{argument} returned {name!r}, a name that rows already have; choose another one."
            )
    try:
        return {name: as_value(score) for name, score in found.items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"{argument} returned {found}; it must hold numbers: {error}.") from error


def as_value(value: Any) -> float | list:
    """Convert a metric for a row: a number, or a list of an array's numbers.

    NaN becomes ``math.nan``, so that equal rows are equal.

    Args:
      value: a number or an array.
    """
    array = np.asarray(value, np.float64)
    if array.ndim:
        return array.tolist()
    return math.nan if np.isnan(array) else float(array)


def is_enough(stop_when: Callable[[Row], Any] | None, row: Row) -> bool:
    """Return whether the run ends after a row.

    Args:
      stop_when: as in ``simulate``. row: of the history.

    Raises:
      TypeError: it returned several values.
    """
    if stop_when is None:
        return False
    said = stop_when(dict(row))
    if np.ndim(said):
        raise TypeError(
            f"stop_when returned {said!r}, of shape {np.shape(said)}; it must return one truth "
            "value, such as bool(array.all())."
        )
    return bool(said)
