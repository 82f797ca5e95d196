"""Partitions of the literature: the examples of each client, under distinct names.

They use host-side NumPy on the labels. Every partition is disjoint and complete, depends only on
the seed, and finishes in bounded time.

Axes: n examples, N clients, C classes, L words of an example of text.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedjax_lab.checks import LARGEST_INT, check_choice, check_int, check_number, errors_about
from fedjax_lab.data.dtypes import unmixed
from fedjax_lab.data.schemes import BY_LABEL, SCHEMES

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
    """Assignment of examples to clients.

    Attributes:
      indices: int32 [n], example indices, grouped by client, ascending within a client.
      sizes: int32 [N], examples of each client.
      spec: the scheme, such as "dirichlet:0.1".
      seed: seed of the draw.
    """

    indices: np.ndarray
    sizes: np.ndarray
    spec: str
    seed: int

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return len(self.sizes)

    @cached_property
    def starts(self) -> np.ndarray:
        """Position of each client's first index in ``indices``, int32 [N]."""
        return (np.cumsum(self.sizes, dtype=np.int64) - self.sizes).astype(np.int32)

    @cached_property
    def hash(self) -> str:
        """First 16 hexadecimal digits of SHA-256 over indices and sizes (little-endian)."""
        digest = hashlib.sha256()
        for array in (self.indices, self.sizes):
            digest.update(array.astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def client(self, i: int) -> np.ndarray:
        """Return the indices of a client's examples, int32 [n_i].

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
      labels: integers [n] from 0. For examples without labels, targets [n, ...] of any kind: iid,
        contiguous, quantity and the natural partition ignore them, the other schemes refuse them.
      spec: one of the above, or an integer array [n] with the client of each example (the
        natural partition).
      num_clients: N.
      seed: the same seed gives the same partition.
      min_size: smallest number of examples of a client; 0 allows empty clients.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the scheme is unknown; the spec is malformed or impossible; a scheme needs labels
        and there are none; there are fewer than N * min_size examples; or a natural partition gives
        a client fewer than min_size.
    """
    labels = np.asarray(labels)
    if labels.ndim == 0 or len(labels) == 0:
        raise ValueError(
            f"labels has shape {labels.shape}; it must have a label or target for each example, "
            "[n] or [n, ...], and at least one."
        )
    n = len(labels)
    check_int("number of examples", n, minimum=1, maximum=LARGEST_INT)
    num_clients = check_int("num_clients", num_clients, minimum=1)
    seed = check_int("seed", seed, minimum=0)
    min_size = check_int("min_size", min_size, minimum=0)
    if n < num_clients * min_size:
        raise ValueError(
            f"num_clients is {num_clients} and min_size {min_size}, which requires "
            f"{num_clients * min_size:,} examples; there are {n:,}. Lower one of them."
        )
    if not isinstance(spec, str):
        owners = np.asarray(spec)
        _check_natural(owners, n, num_clients, min_size)
        return from_owners(owners, num_clients, "natural", seed)
    scheme, value = parse_spec(spec)
    if scheme in BY_LABEL:
        _check_labels(labels, spec)
        # Classes as 0..C-1, of those that occur.
        classes, labels = np.unique(labels, return_inverse=True)
        if scheme == "classes_per_client":
            _check_classes(value, len(classes), num_clients)
    rng = np.random.default_rng(seed)
    owners = SCHEMES[scheme](rng, labels, num_clients, value, min_size)
    return from_owners(owners, num_clients, spec, seed)


def from_owners(owners: np.ndarray, num_clients: int, spec: str, seed: int) -> Partition:
    """Create the partition in which each example has the given client.

    Args:
      owners: integers [n], the client of each example.
      num_clients: N.
      spec, seed: as in ``Partition``.
    """
    indices = np.argsort(owners, kind="stable").astype(np.int32)
    sizes = np.bincount(owners, minlength=num_clients).astype(np.int32)
    return Partition(indices, sizes, spec, seed)


def parse_spec(spec: str) -> tuple[str, float]:
    """Parse a spec into scheme and number; 0 for a scheme without a number.

    Args:
      spec: such as "dirichlet:0.1".

    Raises:
      ValueError: the scheme is unknown, has no number where it needs one, or a number that is not
        allowed.
    """
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


def number_owners(
    owners: Any, min_size: int, argument: str = "spec"
) -> tuple[tuple[str, ...], np.ndarray]:
    """Map client ids to the numbers 0 to N - 1, in sorted order.

    Args:
      owners: the id of each example's client, [n]: integers, text, or UTF-8 as bytes.
      min_size: examples that every client has at least.

    Returns:
      N ids as text, sorted by their type (9 before 10, "10" before "9"), and int64 [n], the number
      of each example's client.

    Raises:
      ValueError: ``owners`` does not have one axis or is empty; ids are not all integers or all
        text; bytes are no UTF-8; or a client has fewer than ``min_size`` examples.
    """
    array = unmixed(owners)
    if array.ndim == 1 and array.dtype.kind in "OT":
        for kind in (str, bytes, (int, np.integer)):
            if all(isinstance(owner, kind) and not isinstance(owner, bool) for owner in array):
                array = np.array(array.tolist())
                break
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iuUS":
        raise ValueError(
            f"{argument} has client ids of shape {array.shape} and dtype {array.dtype}; it must "
            "have one for each example, [n], all of them integers or all of them text."
        )
    if array.dtype.kind == "S":
        about = f"{argument} has client ids that are bytes and no UTF-8 text"
        with errors_about(about, UnicodeDecodeError):
            array = np.char.decode(array, "utf-8")
    ids, numbers, sizes = np.unique(array, return_inverse=True, return_counts=True)
    names = tuple(map(str, ids.tolist()))
    _check_least(argument, names, sizes, min_size)
    return names, numbers


def _check_least(argument: str, ids: Sequence[Any], sizes: np.ndarray, min_size: int) -> None:
    """Check that each client has ``min_size`` examples."""
    least = sizes.min()
    if least < min_size:
        raise ValueError(
            f"{argument} gives client {ids[int(sizes.argmin())]!r} {least} examples; there must be "
            f"at least min_size, which is {min_size}: min_size={least} takes it."
        )


def _check_labels(labels: np.ndarray, spec: str) -> None:
    if labels.ndim > 1 or labels.dtype.kind not in "iu":
        free = (form for form in PARTITIONS if form.partition(":")[0] not in BY_LABEL)
        found = f"are targets of shape {labels.shape} and dtype {labels.dtype}"
        if labels.shape[1:] == (0,):  # as ``partition`` says that there are none
            found = "is no field y"
        raise ValueError(
            f"spec is {spec!r}, which divides examples by their label, an integer for each; there "
            f"{found}. Give {', '.join(free)}, or the array of client ids [n]."
        )
    if labels.min() < 0:
        raise ValueError(
            f"spec is {spec!r}, which divides examples by their label, and one is {labels.min()}; "
            "labels are counted from 0."
        )


def _check_classes(per_client: float, num_classes: int, num_clients: int) -> None:
    if per_client > num_classes:
        raise ValueError(
            f"classes_per_client is {per_client:.0f}; the data have {num_classes} classes."
        )
    if num_clients * per_client < num_classes:
        raise ValueError(
            f"classes_per_client is {per_client:.0f} and num_clients {num_clients}, so some of the "
            f"{num_classes} classes would have no client; their product must be at least "
            f"{num_classes}."
        )


def _check_natural(owners: np.ndarray, n: int, num_clients: int, min_size: int) -> None:
    if owners.shape != (n,) or owners.dtype.kind not in "iu":
        raise ValueError(
            f"spec is an array of shape {owners.shape} and dtype {owners.dtype}; it must be a "
            f"string or an integer client id for each of the {n} examples."
        )
    if owners.min() < 0 or owners.max() >= num_clients:
        raise ValueError(
            f"spec has client ids between {owners.min()} and {owners.max()}; they must lie in "
            f"[0, {num_clients}). Without num_clients, any ids are allowed."
        )
    sizes = np.bincount(owners, minlength=num_clients)
    _check_least("spec", range(num_clients), sizes, min_size)
