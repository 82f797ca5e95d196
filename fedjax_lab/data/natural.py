"""Data with natural clients: tables with a column of ids, LEAF's and FedJAX's files.

Axes: n rows of a table, n_i examples of client i.
"""

import dataclasses
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization

from fedjax_lab.data import tfds
from fedjax_lab.data.clients import from_clients
from fedjax_lab.data.federated import FederatedArrays, partition
from fedjax_lab.data.partition import number_owners
from fedjax_lab.data.sources import Examples
from fedjax_lab.data.tables import Table, as_codes
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import PyTree

# The name of a column, or of several columns that become one array.
Columns = str | Sequence[str]

_CONVERT = "convert is None, so that x and y must be numbers of one shape; found:"
_EXACT = 2**24  # up to here float32 holds all integers


@suggest_keywords
def from_table(
    table: Any,
    *,
    client: str,
    x: Columns,
    y: Columns,
    min_size: int = 1,
    categories: Mapping[str, Sequence[str]] | None = None,
) -> FederatedArrays:
    """Put a table with a column of client ids on the device.

    ::

        clients = data.from_table("users.csv", client="user_id", x=["age", "dose"], y="response")

    Args:
      table: a pandas or polars data frame, a pyarrow table, a ``Dataset`` of Hugging Face's
        ``datasets``, the path of a .csv or .parquet file, or a mapping from names to columns [n,
        ...], such as a dict of arrays.
      client: name of the column of client ids, integers or text.
      x: name of the column of inputs; or several names of columns [n], which become one float array
        [n, number of columns].
      y: name of the column of targets, or several names.
      min_size: examples that every client has at least.
      categories: {text column: its values in the order of their codes}, such as
        ``dict(train.categories)`` for a second table. None: the values that occur, sorted.

    Returns:
      The clients in the order of their ids, which are their ``names``. Text columns in ``x`` or
      ``y`` become integers from 0; ``categories`` of the result gives their values.

    Raises:
      TypeError: ``table`` has no named columns.
      FileNotFoundError: there is no such file.
      ImportError: narwhals or pyarrow is required and missing.
      ValueError: a column is missing, has another length, missing values, or values of several
        kinds; ``categories`` do not fit; a client has fewer than ``min_size`` rows; or ids are
        neither integers nor text.
    """
    read = Table(table)
    names, owners = number_owners(read.column("client", client), min_size, f"client={client!r}")
    train, used = read_columns(read, x, y, categories)
    for argument, array in zip(("x", "y"), train, strict=True):
        if array.shape[:1] != owners.shape:
            raise ValueError(
                f"{argument} has shape {array.shape} and the clients' ids {owners.shape}; the "
                "numbers of rows must be equal."
            )
    clients = partition(train, owners, len(names), min_size=min_size)
    return dataclasses.replace(clients, names=names, categories=tuple(used.items()))


def read_columns(
    table: Table,
    x: Columns,
    y: Columns,
    categories: Mapping[str, Sequence[str]] | None = None,
    names: tuple[str, str] = ("x", "y"),
) -> tuple[Examples, dict[str, tuple[str, ...]]]:
    """Read inputs and targets of a table, and the categories of its text columns.

    Args:
      table: the table.
      x, y, categories: as in ``from_table``.
      names: names of x and y in errors.

    Raises:
      ValueError: as ``from_table``.
    """
    given = dict(categories or {})
    used: dict[str, tuple[str, ...]] = {}
    named = zip(names, (x, y), strict=True)
    examples = Examples(*(_numbers(table, *pair, given, used) for pair in named))
    for name in given:
        if name not in used:
            raise ValueError(f"categories names {name!r}; it must be columns of text in x or y.")
    return examples, used


