"""Write Markdown: tables, and texts from files that must show literally."""

import re

Cells = list[list[str]]
# What begins a link, an image, a tag, a formula or a mention, in some reader of Markdown; and text
# between underscores, which is in italics unless they stand within a word.
_ACTIVE = re.compile(r"[`*\[\]<>\\!&~$@]|://|www\.|(?<!\w)_\S(.*\S)?_(?!\w)")


def markdown_table(rows: Cells, *, text: bool = False) -> str:
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
