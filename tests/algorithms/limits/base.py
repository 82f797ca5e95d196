"""What a row of the table of degenerate limits says."""

from typing import NamedTuple

from fedjax_lab import algorithms
from tests.algorithms.cases.base import N
from tests.algorithms.problem import loss_fn

__all__ = ["COHORT", "FEDAVG", "LR", "Limit", "N"]

COHORT = 4  # of N clients, unless all take part
LR = {"client_lr": 0.2}
FEDAVG = algorithms.fedavg(loss_fn, **LR)  # where many limits lead: one object, run once


class Limit(NamedTuple):
    """``left`` and ``right`` give the same server model.

    Both are algorithms; the rounds are ragged unless the cohort is ``even``: all of it take equal
    steps with equal weights; so does the ``full_cohort`` of N.
    """

    name: str
    left: object
    right: object
    rounds: int = 6
    max_steps: int = 3
    full_cohort: bool = False
    even: bool = False
