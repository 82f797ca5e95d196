"""Figures at the width of a column of a page in print."""

import textwrap
from typing import Any

from fedjax_lab.report.style import legend_of

COLUMN, PAGE = 3.4, 7.0  # inches: one column of two, and both
_TEXT, _SMALL = 8, 7  # points
_LETTER = 0.62  # width of a letter, divided by its size
_LINES = 0.8  # width of lines, divided by that on a screen


def at_print_size(figure: Any, width: float | None = None) -> Any:
    """Resize a figure to its width in print, with legible text; returns the figure.

    Args:
      width: width in inches; None: a column for a single panel, else a page.
    """
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    panels = [axes for axes in figure.axes if axes.axison]
    wide, high = figure.get_size_inches()
    if width is None:
        width = COLUMN if len(panels) == 1 else PAGE
    figure.set_size_inches(width, high * width / wide)
    for text in figure.findobj(Text):
        text.set_fontsize(_TEXT)
    grids = [axes.get_gridspec() for axes in panels]  # a colour bar's axes have none
    columns = max((grid.ncols for grid in grids if grid is not None), default=1)
    letters = int(width / columns * 72 / (_LETTER * _TEXT))  # that stand below a panel
    for axes in panels:
        axes.tick_params(labelsize=_SMALL)
        axes.set_xlabel(textwrap.fill(axes.get_xlabel(), letters))
    for line in figure.findobj(Line2D):
        line.set_linewidth(_LINES * line.get_linewidth())
    for old in list(figure.legends):
        handles = old.legend_handles
        old.remove()
        legend_of(figure, handles, fontsize=_SMALL)
    return figure