def _numbers(
    table: Table,
    argument: str,
    names: Columns,
    given: Mapping[str, Sequence[str]],
    used: dict[str, tuple[str, ...]],
) -> np.ndarray:
    """Join columns into one array; the values of text columns are added to ``used``."""
    parts = []
    for name in [names] if isinstance(names, str) else names:
        part = table.column(argument, name)
        if part.dtype.kind in "US" and part.ndim == 1:
            if part.dtype.kind == "S":
                part = np.char.decode(part, "utf-8")
            part, used[name] = as_codes(argument, name, part, given.get(name))
        if part.dtype.kind not in "biuf":
            raise ValueError(
                f"{argument} is {name!r}, of dtype {part.dtype}; it must be numbers or text."
            )
        if not isinstance(names, str) and part.dtype.kind in "iu" and part.size:
            largest = int(np.abs(part).max())
            if largest > _EXACT:
                raise ValueError(
                    f"{argument}: the column {name!r} has the value {largest}. Several columns "
                    f"become float32, which represents integers only up to {_EXACT} exactly. Scale "
                    "the column, or convert it to text if it is a category."
                )
        parts.append(part)
    if isinstance(names, str):
        return parts[0]
    shapes = {part.shape for part in parts}
    if len(shapes) != 1 or parts[0].ndim != 1:
        raise ValueError(
            f"{argument} is {list(names)}, columns of shapes {sorted(shapes)}; several must be "
            "of one shape [n]."
        )
    return np.stack(parts, axis=1).astype(np.float32)


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
) -> FederatedArrays:
    """Put a prepared tensorflow-datasets set with a feature of client ids on the device.

    Args:
      name: name of the set in TFDS, such as "movielens/100k-ratings".
      client: feature of client ids, integers or text.
      x: the feature of inputs, or several.
      y: the feature of targets, or several.
      split: split of the set.
      data_dir: the TFDS directory; None: TFDS's own.
      min_size: examples that every client has at least.

    Raises:
      ImportError: tensorflow-datasets is missing.
      FileNotFoundError: the set is not prepared; the message says how to.
      ValueError: the set, split or feature does not exist, or as in ``from_table``.
    """
    wanted = [client, *([x] if isinstance(x, str) else x), *([y] if isinstance(y, str) else y)]
    table = tfds.read_columns(f"tfds:{name}", wanted, split, data_dir)
    return from_table(table, client=client, x=x, y=y, min_size=min_size)


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
      FileNotFoundError: the folder has no such file.
      ValueError: a file is damaged or lacks a field; a user occurs twice, or has another number of
        examples than ``num_samples``; or as in ``from_clients``.
    """
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"folder is {folder}, which has no file *.json.")
    clients: dict[str, PyTree] = {}
    for path in paths:
        for user, x, y in _leaf_users(path):
            if user in clients:
                raise ValueError(f"{path}: the user {user!r} occurs twice.")
            clients[user] = (convert or _leaf_examples)(x, y)
    if convert is None:  # 1 and 1.5 are both numbers in JSON
        x_kind = np.result_type(*(user.x.dtype for user in clients.values()))
        y_kind = np.result_type(*(user.y.dtype for user in clients.values()))
        clients = {
            user: Examples(x.astype(x_kind), y.astype(y_kind)) for user, (x, y) in clients.items()
        }
    return from_clients(clients, min_size=min_size)


def _leaf_examples(x: list, y: list) -> Examples:
    arrays = []
    for values in (x, y):
        try:
            array = np.array(values)
        except ValueError as error:  # of several lengths
            raise ValueError(f"{_CONVERT} {error}") from error
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{_CONVERT} {array.dtype}.")
        arrays.append(array)
    return Examples(*arrays)


def _leaf_users(path: Path) -> Iterable[tuple[str, list, list]]:
    """Yield (user, x, y) for the users of a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        users, data = list(map(str, content["users"])), content["user_data"]
        found = [(user, list(data[user]["x"]), list(data[user]["y"])) for user in users]
        stated = content.get("num_samples", [len(y) for _, _, y in found])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{path}: not in LEAF's layout (users, num_samples, user_data with x and y for each "
            f"user): {type(error).__name__} {error}"
        ) from error
    if stated != [len(y) for _, _, y in found]:
        raise ValueError(f"{path}: num_samples differs from the users' numbers of examples.")
    return found


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
      ValueError: it is not such a database, or it is damaged; or as in ``from_clients``.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path is {path}; there is no such file.")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    clients: dict[str, PyTree] = {}
    try:
        rows = connection.execute("SELECT client_id, data FROM federated_data ORDER BY rowid")
        for client_id, packed in rows:
            name = bytes(client_id).decode("utf-8", "backslashreplace")
            clients[name] = serialization.msgpack_restore(zlib.decompress(packed))
    except (sqlite3.Error, zlib.error, ValueError, TypeError) as error:
        raise ValueError(f"{path}: no federated data set of FedJAX's: {error}") from error
    finally:
        connection.close()
    if convert is not None:
        clients = {name: convert(arrays) for name, arrays in clients.items()}
    return from_clients(clients, min_size=min_size)
