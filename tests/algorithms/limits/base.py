"""What a row of the table of degenerate limits says."""

from typing import NamedTuple

LR = {"client_lr": 0.2}


class Limit(NamedTuple):
    """``left`` and ``right`` give the same server model.

    Both are algorithms; the rounds are ragged unless the whole cohort takes equal steps.
    """

    name: str
    left: object
    right: object
    rounds: int = 6
    max_steps: int = 3
    full_cohort: bool = False
