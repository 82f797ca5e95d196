"""Tables as data sets of the command line: columns, held-out clients or examples.

Axes: n rows, N clients.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab import data
from fedjax_lab.checks import check_choice, repeated, warn
from fedjax_lab.command.loaded_data import LoadedData
from fedjax_lab.command.settings import DEFAULT_TEST_SPLIT, NATURAL_SCHEME, DataSettings, said_of
from fedjax_lab.data.cells import Missing
from fedjax_lab.data.columns import TableExamples, read_columns
from fedjax_lab.data.federated import from_partition
from fedjax_lab.data.partition import Partition, number_owners
from fedjax_lab.data.sources import checked_splits
from fedjax_lab.data.tables import FILES, Table
from fedjax_lab.storage.fingerprint import hash_arrays

TASKS = ("classification", "regression")
SPLITS = ("clients", "examples")
_FORMS = "clients:SHARE, examples:SHARE, or another file .csv, .tsv or .parquet"
_NAMES = ("client", "x", "target", "task", "categories", "missing")
_ENDINGS = {"csv": (".csv", ".tsv"), "parquet": (".parquet",)}


class _Split(NamedTuple):
    """How the test set is taken: "clients" or "examples" and their share or number; or a file."""

    unit: str = ""
    share: float | int = 0
    path: str | None = None


class _Owners(NamedTuple):
    """The clients of a table's rows: their names, and the number of each row's client [n]."""

    names: tuple[str, ...]
    of_rows: np.ndarray


class _Clients(NamedTuple):
    """Clients whose examples are in their order: the number of examples of each [N], and names."""

    sizes: np.ndarray
    names: tuple[str, ...] | None

    def federation(self, examples: data.Examples) -> data.FederatedArrays:
        """Create the federation of the examples."""
        rows = np.arange(len(examples.y), dtype=np.int32)
        partition = Partition(rows, np.asarray(self.sizes, np.int32), NATURAL_SCHEME, 0)
        return from_partition(examples, partition, self.names)


class _Division(NamedTuple):
    """Rows of training and test examples in the order of their clients, and these clients."""

    train: np.ndarray
    test: np.ndarray
    seen: _Clients | None = None
    own: _Clients | None = None


def check_table(settings: DataSettings) -> None:
    """Check the settings of columns and of the test set.

    Raises:
      ValueError: a setting is missing or invalid, or the data set is no table.
    """
    if settings.task is not None:
        check_choice("task", settings.task, TASKS)
    if not settings.is_table:
        for name in _NAMES:
            if getattr(settings, name):
                raise ValueError(
                    f"{name} is {getattr(settings, name)!r} and dataset {settings.dataset!r}; "
                    "columns are those of csv:FILE and parquet:FILE."
                )
        if settings.test_split != DEFAULT_TEST_SPLIT:
            raise ValueError(
                f"test_split is {settings.test_split!r} and dataset {settings.dataset!r}, which "
                "has a test set of its own; only tables are divided."
            )
        return
    scheme, _, path = settings.dataset.partition(":")
    if Path(path).suffix.lower() not in _ENDINGS[scheme]:
        allowed = " or ".join(_ENDINGS[scheme])
        raise ValueError(f"dataset is {settings.dataset!r}; the file must end in {allowed}.")
    Missing(parse_missing(settings.missing))
    if not settings.target:
        raise ValueError(
            f"target is missing; dataset {settings.dataset!r} is a table: set --target (of "
            "`fedjax-lab plan`, whose --target is a machine: --target-column) to the column to "
            "predict, and --client to the column of client ids."
        )
    if _split(settings.test_split).unit == "clients" and settings.client is None:
        raise ValueError(
            f"test_split is {settings.test_split!r} and client None; to hold out clients, set "
            "--client to the column of their ids, or use --test-split examples:0.2."
        )


def _split(text: str) -> _Split:
    """Parse a split, such as "clients:0.2" or the path of a file."""
    unit, _, amount = text.partition(":")
    if Path(text).suffix.lower() in FILES:
        return _Split(path=text)
    try:
        check_choice("test_split", unit, SPLITS)
        share = float(amount)
        whole = unit == "clients" and share >= 1 and share.is_integer()
        if not (0 < share < 1 or whole):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"test_split is {text!r}; it must be {_FORMS}, such as clients:0.2 (a fifth of the "
            "clients), clients:3 or examples:0.2."
        ) from None
    return _Split(unit, int(share) if whole else share)


def load_table(settings: DataSettings, seed: int) -> LoadedData:
    """Read a table, and divide it into training and test examples.

    Raises:
      ValueError: a column is missing, has another length, or lacks values; a client has too few
        rows; or labels are out of range.
      FileNotFoundError: there is no such file.
      ImportError: narwhals or pyarrow is missing.
    """
    if both := [name for name in settings.x if name in settings.target]:
        raise ValueError(
            f"x has {both[0]!r}, which is target, too: a model that sees what it is to foretell "
            "learns nothing. Leave it out of x."
        )
    with said_of("dataset", settings.dataset):
        table = Table(settings.dataset.partition(":")[2], parse_missing(settings.missing))
    inputs = settings.x or _other_columns(table, settings)
    found = _read(table, inputs, settings)
    owners = None
    if found.ids is not None:
        about = f"client={settings.client!r}"
        owners = _Owners(*number_owners(found.ids, settings.least_examples, about))
    divided = _divided(settings, owners, len(found.examples.y), seed)
    path, table_hash = _split(settings.test_split).path, None
    if path is None:  # the same for each seed
        table_hash = hash_arrays((*found.examples, owners and owners.of_rows))

    def load(filled: TableExamples) -> LoadedData:
        x, y = filled.examples
        if path is None:
            tests, own = data.Examples(x[divided.test], y[divided.test]), divided.own
        else:
            tests, own = _read_tests(settings, path, inputs, filled, owners)
        splits = {"train": (x[divided.train], y[divided.train]), "test": tests}
        labels = np.concatenate([labels for _, labels in splits.values()])
        classes = None if y.dtype.kind == "f" else int(labels.max()) + 1
        train, test = checked_splits(settings.dataset, splits, classes)
        clients = None if divided.seen is None else divided.seen.federation(train)
        tests_of_clients = None if own is None else own.federation(test)
        return LoadedData(train, test, clients, tests_of_clients, classes, table_hash)

    def with_means_of(rows: np.ndarray) -> LoadedData:
        return load(_read(table, inputs, settings, training=divided.train[rows]))

    if not found.means:
        return load(found)
    # Now that the training rows are known, their means fill gaps.
    every = np.arange(len(divided.train))
    return with_means_of(every)._replace(with_means_of=with_means_of)


def _divided(settings: DataSettings, owners: _Owners | None, n: int, seed: int) -> _Division:
    """Divide the rows; all are for training if another file has the test set."""
    split = _split(settings.test_split)
    if split.path is not None:
        if owners is None:
            return _Division(np.arange(n), np.arange(0))
        order = np.argsort(owners.of_rows, kind="stable")
        return _Division(order, order[:0], _Clients(np.bincount(owners.of_rows), owners.names))
    if owners is None:
        order, held = np.random.default_rng(seed).permutation(n), max(1, round(split.share * n))
        return _Division(np.sort(order[held:]), np.sort(order[:held]))
    numbers = np.arange(n, dtype=np.int32)
    rows = data.partition(numbers, owners.of_rows, len(owners.names), min_size=1)
    rows = rows.share(rows.host_partition(), owners.names)
    with said_of("test_split", settings.test_split):
        divide = data.split_clients if split.unit == "clients" else data.split_examples
        train, test = divide(rows, split.share, seed)
    seen, own = (_Clients(np.asarray(part.sizes), part.names) for part in (train, test))
    own_or_none = own if split.unit == "examples" else None
    return _Division(np.asarray(train.indices), np.asarray(test.indices), seen, own_or_none)


def parse_missing(texts: Sequence[str]) -> Any:
    """Convert the setting ``missing`` to the argument of ``from_table``.

    Args:
      texts: none; one meaning, such as "drop" or "0"; two, of numbers and of text; or several
        MARK=MEANING.

    Raises:
      ValueError: a text has another form, or a mark stands twice.
    """

    def meaning(text: str) -> str | float:
        try:
            return float(text)
        except ValueError:
            return text

    if not texts:
        return None
    if len(texts) <= 2 and not any("=" in text for text in texts):
        first, *others = map(meaning, texts)
        return (first, *others) if others else first
    pairs = [text.rpartition("=") for text in texts]
    if not all(separator for _, separator, _ in pairs):
        raise ValueError(
            f"missing is {' '.join(texts)!r}; it must be drop, mean, keep or a number, two of "
            "these for columns of numbers and of text, or several MARK=MEANING, such as ?=drop."
        )
    if (twice := repeated(mark for mark, *_ in pairs)) is not None:
        raise ValueError(f"missing is {' '.join(texts)!r}; it has the mark {twice!r} twice.")
    return {mark: meaning(text) for mark, _, text in pairs}


def _other_columns(table: Table, settings: DataSettings) -> tuple[str, ...]:
    """Return all columns but client and target."""
    inputs = tuple(
        name for name in table.columns if name not in (settings.client, *settings.target)
    )
    if not inputs:
        raise ValueError(f"x is empty; {settings.dataset} has no column but client and target.")
    if "" in inputs:
        raise ValueError(
            f"x is empty, so that all columns but client and target are inputs, and column "
            f"{table.columns.index('') + 1} of {settings.dataset} has no name (an index that "
            "pandas wrote?); set --x to the columns of inputs."
        )
    return inputs


def _read(
    table: Table,
    inputs: Sequence[str],
    settings: DataSettings,
    first: TableExamples | None = None,
    training: np.ndarray | None = None,
) -> TableExamples:
    """Read inputs [n, ...], targets and ids of the table, with the dtypes for the task.

    Without a setting, the targets of the first table determine the task of both.
    """
    target = settings.target[0] if len(settings.target) == 1 else settings.target
    lacks_ids = first is not None and settings.client not in table.columns
    found = read_columns(
        table,
        inputs,
        target,
        client=None if lacks_ids else settings.client,
        categories=dict.fromkeys(settings.categories) or None,
        first=first,
        training=training,
        names=("x", "target"),
    )
    y = found.examples.y
    of_first = y if first is None else first.examples.y
    if settings.task == "regression" or (settings.task is None and of_first.dtype.kind == "f"):
        if any(name in found.categories for name in settings.target):
            raise ValueError(
                f"task is 'regression' and target {settings.target}, a column of text; it must be "
                "numbers."
            )
        y = y.astype(np.float32)
    elif y.dtype.kind == "f":
        of = "" if first is None else f" in test_split {settings.test_split!r}"
        raise ValueError(
            f"task is 'classification' and target {settings.target} holds floats{of}; it must be "
            "one column of integers from 0, or of text, or of a CSV file and named in --categories."
        )
    return found._replace(examples=data.Examples(found.examples.x, y))


def _read_tests(
    settings: DataSettings,
    path: str,
    inputs: Sequence[str],
    found: TableExamples,
    owners: _Owners | None,
) -> tuple[data.Examples, _Clients | None]:
    """Read the test set from another file, with the clients of its rows if it has their column."""
    table = Table(path, parse_missing(settings.missing))
    if Path(path).samefile(settings.dataset.partition(":")[2]):
        raise ValueError(
            f"test_split is {path!r}, the file that is trained on; it must be another one, or a "
            "part such as examples:0.2."
        )
    tests, ids, *_ = _read(table, inputs, settings, found)
    if owners is None or ids is None:
        return tests, None
    names, of_rows = owners.names, list(map(str, ids.tolist()))
    _check_known(settings, path, tuple(dict.fromkeys(of_rows)), names)
    places = {name: place for place, name in enumerate(names)}
    of = np.array([places.get(name, len(names)) for name in of_rows])
    order = np.argsort(of, kind="stable")  # rows of other clients come last
    counts = np.bincount(of, minlength=len(names) + 1)[:-1]
    tests = data.Examples(tests.x[order], tests.y[order])
    return tests, _Clients(counts, names) if counts.sum() else None


def _check_known(
    settings: DataSettings, path: str, found: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """Check that the test file names clients as the training file does; warn if it has none."""
    if not {*found}.isdisjoint(names):
        return
    about = (
        f"test_split is {path!r}, whose {settings.client} has {_first(found)}; none is a client of "
        f"{settings.dataset}, which has {_first(names)}"
    )
    if not {*map(_number, found)}.isdisjoint(map(_number, names)):
        raise ValueError(f"{about}: spell them in the same way.")
    warn(f"{about}: the clients have no test examples of their own.")


def _first(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _number(name: str) -> float | str:
    """Return the number that an id spells, or else the id without capitals and spaces around."""
    try:
        return float(name)
    except ValueError:
        return name.strip().lower()
