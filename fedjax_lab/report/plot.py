"""Figures of any metrics of histories: a line for each method, with intervals over seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_lab.checks import check_number, repeated
from fedjax_lab.estimates import standard_errors
from fedjax_lab.report.curves import mean_curve
from fedjax_lab.report.style import (
    COLUMN,
    FORMS,
    at_print_size,
    frame,
    legend,
    literal,
    new_figure,
    plain_numbers,
    save,
    styles_of,
)

History = Sequence[Mapping[str, Any]]
_SCREEN = (5.6, 3.5)  # inches, before it gets its printed size
_CHARACTERS = 45  # of ticks' numbers in a figure as wide as a column


def plot(
    histories: Mapping[str, History | Sequence[History]],
    x: str = "round",
    y: str = "accuracy",
    *,
    path: str | Path | None = None,
    width: float = COLUMN,
) -> Any:
    """Draw a metric of histories against another one, as a figure for a paper.

    Several histories with the same label are different seeds: the line is their mean, and the shade
    its 95 % interval (Student's t). Only rounds at which all of them have both metrics are drawn.

    Args:
      histories: label -> ``result.history``, or a list of histories, one for each seed. Any list of
        rows (dicts of numbers) with the names ``x`` and ``y`` is allowed.
      x: a name in the rows, such as "round", "bytes_up", "gradients", "simulated_seconds". Bytes
        are shown in MB (10^6 bytes).
      y: a name in the rows, such as "accuracy", "loss", or a result of your ``evaluate``.
      path: file of the figure, ending in .pdf, .svg or .png. None: no file.
      width: width of the figure in inches; 3.4 is one of two columns, 7 a page.

    Returns:
      A ``matplotlib.figure.Figure``, which you can change before ``figure.savefig``.

    Raises:
      TypeError: ``histories`` is not a mapping, or contains something other than rows.
      ValueError: there is no history, no row has both names, two labels have the same text,
        ``width`` is not above 0, or ``path`` has another suffix.
      ImportError: matplotlib is missing.
    """
    check_number("width", width, minimum=0.0, exclusive_minimum=True)
    path = None if path is None else Path(path)
    if path is not None and path.suffix[1:] not in FORMS:
        allowed = ", ".join(f".{form}" for form in FORMS)
        raise ValueError(f"path is {str(path)!r}; it must end in one of {allowed}.")
    curves = {label: _curve(label, seeds, x, y) for label, seeds in _by_label(histories).items()}
    figure = new_figure(*_SCREEN)
    axes, styles = figure.subplots(), styles_of(curves)
    for label, (across, mean, half_width) in curves.items():
        style = styles[label]
        if half_width is not None:
            low, high = mean - half_width, mean + half_width
            axes.fill_between(across, low, high, color=style["color"], alpha=0.15, linewidth=0)
        marker = "o" if len(across) == 1 else None
        axes.plot(across, mean, linewidth=1.8, marker=marker, **style)
    frame(axes, _title(x), _title(y))
    axes.yaxis.set_major_formatter(plain_numbers(_unit(y)))
    values, room = np.concatenate([across for across, *_ in curves.values()]), width / COLUMN
    _set_ticks(axes.xaxis, values, _unit(x), int(_CHARACTERS * room))
    legend(figure, list(curves), styles)
    at_print_size(figure, width)
    if path is not None:
        save(figure, path)
    return figure


def _unit(name: str) -> float:
    """Return the unit in which an axis counts: a million bytes, or 1."""
    return 1e6 if name.startswith("bytes_") else 1.0


def _title(name: str) -> str:
    return literal(name.replace("_", " ")) + (" (MB)" if name.startswith("bytes_") else "")


def _set_ticks(axis: Any, values: np.ndarray, unit: float, characters: int) -> None:
    """Place as many ticks as have room for their numbers; of integers, at integers."""
    from matplotlib.ticker import MaxNLocator

    shown = plain_numbers(unit)
    widest = max(len(shown(np.round(value / unit, 2) * unit, 0)) for value in values)
    room = max(2, min(8, characters // (widest + 2)))
    is_whole = unit == 1.0 and bool((values == np.round(values)).all())
    axis.set_major_locator(MaxNLocator(room, steps=[1, 2, 2.5, 5, 10], integer=is_whole))
    axis.set_major_formatter(shown)


def _by_label(histories: Any) -> dict[str, list[History]]:
    """Return label -> histories of its seeds."""
    if not isinstance(histories, Mapping):
        raise TypeError(
            f"histories is a {type(histories).__name__}; it must be a dict from labels to "
            "result.history, or to lists of these."
        )
    if not histories:
        raise ValueError("histories is empty; it must have a label with a history.")
    if (twice := repeated(map(str, histories))) is not None:
        raise ValueError(f"histories has two labels with the text {twice!r}; they must differ.")
    found = {}
    for label, given in histories.items():
        seeds = [given] if len(given) and isinstance(given[0], Mapping) else list(given)
        for seed in seeds:
            rows = [] if isinstance(seed, (str, Mapping)) else list(seed)
            if not rows or not all(isinstance(row, Mapping) for row in rows):
                raise TypeError(
                    f"histories[{label!r}] must be result.history, a list of rows, or a list of "
                    "such lists, and none of them empty."
                )
        if not seeds:
            raise ValueError(f"histories[{label!r}] is empty; it must have at least one row.")
        found[str(label)] = seeds
    return found


def _curve(
    label: str, seeds: Sequence[History], x: str, y: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return (mean x [T], mean y [T], half-width of y's interval [T] or None) at common rounds."""
    key = "round" if all("round" in row for rows in seeds for row in rows) else x
    points = [
        {row[key]: (row[x], row[y]) for row in rows if x in row and y in row} for rows in seeds
    ]
    for number, known in enumerate(points):
        if not known:
            names = ", ".join(sorted({name for row in seeds[number] for name in row}))
            raise ValueError(
                f"no row of histories[{label!r}] has both {x!r} and {y!r}; it has {names}."
            )
    across, measured = mean_curve(points)
    if not len(across):
        raise ValueError(f"the seeds of histories[{label!r}] have no {key} in common.")
    if len(seeds) == 1:
        return across, measured[0], None
    spread = measured.std(0, ddof=1) / np.sqrt(len(seeds))
    return across, measured.mean(0), standard_errors(len(seeds)) * spread
