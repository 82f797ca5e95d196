"""Compiled programs outlive the process: the same command starts at once the next time."""

import os
from pathlib import Path
from typing import Any

import jax

# Seconds: what compiles faster is not worth a file.
_WORTH_KEEPING = 0.2


def keep_programs(folder: str | Path | None = None) -> None:
    """Have JAX keep compiled programs on disk and read them back.

    Scripts call it before they compile anything; the library never does by itself. A cache that
    has been chosen already, by ``JAX_COMPILATION_CACHE_DIR`` or by ``jax.config``, stays. The
    files may be deleted at any time.

    Args:
      folder: where; None: ``fedjax_lab/programs`` in the user's cache folder
        (``XDG_CACHE_HOME``, or else ``~/.cache``).
    """
    config: Any = jax.config  # its attributes are made at run time
    if config.jax_compilation_cache_dir:
        return
    if folder is None:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(caches) / "fedjax_lab" / "programs"
    config.update("jax_compilation_cache_dir", str(Path(folder).resolve()))
    config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)
