"""Checks of what a method's functions return, when it is started and when a round is traced."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_lab.clients.metrics import OF_RUN
from fedjax_lab.types import PyTree


def check_parts(function: str, returned: Any, *parts: str) -> tuple[Any, ...]:
    """Check that a function returned several values, and return them.

    Args:
      function: its name.
      returned: what it returned.
      parts: names of the values; "message", "metrics" and "report" are dicts.

    Raises:
      ValueError: it is no tuple or list, or a NamedTuple, such as a server state; it has another
        length; or a value is no dict.
    """
    is_several = isinstance(returned, tuple | list) and not hasattr(returned, "_fields")
    if not is_several or len(returned) != len(parts):
        size = f" of {len(returned)}" if is_several else ""
        raise ValueError(
            f"{function} returned a {type(returned).__name__}{size}; it must return "
            f"({', '.join(parts)})."
        )
    for part, value in zip(parts, returned, strict=True):
        if part in ("message", "metrics", "report") and not isinstance(value, dict):
            raise ValueError(
                f"{function} returned a {type(value).__name__} as {part}; it must be a dict."
            )
    return tuple(returned)


def check_update(returned: Any, reduce: dict[str, str]) -> tuple[dict, PyTree, dict]:
    """Check what ``client_update`` returned, but for shapes and dtypes; return it, as arrays.

    Args:
      returned: (message, row, report).
      reduce: as in ``Phase``; its keys are the fields of the message.

    Raises:
      ValueError: as ``check_parts``, or the message has other fields.
    """
    message, row, report = check_parts("client_update", returned, "message", "row", "report")
    if message.keys() != reduce.keys():
        raise ValueError(f"message has fields {sorted(message)}, not {sorted(reduce)}.")
    return jax.tree.map(jnp.asarray, message), row, report


def check_served(returned: Any) -> tuple[PyTree, dict[str, Any]]:
    """Check what ``server_update`` returned, and return it.

    Args:
      returned: (server state, metrics).

    Raises:
      ValueError: as ``check_parts``.
    """
    server, metrics = check_parts("server_update", returned, "server state", "metrics")
    return server, metrics


def check_names(names: Collection[str], function: str) -> None:
    """Check that metrics have no name under which a run enters a number of its own.

    Args:
      names: of the metrics.
      function: what reports them.

    Raises:
      ValueError: a name is one of ``OF_RUN``.
    """
    if taken := sorted(OF_RUN.intersection(names)):
        raise ValueError(
            f"{function} reports {', '.join(taken)}, which a run itself enters in its rows, as "
            f"{', '.join(sorted(OF_RUN))}; choose another name."
        )


def check_rows(clients: PyTree, num_clients: int) -> None:
    """Check that the clients' initial state is a table with a row for each client.

    Raises:
      ValueError: a leaf has no leading axis of this length; the error names it.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(clients):
        if jnp.shape(leaf)[:1] != (num_clients,):
            raise ValueError(
                f"clients{jax.tree_util.keystr(path)} is {_shape(leaf)}; start must return a table "
                f"with {num_clients} rows, as one_row_per_client(row, num_clients) makes of a row."
            )


def check_report(report: dict[str, Any]) -> None:
    """Check that the metrics in a client's report are pairs whose quotient has the total's shape.

    Args:
      report: name -> (total, weight).

    Raises:
      ValueError: an entry is something else; the error names it.
    """
    for name, entry in report.items():
        shapes = [jnp.shape(value) for value in entry] if isinstance(entry, tuple | list) else []
        if len(shapes) != 2 or shapes[1] not in ((), shapes[0]):
            raise ValueError(
                f"report[{name!r}] of client_update is {jax.tree.map(_shape, entry)}; it must be "
                "(total, weight), two scalars."
            )


def check_direction(descent: PyTree, params: PyTree) -> None:
    """Check that the direction of a local step has the structure and the shapes of the params.

    Raises:
      ValueError: they differ; the error names the leaf.
    """
    _check_alike("direction", descent, params, "as the params are", _size)


def check_memory(new: PyTree, old: PyTree) -> None:
    """Check that what a method carries from step to step keeps structure, shapes and dtypes.

    A Python number in the first memory takes the dtype that it gets.

    Raises:
      ValueError: they differ; the error names the leaf.
    """
    structure: Any = jax.tree.structure(old)
    if structure == jax.tree.structure(new):

        def like(leaf, before):
            is_free = getattr(before, "weak_type", False) and jnp.shape(leaf) == before.shape
            return leaf if is_free else before

        old = jax.tree.map(like, new, old)
    check_kept("a direction", "memory", new, old)


def check_kept(function: str, what: str, new: PyTree, old: PyTree) -> None:
    """Check that a carried value keeps its structure, shapes and dtypes.

    Raises:
      ValueError: they differ; the error names the leaves.
    """
    _check_alike(what, new, old, f"since {function} must return a {what} like the one it got")


def check_message(message: dict, expected: dict, reduce: dict[str, str]) -> None:
    """Check the shapes and dtypes of a message.

    Args:
      message: field -> pytree of arrays.
      expected: field -> pytree of ``jax.ShapeDtypeStruct``.
      reduce: as in ``Phase``; its keys are the fields.

    Raises:
      ValueError: they differ; the error names the field and the leaf.
    """
    for name in reduce:
        why = "as the phase's ``message`` specifies (default: as the params)"
        _check_alike(f"message[{name!r}]", message[name], expected[name], why)
        _check_reduce(name, message[name], reduce[name])


def _check_reduce(name: str, sent: PyTree, how: str) -> None:
    """Check that a field can be summed or averaged in its dtype."""
    for leaf in jax.tree.leaves(sent):
        is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        if (how == "mean" and not is_inexact) or (how == "sum" and leaf.dtype == bool):
            allowed = "a float" if how == "mean" else "a number"
            raise ValueError(
                f"message[{name!r}] has {leaf.dtype}, and its reduce is {how!r}, which takes "
                f"{allowed}: convert it in client_update, or use 'stack'."
            )


def _size(leaf) -> str:
    return str(list(jnp.shape(leaf)))


def _shape(leaf) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def _check_alike(
    name: str, tree: PyTree, expected: PyTree, why: str, of: Callable[[Any], str] = _shape
) -> None:
    """Check that a tree has the structure of another one, and leaves that are alike in ``of``."""
    found, wanted = (jax.tree.map(of, each) for each in (tree, expected))
    if jax.tree.flatten(found) != jax.tree.flatten(wanted):
        where, found, wanted = _first_difference(name, found, wanted)
        raise ValueError(f"{where} is {found}; it must be {wanted}, {why}.")


def _first_difference(name: str, tree: PyTree, other: PyTree) -> tuple[str, PyTree, PyTree]:
    """Find the first difference (path, leaves); the whole trees if their structures differ."""
    leaves, others = (jax.tree_util.tree_leaves_with_path(each) for each in (tree, other))
    if [path for path, _ in leaves] != [path for path, _ in others]:
        return name, tree, other
    different = (
        (name + jax.tree_util.keystr(path), leaf, wanted)
        for (path, leaf), (_, wanted) in zip(leaves, others, strict=True)
        if leaf != wanted
    )
    return next(different, (name, tree, other))  # such as a list in place of a tuple
