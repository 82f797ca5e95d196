"""Columns of tables as arrays: data frames, Arrow tables, CSV and Parquet files, mappings.

Axes: n rows of a table.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import check_choice, errors_about, warn
from fedjax_lab.data import cells
from fedjax_lab.data.cells import Missing, Text
from fedjax_lab.data.csv_files import CsvFile
from fedjax_lab.data.dtypes import unmixed
from fedjax_lab.data.files import read_parquet
from fedjax_lab.machine.extras import imported

FILES = (".csv", ".tsv", ".parquet")
_FRAMES = ("pandas", "polars", "pyarrow", "modin")  # packages

_ALLOWED = (
    "a data frame of pandas or polars, an Arrow table, a Dataset of Hugging Face, a path to a file "
    ".csv, .tsv or .parquet, or a mapping from the names of columns to arrays"
)
# Values that libraries read as dates, times and durations; the classes of pandas derive from these.
_TIMES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)
# An integer of which there is one spelling: 007, 1.0 and +1 are other ids than 7 and 1.
_PLAIN_INTEGER = r"(-?[1-9][0-9]*|0)"
_REMEDY = (
    "fill them or remove their rows, or say what they mean with missing (on the command line "
    "--missing), such as 'drop'"
)


class Column(NamedTuple):
    """A column, before its missing values have a meaning.

    Attributes:
      values: numbers or truth values [n, ...], or text; a row without a value has any.
      marks: mark of a missing value -> its rows; "" for an empty cell, None and NaN.
    """

    values: np.ndarray | Text
    marks: dict[str, np.ndarray]


class Table:
    """A table whose columns are read one by one.

    Attributes:
      name: the file's path; "table" without a file.
      columns: names of the columns.
      missing: the meaning of marks of missing values.
    """

    def __init__(self, table: Any, missing: Any = None):
        """Wrap a table, or read it from a file.

        Raises:
          TypeError: ``table`` has no named columns.
          FileNotFoundError: there is no such file.
          ValueError: a file has another ending, or it is damaged; ``missing`` is no meaning; or
            columns of a data frame have the same name.
          ImportError: narwhals or pyarrow is required and missing.
        """
        self.missing = Missing(missing)
        self._path = Path(table) if isinstance(table, (str, Path)) else None
        self.name = "table" if self._path is None else str(self._path)
        if self._path is not None:
            table = _read_file(self._path)
        self._csv = table if isinstance(table, CsvFile) else None
        # narwhals can read it.
        self._is_frame = type(table).__module__.partition(".")[0] in _FRAMES
        self._table = _as_frame(table) if self._is_frame else table
        if self._is_frame or self._csv is not None:
            columns = self._table.columns
        elif hasattr(table, "__getitem__"):  # a mapping, or with column_names and indexing by name
            columns = getattr(table, "column_names", None) or getattr(table, "keys", list)()
        else:
            raise TypeError(f"table is a {type(table).__name__}; it must be {_ALLOWED}.")
        self.columns = list(columns)
        if not self.columns:
            raise TypeError(f"table is a {type(table).__name__} without columns; pass {_ALLOWED}.")

    def where(self, row: int) -> str:
        """Return the place of a row, from 0, for messages; in a CSV file also its line."""
        if self._csv is not None:
            return f"row {row} (line {self._csv.line_of(row)} of {self._path})"
        return f"row {row}" + ("" if self._path is None else f" of {self._path}")

    def ids(self, name: Any) -> Column:
        """Read a column of clients' ids: integers, or text as it is written.

        Raises:
          ValueError: there is no such column, or it has values of several kinds.
        """
        values, marks = self._read("client", name, self._find("client", name))
        if not isinstance(values, Text):
            return self._of_ids(*_whole(values, marks))
        # NA may be an id among others of text, such as the code of Namibia. Among numbers it is a
        # mark.
        is_text = cells.kind_of(values, self.missing) != "numbers"
        marks |= self._marks(values, ("",) if is_text else cells.MARKS)
        rest = [cell for cell in values.distinct if cell not in marks]
        if self._csv is not None and all(re.fullmatch(_PLAIN_INTEGER, cell) for cell in rest):
            integers = cells.to_numbers(values.distinct, marks)
            if integers.dtype.kind == "i":
                return self._of_ids(integers[values.codes], marks)
        return Column(values, marks)

    def column(self, argument: str, name: Any, is_category: bool | None = None) -> Column:
        """Read a column of numbers, truth values or text.

        Args:
          is_category: whether the column must be text (True) or numbers (False), as that of an
            earlier table is. None: text has the kind that ``cells.kind_of`` finds.

        Raises:
          ValueError: there is no such column; it has values of several kinds, or not of the
            required one; or numbers are infinite.
        """
        place, about = self._find(argument, name), f"{argument}: the column {name!r}"
        if self._csv is not None and not is_category:
            numbers = self._csv.numbers(place)
            if numbers is not None:
                return self._of_numbers(about, numbers, {})
        values, marks = self._read(argument, name, place, bool(is_category))
        if not isinstance(values, Text):
            if not is_category:
                return self._of_numbers(about, values, marks)
            whole, gaps = _whole(values, marks)
            if "" in gaps:  # beside a gap, integers may have become floats
                values, marks = whole, gaps
            if values.dtype.kind not in "iu" or values.ndim > 1:
                raise ValueError(
                    f"categories names {name!r}; it must be columns of text, of integers or of "
                    "dates and times in x or y."
                )
            written = values.astype(str)
            written[marks.pop("", [])] = ""  # an empty cell, as in a column of text
            values = as_text(written.tolist())
        if is_category is None:
            is_category = self._is_category(about, values)
        if is_category:
            return Column(values, marks | self._marks(values, cells.TEXT_MARKS))
        marks |= self._marks(values, cells.MARKS)
        rest = [cell for cell in values.distinct if cell not in marks]
        if self._csv is not None and rest and all(map(cells.is_truth, rest)):
            truths = np.array([cell.strip().lower() == "true" for cell in values.distinct])
            return Column(truths[values.codes], marks)
        strays = [cell for cell in rest if not cells.is_number(cell)]
        if strays:
            raise self._stray_error(about, values, strays)
        numbers = cells.to_numbers(values.distinct, marks)
        return self._of_numbers(about, numbers[values.codes], marks)

    def _find(self, argument: str, name: Any) -> int:
        """Return the place of a column among all."""
        places = [place for place, column in enumerate(self.columns) if column == name]
        if len(places) > 1:
            raise ValueError(
                f"{argument} is {name!r}, the name of the columns "
                f"{' and '.join(str(place + 1) for place in places)}; give them different names."
            )
        if places:
            return places[0]
        if self._csv is not None and len(self.columns) == 1:
            raise ValueError(
                f"{argument} is {name!r}, and {self._path} has the one column {self.columns[0]!r}; "
                "cells must be separated by commas, tabs, semicolons or |."
            )
        if all(isinstance(column, str) for column in [name, *self.columns]):
            check_choice(argument, name, self.columns)
        raise ValueError(
            f"{argument} is {name!r}; it must be one of {', '.join(map(repr, self.columns))}."
        )

    def _read(self, argument: str, name: Any, place: int, is_category: bool = False) -> Column:
        """Read a column as it is: text, numbers or anything else; as categories, times are text."""
        if self._csv is not None:
            return Column(self._csv.text(place), {})
        about, marks = f"{argument}: the column {name!r}", {}
        with errors_about(f"{about} is no array", ValueError):  # rows of several shapes
            found = _of_series(self._table[:, place]) if self._is_frame else self._table[name]
            array = _as_array(found)
        if array.dtype.kind in "mM" and is_category:
            lacks = np.isnat(array)
            array = array.astype(str).astype(object)
            array[lacks] = None
        if array.dtype == object:
            array, rows = _one_kind(about, array, is_category)
            if len(rows) and array.dtype.kind in "US":
                array[rows] = array.dtype.type()  # an empty cell, which is a mark
            elif len(rows):
                marks[""] = rows
        if array.dtype.kind in "mM" and array.size:
            raise _time_error(about, array.flat[0])
        if array.dtype.kind == "S" and array.ndim == 1:
            with errors_about(f"{about} has bytes that are no UTF-8 text", UnicodeDecodeError):
                array = np.char.decode(array, "utf-8")
        if array.dtype.kind in "UT" and array.ndim == 1:
            return Column(as_text(array.tolist()), marks)
        return Column(array, marks)

    def _marks(self, text: Text, marks: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Return the rows of each cell that marks a missing value."""
        is_text = marks != cells.MARKS
        found = [cell for cell in text.distinct if self.missing.is_mark(cell, marks)]
        lost = [cell for cell in found if self.missing.of(cell, is_text=is_text) != "keep"]
        return {cell: text.rows_of(cell) for cell in lost}

    def _is_category(self, about: str, text: Text) -> bool:
        """Return True if a column of text has categories, False if it has numbers."""
        kind = cells.kind_of(text, self.missing)
        if kind == "times":
            row = int(np.argmax(text.codes == len(text.distinct) - 1))
            raise ValueError(
                f"{about} has dates or times, such as {text.distinct[-1]!r} in {self.where(row)}; "
                "convert them to numbers, or name the column in categories (on the command line "
                "--categories) if they are categories."
            )
        if kind == "truths":
            return self._csv is None
        if kind != "numbers":
            return True
        rest = [cell for cell in text.distinct if cell.strip()]
        if self._csv is not None or not all(map(cells.is_number, rest)):
            return False
        warn(
            f"{about} is text whose cells are numbers, and stays text: its values become "
            "categories. Convert it to numbers; or name it in categories (on the command line "
            "--categories) if it has categories.",
        )
        return True

    def _stray_error(self, about: str, text: Text, strays: list[str]) -> ValueError:
        """Build the error for text in a column of numbers, with the first row that has it."""
        found = set(strays)
        rows = np.flatnonzero(np.array([cell in found for cell in text.distinct])[text.codes])
        first, where = text.distinct[text.codes[rows[0]]], self.where(int(rows[0]))
        if self.missing.is_mark(first, cells.MARKS) and self.missing.of(first) == "keep":
            return ValueError(
                f"missing is 'keep' for {first!r}, which {where} has. {about} is one of numbers; "
                "it must be 'drop' or, of an input, 'mean' or a number, as in ('mean', 'keep')."
            )
        return ValueError(
            f"{about} must be numbers, and {where} has {first!r} ({len(rows):,} of "
            f"{len(text.codes):,} rows have text). Write numbers such as 2.5 or 1000; or say with "
            "missing (on the command line --missing) what this text means, such as "
            "{'unknown': 'drop'}; or name the column in categories (--categories) if it has "
            "categories."
        )

    def _of_ids(self, ids: np.ndarray, marks: dict[str, np.ndarray]) -> Column:
        """Find the marks of the user's among ids that are integers, exactly."""
        if ids.dtype.kind not in "iu" or ids.ndim > 1:
            return Column(ids, marks)
        known = [mark for mark in self.missing.marks if self.missing.of(mark) != "keep"]
        integers = {mark: int(mark) for mark in known if re.fullmatch(_PLAIN_INTEGER, mark)}
        return _with_marks(ids, marks, integers)

    def _of_numbers(self, about: str, array: np.ndarray, marks: dict[str, np.ndarray]) -> Column:
        """Find missing values among numbers: NaN, and the marks of the user's that are numbers."""
        if array.dtype.kind == "f":
            bad = ~np.isfinite(array)
            if array.ndim == 1:
                rows = np.flatnonzero(np.isnan(array))
                bad[rows] = False
                marks = {**marks, "": rows} if len(rows) else marks
            if bad.any():
                row = int(np.argwhere(bad)[0, 0])
                raise ValueError(
                    f"{about} has values that are missing, NaN or infinite, the first in "
                    f"{self.where(row)}; fill them or remove their rows."
                )
        if array.dtype.kind not in "iuf" or array.ndim > 1:
            return Column(array, marks)
        known = filter(cells.is_number, self.missing.marks)
        return _with_marks(array, marks, {mark: float(mark) for mark in known})


