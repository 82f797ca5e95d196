"""Data with natural clients: tables with a column of ids, LEAF's and FedJAX's files.

Axes: n rows of a table, n_i examples of client i.
"""

import dataclasses
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization

from fedjax_lab.checks import errors_about, repeated, warn
from fedjax_lab.data import tfds
from fedjax_lab.data.clients import from_clients, name_of
from fedjax_lab.data.columns import Categories, Columns, read_columns, several
from fedjax_lab.data.federated import FederatedArrays, partition
from fedjax_lab.data.partition import number_owners
from fedjax_lab.data.sources import Examples
from fedjax_lab.data.tables import Table
from fedjax_lab.machine.json_file import distinct
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import PyTree


@suggest_keywords
def from_table(
    table: Any,
    *,
    client: Any,
    x: Columns,
    y: Columns,
    min_size: int = 1,
    categories: Categories | None = None,
    missing: Any = None,
) -> FederatedArrays:
    """Put a table with a column of client ids on the device.

    ::

        clients = data.from_table("users.csv", client="user_id", x=["age", "dose"], y="response")

    A column of text, as all columns of a CSV file are, is one of numbers if at least half of its
    cells that are not missing are numbers (also as people write them: "2,5", "$25", "25%",
    "1,000"). Then any text that is no number is an error. In a CSV file it is one of truth values
    if all cells are "true" or "false". Otherwise it has categories. Text of another table whose
    cells are all numbers stays text, with a warning.

    Args:
      table: a pandas or polars data frame, a pyarrow table, a ``Dataset`` of Hugging Face's
        ``datasets``, the path of a .csv, .tsv or .parquet file, or a mapping from names to columns
        [n, ...], such as a dict of arrays. A file of text is UTF-8, has a header, and may separate
        cells by commas, tabs, semicolons or |.
      client: name of the column of client ids: integers, whole floats (as pandas makes of integers
        in a merge) or text. The ids of a CSV file are as it has them: "007" and "7" are two
        clients.
      x: name of the column of inputs; or several names of columns [n], which become one float array
        [n, number of columns].
      y: name of the column of targets, or several names. One that is also among several inputs is
        warned of.
      min_size: examples that every client has at least.
      categories: {text column: its values in the order of their codes, or None for the values that
        occur, sorted}. It makes a column one of text, whatever its cells are. With the values of a
        first table, ``dict(train.categories)``, all other columns must be numbers.
      missing: what a missing value means: "drop" (leave the row out), "mean" (of the column's other
        numbers) or a number to fill in, both in ``x`` alone, or "keep" (a category like others).
        The mean is of all rows, also those that ``split_clients`` or ``split_examples`` hold out
        later; where held-out rows must not count, fill the gaps yourself.
        None and NaN are missing, and in text the marks ``cells.MARKS`` (an empty cell, ?, NA, N/A,
        NaN, null, None, - and .; among categories not ?, None, - and .). A pair is for columns of
        numbers and of text, such as ("mean", "keep"). A mapping from marks to
        these gives single marks a meaning in all columns, also others, such as {"?": "mean",
        "-9": "drop"}; its mark "" is that of empty cells, None and NaN. None: a missing value is an
        error.

    Returns:
      The clients in the order of their ids, which are their ``names``. Text columns in ``x`` or
      ``y`` become integers from 0; ``categories`` of the result gives their values.

    Raises:
      TypeError: ``table`` has no named columns.
      FileNotFoundError: there is no such file.
      ImportError: narwhals or pyarrow is required and missing.
      ValueError: a file is damaged, or not UTF-8; a column is missing, has another length, values
        of several kinds, missing values without a meaning, or text among numbers (the message names
        row, column and value); ``categories`` or ``missing`` do not fit; a client has fewer than
        ``min_size`` rows; or ids are neither integers nor text.
    """
    _warn_of_leaks(several(x), several(y))
    rows = read_columns(Table(table, missing), x, y, client=client, categories=categories)
    names, owners = number_owners(rows.ids, min_size, f"client={client!r}")
    clients = partition(rows.examples, owners, len(names), min_size=min_size)
    return dataclasses.replace(clients, names=names, categories=tuple(rows.categories.items()))


def _warn_of_leaks(x: list[Any], y: list[Any]) -> None:
    """Warn of targets among the inputs; an autoencoder has all inputs as targets."""
    both = [name for name in y if name in x]
    if both and set(x) != set(y):
        warn(
            f"x has {both[0]!r}, which is in y, too: a model that sees what it is to foretell "
            "learns nothing. Leave it out of x."
        )


