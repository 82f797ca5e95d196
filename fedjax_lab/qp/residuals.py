"""Checks whether the quadratic programs of a run were solved.

A residual is the largest violation of the program's conditions, in units of the lengths of the
vector and of the row (``qp.ConeInfo.kkt_residual``). In GradMA's runs, float32 residuals are at
most 1e-5 if the program is solved, and were 1 or more for a solver that failed. The bound is in
between, at the accuracy with which float32 represents rows that oppose each other. A mean above
the bound shows that steps followed vectors that are not projections.
"""

from collections.abc import Mapping
from typing import Any

QP_RESIDUALS = ("client_qp_residual", "server_qp_residual")  # metrics of a round, and of a row
LARGEST_RESIDUAL = 1e-3


def unsolved(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the residuals above the bound: metric -> its mean.

    Args:
      row: {name: number or None} of a round or of an evaluation.
    """
    found = {name: row.get(name) for name in QP_RESIDUALS}
    return {name: value for name, value in found.items() if value and value > LARGEST_RESIDUAL}
