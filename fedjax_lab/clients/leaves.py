"""Which leaves of the params are a client's own: by a word, a pattern or a function of their paths.

A part of the params is the params with None in the place of all other leaves.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_lab.tree import path_text
from fedjax_lab.types import Params, PyTree

# A word of ``WORDS``, a regular expression that is searched for in the path of a leaf (such as
# "blocks_0/dense/kernel"), or a function of the path.
Leaves = str | Callable[[str], bool]

_HEADS = ("classifier", "decoder", "decoder_bias", "head", "lm_head")
_HEAD = rf"(^|/)({'|'.join(_HEADS)})(/|$)"
# All of a layer called norm; of one with a longer name, such as attention_norm, the leaves that a
# normalisation layer has, since a conv_norm may hold other layers, too.
_NORM = (
    r"(^|/)(norm|(batch|group|layer|rms)_?norm|bn)(_?\d+)?(/|$)"
    r"|(^|/)(\w*norm|(\w+_)?[bgl]n)(_?\d+|_f)?/"
    r"(scale|bias|weight|gamma|beta|running_mean|running_var)$"
)
# What the words stand for; "all" and "nothing" are the only ones that may mean all leaves or none.
WORDS: dict[str, Callable[[str], bool]] = {
    "head": lambda path: re.search(_HEAD, path) is not None,
    "body": lambda path: re.search(_HEAD, path) is None,
    "norm": lambda path: re.search(_NORM, path, re.IGNORECASE) is not None,
    "all": lambda path: True,
    "nothing": lambda path: False,
}


def check_leaves(argument: str, leaves: Leaves) -> None:
    """Check that ``leaves`` selects paths.

    Raises:
      TypeError: it is none of these.
      ValueError: it is no regular expression.
    """
    if callable(leaves):
        return
    if not isinstance(leaves, str):
        raise TypeError(
            f"{argument} is {leaves!r}; it must be one of {', '.join(WORDS)}, a regular expression "
            "for the paths of leaves, or a function of a path."
        )
    try:
        re.compile(leaves)
    except re.error as error:
        raise ValueError(f"{argument} is {leaves!r}, no regular expression: {error}.") from None


def check_some(method: str, argument: str, leaves: Leaves, params: Params) -> None:
    """Check that some leaves of the params are selected and some not, unless a word allows it.

    Raises:
      ValueError: all leaves are meant, or none.
    """
    if leaves in ("all", "nothing"):
        return
    paths = paths_of(params)
    meant = [_holds(leaves, path) for path in paths]
    if all(meant) or not any(meant):
        hint = ""
        if leaves == "norm":
            hint = " The model needs normalisation layers, such as models.mlp(norm='batch') has."
        if leaves in ("head", "body"):
            hint = f" The head is known by its name: {', '.join(_HEADS[:-1])} or {_HEADS[-1]}."
        raise ValueError(
            f"{argument} is {leaves!r}, which holds for {'all' if all(meant) else 'no'} leaves of "
            f"the params of {method}: {', '.join(paths)}.{hint} Give a pattern of their paths, or "
            "say 'all' or 'nothing'."
        )


def paths_of(params: PyTree) -> list[str]:
    """Return the paths of all leaves, such as "blocks_0/dense/kernel"."""
    return [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def split(params: PyTree, leaves: Leaves) -> tuple[PyTree, PyTree]:
    """Split params into (other leaves, these leaves), each with None in place of the others."""

    def part(these: bool) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if _holds(leaves, path_text(path)) == these else None, params
        )

    return part(False), part(True)


def join(part: PyTree, other: PyTree) -> Params:
    """Join two parts, as ``split`` returns them, to params."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, part, other, is_leaf=lambda leaf: leaf is None
    )


def exact_mean(rows: PyTree) -> PyTree:
    """Average a table [N, ...] over its clients; if all rows are equal, exactly that row."""
    return jax.tree.map(lambda r: r[0] + (r - r[:1]).mean(0).astype(r.dtype), rows)


class _Turns(NamedTuple):
    """State of ``one_after_the_other``."""

    steps: jax.Array  # int32 scalar, local steps taken in this round
    inner: Any


def one_after_the_other(
    leaves: Leaves, steps: int | jax.Array, transform: optax.GradientTransformation | None
) -> optax.GradientTransformation:
    """Build a ``step_transform``: a round's first steps move these leaves, the rest the others.

    Args:
      steps: how many steps move them, at least 0, may be traced; 0: they never move.
      transform: of the leaves that move; what it makes of the others is dropped. None: nothing.
    """
    inner = optax.identity() if transform is None else transform

    def init(params: Params) -> _Turns:
        return _Turns(jnp.zeros((), jnp.int32), inner.init(params))

    def update(direction, state, params=None):
        first = False if isinstance(steps, int) and steps == 0 else state.steps < steps

        def moving(tree):
            def move(path, leaf):
                moves = first if _holds(leaves, path_text(path)) else jnp.logical_not(first)
                return jnp.where(moves, leaf, jnp.zeros_like(leaf))

            return jax.tree_util.tree_map_with_path(move, tree)

        direction, inner_state = inner.update(moving(direction), state.inner, params)
        return moving(direction), _Turns(state.steps + 1, inner_state)

    return optax.GradientTransformation(init, update)


def _holds(leaves: Leaves, path: str) -> bool:
    if callable(leaves):
        return bool(leaves(path))
    return WORDS[leaves](path) if leaves in WORDS else re.search(leaves, path) is not None
