"""Memory of a device."""

import os
from typing import Any

import jax


def device_memory(device: Any = None) -> int:
    """Return the bytes that a device may use.

    This is the device's own limit if it has one (GPU, TPU). Otherwise it is an equal share of the
    machine's physical memory for each host device.

    Args:
      device: a JAX device of this process; None: the first one.

    Raises:
      OSError: neither the device nor the operating system reports its memory.
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