@suggest_keywords
def from_tfds(
    name: str,
    *,
    client: str,
    x: Columns,
    y: Columns,
    split: str = "train",
    data_dir: str | Path | None = None,
    min_size: int = 1,
    categories: Categories | None = None,
    missing: Any = None,
) -> FederatedArrays:
    """Put a prepared tensorflow-datasets set with a feature of client ids on the device.

    Args:
      name: name of the set in TFDS, such as "movielens/100k-ratings".
      client: feature of client ids, integers or text.
      x: the feature of inputs, or several.
      y: the feature of targets, or several.
      split: split of the set.
      data_dir: the TFDS directory; None: TFDS's own.
      min_size, categories, missing: as in ``from_table``.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared; the message says how to.
      ValueError: the set, split or feature does not exist, or as in ``from_table``.
    """
    wanted = [client, *several(x), *several(y)]
    table = tfds.read_columns(f"tfds:{name}", wanted, split, data_dir)
    about: dict[str, Any] = {"min_size": min_size, "categories": categories, "missing": missing}
    return from_table(table, client=client, x=x, y=y, **about)


@suggest_keywords
def load_leaf(
    folder: str | Path,
    *,
    convert: Callable[[list, list], PyTree] | None = None,
    min_size: int = 1,
) -> FederatedArrays:
    """Read the users of a folder in LEAF's layout, such as ``data/femnist/data/train``.

    Every file ``*.json`` has ``users`` (ids), ``num_samples`` and ``user_data`` with lists ``x``
    and ``y`` for each user. Source: Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018.

    Args:
      folder: folder of the files, which are read in the order of their names.
      convert: (x, y) of a user -> pytree of arrays [n_i, ...], for example if x is text. None:
        ``Examples``, which needs numbers of one shape.
      min_size: examples that every user has at least.

    Returns:
      The users in the order of the files. If only some users have integers, all values become
      floats.

    Raises:
      FileNotFoundError: ``folder`` is no folder, or has no such file.
      TypeError: ``convert`` is no function.
      ValueError: a file is damaged or lacks a field; a user occurs twice, has data but is not among
        ``users``, or has another number of examples than ``num_samples``; no file has a user; or as
        in ``from_clients``.
    """
    _check_convert(convert, "(x, y)")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"folder is {folder}; there is no such folder.")
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"folder is {folder}, which has no file *.json.")
    clients: dict[str, PyTree] = {
        user: convert(x, y) if convert else _leaf_examples(where, x, y)
        for user, where, x, y in leaf_users(paths)
    }
    if not clients:
        raise ValueError(f"folder is {folder}, whose files have no users.")
    if convert is None:  # 1 and 1.5 are both numbers in JSON
        some = [user for user in clients.values() if len(user.y)] or list(clients.values())
        x_kind = np.result_type(*(user.x.dtype for user in some))
        y_kind = np.result_type(*(user.y.dtype for user in some))
        clients = {
            user: Examples(x.astype(x_kind), y.astype(y_kind)) for user, (x, y) in clients.items()
        }
    return from_clients(clients, min_size=min_size)


def _check_convert(convert: Any, of: str) -> None:
    if not (convert is None or callable(convert)):
        raise TypeError(f"convert is {convert!r}; it must be a function of {of}, or None.")


def _leaf_examples(where: str, x: list, y: list) -> Examples:
    about = f"{where}: convert is None, so that x and y must be numbers of one shape; found"
    arrays = []
    for values in (x, y):
        with errors_about(about, ValueError):
            array = np.array(values)  # an error for several lengths
            if array.dtype.kind not in "biuf":
                raise ValueError(f"{array.dtype}.")
            if _is_beyond_int64(values, array):
                raise ValueError("integers beyond int64.")
        arrays.append(array)
    return Examples(*arrays)


def _is_beyond_int64(values: list, array: np.ndarray) -> bool:
    """Return whether integers became uint64, or float64, which rounds them."""
    if array.dtype.kind == "u":
        return True
    if array.dtype.kind != "f" or not np.abs(array).max(initial=0.0) >= 2.0**63:
        return False
    return all(isinstance(value, int) for value in np.array(values, object).flat)


