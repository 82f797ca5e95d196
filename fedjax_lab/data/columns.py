"""Inputs, targets and clients' ids of a table, with the meaning of missing values applied.

Axes: n rows of a table, less those that are dropped.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab.data.cells import Missing, Text
from fedjax_lab.data.dtypes import check_float32
from fedjax_lab.data.sources import Examples
from fedjax_lab.data.tables import Column, Table, missing_error

# The name of a column, or of several columns that become one array.
Columns = Any
# {text column: its values in the order of their codes, or None for those that occur}
Categories = Mapping[Any, Sequence[str] | None]
Marks = Mapping[str, np.ndarray]  # {mark of a missing value: the rows that have it}

_EXACT = 2**24  # up to here float32 holds all integers
_LOST = 0.01  # share of a column's standard deviation that rounding may take


class TableExamples(NamedTuple):
    """Examples of a table, in the order of its rows.

    Attributes:
      examples: inputs and targets [n, ...].
      ids: clients' ids [n], integers or text; None without a column of them.
      categories: {text column: its values in the order of their codes}.
      means: {column of numbers: the mean that replaces missing values, here or in a later table}.
    """

    examples: Examples
    ids: np.ndarray | None
    categories: dict[Any, tuple[str, ...]]
    means: dict[Any, float]


def read_columns(
    table: Table,
    x: Columns,
    y: Columns,
    *,
    client: Any = None,
    categories: Categories | None = None,
    first: TableExamples | None = None,
    training: np.ndarray | None = None,
    names: tuple[str, str] = ("x", "y"),
) -> TableExamples:
    """Read inputs, targets and clients' ids of a table.

    Args:
      x, y, client, categories: as in ``from_table``; without ``client`` there are no ids.
      first: what was read from an earlier table: its types, categories and means are used.
      training: int [m], the rows whose numbers make the means, counted without the dropped ones;
        None: all.

    Raises:
      ValueError: as ``from_table``.
    """
    given = dict(categories or {}) if first is None else dict(first.categories)
    # dict(train.categories) is empty if the first table had no text.
    has_values = not given or any(values is not None for values in given.values())
    is_later = first is not None or (categories is not None and has_values)
    found: dict[tuple[str, Any], Column] = {}
    for argument, of in zip(names, (x, y), strict=True):
        for name in several(of):
            is_category = True if name in given else (False if is_later else None)
            values, marks = table.column(argument, name, is_category)
            if (argument, name) in found:
                raise ValueError(f"{argument} names the column {name!r} twice; name it once.")
            known = given.get(name) or ()  # NA, for example, if the first table has it as a value
            marks = {mark: rows for mark, rows in marks.items() if mark not in known}
            found[argument, name] = Column(values, marks)
    for name in given:
        if first is None and not any(name == column for _, column in found):
            raise ValueError(f"categories names {name!r}; it must be columns of text in x or y.")
    if client is not None:
        found["client", client] = table.ids(client)
    _check_lengths(found)
    if not next(iter(found.values())).values.shape[0]:
        raise ValueError(f"{table.name} has no rows; there must be at least one.")
    chosen = ~_dropped(table, found)
    known = chosen  # the rows that means may depend on
    if training is not None:
        known = np.zeros_like(chosen)
        known[np.flatnonzero(chosen)[training]] = True
    ids = None
    if client is not None:
        of_rows = found["client", client].values
        if isinstance(of_rows, Text):
            of_rows = np.array(of_rows.distinct)[of_rows.codes]
        ids = of_rows[chosen]
    used: dict[Any, tuple[str, ...]] = {}
    means = {} if first is None else dict(first.means)
    joined = []
    for argument, of in zip(names, (x, y), strict=True):
        parts = []
        for name in several(of):
            column = found[argument, name]
            if isinstance(column.values, Text):
                used[name] = _values_of(name, column.values, chosen, given)
                parts.append(_codes(table, argument, name, column.values, chosen, used[name]))
                continue
            numbers, marks = column.values, column.marks
            _check_numbers(argument, name, numbers)
            if argument == "x" and name not in means and table.missing.has("mean"):
                means |= _mean_of(name, numbers, marks, known)
            parts.append(_filled(argument, name, numbers, marks, table.missing, means)[chosen])
        joined.append(_joined(argument, of, parts))
    inputs, targets = joined
    if targets.dtype == bool:  # losses take classes
        targets = targets.astype(np.int32)
    return TableExamples(Examples(inputs, targets), ids, used, means)


def several(names: Columns) -> list[Any]:
    """Return the names of one or several columns as a list."""
    return [names] if _is_one(names) else list(names)


def _is_one(names: Columns) -> bool:
    return isinstance(names, str) or not isinstance(names, Iterable)


def _check_lengths(found: Mapping[tuple[str, Any], Column]) -> None:
    """Check that all columns have the same number of rows."""
    shapes = {key: column.values.shape for key, column in found.items()}
    first = next((key for key in shapes if key[0] == "client"), next(iter(shapes)))
    for (argument, name), shape in shapes.items():
        if shape[:1] != shapes[first][:1]:
            of_first = "the clients' ids" if first[0] == "client" else f"the column {first[1]!r}"
            raise ValueError(
                f"{argument} has shape {shape} and {of_first} {shapes[first]}; the numbers of rows "
                f"must be equal (column {name!r})."
            )


def _dropped(table: Table, found: Mapping[tuple[str, Any], Column]) -> np.ndarray:
    """Return which rows are left out, bool [n]; check that every mark has a meaning."""
    dropped = np.zeros(next(iter(found.values())).values.shape[:1], bool)
    for (argument, name), column in found.items():
        about = f"{argument}: the column {name!r}"
        is_text = isinstance(column.values, Text)
        meanings = {mark: table.missing.of(mark, is_text=is_text) for mark in column.marks}
        open_marks = [mark for mark, meaning in meanings.items() if meaning is None]
        if open_marks:
            raise missing_error(table, about, column, open_marks)
        is_input = argument == "x" and not is_text
        for mark, rows in column.marks.items():
            meaning = meanings[mark]
            if meaning == "drop":
                dropped[rows] = True
            elif meaning == "keep" or not is_input:
                kind = "an input of numbers" if is_input else "no input of numbers"
                allowed = "'drop', 'mean' or a number" if is_input else "'drop' or 'keep' (of text)"
                if is_text and argument == "x" and meaning != "keep":
                    kind, allowed = "one of text", f"'drop' or 'keep', as in ({meaning!r}, 'keep')"
                if argument == "client" and meaning == "keep":  # but of numbers it is not
                    kind = "one of ids that look like numbers"
                    allowed = (
                        f"({table.missing.of(mark)!r}, 'drop'), which leaves the row out, or "
                        "'keep' for both kinds of columns, which makes the mark an id"
                    )
                raise ValueError(
                    f"missing is {meaning!r} for {mark!r}, which {table.where(int(rows[0]))} has. "
                    f"{about} is {kind}; it must be {allowed}."
                )
    if len(dropped) and dropped.all():
        empty = [n for (_, n), column in found.items() if _is_empty(column)]
        hint = f"; leave out {empty[0]!r}, which has no other" if empty else ""
        raise ValueError(f"missing is 'drop', and every row has a missing value{hint}.")
    return dropped


def _is_empty(column: Column) -> bool:
    """Return True if every row has a missing value."""
    return sum(map(len, column.marks.values())) == column.values.shape[0]


def _check_numbers(argument: str, name: Any, column: np.ndarray) -> None:
    """Check that a column has numbers: floats, integers or truth values."""
    if column.dtype.kind not in "biuf":
        raise ValueError(
            f"{argument} is {name!r}, of dtype {column.dtype}; it must be numbers or text."
        )


def _mean_of(name: Any, numbers: np.ndarray, marks: Marks, known: np.ndarray) -> dict[Any, float]:
    """Return {name: mean of a column's numbers in some rows}; {} if there are none.

    Args:
      known: bool [n], the rows.
    """
    has_value = known.copy()
    for rows in marks.values():
        has_value[rows] = False
    if numbers.ndim > 1 or not has_value.any():
        return {}
    return {name: float(numbers[has_value].mean(dtype=np.float64))}


def _filled(
    argument: str,
    name: Any,
    numbers: np.ndarray,
    marks: Marks,
    missing: Missing,
    means: Mapping[Any, float],
) -> np.ndarray:
    """Return a column's numbers, with missing values filled in except in rows that are dropped."""
    for mark, rows in marks.items():
        meaning = missing.of(mark)
        if meaning == "drop":
            continue
        if meaning == "mean" and name not in means:
            raise ValueError(
                f"missing is 'mean', and {argument}: the column {name!r} has no other numbers, "
                "or none in a training row."
            )
        number = means[name] if meaning == "mean" else meaning
        numbers = numbers.astype(_dtype_with(numbers.dtype, number))
        numbers[rows] = number
    return numbers


def _dtype_with(dtype: np.dtype, number: float) -> np.dtype:
    """Return a dtype like this one that holds a number, too."""
    if dtype.kind == "f" or (dtype.kind == "b" and number in (0, 1)):
        return dtype
    if not float(number).is_integer():
        return np.dtype(np.float64)
    wide = np.dtype(np.int8) if dtype.kind == "b" else dtype
    return np.result_type(wide, np.min_scalar_type(int(number)))


def _values_of(name: Any, text: Text, chosen: np.ndarray, given: Categories) -> tuple[str, ...]:
    """Return the values of a text column in the order of their codes: the given ones, or those
    that occur in the chosen rows.
    """
    values = given.get(name)
    if values is None:
        return tuple(text.distinct[code] for code in np.unique(text.codes[chosen]))
    if isinstance(values, (str, Mapping)):
        raise TypeError(
            f"categories[{name!r}] is {values!r}; it must be a sequence of the column's values."
        )
    if len(set(values)) != len(values):
        raise ValueError(f"categories[{name!r}] names a value twice; they must differ.")
    return tuple(values)


def _codes(
    table: Table,
    argument: str,
    name: Any,
    text: Text,
    chosen: np.ndarray,
    values: Sequence[str],
) -> np.ndarray:
    """Encode the chosen rows of a text column as int32, by the places of its values."""
    codes, places = text.codes[chosen], {value: place for place, value in enumerate(values)}
    place_of = np.zeros(len(text.distinct), np.int32)
    for code in np.unique(codes):
        value = text.distinct[code]
        if value not in places:
            row = int(np.flatnonzero(chosen & (text.codes == code))[0])
            raise ValueError(
                f"{argument}: the column {name!r} has the value {value!r}, which is not in "
                f"categories[{name!r}]: {', '.join(map(str, values[:10]))}. The first is in "
                f"{table.where(row)}."
            )
        place_of[code] = places[value]
    return place_of[codes]


def _check_exact(argument: str, name: Any, part: np.ndarray) -> None:
    """Refuse floats that float32 does not hold, or cannot tell apart."""
    if part.dtype != np.float64 or not part.size:
        return
    check_float32(f"{argument}: the column {name!r}", part)
    loss, spread = np.abs(part.astype(np.float32) - part).max(), part.std()
    if loss > _LOST * spread > 0:
        raise ValueError(
            f"{argument}: the column {name!r} has values around {part.mean():.10g} that differ by "
            f"about {spread:.3g}, which float32 rounds by up to {loss:.3g}: subtract a constant "
            "from the column, or convert it to text if it is a category."
        )


def _joined(argument: str, names: Columns, parts: list[np.ndarray]) -> np.ndarray:
    """Return one column as it is, and several as float32 [n, number of columns]."""
    is_one = _is_one(names) or (len(parts) == 1 and parts[0].ndim > 1)
    if not is_one or jax.dtypes.canonicalize_dtype(np.float64) == np.float32:
        for name, part in zip(several(names), parts, strict=True):
            _check_exact(argument, name, part)
    if is_one:
        return parts[0]
    for name, part in zip(names, parts, strict=True):
        largest = int(np.abs(part).max()) if part.dtype.kind in "iu" and part.size else 0
        if largest > _EXACT:
            raise ValueError(
                f"{argument}: the column {name!r} has the value {largest}. Several columns "
                f"become float32, which represents integers only up to {_EXACT} exactly. Scale "
                "the column, or convert it to text if it is a category."
            )
    shapes = {part.shape for part in parts}
    if len(shapes) != 1 or parts[0].ndim != 1:
        raise ValueError(
            f"{argument} is {list(names)}, columns of shapes {sorted(shapes)}; several must be "
            "of one shape [n]."
        )
    return np.stack(parts, axis=1).astype(np.float32)
