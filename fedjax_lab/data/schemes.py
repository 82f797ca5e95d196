"""The rules by which a partition assigns examples to clients.

A scheme is a function (rng, labels [n], N, number of the spec, min_size) -> owner of each
example, int [n]. ``split_indices`` in ``partition`` says what each one does.

Axes: n examples, N clients, C classes.
"""

from collections.abc import Callable

import numpy as np


def _iid(rng, labels, num_clients, value, min_size):
    del value, min_size
    return _at_random(rng, _equal_sizes(len(labels), num_clients))


def _contiguous(rng, labels, num_clients, value, min_size):
    del rng, value, min_size
    return np.repeat(np.arange(num_clients), _equal_sizes(len(labels), num_clients))


def _dirichlet(rng, labels, num_clients, alpha, min_size):
    available = np.bincount(labels)
    counts = _reserve(rng, available, num_clients, min_size)
    for k, rest in enumerate(available - counts.sum(0)):
        # A new order of the clients for each class, so that rounding does not favour the same ones.
        order = rng.permutation(num_clients)
        counts[order, k] += _cut(_log_dirichlet(rng, alpha, (1, num_clients))[0], rest)
    return _deal(rng, labels, counts)


def _dirichlet_equal(rng, labels, num_clients, alpha, min_size):
    del min_size  # Equal sizes are at least n // N >= min_size.
    available = np.bincount(labels)
    wanted = _equal_sizes(len(labels), num_clients)
    log_prior = _log_dirichlet(rng, alpha, (num_clients, len(available)))
    counts = np.zeros((num_clients, len(available)), np.int64)
    # All clients draw a class for each of their open places at once. A class with too few examples
    # is given to a random part of these places and then dropped, so there are at most about C
    # iterations.
    while wanted.any():
        open_clients = np.flatnonzero(wanted)
        live = np.flatnonzero(available)
        log_p = log_prior[np.ix_(open_clients, live)]
        demand = rng.multinomial(wanted[open_clients], _softmax(log_p))
        for j, k in enumerate(live):
            column = demand[:, j]
            if column.sum() > available[k]:
                column = rng.multivariate_hypergeometric(column, available[k], method="marginals")
            counts[open_clients, k] += column
            wanted[open_clients] -= column
            available[k] -= column.sum()
    return _deal(rng, labels, counts)


def _classes_per_client(rng, labels, num_clients, per_client, min_size):
    available = np.bincount(labels)
    num_classes, per_client = len(available), int(per_client)
    # Each client gets P classes from shuffled decks of all C, so that every class has about as many
    # clients.
    hands = np.empty(num_clients * per_client, np.int64)
    for start in range(0, len(hands), num_classes):
        deck = rng.permutation(num_classes)
        held = hands[start - start % per_client : start]  # classes from the previous deck
        again = np.isin(deck, held)
        deck = np.concatenate([deck[~again], deck[again]])
        hands[start : start + num_classes] = deck[: len(hands) - start]
    holds = np.zeros((num_clients, num_classes), bool)
    holds[np.repeat(np.arange(num_clients), per_client), hands] = True
    holds = holds[rng.permutation(num_clients)]
    counts = np.zeros((num_clients, num_classes), np.int64)
    sizes = np.zeros(num_clients, np.int64)
    for k in rng.permutation(num_classes):
        holders = rng.permutation(np.flatnonzero(holds[:, k]))
        # The remainder of an even division goes to the clients with the fewest examples so far.
        holders = holders[np.argsort(sizes[holders], kind="stable")]
        share = _equal_sizes(int(available[k]), len(holders))
        counts[holders, k] = share
        sizes[holders] += share
    _raise_to(min_size, counts, holds)
    return _deal(rng, labels, counts)


def _similarity(rng, labels, num_clients, percent, min_size):
    del min_size  # Equal sizes are at least n // N >= min_size.
    n = len(labels)
    order = rng.permutation(n)
    num_iid = round(n * percent / 100)
    iid_sizes = _equal_sizes(num_iid, num_clients)
    owners = np.empty(n, np.int64)
    owners[order[:num_iid]] = np.repeat(np.arange(num_clients), iid_sizes)
    rest = order[num_iid:]
    rest = rest[np.argsort(labels[rest], kind="stable")]
    owners[rest] = np.repeat(np.arange(num_clients), _equal_sizes(n, num_clients) - iid_sizes)
    return owners


def _quantity(rng, labels, num_clients, alpha, min_size):
    log_p = _log_dirichlet(rng, alpha, (1, num_clients))[0]
    return _at_random(rng, min_size + _cut(log_p, len(labels) - num_clients * min_size))


