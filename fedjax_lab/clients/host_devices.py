"""Creates one CPU device for each core, so that a cohort's clients run on all cores.

With the small matrices of local steps, XLA runs the program of one CPU device mostly on one core.
It has a single CPU device by default; the number can only be set before its first use.
"""

import collections
import contextlib
import os
from typing import Any

import jax

_VARIABLE = "FEDJAX_LAB_CPU_DEVICES"
_XLA_FLAG = "xla_force_host_platform_device_count"
_MOST_WAITING = 8


def divide_cpu() -> None:
    """Set the number of JAX's CPU devices, if the backend has not started yet.

    It is the environment variable ``FEDJAX_LAB_CPU_DEVICES`` if that is set, else the number of
    cores that this process may use.

    Importing the package calls this function. It has no effect if the number is already fixed, by
    ``jax.config.update("jax_num_cpu_devices", n)``, by XLA's flag, or by an earlier use of JAX.
    GPUs and TPUs are not affected.

    Raises:
      ValueError: the number is no positive integer.
    """
    config: Any = jax.config  # attributes are created at run time
    if config.jax_num_cpu_devices > 0 or _XLA_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    text = os.environ.get(_VARIABLE, "")
    if text and (not text.isdigit() or int(text) < 1):
        raise ValueError(f"{_VARIABLE} is {text!r}; it must be a positive integer.")
    count = int(text) if text else _cores()
    with contextlib.suppress(RuntimeError):  # the backend has started already
        config.update("jax_num_cpu_devices", count)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WaitingCalls:
    """The last calls of a program for several CPU devices, few of which may wait to be computed.

    XLA lets 32 wait. The threads that start the next one are those that compute, one for each core:
    all of them wait, and after 40 seconds XLA ends the process.
    """

    def __init__(self) -> None:
        """Know no call yet."""
        self._results: collections.deque[jax.Array] = collections.deque()

    def add(self, result: jax.Array) -> None:
        """Wait until all but the last few calls have been computed.

        Args:
          result: scalar that the last call returned; one on a single device, or on devices that
            are no CPUs, is ignored.
        """
        devices = result.devices()
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            self._results.append(result)
            if len(self._results) > _MOST_WAITING:
                self._results.popleft().block_until_ready()
