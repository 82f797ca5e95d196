"""Optax transformations of a client's direction: which way they turn it, and their step.

Optimizers return what is to be added, and clients subtract.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_lab import tree
from fedjax_lab.checks import is_traced
from fedjax_lab.types import Params, PyTree

_NAMED = 5  # leaves in an error
_VECTOR = 64  # entries, all of which noise would hardly turn
_OF_LEAVES = (optax.MaskedState, optax.PartitionState)


def direction(transform: Any) -> int | None:
    """Return -1 for a transformation that turns a vector round, and 1 for one that keeps its signs.

    0: neither. None: it cannot be told, because it is made for params of a certain structure.
    """
    found = _directions(transform, jnp.zeros(_VECTOR))
    return None if found is None else found[0]


def check_leaves(
    name: str, transform: optax.GradientTransformation, params: Params, state: PyTree
) -> None:
    """Refuse a transformation of single leaves, such as ``optax.masked``, that turns one round.

    Args:
      params: of the structure that it is made for; only numbers of axes count.

    Raises:
      ValueError: it contains an optimizer, whose updates are to be added and not descended.
    """
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, _OF_LEAVES))
    if not any(isinstance(p, _OF_LEAVES) for p in parts) and direction(transform) is not None:
        return
    probes = jax.tree.map(lambda leaf: jnp.zeros([_VECTOR, *[2] * (leaf.ndim - 1)]), params)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found = _directions(transform, probes) or [0] * len(paths)
    turned = [tree.path_text(path) for path, way in zip(paths, found, strict=True) if way == -1]
    if turned:
        raise ValueError(
            f"{name} changes the sign of {', '.join(turned[:_NAMED])}"
            f"{' and other leaves' * (len(turned) > _NAMED)}, as optax.adam(...) and "
            "optax.sgd(...) do inside optax.multi_transform or optax.masked. Clients subtract its "
            "result times client_lr: put transformations without a learning rate inside, such as "
            "optax.scale_by_adam(). optax.chain(optax.scale_by_adam(), optax.scale(5.0)) has five "
            "times client_lr."
        )


def transformed(
    transform: optax.GradientTransformation, grads: PyTree, state: PyTree, params: Params
) -> tuple[PyTree, PyTree]:
    """Transform a client's gradient or direction; returns (the result, new state).

    Raises:
      TypeError: it needs more than these, such as the loss.
    """
    try:
        return transform.update(grads, state, params)
    except TypeError as error:
        raise TypeError(
            "gradient_transform or step_transform cannot be used by clients, who give it a "
            f"direction and the params: {error}"
        ) from error


def _directions(transform: optax.GradientTransformation, params: PyTree) -> list[int] | None:
    """Return for each leaf -1 if some step's update of it changes sign, 1 if none of them does."""
    with jax.ensure_compile_time_eval():
        ones = jax.tree.map(
            lambda leaf: jnp.where(jnp.arange(leaf.size) % 2, 1.0, -1.0).reshape(leaf.shape), params
        )
        try:
            state, steps = transform.init(params), []
            for _ in range(3):  # a schedule may begin with 0
                update, state = transform.update(ones, state, params)
                if is_traced(update):
                    return None
                pairs = zip(jax.tree.leaves(update), jax.tree.leaves(ones), strict=True)
                steps.append([np.asarray(u) * np.asarray(one) for u, one in pairs])
        except Exception:  # made for params of another structure
            return None
    of_leaves = [*zip(*steps, strict=True)]
    turned = [any(p.size and (p < 0).all() for p in products) for products in of_leaves]
    kept = [all((p > 0).all() for p in products) for products in of_leaves]
    return [-1 if t else int(k) for t, k in zip(turned, kept, strict=True)]
