"""JAX's settings for debugging, and what they mean for runs.

=========================  ==============================================================
setting                    in ``simulate``, ``sweep`` and ``tune``
=========================  ==============================================================
``jax_debug_nans``,        rounds run one by one, and the ``FloatingPointError`` names the
``jax_debug_infs``         round; in a sweep, the rounds of the chunk
``jax_disable_jit``        refused, because all rounds are compiled
``jax_debug_key_reuse``    off, with a warning: a cohort with values that are not finite is
                           run again with the same keys, which is intended
``jax_transfer_guard``     "disallow" is off: a run copies its arguments to the devices, and
                           its rows back. Its rounds transfer nothing
=========================  ==============================================================
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from fedjax_lab.checks import warn

Function = TypeVar("Function", bound=Callable[..., Any])

_NO_JIT = (
    "jax_disable_jit is True; {name} compiles its rounds and cannot run without. To look into a "
    "round, run it by itself under jax.disable_jit(): state, metrics = build_round(algorithm, "
    "'scan')(state, data.draw_batch(clients, key, round, ...)), with state = "
    "algorithm.init(params, clients.num_clients) before round 0."
)
_KEYS = (
    "jax_debug_key_reuse is True; {name} runs without this check, because a cohort with values "
    "that are not finite is run again with the same keys. Check a loss by itself: "
    "jax.jit(loss_fn)(params, examples, key)."
)
_GUARDS = ("host_to_device", "device_to_host", "device_to_device")


def _setting(name: str) -> Any:
    return getattr(jax.config, f"jax_{name}")


def values_are_checked() -> bool:
    """Return True if JAX looks for NaN or infinities in results (``jax_debug_nans``, ``_infs``).

    Its error names the operation only if a jitted function is called, not a compiled program.
    """
    return _setting("debug_nans") or _setting("debug_infs")


def debuggable(function: Function) -> Function:
    """Make a function that runs rounds follow JAX's settings for debugging, as described above."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        name = function.__name__
        if _setting("disable_jit"):
            raise ValueError(_NO_JIT.format(name=name))
        guards = [_setting(f"transfer_guard_{name}") for name in _GUARDS]
        with contextlib.ExitStack() as stack:
            if any(guard and guard.startswith("disallow") for guard in guards):
                stack.enter_context(jax.transfer_guard("allow"))
            if _setting("debug_key_reuse"):
                warn(_KEYS.format(name=name))
                stack.enter_context(jax.debug_key_reuse(False))
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
