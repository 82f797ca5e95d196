"""How much memory a device has for us."""

import os
from typing import Any

import jax


def device_memory(device: Any = None) -> int:
    """Bytes that a device may use.

    Its own limit where it tells one (GPU, TPU). Otherwise the machine's physical memory, of
    which each of the host devices gets an equal share.

    Args:
      device: a JAX device of this process; None: the first one.

    Raises:
      OSError: neither the device nor the operating system says how much there is.
    """
    if device is None:
        device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return int(limit)
    if not hasattr(os, "sysconf"):
        raise OSError(f"the memory of {device} is unknown on this operating system.")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return physical // len(jax.local_devices(backend=device.platform))
