"""Target machines: devices, memory, compilers, and figures of compiled programs."""
