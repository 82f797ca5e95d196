"""The data set of a run: by name, a table, or from a function of one's own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_lab import data
from fedjax_lab.command.factories import find, is_own
from fedjax_lab.command.loaded_data import LoadedData
from fedjax_lab.command.options import parse_options_of
from fedjax_lab.command.settings import DataSettings
from fedjax_lab.command.table_data import load_table
from fedjax_lab.data.dtypes import native
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
    owner = f"dataset is {settings.dataset!r}"
    try:
        train, test = returned
        of_clients = isinstance(train, Mapping)
        names = list(train) if of_clients else []
        given = [train[name] for name in names] if of_clients else [train]
        parts = [(np.asarray(part[0]), np.asarray(part[1])) for part in given]
        # Arrays without examples may have another shape and dtype.
        filled = [part for part in parts if len(part[0]) or len(part[1])] or parts
        x, y = (np.concatenate([part[i] for part in filled]) for i in (0, 1))
        splits = {"train": (x, y), "test": (np.asarray(test[0]), np.asarray(test[1]))}
    except (TypeError, ValueError, LookupError) as error:
        raise TypeError(
            f"{owner}, which returned a {type(returned).__name__}; {_FORMS} ({error})."
        ) from error
    _check_parts(owner, names, parts)
    if of_clients != settings.is_natural:
        comes, flag = ("with its", "natural") if of_clients else ("without", "iid or another one")
        raise ValueError(
            f"partition is {settings.partition!r}; {settings.dataset} comes {comes} clients: give "
            f"--partition {flag}."
        )
    classes = None
    if y.ndim == 1 and y.dtype.kind in "iu":
        classes = 1 + max(int(labels.max()) for _, labels in splits.values())
    if y.ndim > 1 and y.dtype.kind in "iu":  # words; checked as those of a text are
        train, test = (data.Examples(*(a.astype(np.int32) for a in s)) for s in splits.values())
    else:
        train, test = checked_splits(settings.dataset, splits, classes)
    clients = None
    if of_clients:
        ends = np.cumsum([0, *(len(part[1]) for part in parts)])
        bounds = zip(names, ends, ends[1:], strict=False)
        held = {name: (train.x[a:b], train.y[a:b]) for name, a, b in bounds}
        clients = data.from_clients(held, min_size=settings.least_examples)
    return LoadedData(train, test, clients, classes=classes)


def _check_parts(
    owner: str, names: Sequence[Any], parts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Check what joined clients would hide: other numbers of inputs than targets, other dtypes."""
    for name, (x, y) in zip(names, parts, strict=False):
        if len(x) != len(y):
            raise ValueError(
                f"{owner}: client {name!r} has {len(x)} inputs and {len(y)} targets; there must be "
                "as many."
            )
    filled = [(name, part) for name, part in zip(names, parts, strict=False) if part[0].size]
    for name, part in filled:
        for place, array, of_first in zip("xy", part, filled[0][1], strict=True):
            if native(array.dtype) != native(of_first.dtype):
                raise ValueError(
                    f"{owner}: {place} of client {name!r} has dtype {array.dtype} and {place} of "
                    f"client {filled[0][0]!r} {of_first.dtype}; all must be alike."
                )
