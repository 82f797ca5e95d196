"""The style of figures: colours, axes, legends, their size in print, files."""

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_lab.machine.atomic_files import write_atomically
from fedjax_lab.machine.extras import imported

# Okabe and Ito's colours, which differ in lightness too, without the yellow; then dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")
FORMS = ("png", "pdf", "svg")
_DPI = 100
COLUMN, PAGE = 3.4, 7.0  # inches, in print: one column of two, and both
_TEXT, _SMALL = 8, 7  # points, in print
_LETTER = 0.62  # width of a letter, divided by its size
_LINES = 0.8  # width of lines in print, divided by that on a screen
# In a PDF, TrueType fonts, which journals require; in an SVG, letters as outlines.
_VECTORS: Any = {"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "fedjax_lab"}
_UNDATED: Any = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}

Style = dict[str, Any]
Styles = Mapping[str, Style]


def line_style(colour: int, dash: int) -> Style:
    """Return a line's colour and dash; numbers count from 0 and wrap around."""
    return {"color": COLOURS[colour % len(COLOURS)], "linestyle": DASHES[dash % len(DASHES)]}


def styles_of(labels: Iterable[str]) -> Styles:
    """Return a style for each label: all colours in solid lines, then in dashed ones."""
    return {
        label: line_style(place, place // len(COLOURS))
        for place, label in enumerate(dict.fromkeys(labels))
    }


def new_figure(width: float, height: float) -> Any:
    """Create a matplotlib Figure with a size in inches.

    Raises:
      ImportError: matplotlib is missing.
    """
    figures = imported("matplotlib.figure", "a report's figures need matplotlib", "report")
    return figures.Figure(figsize=(width, height), layout="constrained")


def panels(count: int, width: float, height: float, columns: int = 3) -> tuple[Any, list[Any]]:
    """Create (figure, its axes): ``count`` panels, in even rows of up to ``columns``."""
    down = -(-count // columns)
    across = -(-count // down)
    figure = new_figure(across * width, down * height)
    figure.set_layout_engine("constrained", wspace=0.04, hspace=0.04)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for empty in axes[count:]:
        empty.set_axis_off()
    return figure, list(axes[:count])


def frame(axes: Any, xlabel: str, ylabel: str, title: str = "") -> None:
    """Add labels and a light grid below the data; remove the lines at the top and the right."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)


def log_axis(axes: Any, which: str, low: float, high: float) -> None:
    """Make an axis ("x" or "y") logarithmic with plain numbers; 1, 2, 5 for a short range."""
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    subs = (1, 2, 5) if high < 200 * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=8))
    if low >= 1e-3 and high < 1e7:
        axis.set_major_formatter(plain_numbers())
    axis.set_minor_formatter(NullFormatter())


def plain_numbers(unit: float = 1.0) -> Any:
    """Create a formatter of ticks without exponents, such as 1,500 and 0.25.

    Args:
      unit: the value that is shown as 1.
    """
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value / unit:,.10g}")


def legend(figure: Any, labels: Sequence[str], styles: Styles) -> None:
    """Add a legend below the axes; the figure grows by the legend's rows."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linewidth=2, label=literal(label), **styles[label]) for label in labels
    ]
    legend_of(figure, handles)


def legend_of(figure: Any, handles: Sequence[Any], fontsize: float = 10) -> None:
    """Add a legend below the axes for lines that have labels.

    Args:
      figure: the figure, which grows by the height of the legend.
    """
    longest = max(len(handle.get_label()) for handle in handles)
    width = figure.get_figwidth() * 110 / fontsize  # characters that fit, roughly
    columns = max(1, min(len(handles), int(width // (longest + 8))))
    rows = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + 0.022 * fontsize * rows)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3,
        fontsize=fontsize,
    )


def at_print_size(figure: Any, width: float | None = None) -> Any:
    """Resize a figure to its width in print, with legible text; returns the figure.

    Args:
      width: width in inches; None: a column for a single panel, else a page.
    """
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    shown = [axes for axes in figure.axes if axes.axison]
    wide, high = figure.get_size_inches()
    if width is None:
        width = COLUMN if len(shown) == 1 else PAGE
    figure.set_size_inches(width, high * width / wide)
    for text in figure.findobj(Text):
        text.set_fontsize(_TEXT)
    grids = [axes.get_gridspec() for axes in shown]  # a colour bar's axes have none
    columns = max((grid.ncols for grid in grids if grid is not None), default=1)
    letters = int(width / columns * 72 / (_LETTER * _TEXT))  # that stand below a panel
    for axes in shown:
        axes.tick_params(labelsize=_SMALL)
        axes.set_xlabel(textwrap.fill(axes.get_xlabel(), letters))
    for line in figure.findobj(Line2D):
        line.set_linewidth(_LINES * line.get_linewidth())
    for old in list(figure.legends):
        handles = old.legend_handles
        old.remove()
        legend_of(figure, handles, fontsize=_SMALL)
    return figure


def literal(label: str) -> str:
    """Escape a label so that matplotlib reads no formula in it."""
    return label.replace("$", r"\$")


def save(figure: Any, path: Path) -> None:
    """Write a PNG, PDF or SVG file, depending on the suffix; equal figures give equal bytes.

    A PNG file has a palette, which halves its size.
    """
    import matplotlib

    form = path.suffix[1:]
    with matplotlib.rc_context(_VECTORS), write_atomically(path, "wb") as file:
        if form != "png":
            figure.savefig(file, format=form, metadata=_UNDATED[form])
            return
        from PIL import Image

        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=_DPI, format="png", metadata={"Software": None})
        palette = Image.open(buffer).convert("RGB").quantize(256)
        palette.save(file, format="png", optimize=True)
