"""Checks of the results of a method's two halves, when a round is traced."""

import chex
import jax
import jax.numpy as jnp

from fedjax_lab.types import PyTree


def check_kept(function: str, what: str, new: PyTree, old: PyTree) -> None:
    """Check that a carried value keeps its structure, shapes and dtypes.

    Raises:
      ValueError: they differ; the error names the leaves.
    """
    chex.assert_trees_all_equal_shapes_and_dtypes(
        *(jax.eval_shape(lambda tree=tree: tree) for tree in (new, old)),
        custom_message=f"{function} must return a {what} (tree 0) like the one it got (tree 1)",
        exception_type=ValueError,
    )


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
        sent, said = (jax.tree.map(_shape, tree[name]) for tree in (message, expected))
        if jax.tree.flatten(sent) != jax.tree.flatten(said):
            where, sent, said = _first_difference(f"message[{name!r}]", sent, said)
            raise ValueError(
                f"{where} is {sent}; it must be {said}, as the phase's ``message`` specifies "
                "(default: as the params)."
            )
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
