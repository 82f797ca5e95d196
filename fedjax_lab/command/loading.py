"""The data set of a run: by name, a table, or from a function of one's own."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_lab import data
from fedjax_lab.command.factories import find, is_own
from fedjax_lab.command.loaded_data import LoadedData
from fedjax_lab.command.options import parse_options_of
from fedjax_lab.command.settings import DataSettings, said_of
from fedjax_lab.command.table_data import load_table
from fedjax_lab.data.federated import from_partition
from fedjax_lab.data.shakespeare import NUM_TOKENS
from fedjax_lab.data.sources import checked_splits
from fedjax_lab.data.text import NUM_BYTES

_FORMS = (
    "it must return (train, test): two pairs (x, y), or in place of train a mapping from the id of "
    "a client to its pair"
)


def load_divided(settings: DataSettings, seed: int) -> LoadedData:
    """Load training and test examples, with their clients if the data set has them.

    Raises:
      ValueError, FileNotFoundError, ImportError: the data set, or a package to read it, is missing.
      TypeError: a custom function does not return two sets of examples.
    """
    if settings.is_table:
        return load_table(settings, seed)
    if is_own("dataset", settings.dataset):
        return _load_own(settings)
    if settings.is_federated:
        return _load_federated(settings)
    found = data.load(settings.dataset, **settings.load_options())
    of_bytes = found[0].y.ndim > 1 and settings.tokens == "bytes"
    return LoadedData(*found, classes=NUM_BYTES if of_bytes else None)


def _load_federated(settings: DataSettings) -> LoadedData:
    name, _, path = settings.dataset.partition(":")
    if not path:
        raise ValueError(f"dataset is {settings.dataset!r}; a folder must follow the colon.")
    clients, tests = data.load_federated(name, path)
    train, test = (data.Examples(*map(np.asarray, part.examples)) for part in (clients, tests))
    if not settings.is_natural:
        return LoadedData(train, test, classes=NUM_TOKENS)
    smallest, least = int(clients.sizes.min()), settings.least_examples
    if smallest < least:
        raise ValueError(
            f"min_client_size is {least}; the smallest client of {settings.dataset} has {smallest} "
            f"examples: min_client_size={smallest} takes it."
        )
    return LoadedData(train, test, clients, tests, NUM_TOKENS)


def _load_own(settings: DataSettings) -> LoadedData:
    returned = find("dataset", settings.dataset)(
        **parse_options_of("dataset", settings.dataset, settings.dataset_option)
    )
    given: Any
    try:
        train, test = returned
        is_mapping = isinstance(train, Mapping)
        given = {name: _pair(train[name]) for name in train} if is_mapping else _pair(train)
        tests = _pair(test)
    except (TypeError, ValueError, LookupError) as error:
        raise TypeError(
            f"dataset is {settings.dataset!r}, which returned a {type(returned).__name__}; "
            f"{_FORMS} ({error})."
        ) from error
    if is_mapping != settings.is_natural:
        comes, flag = ("with its", "natural") if is_mapping else ("without", "iid or another one")
        raise ValueError(
            f"partition is {settings.partition!r}; {settings.dataset} comes {comes} clients: give "
            f"--partition {flag}."
        )
    clients = classes = None
    if is_mapping:
        with said_of("dataset", settings.dataset):
            clients = data.from_clients(given, min_size=settings.least_examples)
        given = _pair(clients.examples)
    splits, y = {"train": given, "test": tests}, given[1]
    if y.ndim == 1 and y.dtype.kind in "iu":
        classes = 1 + max(int(labels.max()) for _, labels in splits.values())
    if y.ndim > 1 and y.dtype.kind in "iu":  # words; checked as those of a text are
        train, test = (data.Examples(*(a.astype(np.int32) for a in s)) for s in splits.values())
    else:
        train, test = checked_splits(settings.dataset, splits, classes)
    if clients is not None:  # with the examples as they are stored
        clients = from_partition(train, clients.host_partition(), clients.names)
    return LoadedData(train, test, clients, classes=classes)


def _pair(part: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(part[0]), np.asarray(part[1])
