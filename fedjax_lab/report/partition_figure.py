"""Figure of the clients' labels, as bubbles (GradMA, Figure 8) and as a heat map (FedSpeed,
Figure 4.1).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_lab.data.partition_plot import draw_shares, shown_clients
from fedjax_lab.report.style import COLOURS, frame, new_figure


def partition_figure(histogram: Sequence[Sequence[int]] | np.ndarray) -> Any:
    """Draw bubbles with the numbers of examples, and a heat map of each client's label shares.

    With more than 100 clients, 100 are shown, evenly spaced in the order of size.

    Args:
      histogram: examples of each client with each label, int [N, C].

    Raises:
      ValueError: the histogram does not have two axes, or is empty.
    """
    counts = np.asarray(histogram, float)
    if counts.ndim != 2 or not counts.size:
        raise ValueError(f"histogram has shape {counts.shape}; it must be [N, C].")
    num_clients = len(counts)
    shown, xlabel = shown_clients(counts.sum(1))
    counts = counts[shown]
    width, height = 6.2, 3.6
    figure = new_figure(2 * width, height)
    left, right = figure.subplots(1, 2)
    _bubbles(left, counts, 72 * 0.85 * width, 72 * 0.7 * height)
    draw_shares(right, counts, "share of the client's examples")
    largest = f"area: examples (largest {counts.max():,.0f})"
    for axes, above in ((left, largest), (right, "label shares")):
        frame(axes, xlabel, "class", above)
        axes.set_yticks(right.get_yticks())
        if len(shown) < num_clients:
            axes.set_xticks([])
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
    right.grid(False)
    return figure


def _bubbles(axes: Any, counts: np.ndarray, width: float, height: float) -> None:
    """Draw circles on axes of about ``width`` x ``height`` points; the largest fills its row.

    Of many clients they may be wider than a column, since they show through.
    """
    num_clients, num_classes = counts.shape
    diameter = min(22.0, max(12.0, width / num_clients), max(5.0, 0.95 * height / num_classes))
    client, label = np.nonzero(counts)
    share = counts[client, label] / max(1.0, counts.max())
    axes.scatter(client, label, s=share * diameter**2, color=COLOURS[0], alpha=0.65, linewidths=0)
    axes.set_xlim(-1, num_clients)
    axes.set_ylim(-0.7, num_classes - 0.3)
