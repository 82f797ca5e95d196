"""Solutions of the quadratic program in float64, by scipy, and how far others are from them."""

import numpy as np
from scipy.optimize import nnls


def unit_rows(p: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the nonzero rows with norm 1, all norms, and ||p|| (1 for p = 0), in float64."""
    rows = rows.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1)
    rows = rows[norms > 0] / norms[norms > 0, None]
    return rows, norms, float(np.linalg.norm(p.astype(np.float64))) or 1.0


def oracle(p: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return q in float64: nnls on an orthogonal reduction of [M, p] to C + 1 coordinates."""
    p = p.astype(np.float64)
    units, _, size = unit_rows(p, rows)
    if not len(units):
        return p
    stacked = np.vstack([units, p[None] / size])
    if p.size > 20_000:  # a square root of the Gram matrix, in float64
        values, vectors = np.linalg.eigh(stacked @ stacked.T)
        stacked = vectors * np.sqrt(np.maximum(values, 0))
    elif p.size > len(stacked):
        stacked = np.linalg.qr(stacked.T, mode="r").T
    z = nnls(stacked[:-1].T, -stacked[-1], maxiter=200 * len(units) + 1000)[0]
    return p + size * (z @ units)


def errors(p, rows, q, z, q_oracle) -> tuple[float, float]:
    """Return the relative KKT residual and the relative distance to the oracle, in float64."""
    units, norms, size = unit_rows(p, rows)
    q = q.astype(np.float64)
    distance = float(np.linalg.norm(q - q_oracle)) / size
    if not len(units):
        return 0.0, distance
    slack = units @ (q / size)
    y = z.astype(np.float64)[norms > 0] * norms[norms > 0] / size
    products = y * abs(slack) / max(1.0, y.max())
    return max(0.0, (-y).max(), (-slack).max(), products.max()), distance
