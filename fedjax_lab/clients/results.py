"""Checks of the results of a method's two halves, when a round is traced."""

import jax
import jax.numpy as jnp

from fedjax_lab.types import PyTree


def check_kept(function: str, what: str, new: PyTree, old: PyTree) -> None:
    """Check that a carried value keeps its structure, shapes and dtypes.

    Raises:
      ValueError: they differ; the error names the leaves.
    """
    _check_alike(what, new, old, f"since {function} must return a {what} like the one it got")


def check_message(message: dict, expected: dict, reduce: dict[str, str]) -> None:
    """Check the fields, shapes and dtypes of a message.

    Args:
      message: field -> pytree of arrays.
      expected: field -> pytree of ``jax.ShapeDtypeStruct``.
      reduce: as in ``Phase``; its keys are the fields.

    Raises:
      ValueError: they differ; the error names the field and the leaf.
    """
    if message.keys() != reduce.keys():
        raise ValueError(f"message has fields {sorted(message)}, not {sorted(reduce)}.")
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


def _check_alike(name: str, tree: PyTree, expected: PyTree, why: str) -> None:
    """Check that a tree has the structure, shapes and dtypes of another one."""
    found, wanted = (jax.tree.map(_shape, each) for each in (tree, expected))
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


def _shape(leaf) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
