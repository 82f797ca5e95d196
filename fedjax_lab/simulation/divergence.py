"""Whether runs have diverged, by one rule for runs, sweeps and searches; and what is warned of.

A run has diverged if its global model is not finite, or if clients participated in a round and
none of them gave finite values. If only the loss is not finite, the run continues with a warning.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_lab.checks import warn
from fedjax_lab.qp.residuals import LARGEST_RESIDUAL, QP_RESIDUALS, unsolved


def finite_and_other_clients(metrics: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Count the clients of each round: (those with finite values, the others).

    Args:
      metrics: of rounds, [..., rounds]. ``finite_clients`` is the share of the participants with
        finite values, where other clients count as participants, too (``with_dp``).
    """
    came = np.asarray(metrics["participants"])
    finite = np.rint(came * np.asarray(metrics.get("finite_clients", 1)))
    return finite, came - finite + np.asarray(metrics.get("nonfinite_clients", 0))


def lost_rounds(metrics: Mapping[str, Any]) -> np.ndarray:
    """Find the rounds in which clients participated and none had finite values: bool [..., rounds].

    Args:
      metrics: of rounds, [..., rounds].
    """
    finite, others = finite_and_other_clients(metrics)
    return (others > 0) & (finite == 0)


class Watch:
    """Checks runs for values that are not finite and for unsolved quadratic programs; warns once.

    Args:
      name: name of the method of a single run, which is warned of divergence and of clients that
        are left out, and ends before such a round. None: several runs, whose result says so.
      on_nonfinite: as in ``simulate``.
    """

    def __init__(self, name: str | None, on_nonfinite: str):
        self._name, self._is_single = name or "a run", name is not None
        self._stop_at_once = on_nonfinite == "stop"
        self._told: set[str] = set()

    def look(self, first: int, metrics: Mapping[str, Any], is_finite: Any) -> tuple[int, Any]:
        """Check a chunk of rounds.

        Args:
          first: number of its first round, from 0.
          metrics: of its rounds, [..., length] each.
          is_finite: whether the global models are finite after it, bool [...].

        Returns:
          (number of rounds before the one that ends a single run, bool [...]: which runs diverged
          in this chunk).

        Raises:
          RuntimeError: a Poisson cohort had more clients than slots.
        """
        if np.any(metrics.get("overflow", False)):
            raise RuntimeError(
                "a Poisson cohort has more clients than slots, which has a probability of 1e-9 in "
                "a round; choose another seed."
            )
        left, excluded = finite_and_other_clients(metrics)
        length = left.shape[-1]
        if self._stop_at_once and excluded.any() and self._is_single:
            at = int((excluded > 0).argmax())
            warn(f"diverged: on_nonfinite is 'stop': the run ends before round {first + at}.")
            return at, True
        if self._is_single:
            self._warn_of_clients(first, left, excluded)
        if "nonfinite_clients" in metrics:  # else values may be anything
            self._warn_of_losses(first, left, metrics)
        self._warn_of_programs(first, metrics)
        lost = excluded > 0 if self._stop_at_once else lost_rounds(metrics)
        diverged = lost.any(-1) | ~np.asarray(is_finite)
        if self._is_single and lost.any():
            warn(f"diverged: in round {first + int(lost.argmax())} no client was finite.")
        elif self._is_single and diverged:
            warn(f"diverged: the global model is not finite after round {first + length}.")
        return length, diverged

    def _worst(self, topic: str, values: np.ndarray) -> tuple[Any, ...] | None:
        """Return the place of the largest value, once for each topic; None if all are 0."""
        if topic in self._told or not values.any():
            return None
        self._told.add(topic)
        return np.unravel_index(values.argmax(), values.shape)

    def _warn_of_clients(self, first: int, left: np.ndarray, excluded: np.ndarray) -> None:
        if (at := self._worst("clients", excluded)) is not None:
            warn(
                f"in round {first + at[-1]} of {self._name} {excluded[at]:.0f} of "
                f"{excluded[at] + left[at]:.0f} clients gave values that are not finite and were "
                "left out; rows count them as nonfinite_clients."
            )

    def _warn_of_losses(self, first: int, left: np.ndarray, metrics: Mapping[str, Any]) -> None:
        odd = (left > 0) & ~np.isfinite(metrics.get("loss", left))
        if (at := self._worst("losses", odd)) is not None:
            warn(
                f"in round {first + at[-1]} of {self._name} the loss is {metrics['loss'][at]}, "
                "although the messages are finite: the examples may have labels without a logit, "
                "or the loss may have values that its gradients do not show. The run continues."
            )

    def _warn_of_programs(self, first: int, metrics: Mapping[str, Any]) -> None:
        found = {name: np.nan_to_num(metrics[name]) for name in QP_RESIDUALS if name in metrics}
        bad = list(unsolved({name: values.max() for name, values in found.items()}))
        if bad and (at := self._worst("programs", found[bad[0]])) is not None:
            warn(
                f"in round {first + at[-1]} of {self._name} {bad[0]} is {found[bad[0]][at]:.2g}, "
                f"above {LARGEST_RESIDUAL:g}: its quadratic programs were not solved, and their "
                "results are no projections; reports mark the run."
            )
