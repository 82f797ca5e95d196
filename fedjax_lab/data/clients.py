"""Natural clients: data that come with their clients, and splits of a federation.

All functions work on indices, with NumPy on the host. The parts of a split share their examples on
the device.

Axes: n examples of all clients, n_i of client i, N clients.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from fedjax_lab.checks import LARGEST_INT, check_int, check_share, repeated
from fedjax_lab.data.cells import check_text
from fedjax_lab.data.dtypes import common_length, native, stored_dtype, to_native
from fedjax_lab.data.federated import FederatedArrays, as_examples, from_partition
from fedjax_lab.data.heterogeneity import labels_of
from fedjax_lab.data.partition import Partition, from_owners
from fedjax_lab.data.streams import FederatedStream, check_clients
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import PyTree

Clients = TypeVar("Clients", FederatedArrays, FederatedStream)


@suggest_keywords
def from_clients(clients: Mapping[Any, PyTree], *, min_size: int = 1) -> FederatedArrays:
    """Put data that come with their clients on the device.

    ::

        clients = data.from_clients({"alice": (x_a, y_a), "bob": (x_b, y_b)})
        clients.names  # ("alice", "bob")

    Args:
      clients: mapping from ids (text, also as bytes, integers, or objects with a string form) to
        examples, in the order of the client numbers. Examples are a tuple (x, y), which becomes
        ``Examples``, or any other pytree of arrays [n_i, ...], with targets of any kind and shape.
        Structure, dtypes and the shape of an example must be the same for all clients.
      min_size: examples that every client has at least; 0 allows empty clients, which are never
        drawn. Their arrays may be ``np.array([])``.

    Returns:
      The federation, with the scheme "natural". 64-bit numbers become 32-bit ones.

    Raises:
      TypeError: ``clients`` is not a mapping.
      ValueError: there is no client; two ids have the same string; a client has fewer than
        ``min_size`` examples, or another structure, dtype or shape than the first one (the message
        names it); or arrays are not numeric or have integers beyond 32 bits.
    """
    min_size = check_int("min_size", min_size, minimum=0)
    if not isinstance(clients, Mapping):
        raise TypeError(
            f"clients is a {type(clients).__name__}; it must be a mapping from the id of a client "
            "to its examples."
        )
    if not clients:
        raise ValueError("clients is empty; there must be at least one.")
    names = tuple(map(name_of, clients))
    if (twice := repeated(names)) is not None:
        raise ValueError(f"clients has two ids with the text {twice!r}; they must differ.")
    for name in names:
        check_text("clients has an id that", name)
    trees = [jax.tree.map(np.asanyarray, as_examples(value)) for value in clients.values()]
    sizes = [_size(name, tree, min_size) for name, tree in zip(names, trees, strict=True)]
    count = check_int("number of examples", sum(sizes), minimum=1, maximum=LARGEST_INT)
    first = sizes.index(next(filter(None, sizes)))
    for name, tree, size in zip(names, trees, sizes, strict=True):
        _check_alike(name, tree, names[first], trees[first], is_empty=not size)
    held = [jax.tree.map(to_native, tree) for tree, size in zip(trees, sizes, strict=True) if size]
    examples = jax.tree.map(lambda *parts: np.concatenate(parts), *held)
    host = Partition(np.arange(count, dtype=np.int32), np.array(sizes, np.int32), "natural", 0)
    return from_partition(examples, host, names)


def name_of(client_id: Any) -> str:
    """Return the name of a client: its id as text, of bytes what they say in UTF-8.

    Args:
      client_id: any value; bytes that are no UTF-8 stay as escapes, such as \\xff.
    """
    if isinstance(client_id, bytes):
        return client_id.decode("utf-8", "backslashreplace")
    return str(client_id)


def _size(name: str, tree: PyTree, min_size: int) -> int:
    size = common_length(f"clients[{name!r}]", tree)
    if size < min_size:
        raise ValueError(
            f"clients[{name!r}] has {size} example{'s' * (size != 1)}; there must be at least "
            f"min_size, which is {min_size}: min_size={size} takes it."
        )
    return size


def _check_alike(name: str, tree: PyTree, first_name: str, first: PyTree, is_empty: bool) -> None:
    """Check structure, dtypes and shapes; ``np.array([])`` fits as examples of any shape."""
    found: Any = jax.tree.structure(tree)
    wanted: Any = jax.tree.structure(first)
    if found != wanted:
        raise ValueError(
            f"clients[{name!r}] is {found}, clients[{first_name!r}] {wanted}; all must be alike."
        )
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves_with_path(first), strict=True)
    for leaf, (path, other) in leaves:
        where = jax.tree_util.keystr(path)
        stored_dtype(f"clients[{name!r}]{where}", leaf)
        is_alike = (native(leaf.dtype), leaf.shape[1:]) == (native(other.dtype), other.shape[1:])
        if not is_alike and not (is_empty and leaf.shape[1:] in ((), other.shape[1:])):
            raise ValueError(
                f"clients[{name!r}]{where} has examples of shape {leaf.shape[1:]} and dtype "
                f"{leaf.dtype}, clients[{first_name!r}]{where} of {other.shape[1:]} and "
                f"{other.dtype}; all must be alike."
            )


@suggest_keywords
def split_clients(clients: Clients, held_out: float, seed: int = 0) -> tuple[Clients, Clients]:
    """Hold out clients from training.

    Both parts share the example arrays and keep the order and the names of the clients. Clients are
    numbered from 0 in each part.

    Args:
      clients: N clients.
      held_out: clients to hold out: a share, float in (0, 1), rounded but at least one client; or a
        number, int.
      seed: the same seed holds out the same clients.

    Returns:
      (clients for training, held-out clients).

    Raises:
      TypeError: ``clients`` is no federation, or ``held_out`` or ``seed`` is not a number.
      ValueError: one part would have no client, or none with data.
    """
    check_clients(clients)
    seen, unseen = held_out_clients(clients.num_clients, held_out, seed)
    sizes, starts = np.asarray(clients.sizes), np.asarray(clients.starts)
    indices = np.asarray(clients.indices)

    def part(ids: np.ndarray) -> Clients:
        held = [indices[starts[i] : starts[i] + sizes[i]] for i in ids]
        names = None if clients.names is None else tuple(clients.names[i] for i in ids)
        return _share(clients, np.concatenate(held), sizes[ids], names)

    return part(seen), part(unseen)


def held_out_clients(num_clients: int, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the clients that ``split_clients`` holds out.

    Returns:
      (ids for training [N - H], held-out ids [H]), integers, both in rising order.

    Raises:
      TypeError, ValueError: as ``split_clients``.
    """
    if num_clients < 2:
        raise ValueError("clients has one client; there must be two, to hold one of them out.")
    if isinstance(held_out, (float, np.floating)):
        check_share("held_out", held_out)
        count = max(1, round(held_out * num_clients))
        if count == num_clients:
            raise ValueError(
                f"held_out is {held_out}, all {num_clients} clients when rounded; one must be left "
                "for training."
            )
    else:
        count = check_int("held_out", held_out, minimum=1, maximum=num_clients - 1)
    rng = np.random.default_rng(check_int("seed", seed, minimum=0))
    unseen = np.sort(rng.permutation(num_clients)[:count])
    return np.setdiff1d(np.arange(num_clients), unseen), unseen


