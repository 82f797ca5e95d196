"""CSV files as tables of text, by RFC 4180: quoted cells may have separators and line breaks."""

import csv
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_lab.data.cells import INTEGER, NUMBER, Text
from fedjax_lab.data.files import open_text
from fedjax_lab.machine.extras import imported

SEPARATORS = (",", "\t", ";", "|")
_BLOCK = 2**24  # bytes that pyarrow parses at once; a row of a file with quotes must fit


class CsvFile:
    """A CSV file whose cells are text, exactly as they are written.

    The separator is the one of comma, tab, semicolon and | that divides the header into the most
    names. Empty lines are skipped.

    Args:
      path: the file, UTF-8.

    Attributes:
      path: the file.
      separator: between cells.
      columns: names in the header.
      cells: a pyarrow table of strings; its columns are called f0, f1, ...

    Raises:
      ValueError: the file is empty, is not UTF-8, or a row is not divided as the header is; the
        message names the line.
      ImportError: pyarrow is missing.
    """

    def __init__(self, path: Path):
        needs = f"table is {str(path)!r}, which needs pyarrow"
        pyarrow = imported("pyarrow", needs, "tables")
        arrow = imported("pyarrow.csv", needs, "tables")
        self.path = path
        headers = {separator: self._header(separator) for separator in SEPARATORS}
        self.separator = max(SEPARATORS, key=lambda separator: len(headers[separator]))
        self.columns = headers[self.separator]
        if not self.columns:
            raise ValueError(f"{path} is empty; its first line must have the names of the columns.")
        has_quotes = _has_quotes(path)
        if has_quotes:
            self._check_rows()  # pyarrow joins an open quote with all that follows
        kinds = {f"f{i}": pyarrow.string() for i in range(len(self.columns))}
        try:
            cells = arrow.read_csv(
                path,
                read_options=arrow.ReadOptions(
                    autogenerate_column_names=True, block_size=_BLOCK if has_quotes else None
                ),
                parse_options=arrow.ParseOptions(
                    delimiter=self.separator, newlines_in_values=has_quotes
                ),
                convert_options=arrow.ConvertOptions(column_types=kinds, strings_can_be_null=False),
            )
        except pyarrow.ArrowException as error:
            self._check_rows()
            raise ValueError(f"{path} cannot be read: {error}") from error
        self.cells = cells.slice(1)
        if not self.cells.num_rows:
            raise ValueError(f"{path} has no rows but the names of its columns.")

    def text(self, place: int) -> Text:
        """Return a column as text."""
        encoded = self.cells.column(place).dictionary_encode().unify_dictionaries()
        distinct = encoded.chunk(0).dictionary.to_pylist()
        codes = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
        order = sorted(range(len(distinct)), key=distinct.__getitem__)
        return Text([distinct[code] for code in order], np.argsort(order)[codes])

    def numbers(self, place: int) -> np.ndarray | None:
        """Return a column as int64 or float64 [n] if each cell is a number, or None.

        Numbers are mostly distinct: without this, a column takes eight times as long.
        """
        from pyarrow import ArrowInvalid, compute, float64, int64

        column = self.cells.column(place)

        def match(pattern: str) -> bool:
            found = compute.match_substring_regex(column, f"^({pattern})$")
            return bool(compute.all(found).as_py())

        if match(INTEGER):
            try:
                return compute.cast(compute.utf8_trim(column, "+ \t"), int64()).to_numpy()
            except ArrowInvalid:  # beyond 64 bits
                pass
        if not match(NUMBER):
            return None
        return compute.cast(compute.utf8_trim_whitespace(column), float64()).to_numpy()

    def line_of(self, row: int) -> int:
        """Return the line, from 1, in which a row begins; rows count from 0, behind the header."""
        rows = self._rows(self.separator)
        return next(line for number, (line, _) in enumerate(rows, start=-1) if number == row)

    def _header(self, separator: str) -> list[str]:
        return next((cells for _, cells in self._rows(separator, strict=False)), [])

    def _check_rows(self) -> None:
        """Check that each row has as many cells as the header."""
        for line, cells in self._rows(self.separator):
            if len(cells) != len(self.columns):
                raise ValueError(
                    f"{self.path}, line {line} has {len(cells)} cells and the header "
                    f"{len(self.columns)} names, separated by {self.separator!r}. Cells that "
                    "contain the separator must be in double quotes."
                )

    def _rows(self, separator: str, strict: bool = True) -> Iterator[tuple[int, list[str]]]:
        """Yield (line where the row begins, cells)."""
        limit = csv.field_size_limit(sys.maxsize)
        with open_text(self.path, newline="") as file:
            reader: Any = csv.reader(file, delimiter=separator, strict=strict)
            line = 1
            try:
                for cells in reader:
                    if cells:
                        yield line, cells
                    line = reader.line_num + 1
            except csv.Error as error:
                raise ValueError(
                    f"{self.path}, the row that begins in line {line} is damaged: {error}. A quote "
                    "that opens a cell needs one that closes it; quotes inside are doubled."
                ) from error
            finally:
                csv.field_size_limit(limit)


def _has_quotes(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b'"') >= 0
