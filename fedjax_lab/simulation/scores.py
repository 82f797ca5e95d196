"""The caller's evaluation functions."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab.clients.sources import on_any_device
from fedjax_lab.simulation.chunks import Chunks
from fedjax_lab.simulation.computation import Computation
from fedjax_lab.simulation.history import History, as_value, check_scores
from fedjax_lab.simulation.stopwatch import Stopwatch
from fedjax_lab.storage.rows import Row
from fedjax_lab.types import FedState, Metrics, Params


class Evaluators(NamedTuple):
    """The functions that evaluate a run.

    Attributes:
      run: the computation.
      chunks: the state.
      evaluate: global model -> dict of numbers or arrays, or None.
      diagnose: state -> dict of numbers or arrays, or None.
      score_clients: global model -> dict of numbers or arrays that are no part of a row, or None.
    """

    run: Computation
    chunks: Chunks
    evaluate: Callable[[Params], Mapping[str, Any]] | None
    diagnose: Callable[[FedState], Mapping[str, Any]] | None
    score_clients: Callable[[Params], Mapping[str, Any]] | None

    def row(self, history: History, metrics: Metrics, diverged: bool) -> Row:
        """Compute the scores of a row, NaN for a diverged model; all processes call it.

        Raises:
          TypeError: a function did not return a dict of numbers.
          ValueError: a name is reserved.
        """
        taken = history.names(metrics)
        stops = self.run.on_nonfinite == "stop"  # before a round that is not finite
        if diverged and not (stops and self.chunks.is_finite()):
            return self._missing(history.rows, taken)
        values = _scores("evaluate", self.evaluate, self.chunks.params, taken, _copied)
        if self.diagnose is None:
            return values
        state = self.chunks.whole_state()
        # No copy of the clients' rows, which may be most of the memory.
        state = state._replace(server=jax.tree.map(_copied, state.server))
        return values | _scores("diagnose", self.diagnose, state, {*taken, *values})

    def of_clients(self, round: int, clock: Stopwatch) -> Row | None:
        """Compute what ``score_clients`` says of the global model, whose time is not counted.

        All processes call it. None: there is no such function.

        Raises:
          TypeError: the function did not return a dict of numbers.
          ValueError: it returned "round".
        """
        if self.score_clients is None:
            return None
        with clock.uncounted():
            params, taken = self.chunks.params, {"round"}
            values = _scores("score_clients", self.score_clients, params, taken, _copied)
        return {"round": round, **values}

    def _missing(self, history: Sequence[Row], taken: set[str]) -> Row:
        """Return NaN under the names of the scores, for a model that is not evaluated.

        The names are those of the last row. Before the first row, they come from ``evaluate`` on
        the initial global model, and from ``diagnose`` if JAX can trace it.
        """
        if history:
            known = {name: value for name, value in history[-1].items() if name not in taken}
        else:
            known = _scores("evaluate", self.evaluate, self.run.params, taken)
            if self.diagnose is not None:
                with suppress(Exception):  # what cannot be traced, or is no dict
                    shapes = jax.eval_shape(self.diagnose, self.chunks.whole_state())
                    known |= {name: np.zeros(leaf.shape).tolist() for name, leaf in shapes.items()}
        return {name: as_value(np.full(np.shape(value), np.nan)) for name, value in known.items()}


def _copied(leaf: jax.Array) -> jax.Array:
    """Copy what the next rounds overwrite: the function may keep it, such as the best model.

    It may also use it together with arrays of its own, which may be on other devices.
    """
    return on_any_device(jax.device_put(leaf, leaf.sharding, may_alias=False))


def _scores(
    argument: str,
    function: Callable[..., Any] | None,
    value: Any,
    taken: set[str],
    given: Callable[[Any], Any] = lambda leaf: leaf,
) -> Row:
    """Convert the result of ``evaluate`` or ``diagnose`` for a row; ``given`` makes its leaves."""
    # A new tree, so that a function that changes a dict does not change the run's state.
    scores = {} if function is None else function(jax.tree.map(given, value))
    check_scores(argument, scores, taken)
    try:
        return {name: as_value(score) for name, score in scores.items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"{argument} returned {scores}; it must hold numbers: {error}.") from error