@suggest_keywords
def split_examples(clients: Clients, fraction: float, seed: int = 0) -> tuple[Clients, Clients]:
    """Give every client training examples and test examples of its own.

    Both federations have the same clients in the same order and share the example arrays. A
    client's test set gets ``fraction`` n_i of its n_i examples, rounded, at least one and at most
    n_i - 1. A client with one example keeps it for training and has an empty test set.

    Args:
      clients: N clients.
      fraction: share of a client's examples for testing, in (0, 1).
      seed: the same seed gives the same parts.

    Returns:
      (train, test).

    Raises:
      TypeError: ``clients`` is no federation, or another argument is not a number.
      ValueError: ``fraction`` or ``seed`` is out of range, or no client has two examples.
    """
    check_clients(clients)
    check_share("fraction", fraction)
    rng = np.random.default_rng(check_int("seed", seed, minimum=0))
    sizes, indices = np.asarray(clients.sizes), np.asarray(clients.indices)
    if sizes.max() < 2:
        raise ValueError("clients have one example each; one of them must have two.")
    counts = np.where(sizes < 2, 0, np.clip(np.rint(fraction * sizes), 1, np.maximum(sizes - 1, 1)))
    # Within each client, those that draw the smallest numbers are for testing.
    owners = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((rng.random(len(owners)), owners))
    is_test = np.empty(len(owners), bool)
    is_test[order] = np.arange(len(owners)) - np.asarray(clients.starts)[owners] < counts[owners]

    def part(chosen: np.ndarray) -> Clients:
        left = np.bincount(owners[chosen], minlength=len(sizes))
        return _share(clients, indices[chosen], left, clients.names)

    return part(~is_test), part(is_test)


