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
    """Mean and 95 % interval of independent values: mean ± t(0.975, n - 1) s / sqrt(n).

    Args:
      values: one for each seed; NaN makes the estimate NaN.

    Raises:
      ValueError: there are no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("values is empty; there must be at least one.")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    from scipy import stats  # jax brings it; only a report needs it

    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return Estimate(mean, float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n), n)


def format_estimate(value: Estimate, digits: int) -> str:
    """Such as "95.12 ± 0.31"; a dash for NaN.

    Args:
      value: mean and half-width.
      digits: after the decimal point.
    """
    if math.isnan(value.mean):
        return NOTHING
    text = f"{value.mean:,.{digits}f}"
    if value.half_width is None:
        return text
    return f"{text} ± {value.half_width:,.{digits}f}"


def markdown_table(rows: Rows, *, text: bool = False) -> str:
    """Rows, the first of which is the head, as a Markdown table.

    Args:
      rows: lists of texts of equal length.
      text: columns are aligned to the left; else those from the second on to the right.
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

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
    """A text from a file as Markdown that shows it: no link, no image, no tag.

    Args:
      text: of one line; it stays as it is where it holds nothing that Markdown reads.
    """
    text = printable(text)
    return code(text) if _ACTIVE.search(text) else text


def code(text: str) -> str:
    """A text as a code span of Markdown, in which nothing is read.

    Args:
      text: of one line.
    """
    text = printable(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    room = " " if longest or not text.strip() else ""
    return f"{fence}{room}{text}{room}{fence}"


def printable(text: str) -> str:
    """A text without line breaks and other characters that steer what shows it.

    Args:
      text: any.
    """
    return "".join(letter if letter.isprintable() else " " for letter in text)


def format_value(value: Any) -> str:
    """A value as it is written after ``name=``.

    Args:
      value: a number, a bool, None, text, or a tuple of these.
    """
    if isinstance(value, (tuple, list)):
        return ",".join(map(format_value, value)) + ("," if len(value) == 1 else "")
    words: dict[Any, str] = {True: "true", False: "false"}
    return "none" if value is None else words[value] if isinstance(value, bool) else str(value)
