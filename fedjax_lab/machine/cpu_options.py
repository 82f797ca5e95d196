"""Options of XLA's compiler for CPU, for programs that its defaults do not suit.

Other backends have none of them, and a release of JAX may have only some.
"""

import functools
from typing import Any

import jax

_EMITTERS = "xla_cpu_use_fusion_emitters"
_REGIONS = "xla_cpu_copy_insertion_use_region_analysis"


def quick_options() -> dict[str, Any] | None:
    """Return options for a short compilation; None: there are none.

    XLA spends a third to a half of a compilation in its emitters of fused loops. Without them,
    programs take longer to run and may round differently; see ``quick``.
    """
    return _known(_EMITTERS, False)


def round_options() -> dict[str, Any] | None:
    """Return options for programs of rounds; None: there are none.

    A local step updates params that its backward pass still reads. By default, XLA copies these
    params in each step. With an analysis of the order in which they are read and written, it
    updates them in place. The bits are the same.
    """
    return _known(_REGIONS, True)


def _known(option: str, value: bool) -> dict[str, Any] | None:
    """Return an option with its value, if the current backend knows it."""
    is_known = jax.default_backend() == "cpu" and _is_known(option)
    return {option: value} if is_known else None


@functools.cache
def _is_known(option: str) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={option: True})
    except jax.errors.JaxRuntimeError:  # no such option
        return False
    return True
