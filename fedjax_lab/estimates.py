"""Means with intervals over seeds, and how values are written in tables."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

Rows = list[list[str]]
NOTHING = "-"
# What begins a link, an image, a tag, a formula or a mention, in some reader of Markdown.
_ACTIVE = re.compile(r"[`*\[\]<>\\!&~$@]|://|www\.")


class Estimate(NamedTuple):
    """A mean over seeds.

    Attributes:
      mean: NaN if a seed has no value.
      half_width: of the 95 % interval (Student's t); None for a single seed.
      n: number of seeds.
    """

    mean: float
    half_width: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Compute the mean and 95 % interval of independent values: mean ± t(0.975, n - 1) s / sqrt(n).

    Args:
      values: one value for each seed; a NaN makes the estimate NaN.

    Raises:
      ValueError: there are no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("values is empty; there must be at least one.")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return Estimate(mean, standard_errors(n) * deviation / math.sqrt(n), n)


def standard_errors(n: int) -> float:
    """Return the half-width of a mean's 95 % interval (Student's t), in standard errors.

    Args:
      n: number of values, at least 2.
    """
    # A dependency of jax that only reports need; scipy.stats takes half a second to import.
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 0.975))


def format_estimate(value: Estimate, digits: int) -> str:
    """Format an estimate, such as "95.12 ± 0.31"; NaN becomes a dash.

    Args:
      value: mean and half-width.
      digits: digits after the decimal point.
    """
    if math.isnan(value.mean):
        return NOTHING
    text = f"{value.mean:,.{digits}f}"
    if value.half_width is None:
        return text
    return f"{text} ± {value.half_width:,.{digits}f}"


def markdown_table(rows: Rows, *, text: bool = False) -> str:
    """Format rows as a Markdown table; the first row is the header.

    Args:
      rows: lists of texts of equal length.
      text: align all columns left; otherwise all but the first are aligned right.
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    # A colon without a dash, in a column one letter wide, would be no table.
    widths = [max(2, *(len(row[i]) for row in cells)) for i in range(len(cells[0]))]

    def line(row: list[str]) -> str:
        padded = [
            cell.ljust(width) if text or i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rules = ["-" * (width - 1) for width in widths]
    rule = [f":{dashes}" if text or i == 0 else f"{dashes}:" for i, dashes in enumerate(rules)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def inert(text: str) -> str:
    """Escape a text from a file so that Markdown shows it literally: no link, no image, no tag.

    Args:
      text: one line. It is unchanged if it contains no Markdown syntax.
    """
    text = printable(text)
    return code(text) if _ACTIVE.search(text) else text


def code(text: str) -> str:
    """Format a text as a Markdown code span, which contains no other syntax.

    Args:
      text: one line.
    """
    text = printable(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    room = " " if longest or not text.strip() else ""
    return f"{fence}{room}{text}{room}{fence}"


def printable(text: str) -> str:
    """Remove line breaks and other control characters from a text.

    Args:
      text: any text.
    """
    return "".join(letter if letter.isprintable() else " " for letter in text)


def format_value(value: Any) -> str:
    """Format a value for display after ``name=``.

    Args:
      value: a number, a bool, None, text, or a tuple of these.
    """
    if isinstance(value, (tuple, list)):
        return ",".join(map(format_value, value)) + ("," if len(value) == 1 else "")
    words: dict[Any, str] = {True: "true", False: "false"}
    return "none" if value is None else words[value] if isinstance(value, bool) else str(value)
