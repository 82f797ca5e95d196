"""Figures of partitions: the sizes of the clients, and the shares of their labels.

Axes: N clients, M of them shown, C classes.
"""

from typing import Any

import numpy as np

from fedjax_lab.data.heterogeneity import Heterogeneity
from fedjax_lab.machine.extras import imported

# Largest numbers of clients and of names that are legible in a figure.
MOST_SHOWN = 100
_MOST_NAMED = 10


def plot_partition(
    spec: str, sizes: np.ndarray, measured: Heterogeneity | None, names: tuple[str, ...] | None
) -> Any:
    """Draw the sizes of the clients, and below them their label shares.

    Args:
      spec: the scheme, for the title.
      sizes: integers [N].
      measured: the heterogeneity of the clients; None: no label shares.
      names: the clients' ids, or None.

    Raises:
      ImportError: matplotlib is missing.
    """
    figures = imported("matplotlib.figure", "plot needs matplotlib", "report")
    shown, xlabel = shown_clients(sizes)
    title = (
        f"{spec}: {len(sizes):,} clients, {sizes.min():,} to {sizes.max():,} "
        f"examples (median {np.median(sizes):,.10g})"
    )
    figure = figures.Figure(figsize=(9, 3 if measured is None else 5), layout="constrained")
    if measured is None:
        top = bottom = figure.subplots()
    else:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.5))
        title += f", label skew {measured.mean_tv_distance:.2f}"
        draw_shares(bottom, measured.label_histogram[shown], "share of the client's data", 1.0)
        bottom.set_ylabel("class")
    top.bar(np.arange(len(shown)), sizes[shown], width=0.9, color="#35608d")
    top.set_ylabel("examples")
    top.set_title(title, fontsize=11)
    bottom.set_xlabel(xlabel)
    if len(shown) < len(sizes):
        bottom.set_xticks([])
    elif names is not None and len(names) <= _MOST_NAMED:
        bottom.set_xticks(np.arange(len(names)), names, parse_math=False)
    else:
        bottom.locator_params(axis="x", integer=True)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def shown_clients(sizes: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the clients that a figure shows, and the label of their axis.

    Of more than 100 clients, 100 are shown, evenly spaced in the order of size.

    Args:
      sizes: numbers of examples, [N].

    Returns:
      Integers [M], and the label.
    """
    if len(sizes) <= MOST_SHOWN:
        return np.arange(len(sizes)), "client"
    by_size = np.argsort(sizes, kind="stable")
    places = np.linspace(0, len(sizes) - 1, MOST_SHOWN).round().astype(int)
    return by_size[places], f"client ({MOST_SHOWN} of {len(sizes):,}, in order of size)"


def draw_shares(axes: Any, counts: np.ndarray, label: str, most: float | None = None) -> None:
    """Draw the label shares of clients as a heat map with a colour bar.

    Args:
      counts: examples of each client with each label, [M, C].
      label: of the colour bar.
      most: share of the darkest colour; None: the largest.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axes.imshow(
        shares.T,
        aspect="auto",
        origin="lower",
        cmap="YlGnBu",
        vmin=0,
        vmax=max(shares.max(), 1e-9) if most is None else most,
        interpolation="nearest",
    )
    axes.figure.colorbar(image, ax=axes, label=label, pad=0.01)
    axes.set_yticks(np.arange(0, shares.shape[1], max(1, shares.shape[1] // 10)))