SCHEMES: dict[str, Callable[..., np.ndarray]] = {
    "iid": _iid,
    "contiguous": _contiguous,
    "dirichlet": _dirichlet,
    "dirichlet_equal": _dirichlet_equal,
    "classes_per_client": _classes_per_client,
    "similarity": _similarity,
    "quantity": _quantity,
}
BY_LABEL = ("dirichlet", "dirichlet_equal", "classes_per_client", "similarity")


def _at_random(rng: np.random.Generator, sizes: np.ndarray) -> np.ndarray:
    """Assign random examples to clients of these sizes; returns owners [n]."""
    owners = np.empty(sizes.sum(), np.int64)
    owners[rng.permutation(len(owners))] = np.repeat(np.arange(len(sizes)), sizes)
    return owners


def _equal_sizes(n: int, parts: int) -> np.ndarray:
    """Divide n into sizes that differ by at most 1, larger ones first: int64 [parts]."""
    return n // parts + (np.arange(parts) < n % parts)


def _log_dirichlet(rng: np.random.Generator, alpha: float, shape: tuple[int, int]) -> np.ndarray:
    """Draw the logarithms of Dirichlet(alpha) rows, up to a constant per row.

    Gamma(a) = Gamma(a + 1) U^(1/a) is taken in logarithms: at small a, Gamma(a) itself
    underflows to 0 in whole rows.
    """
    boosted = np.log(rng.standard_gamma(alpha + 1, shape)) - np.log(alpha)
    log_u = -rng.standard_exponential(shape)
    # Relative to the largest before the division by alpha, which may overflow to -inf.
    scaled = log_u + alpha * boosted
    with np.errstate(over="ignore"):
        return (scaled - scaled.max(1, keepdims=True)) / alpha


def _softmax(log_p: np.ndarray) -> np.ndarray:
    top = log_p.max(1, keepdims=True)
    # If all priors of a row are 0 in float64, the classes get equal ones.
    p = np.exp(np.where(np.isfinite(top), log_p - np.where(np.isfinite(top), top, 0), 0))
    return p / p.sum(1, keepdims=True)


def _cut(log_p: np.ndarray, n: int) -> np.ndarray:
    """Cut n items at the cumulative proportions exp(log_p): int64 counts that sum to n."""
    ends = np.floor(np.cumsum(_softmax(log_p[None])[0]) * n).astype(np.int64)
    ends = np.minimum(ends, n)
    ends[-1] = n
    return np.diff(ends, prepend=0)


def _reserve(
    rng: np.random.Generator, available: np.ndarray, num_clients: int, min_size: int
) -> np.ndarray:
    """Assign min_size examples per client, each of a random class with examples left: [N, C]."""
    num_classes = len(available)
    left = available.copy()
    clients = np.repeat(np.arange(num_clients), min_size)
    cells = []
    while len(clients):
        clients = rng.permutation(clients)
        drawn = rng.choice(np.flatnonzero(left), len(clients))
        # The first `left` clients that drew a class get an example of it.
        order = np.argsort(drawn, kind="stable")
        drawn, clients = drawn[order], clients[order]
        rank = np.arange(len(drawn)) - np.searchsorted(drawn, drawn)
        served = rank < left[drawn]
        cells.append(clients[served] * num_classes + drawn[served])
        left -= np.bincount(drawn[served], minlength=num_classes)
        clients = clients[~served]
    flat = np.concatenate([*cells, np.empty(0, np.int64)])
    counts = np.bincount(flat, minlength=num_clients * num_classes)
    return counts.reshape(num_clients, num_classes)


def _raise_to(min_size: int, counts: np.ndarray, holds: np.ndarray) -> None:
    """Move examples, in place, from the largest co-holders to clients below ``min_size``."""
    sizes = counts.sum(1)
    for client in np.flatnonzero(sizes < min_size):
        while sizes[client] < min_size:
            spare = (counts > 0) & holds[client] & (sizes > min_size)[:, None]
            givers = np.flatnonzero(spare.any(1))
            if len(givers) == 0:
                raise ValueError(
                    f"min_size is {min_size}; with {int(holds.sum(1).max())} classes per client, "
                    f"some of the {len(counts)} clients would have fewer. Lower min_size or "
                    "num_clients, or allow more classes."
                )
            giver = givers[np.argmax(sizes[givers])]
            k = np.argmax(np.where(spare[giver], counts[giver], -1))
            counts[giver, k] -= 1
            counts[client, k] += 1
            sizes[giver] -= 1
            sizes[client] += 1


def _deal(rng: np.random.Generator, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Assign counts[i, k] random examples of class k to client i; returns owners [n]."""
    num_clients, num_classes = counts.shape
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    owners = np.empty(len(labels), np.int64)
    owners[order] = np.repeat(np.tile(np.arange(num_clients), num_classes), counts.T.ravel())
    return owners