def leaf_users(paths: Iterable[Path]) -> Iterator[tuple[str, str, list, list]]:
    """Read (user, location for errors, x, y) of the users of files in LEAF's layout.

    Raises:
      ValueError: a file is damaged, lacks a field or has one twice, or its fields differ in their
        users or numbers of examples; or a user occurs twice.
    """
    seen = set()
    for path in paths:
        for user, x, y in _leaf_file(path):
            if user in seen:
                raise ValueError(f"{path}: the user {user!r} occurs twice.")
            seen.add(user)
            yield user, f"{path}, user {user!r}", x, y


def _leaf_file(path: Path) -> list[tuple[str, list, list]]:
    """Read (user, x, y) of the users of one file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text, object_pairs_hook=distinct)
        users, data = list(map(str, content["users"])), content["user_data"]
        found = [(user, list(data[user]["x"]), list(data[user]["y"])) for user in users]
        stated = content.get("num_samples", [len(y) for _, _, y in found])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not in LEAF's layout (users, num_samples, user_data with x and y for each "
            f"user): {type(error).__name__} {error}"
        ) from error
    if others := data.keys() - set(users):
        raise ValueError(
            f"{path}: user_data has {min(others)!r}, who is not among users; its examples would be "
            "left out."
        )
    counts = [len(y) for _, _, y in found]
    if stated != counts:
        raise ValueError(f"{path}: num_samples {_difference(users, stated, counts)}.")
    return found


def _difference(users: list[str], stated: Any, counts: list[int]) -> str:
    """Describe how LEAF's ``num_samples`` differs from the numbers of examples."""
    if not isinstance(stated, list) or len(stated) != len(counts):
        return f"is {stated!r:.60}; it must be a list of {len(counts)} numbers, one for each user"
    rows = zip(users, stated, counts, strict=True)
    user, number, count = next(row for row in rows if row[1] != row[2])
    return f"is {number!r} for the user {user!r}, who has {count} example{'s' * (count != 1)}"


@suggest_keywords
def load_fedjax(
    path: str | Path,
    *,
    convert: Callable[[dict[str, Any]], PyTree] | None = None,
    min_size: int = 1,
) -> FederatedArrays:
    """Read a federated data set in FedJAX's SQLite format, such as its EMNIST.

    Args:
      path: the file, as ``SQLiteFederatedDataBuilder`` writes it: a table ``federated_data`` with
        ``client_id`` and ``data``, named arrays packed with msgpack and zlib.
      convert: the arrays of a client -> pytree of arrays [n_i, ...], such as
        ``lambda d: (d["pixels"], d["label"])``. None: the dict unchanged.
      min_size: examples that every client has at least.

    Returns:
      The clients in the order of the file.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: ``convert`` is no function.
      ValueError: it is not such a database, or it is damaged; ids are neither bytes nor text, or
        two are the same text; arrays have text; or as in ``from_clients``.
    """
    from msgpack import ExtType  # flax needs msgpack

    _check_convert(convert, "a client's dict of arrays")
    clients: dict[str, PyTree] = dict(read_fedjax(Path(path)))
    if convert is not None:
        clients = {name: convert(arrays) for name, arrays in clients.items()}
    is_packed = lambda leaf: isinstance(leaf, ExtType)  # noqa: E731
    for name, examples in clients.items():
        if any(map(is_packed, jax.tree.leaves(examples, is_leaf=is_packed))):
            raise ValueError(
                f"{path}: {name!r} has arrays of text, which FedJAX packs in a way of its own; "
                "convert must return arrays of numbers."
            )
    return from_clients(clients, min_size=min_size)


def read_fedjax(path: Path) -> dict[str, dict[str, Any]]:
    """Read the clients of a file in FedJAX's SQLite format: {client: {name: array}}.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not such a database, or it is damaged; or ids are neither bytes nor text, or
        two are the same text.
    """
    if not path.is_file():
        raise FileNotFoundError(f"path is {path}; there is no such file.")
    clients: list[tuple[str, dict[str, Any]]] = []
    kinds = (sqlite3.Error, zlib.error, ValueError, TypeError)
    with (
        errors_about(f"{path}: no federated data set of FedJAX's", kinds),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection,
    ):
        rows = connection.execute("SELECT client_id, data FROM federated_data ORDER BY rowid")
        for client_id, packed in rows:
            arrays = serialization.msgpack_restore(zlib.decompress(packed))
            if not isinstance(client_id, (bytes, str)):
                raise TypeError(f"a client has the id {client_id!r}; ids must be bytes or text.")
            clients.append((name_of(client_id), arrays))
    if (twice := repeated(name for name, _ in clients)) is not None:
        raise ValueError(f"{path}: two clients have ids with the text {twice!r}; they must differ.")
    return dict(clients)
