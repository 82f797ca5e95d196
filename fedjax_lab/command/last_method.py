"""Keeps a process's last method, so that runs with other seeds are not traced and lowered again.

Traced rounds belong to a Python object (``keep_chunks``), so runs have to share it. Of four times
``run --algorithm fedavg --rounds 5`` in one process, with FEDJAX_LAB_PROGRAMS=off, the first took
18 processor seconds and the others 3.5 each; without this, the others took 10 to 12. Another
partition takes 4 (without: 16).
"""

from collections.abc import Callable
from typing import Any, TypeVar

from fedjax_lab.command.config import RunConfig

Made = TypeVar("Made")

# Recorded settings on which a method does not depend.
_OTHERS = ("seed", "init_seed", "partition", "partition_seed")
_last: dict[Any, Any] = {}  # at most one


def last_or_new(config: RunConfig, data: str, make: Callable[[], Made]) -> Made:
    """Return what was made for the last config if only its seeds differ, else make it.

    Args:
      config: the settings, resolved, without code of the user's own, which may change.
      make: function of nothing that makes whatever depends on the settings and the data alone.
    """
    kept = config.record()
    for name in _OTHERS:
        if name != "seed" or config.privacy.attack is None:  # attackers are drawn with the seed
            kept.pop(name, None)
    key = repr(sorted(kept.items())), data
    if key not in _last:
        made = make()
        _last.clear()
        _last[key] = made
    return _last[key]
