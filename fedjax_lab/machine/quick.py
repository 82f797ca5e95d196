"""Short compilations of programs that run once or a few times.

On CPU, XLA spends a third to a half of a compilation in its emitters of fused loops. Without them,
a program takes longer to run: rounds of an MLP 1.2 times as long, those of GradMA 2.7 times. They
may also round products and sums differently. Rounds are therefore never compiled this way: the bits
of a run would depend on how long it is.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

_EMITTERS = "xla_cpu_use_fusion_emitters"


def quick_options() -> dict[str, Any] | None:
    """Return the compiler's options for a short compilation; None: it has none.

    XLA's compiler for CPU alone has them, and not in every release.
    """
    return {_EMITTERS: False} if jax.default_backend() == "cpu" and _is_known() else None


@functools.cache
def _is_known() -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={_EMITTERS: False})
    except jax.errors.JaxRuntimeError:  # no such option
        return False
    return True


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


def quick_jit(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Jit a function with a short compilation.

    As with ``jax.jit``, the result may be called inside other transformed functions.

    Args:
      function: as of ``jax.jit``.
      **settings: keyword arguments of ``jax.jit``.
    """

    @functools.cache
    def jitted(is_outermost: bool) -> Callable[..., Any]:
        # JAX refuses options of a program inside another one.
        options = quick_options() if is_outermost else None
        return jax.jit(function, compiler_options=options, **settings)

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        return jitted(not _is_traced((arguments, named)))(*arguments, **named)

    return run


def _is_traced(arguments: Any) -> bool:
    """Return True if a call is being traced, even one without traced arguments."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        return True
    return isinstance(jax.device_put(np.int32(0)), jax.core.Tracer)
