"""Columns of tables as arrays: data frames, Arrow tables, CSV and Parquet files, mappings.

Axes: n rows of a table.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_lab.checks import check_choice

_NEEDS = "`pip install 'fedjax-lab[tables]'`."
_ALLOWED = (
    "a data frame of pandas or polars, an Arrow table, a Dataset of Hugging Face, a path to a file "
    ".csv or .parquet, or a mapping from the names of columns to arrays"
)


class Table:
    """A table whose columns are read one by one.

    Attributes:
      columns: names of the columns.
    """

    def __init__(self, table: Any):
        """Wrap a table, or read it from a file.

        Args:
          table: as in ``from_table``.

        Raises:
          TypeError: ``table`` has no named columns.
          FileNotFoundError: there is no such file.
          ValueError: a file is neither .csv nor .parquet, or it is damaged.
          ImportError: narwhals or pyarrow is required and missing.
        """
        if isinstance(table, (str, Path)):
            table = _read_file(Path(table))
        # A mapping, or an object with column_names and indexing by name.
        self._plain = not _is_frame(table) and hasattr(table, "__getitem__")
        if self._plain:
            self._frame = table
            columns = getattr(table, "column_names", None) or getattr(table, "keys", list)()
        else:
            self._frame = _as_frame(table)
            columns = self._frame.columns
        self.columns = list(columns)
        if not self.columns:
            raise TypeError(f"table is a {type(table).__name__} without columns; pass {_ALLOWED}.")

    def column(self, argument: str, name: str) -> np.ndarray:
        """Return a column as an array [n, ...] of numbers or text.

        Args:
          argument: argument of the caller that has the name, for errors.
          name: name of the column.

        Raises:
          ValueError: there is no such column, a value is missing, or values are of several kinds.
        """
        check_choice(argument, name, self.columns)
        column = self._frame[name]
        try:
            array = np.asarray(column) if self._plain else _of_series(column)
        except ValueError as error:  # rows of several shapes
            raise ValueError(f"{argument}: the column {name!r} is no array: {error}") from error
        if array.dtype == object:
            array = _one_kind(argument, name, array)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(
                f"{argument}: the column {name!r} has values that are missing, NaN or infinite, "
                f"the first in row {int(np.argwhere(~np.isfinite(array))[0, 0])}; fill them or "
                "remove their rows."
            )
        return array


def as_codes(
    argument: str, name: str, column: np.ndarray, values: Sequence[str] | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Encode the values of a text column as integers.

    Args:
      argument: argument of the caller that has the name, for errors.
      name: name of the column.
      column: text [n].
      values: the values of the codes 0, 1, ...; None: the values that occur, sorted.

    Returns:
      int32 [n], and the values.

    Raises:
      ValueError: a value is not in ``values``, or one of these occurs twice.
    """
    found, codes = np.unique(column.astype(str), return_inverse=True)
    if values is None:
        return codes.astype(np.int32), tuple(found.tolist())
    places = {value: i for i, value in enumerate(values)}
    if len(places) != len(values):
        raise ValueError(f"categories[{name!r}] names a value twice; they must differ.")
    for value in found.tolist():
        if value not in places:
            raise ValueError(
                f"{argument}: the column {name!r} has the value {value!r}, which is not in "
                f"categories[{name!r}]: {', '.join(map(str, values[:10]))}."
            )
    numbers = np.array([places[value] for value in found.tolist()], np.int32)
    return numbers[codes], tuple(values)


def _read_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"table is {str(path)!r}; there is no such file.")
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"table is {str(path)!r}; a file must end in .csv or .parquet.")
    try:
        import pyarrow
        from pyarrow import csv, parquet
    except ImportError as error:
        raise ImportError(f"table is {str(path)!r}, which needs pyarrow: {_NEEDS}") from error
    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        # An empty cell is a missing value, in columns of text as in columns of numbers.
        return csv.read_csv(path, convert_options=csv.ConvertOptions(strings_can_be_null=True))
    except pyarrow.ArrowException as error:
        raise ValueError(f"table is {str(path)!r}, which cannot be read: {error}") from error


def _is_frame(table: Any) -> bool:
    """Return True if narwhals can read the table."""
    return type(table).__module__.partition(".")[0] in ("pandas", "polars", "pyarrow", "modin")


def _as_frame(table: Any) -> Any:
    if not _is_frame(table):
        raise TypeError(f"table is a {type(table).__name__}; it must be {_ALLOWED}.")
    try:
        import narwhals
    except ImportError as error:
        raise ImportError(f"table is a {type(table).__name__}: {_NEEDS}") from error
    try:
        frame = narwhals.from_native(table)
    except TypeError as error:
        raise TypeError(f"table is a {type(table).__name__}; it must be {_ALLOWED}.") from error
    return frame.collect() if isinstance(frame, narwhals.LazyFrame) else frame


def _of_series(series: Any) -> np.ndarray:
    """Convert a narwhals Series to an array; with missing values, to objects that include None."""
    if series.null_count() or not series.dtype.is_numeric():
        values = series.to_list()
        if values and isinstance(values[0], (list, np.ndarray)):
            return np.array(values)
        array = np.empty(len(values), object)
        array[:] = values
        for row in np.flatnonzero(series.is_null().to_numpy()):  # pandas uses NaN
            array[row] = None
        return array
    if series.dtype.is_decimal():
        return np.array(series.to_list(), np.float64)
    return series.to_numpy()


def _one_kind(argument: str, name: str, array: np.ndarray) -> np.ndarray:
    """Convert objects to an array of text, truth values or numbers."""
    for row, value in enumerate(array.ravel()):
        if value is None or value is not value:
            raise ValueError(
                f"{argument}: the column {name!r} has missing values, the first in row {row}; fill "
                "them or remove their rows."
            )
    for kind in (str, bytes, (bool, np.bool_), (int, np.integer), (int, float, np.number)):
        if all(
            isinstance(value, kind)
            and (isinstance(value, (bool, np.bool_)) <= (kind == (bool, np.bool_)))
            for value in array.ravel()
        ):
            return np.array(array.tolist())
    kinds = sorted({type(value).__name__ for value in array.ravel()})
    raise ValueError(
        f"{argument}: the column {name!r} has {', '.join(kinds)}; it must have only numbers, only "
        "truth values or only text."
    )
