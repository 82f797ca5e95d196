"""The rule by which a run has diverged, for runs, sweeps and searches.

A run has diverged if its global model is not finite, or if clients participated in a round and
none of them gave finite values. If only the loss is not finite, the run continues with a warning.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

ODD_LOSS = (
    "although the messages are finite: the examples may have labels without a logit, or the loss "
    "may have values that its gradients do not show."
)


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


def odd_losses(metrics: Mapping[str, Any]) -> np.ndarray:
    """Find the rounds whose loss is not finite although messages are finite: bool [..., rounds].

    Args:
      metrics: of rounds, [..., rounds].
    """
    finite, _ = finite_and_other_clients(metrics)
    if "nonfinite_clients" not in metrics:  # clients are not checked, and values may be anything
        return np.zeros(finite.shape, bool)
    return (finite > 0) & ~np.isfinite(metrics.get("loss", finite))
