"""Loss surfaces around the last models, on one colour scale."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_lab.report.style import literal, panels

_LEVELS = 16
_WIDE = 20.0  # ratio of losses beyond which levels are spaced by their logarithm


def surface_figure(landscapes: Mapping[str, Mapping[str, Any]]) -> Any:
    """Draw contours of the loss on a plane through each model, which is the cross in the middle.

    Args:
      landscapes: label -> {"offsets": [P], "losses": [P, P], "eigenvalues": largest ones of the
        Hessian (optional)}. losses[i][j] is at offsets[i] along the first direction and offsets[j]
        along the second; null if it is not finite.

    Raises:
      ValueError: no loss is finite, or losses do not fit their offsets.
    """
    losses = {label: _losses(label, found) for label, found in landscapes.items()}
    finite = np.concatenate([values[np.isfinite(values)] for values in losses.values()])
    if not finite.size:
        raise ValueError("landscapes has no finite loss.")
    low, high = float(finite.min()), float(finite.max())
    if low > 0 and high > _WIDE * low:
        from matplotlib.colors import LogNorm

        levels, norm = np.geomspace(low, high, _LEVELS), LogNorm(low, high)
    else:
        high = max(high, low + 1e-6 * max(1.0, abs(low)))
        levels, norm = np.linspace(low, high, _LEVELS), None
    levels[0], levels[-1] = low, high  # not beside them by a rounding
    figure, all_axes = panels(len(losses), 3.3, 3.2, columns=4)
    for axes, (label, values) in zip(all_axes, losses.items(), strict=True):
        offsets = np.asarray(landscapes[label]["offsets"], float)
        drawn = axes.contourf(
            offsets,
            offsets,
            np.ma.masked_invalid(values.T),
            levels=levels,
            norm=norm,
            cmap="viridis",
        )
        axes.plot(0, 0, "+", color="white", ms=9, mew=1.6)
        axes.set_aspect("equal")
        axes.set_xlabel("first direction")
        axes.set_ylabel("second direction")
        axes.set_title(f"{literal(label)}{_eigenvalues(landscapes[label])}", fontsize=10)
    bar = figure.colorbar(drawn, ax=all_axes, label="training loss", pad=0.01, shrink=0.9)
    ticks = levels[:: (_LEVELS - 1) // 5]
    bar.set_ticks(ticks, labels=[f"{value:.2g}" for value in ticks])
    bar.minorticks_off()
    return figure


def _losses(label: str, found: Mapping[str, Any]) -> np.ndarray:
    losses, points = np.asarray(found["losses"], float), len(found["offsets"])
    if losses.shape != (points, points):
        raise ValueError(
            f"losses of {label} have shape {losses.shape}; {points} offsets need "
            f"{(points, points)}."
        )
    return np.where(np.isfinite(losses), losses, np.nan)


def _eigenvalues(found: Mapping[str, Any]) -> str:
    values = [f"{value:.3g}" for value in found.get("eigenvalues") or () if value is not None]
    return f"\nλ = {', '.join(values)}" if values else ""