def _whole(
    values: np.ndarray, marks: dict[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Convert whole floats to integers: pandas makes them of ids in merges and beside NaN."""
    if values.dtype.kind == "f" and values.ndim == 1 and values.size:
        exact = 2 ** (np.finfo(values.dtype).nmant + 1)  # from here on, two may have become equal
        lacks = np.isnan(values)
        lacks[marks.get("", np.array([], int))] = True
        filled = np.where(lacks, 0, values)
        if (filled == np.rint(filled)).all() and abs(filled).max() < exact:
            values = filled.astype(np.int64)
            marks = marks | {"": np.flatnonzero(lacks)} if lacks.any() else marks
    return values, marks


def _with_marks(
    values: np.ndarray, marks: dict[str, np.ndarray], numbers: Mapping[str, float]
) -> Column:
    """Add marks that are numbers, at the rows that have them and no other mark."""
    marked = np.concatenate([np.array([], int), *marks.values()])
    rows = {m: np.setdiff1d(np.flatnonzero(values == n), marked) for m, n in numbers.items()}
    return Column(values, marks | {mark: found for mark, found in rows.items() if len(found)})


def missing_error(table: Table, about: str, column: Column, marks: Sequence[str]) -> ValueError:
    """Build the error for missing values without a meaning."""
    mark = min(marks, key=lambda mark: column.marks[mark][0])
    place = table.where(int(column.marks[mark][0]))
    is_nan = not isinstance(column.values, Text) and column.values.dtype.kind == "f"
    what = "values that are missing, NaN or infinite" if is_nan and not mark else "missing values"
    shown = f", {mark!r}" if mark else ""
    return ValueError(f"{about} has {what}, the first in {place}{shown}; {_REMEDY}.")


def as_text(values: list[str]) -> Text:
    """Number the values of a column of text."""
    distinct = sorted(set(values))
    places = {value: place for place, value in enumerate(distinct)}
    return Text(distinct, np.fromiter((places[value] for value in values), np.int64, len(values)))


def _read_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"table is {str(path)!r}; there is no such file.")
    if path.suffix.lower() not in FILES:
        raise ValueError(
            f"table is {str(path)!r}; a file must end in .csv, .tsv or .parquet. Read others with "
            "pandas or polars, and pass the data frame."
        )
    return read_parquet("table", path) if path.suffix.lower() == ".parquet" else CsvFile(path)


def _as_frame(table: Any) -> Any:
    needs = f"table is a {type(table).__name__}, which needs narwhals"
    narwhals = imported("narwhals", needs, "tables")
    try:
        frame = narwhals.from_native(table)
        frame = frame.collect() if isinstance(frame, narwhals.LazyFrame) else frame
        frame.columns  # noqa: B018  names that occur twice are noticed here
    except TypeError as error:
        raise TypeError(f"table is a {type(table).__name__}; it must be {_ALLOWED}.") from error
    except narwhals.exceptions.DuplicateError as error:
        raise ValueError(f"table has columns of the same name; rename them: {error}") from error
    return frame


def _of_series(series: Any) -> np.ndarray:
    """Convert a narwhals Series to an array, of objects if it is not plain numbers."""
    kind = series.dtype
    if series.null_count() or not kind.is_numeric() or kind.is_decimal():
        values = series.to_list()
        if values and isinstance(values[0], (list, np.ndarray)):
            return np.array(values)
        array = np.empty(len(values), object)
        array[:] = values
        for row in np.flatnonzero(series.is_null().to_numpy()):  # pandas uses NaN
            array[row] = None
        return array
    return series.to_numpy()


def _as_array(values: Any) -> np.ndarray:
    """Convert to an array; masked values become None."""
    if not np.ma.is_masked(values):
        return unmixed(values)
    array = np.asarray(values).astype(object)
    array[np.ma.getmaskarray(values)] = None
    return array


def _one_kind(about: str, array: np.ndarray, is_category: bool) -> tuple[np.ndarray, np.ndarray]:
    """Convert objects to an array of text, truth values or numbers, and the rows without one."""
    flat = array.ravel()
    lacks = np.fromiter(map(cells.is_missing, flat), bool, len(flat))
    if lacks.any():
        if array.ndim == 1 and lacks.all():
            raise ValueError(f"{about} has no value in any row; leave it out.")
        if array.ndim > 1:
            row = int(np.argwhere(lacks.reshape(array.shape))[0, 0])
            raise ValueError(f"{about} has missing values, the first in row {row}; {_REMEDY}.")
        array = array.copy()
        array[lacks] = flat[~lacks][0]
    truths: Any = (bool, np.bool_)  # not among numbers, although Python's are integers
    # Decimals are those of a database.
    others: Any = (str, bytes, (int, np.integer), (int, float, np.number, Decimal))
    values = array.ravel()
    has_truths = any(isinstance(value, truths) for value in values)
    for kind in [truths] if has_truths else others:
        if all(isinstance(value, kind) for value in values):
            dtype = np.float64 if any(isinstance(value, Decimal) for value in values) else None
            return np.array(array.tolist(), dtype), np.flatnonzero(lacks)
    times = [value for value in values if isinstance(value, _TIMES)]
    if is_category and len(times) == len(values) and array.ndim == 1:
        return np.array([str(value) for value in values]), np.flatnonzero(lacks)
    if times:
        raise _time_error(about, times[0])
    kinds = sorted({type(value).__name__ for value in values})
    raise ValueError(
        f"{about} has {', '.join(kinds)}; it must have only numbers, only truth values or only "
        "text."
    )


def _time_error(about: str, value: Any) -> ValueError:
    """Build the error for a column of dates, times or durations."""
    return ValueError(
        f"{about} has dates or times, such as {str(value)!r}; leave the column out, or convert "
        "them to numbers, such as seconds (in pandas, (t - t.min()).dt.total_seconds()), or to "
        "text if they are ids; or name the column in categories (on the command line "
        "--categories) if it has categories."
    )
