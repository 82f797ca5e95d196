"""What a loss reads beside the params and nobody trains, while the program that reads it is traced.

A method calls its loss as (params, examples, key). The frozen part reaches it past the method, and
past every wrapper around it: the round, which has it among its arguments, holds it while it traces
a client's half.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from fedjax_lab.types import PyTree

_HELD: contextvars.ContextVar[PyTree] = contextvars.ContextVar("frozen", default=None)


@contextlib.contextmanager
def hold_frozen(frozen: PyTree) -> Iterator[None]:
    """Inside, ``held_frozen`` returns ``frozen``; with (), what it returns outside.

    Args:
      frozen: pytree of arrays, traced or not.
    """
    token = _HELD.set(frozen) if jax.tree.leaves(frozen) else None
    try:
        yield
    finally:
        if token is not None:
            _HELD.reset(token)


def held_frozen() -> PyTree:
    """The frozen part of the round that is traced.

    Raises:
      RuntimeError: no round is traced, or one whose state has no frozen part.
    """
    held = _HELD.get()
    if held is None:
        raise RuntimeError(
            "the loss of with_frozen was called outside of a round of its method, or with a state "
            "whose field ``frozen`` is (); algorithm.init and result.state have it."
        )
    return held
