"""Optax transformations of a client's direction: which way they turn it, their state and step.

Optimizers return what is to be added, and clients subtract.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_lab import tree
from fedjax_lab.checks import is_traced
from fedjax_lab.machine.keys import compact, fold_in, is_key
from fedjax_lab.types import Key, Params, PyTree

# Folded into a client's key for random keys in the state; see ``clients.local``.
_STATE = np.uint32(2**32 - 2)
_NAMED = 5  # leaves in an error
_VECTOR = 64  # entries, all of which noise would hardly turn
_OF_LEAVES = (optax.MaskedState, optax.PartitionState)


def has_parts(transform: Any) -> bool:
    """Return True for what has optax's ``init`` and ``update``, such as ``optax.MultiSteps``."""
    return not isinstance(transform, type) and all(
        callable(getattr(transform, part, None)) for part in ("init", "update")
    )


def check_transform(name: str, transform: Any) -> None:
    """Check that an argument is None or an optax transformation that keeps the direction's sign.

    Raises:
      TypeError: it is no transformation.
      ValueError: it is an optimizer, whose updates are to be added and not descended.
    """
    if transform is None:
        return
    if not has_parts(transform):
        raise TypeError(
            f"{name} is {transform!r}; it must be an optax transformation, such as "
            "optax.clip_by_global_norm(10.0) or optax.scale_by_adam()."
        )
    if direction(transform) == -1:
        raise ValueError(
            f"{name} changes the sign of its input, as optax.adam(...) and optax.sgd(...) do. "
            "Clients subtract its result times client_lr: pass a transformation without a learning "
            "rate, such as optax.scale_by_adam() or optax.trace(0.9)."
        )


def direction(transform: Any) -> int | None:
    """Return -1 for a transformation that turns a vector round, and 1 for one that keeps its signs.

    0: neither. None: it cannot be told, because it is made for params of a certain structure.
    """
    found = _directions(transform, jnp.zeros(_VECTOR))
    return None if found is None else found[0]


def initial_state(
    transform: optax.GradientTransformation | None,
    params: Params,
    key: Key,
    name: str = "step_transform",
) -> PyTree:
    """Initialise a client's state of a transformation; () without one.

    A random key in it, such as that of ``optax.add_noise``, is the same for all clients and rounds.
    The client's key is folded into it, so that they draw different numbers.

    Raises:
      ValueError: it turns some leaves round, as an optimizer inside ``optax.masked`` does.
    """
    if transform is None:
        return ()
    state = transform.init(params)
    _check_leaves(name, transform, params, state)
    if not any(map(is_key, jax.tree.leaves(state))):
        return state
    own = jax.random.bits(fold_in(key, _STATE))

    def combine(leaf):
        if not is_key(leaf):
            return leaf
        combined = jax.vmap(jax.random.fold_in, (0, None))(compact(leaf).reshape(-1), own)
        return combined.reshape(leaf.shape)

    return jax.tree.map(combine, state)


def _check_leaves(
    name: str, transform: optax.GradientTransformation, params: Params, state: PyTree
) -> None:
    """Refuse a transformation of single leaves, such as ``optax.masked``, that turns one round.

    Args:
      params: of the structure that it is made for; only numbers of axes count.
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
