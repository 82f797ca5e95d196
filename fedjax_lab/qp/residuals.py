"""Whether the quadratic programs of a run were solved.

A residual is the largest violation of the program's conditions in units of the lengths of the
vector and of the row (``qp.ConeInfo.kkt_residual``). Solved in float32, those of GradMA's runs end
at 1e-5 or below, and those of a solver that failed were 1 and more: the bound lies between, at the
accuracy to which float32 knows rows that oppose each other. A mean beyond it says that steps were
taken along vectors that are no projections.
"""

from collections.abc import Mapping
from typing import Any

QP_RESIDUALS = ("client_qp_residual", "server_qp_residual")  # metrics of a round, and of a row
LARGEST_RESIDUAL = 1e-3


def unsolved(row: Mapping[str, Any]) -> dict[str, float]:
    """The residuals beyond the bound: metric -> its mean.

    Args:
      row: {name: number or None}, of a round or of an evaluation.
    """
    found = {name: row.get(name) for name in QP_RESIDUALS}
    return {name: value for name, value in found.items() if value and value > LARGEST_RESIDUAL}
