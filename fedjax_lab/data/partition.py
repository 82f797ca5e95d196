"""Which client holds which example: the partitions of the literature, each under its own name.

Host-side NumPy on the labels. Every partition is disjoint and complete, depends on the seed
alone, and ends in bounded time.

Axes: n examples, N clients, C classes, L words of an example of text.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import check_choice, check_int, check_number

PARTITIONS = {
    "iid": "equal sizes, examples at random",
    "contiguous": "equal sizes, the examples in their order: a stretch of the text for each client",
    "dirichlet:A": "each class cut over the clients with Dirichlet(A): unequal sizes",
    "dirichlet_equal:A": "a class prior per client from Dirichlet(A), equal sizes",
    "classes_per_client:P": "at most P classes per client, shared evenly by their holders",
    "similarity:S": "S percent of the data iid, the rest sorted by label",
    "quantity:A": "sizes from Dirichlet(A), labels iid",
}


@dataclass(frozen=True, eq=False)
class Partition:
    """Which client holds which example.

    Attributes:
      indices: int32 [n], example indices, client after client, ascending within a client.
      sizes: int32 [N], examples of each client.
      spec: the scheme, such as "dirichlet:0.1".
      seed: the seed that it was drawn with.
    """

    indices: np.ndarray
    sizes: np.ndarray
    spec: str
    seed: int

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.sizes)

    @cached_property
    def starts(self) -> np.ndarray:
        """int32 [N], where each client's indices begin."""
        return (np.cumsum(self.sizes, dtype=np.int64) - self.sizes).astype(np.int32)

    @cached_property
    def hash(self) -> str:
        """First 16 hexadecimal digits of SHA-256 over indices and sizes (little-endian)."""
        digest = hashlib.sha256()
        for array in (self.indices, self.sizes):
            digest.update(array.astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def client(self, i: int) -> np.ndarray:
        """int32 [n_i], the examples of client ``i``.

        Args:
          i: client id, in [0, N).
        """
        return self.indices[self.starts[i] : self.starts[i] + self.sizes[i]]


def split_indices(
    labels: Any,
    spec: str | np.ndarray,
    num_clients: int,
    seed: int,
    min_size: int = 2,
) -> Partition:
    """Divide examples among clients.

    - ``iid``: a random permutation cut into equal parts (sizes differ by at most 1).
    - ``contiguous``: the same without the permutation; the seed has no influence.
    - ``dirichlet:A``: every class is cut at the proportions of one Dirichlet(A 1_N) draw, so
      that labels and sizes are both skewed (NIID-Bench; GradMA's code). As in GradMA's code,
      each client first gets ``min_size`` examples of random classes.
    - ``dirichlet_equal:A``: every client has a class prior from Dirichlet(A 1_C) and equal
      size (Hsu et al. 2019). Classes are drawn from the prior until none is left; then the
      class is dropped and the prior renormalised, so no example is used twice.
    - ``classes_per_client:P``: at most P classes per client. All classes have equally many
      holders (to within 1), and the holders of a class share it evenly.
    - ``similarity:S``: S percent are dealt iid, the rest is sorted by label and dealt
      contiguously (SCAFFOLD); equal sizes. S = 0 is the usual sorted split.
    - ``quantity:A``: sizes from Dirichlet(A 1_N) after ``min_size`` each, labels iid.

    Args:
      labels: integers [n]; or, for examples without a label, the targets [n, L] of sequences,
        which iid, contiguous, quantity and the natural partition do not look at, and the other
        schemes refuse.
      spec: one of the above, or an integer array [n] with the client of each example (the
        natural partition).
      num_clients: N.
      seed: the same seed gives the same partition.
      min_size: examples that every client has at least; 0 allows empty clients.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: unknown scheme, malformed or impossible spec, a scheme by label where there are
        sequences, fewer than N * min_size examples, or a natural partition that leaves a client
        with fewer than min_size.
    """
    labels = np.asarray(labels)
    if labels.ndim not in (1, 2) or labels.dtype.kind not in "iu" or labels.size == 0:
        raise ValueError(
            f"labels has shape {labels.shape} and dtype {labels.dtype}; it must be a non-empty "
            "vector of integers [n], or the targets of sequences [n, L]."
        )
    n = len(labels)
    check_int("number of examples", n, minimum=1, maximum=np.iinfo(np.int32).max)
    num_clients = check_int("num_clients", num_clients, minimum=1)
    seed = check_int("seed", seed, minimum=0)
    min_size = check_int("min_size", min_size, minimum=0)
    if n < num_clients * min_size:
        raise ValueError(
            f"num_clients is {num_clients} and min_size {min_size}, which takes "
            f"{num_clients * min_size:,} examples; there are {n:,}. Lower one of them."
        )
    if not isinstance(spec, str):
        owners = _check_natural(np.asarray(spec), n, num_clients, min_size)
        return _from_owners(owners, num_clients, "natural", seed)
    scheme, value = _parse(spec)
    if scheme in _BY_LABEL:
        if labels.ndim > 1:
            free = (form for form in PARTITIONS if form.partition(":")[0] not in _BY_LABEL)
            raise ValueError(
                f"spec is {spec!r}, which divides examples by their label; these are sequences, "
                f"with targets of shape {labels.shape}. Give {', '.join(free)}, or the integer "
                "array of client ids [n]."
            )
        # Classes as 0..C-1, of those that occur.
        classes, labels = np.unique(labels, return_inverse=True)
        if scheme == "classes_per_client":
            _check_classes(value, len(classes), num_clients)
    rng = np.random.default_rng(seed)
    owners = _SCHEMES[scheme](rng, labels, num_clients, value, min_size)
    return _from_owners(owners, num_clients, spec, seed)


class Heterogeneity(NamedTuple):
    """How unlike the clients are. Of sequences, the labels are their words.

    Attributes:
      label_histogram: int64 [N, C].
      sizes: int64 [N].
      tv_distance: float64 [N], total variation distance of each client's label distribution
        to that of all data together; NaN for a client without data.
      classes_per_client: int64 [N].
    """

    label_histogram: np.ndarray
    sizes: np.ndarray
    tv_distance: np.ndarray
    classes_per_client: np.ndarray

    @property
    def mean_tv_distance(self) -> float:
        """Mean over the clients with data, in [0, 1): 0 where all have the global mix."""
        return float(np.nanmean(self.tv_distance))

    @property
    def size_range(self) -> tuple[int, float, int]:
        """(min, median, max) of the sizes."""
        return int(self.sizes.min()), float(np.median(self.sizes)), int(self.sizes.max())


def heterogeneity(labels: Any, partition: Partition) -> Heterogeneity:
    """Label histogram, sizes, and distances to the global label distribution.

    Args:
      labels: integers [n], or [n, L] of sequences, from 0.
      partition: a ``Partition`` of them (or anything with its ``indices`` and ``sizes``).
    """
    labels = np.asarray(labels)
    sizes = np.asarray(partition.sizes).astype(np.int64)
    num_clients, num_classes = len(sizes), int(labels.max()) + 1
    owners = np.repeat(np.arange(num_clients), sizes)
    targets = labels[np.asarray(partition.indices)].reshape(len(owners), -1)
    cells = (owners[:, None] * num_classes + targets).ravel()
    histogram = np.bincount(cells, minlength=num_clients * num_classes)
    histogram = histogram.reshape(num_clients, num_classes)
    overall = histogram.sum(0) / histogram.sum()
    distance = np.full(num_clients, np.nan)
    held = sizes > 0
    shares = histogram[held] / histogram[held].sum(1, keepdims=True)
    distance[held] = 0.5 * np.abs(shares - overall).sum(1)
    return Heterogeneity(histogram, sizes, distance, (histogram > 0).sum(1))


def describe(labels: Any, partition: Partition) -> str:
    """Summarise a partition in a few lines.

    Args:
      labels: integers [n], or targets [n, L].
      partition: a partition of them.
    """
    measured = heterogeneity(labels, partition)
    low, median, high = measured.size_range
    classes = measured.classes_per_client
    kind = "classes" if np.ndim(labels) == 1 else "words"
    empty = int((measured.sizes == 0).sum())
    lines = [
        f"{partition.spec}, seed {partition.seed}, hash {partition.hash}",
        f"{measured.sizes.sum():,} examples, {len(measured.sizes):,} clients"
        + (f", {empty:,} of them empty" if empty else ""),
        f"examples per client: min {low:,}, median {median:,.10g}, max {high:,}",
        f"{kind} per client: min {classes.min()}, median {np.median(classes):.10g}, "
        f"max {classes.max()} of {measured.label_histogram.shape[1]}",
        f"label skew (mean total variation distance to the global mix): "
        f"{measured.mean_tv_distance:.3f}",
    ]
    return "\n".join(lines)


def _parse(spec: str) -> tuple[str, float]:
    """Scheme and number of a spec; the number of a scheme without one is 0."""
    scheme, colon, text = spec.partition(":")
    forms = {form.partition(":")[0]: form for form in PARTITIONS}
    if scheme == "natural":
        raise ValueError("spec is 'natural'; pass the integer array of client ids [n] instead.")
    check_choice("scheme of spec", scheme, forms)
    if ":" not in forms[scheme]:
        if colon:
            raise ValueError(f"spec is {spec!r}; {scheme} takes no number.")
        return scheme, 0.0
    try:
        value = float(text)
    except ValueError:
        raise ValueError(
            f"spec is {spec!r}; it must be {forms[scheme]!r} with a number in place of the letter."
        ) from None
    argument = f"number in spec {spec!r}"
    if scheme == "similarity":
        check_number(argument, value, minimum=0, maximum=100)
    elif scheme == "classes_per_client":
        if not value.is_integer():
            raise ValueError(f"{argument} is {text}; it must be an integer.")
        check_number(argument, value, minimum=1)
    else:
        check_number(argument, value, minimum=0, exclusive_minimum=True)
    return scheme, value


def _check_classes(per_client: float, num_classes: int, num_clients: int) -> None:
    if per_client > num_classes:
        raise ValueError(
            f"classes_per_client is {per_client:.0f}; the data have {num_classes} classes."
        )
    if num_clients * per_client < num_classes:
        raise ValueError(
            f"classes_per_client is {per_client:.0f} and num_clients {num_clients}, which leaves "
            f"some of the {num_classes} classes without a holder; their product must be at least "
            f"{num_classes}."
        )


def _check_natural(owners: np.ndarray, n: int, num_clients: int, min_size: int) -> np.ndarray:
    if owners.shape != (n,) or owners.dtype.kind not in "iu":
        raise ValueError(
            f"spec is an array of shape {owners.shape} and dtype {owners.dtype}; it must be a "
            f"string or an integer client id for each of the {n} examples."
        )
    if owners.min() < 0 or owners.max() >= num_clients:
        raise ValueError(
            f"spec has client ids between {owners.min()} and {owners.max()}; they must lie in "
            f"[0, {num_clients}). numpy.unique(..., return_inverse=True) renumbers them."
        )
    sizes = np.bincount(owners, minlength=num_clients)
    if sizes.min() < min_size:
        raise ValueError(
            f"spec gives client {sizes.argmin()} {sizes.min()} examples; there must be at least "
            f"min_size, which is {min_size}."
        )
    return owners


def _from_owners(owners: np.ndarray, num_clients: int, spec: str, seed: int) -> Partition:
    indices = np.argsort(owners, kind="stable").astype(np.int32)
    sizes = np.bincount(owners, minlength=num_clients).astype(np.int32)
    return Partition(indices, sizes, spec, seed)


# A scheme returns the owner of each example, int [n].


def _iid(rng, labels, num_clients, value, min_size):
    del value, min_size
    owners = np.empty(len(labels), np.int64)
    owners[rng.permutation(len(labels))] = np.repeat(
        np.arange(num_clients), _equal_sizes(len(labels), num_clients)
    )
    return owners


def _contiguous(rng, labels, num_clients, value, min_size):
    del rng, value, min_size
    return np.repeat(np.arange(num_clients), _equal_sizes(len(labels), num_clients))


def _dirichlet(rng, labels, num_clients, alpha, min_size):
    available = np.bincount(labels)
    counts = _reserve(rng, available, num_clients, min_size)
    for k, rest in enumerate(available - counts.sum(0)):
        # A new order of the clients for each class: else rounding favours the same ones.
        order = rng.permutation(num_clients)
        counts[order, k] += _cut(_log_dirichlet(rng, alpha, (1, num_clients))[0], rest)
    return _deal(rng, labels, counts)


def _dirichlet_equal(rng, labels, num_clients, alpha, min_size):
    del min_size  # Equal sizes are at least n // N >= min_size.
    available = np.bincount(labels)
    wanted = _equal_sizes(len(labels), num_clients)
    log_prior = _log_dirichlet(rng, alpha, (num_clients, len(available)))
    counts = np.zeros((num_clients, len(available)), np.int64)
    # All open places of all clients draw at once. A class in excess demand goes to a random
    # part of those who drew it, and is dropped: so there are about C rounds at most.
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
    # Hands of P classes are dealt from shuffled decks of all C, so that holders are balanced.
    hands = np.empty(num_clients * per_client, np.int64)
    for start in range(0, len(hands), num_classes):
        deck = rng.permutation(num_classes)
        held = hands[start - start % per_client : start]  # of a hand begun with the last deck
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
        # What is left over after an even share goes to the clients that have least so far.
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
    n = len(labels)
    log_p = _log_dirichlet(rng, alpha, (1, num_clients))[0]
    sizes = min_size + _cut(log_p, n - num_clients * min_size)
    owners = np.empty(n, np.int64)
    owners[rng.permutation(n)] = np.repeat(np.arange(num_clients), sizes)
    return owners


_SCHEMES: dict[str, Callable[..., np.ndarray]] = {
    "iid": _iid,
    "contiguous": _contiguous,
    "dirichlet": _dirichlet,
    "dirichlet_equal": _dirichlet_equal,
    "classes_per_client": _classes_per_client,
    "similarity": _similarity,
    "quantity": _quantity,
}
_BY_LABEL = ("dirichlet", "dirichlet_equal", "classes_per_client", "similarity")


def _equal_sizes(n: int, parts: int) -> np.ndarray:
    """int64 [parts] that sum to n and differ by at most 1, larger ones first."""
    return n // parts + (np.arange(parts) < n % parts)


def _log_dirichlet(rng: np.random.Generator, alpha: float, shape: tuple[int, int]) -> np.ndarray:
    """Logarithms, up to a constant per row, of Dirichlet(alpha) rows.

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
    # A row whose classes all have prior 0 in float64 falls back on equal ones.
    p = np.exp(np.where(np.isfinite(top), log_p - np.where(np.isfinite(top), top, 0), 0))
    return p / p.sum(1, keepdims=True)


def _cut(log_p: np.ndarray, n: int) -> np.ndarray:
    """int64 counts that sum to n: n items cut at the cumulative proportions exp(log_p)."""
    ends = np.floor(np.cumsum(_softmax(log_p[None])[0]) * n).astype(np.int64)
    ends = np.minimum(ends, n)
    ends[-1] = n
    return np.diff(ends, prepend=0)


def _reserve(
    rng: np.random.Generator, available: np.ndarray, num_clients: int, min_size: int
) -> np.ndarray:
    """Counts [N, C]: min_size examples per client, each of a random class with any left."""
    num_classes = len(available)
    left = available.copy()
    clients = np.repeat(np.arange(num_clients), min_size)
    cells = []
    while len(clients):
        clients = rng.permutation(clients)
        drawn = rng.choice(np.flatnonzero(left), len(clients))
        # An example is there for the first `left` of those who drew its class.
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
    """Owner [n] of each example: client i gets counts[i, k] random examples of class k."""
    num_clients, num_classes = counts.shape
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    owners = np.empty(len(labels), np.int64)
    owners[order] = np.repeat(np.tile(np.arange(num_clients), num_classes), counts.T.ravel())
    return owners