def _share(
    clients: Clients,
    indices: np.ndarray,
    sizes: np.ndarray,
    names: tuple[str, ...] | None,
) -> Clients:
    info = clients.partition
    host = Partition(indices, sizes.astype(np.int32), info.spec, info.seed)
    return clients.share(host, names)


@suggest_keywords
def divide_like(
    clients: FederatedArrays | FederatedStream, test: PyTree, seed: int = 0
) -> FederatedArrays:
    """Divide other examples, such as the test set, with each client's label distribution.

    The examples of a class are divided in proportion to the clients' examples of that class. Shares
    are rounded by largest remainders, with ties broken at random, so each count is exact to within
    one. If both sets have the same label distribution, each client's test set has the client's
    distribution. Every example is used once.

    Args:
      clients: N clients, with class labels.
      test: ``Examples``, a tuple (x, y), or a pytree with integer labels [n] from 0 in ``y``.
      seed: decides which examples of a class a client gets; the same seed gives the same division.

    Returns:
      N clients in the order of ``clients`` and with its names; some may have no examples. The
      scheme is "like" followed by the scheme of ``clients``.

    Raises:
      TypeError: ``clients`` is no federation, or ``seed`` is not a number.
      ValueError: examples have no class labels, ``test`` has a label that no client has, or
        ``seed`` is negative.
    """
    check_clients(clients)
    rng = np.random.default_rng(check_int("seed", seed, minimum=0))
    test = as_examples(test)
    labels = labels_of(test)
    if labels is None or labels.ndim > 1:
        raise ValueError("test has no class labels; y must be integers [n] from 0.")
    held = clients.label_histogram()
    unknown = np.setdiff1d(labels, np.flatnonzero(held.sum(0)))
    if len(unknown):
        raise ValueError(f"test has the label {unknown[0]}, which no client has; remove it.")
    owners = np.empty(len(labels), np.int64)
    for k in np.unique(labels):
        (of_class,) = np.nonzero(labels == k)
        counts = _apportion(rng, len(of_class), held[:, k])
        owners[rng.permutation(of_class)] = np.repeat(np.arange(len(counts)), counts)
    host = from_owners(owners, clients.num_clients, f"like {clients.partition.spec}", seed)
    return from_partition(test, host, clients.names)


def _apportion(rng: np.random.Generator, total: int, weights: np.ndarray) -> np.ndarray:
    """Divide ``total`` into integers in proportion to weights, by the largest remainders."""
    counts, remainders = np.divmod(total * weights, weights.sum())
    order = np.lexsort((rng.random(len(weights)), -remainders))
    counts[order[: total - counts.sum()]] += 1
    return counts
