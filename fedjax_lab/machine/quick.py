"""A pause of Python's garbage collection while a round is traced."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collection; also a decorator.

    Tracing a round creates hundreds of thousands of objects that stay alive. Collections then look
    at all objects of JAX again and again, which takes a fifth of the time of tracing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
