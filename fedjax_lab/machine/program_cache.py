"""JAX's cache of compiled programs on disk, so that a script does not compile twice."""

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax

from fedjax_lab.checks import check_tilde, warn

VARIABLE = "FEDJAX_LAB_PROGRAMS"
# Seconds; programs that compile faster are not stored.
_WORTH_KEEPING = 0.1
_JAX_WORTH_KEEPING, _JAX_MOST = 1.0, -1  # JAX's defaults, which the user has not chosen
_MOST_BYTES = 2**30
_MOST_PROGRAMS = 500  # JAX looks at each whenever it stores one: 0.1 ms each
_LOCK = ".lockfile"  # JAX's own


def keep_programs(folder: str | Path | None = None) -> bool:
    """Let JAX store compiled programs on disk and read them back.

    At most 1 GiB is kept; the least recently used programs are deleted. When a process begins, the
    500 most recently used are kept, because JAX reads the size and the time of each one whenever it
    stores another. Several processes may share the folder. Incomplete files of killed processes are
    deleted here. The files may be deleted at any time.

    Nothing changes if ``FEDJAX_LAB_PROGRAMS`` is "off", or if JAX's own settings
    (``JAX_COMPILATION_CACHE_DIR``, ``JAX_ENABLE_COMPILATION_CACHE``, ``jax.config``) select a cache
    or turn it off. JAX's limits, if set, are kept.

    Args:
      folder: folder of the cache. None: the folder in ``FEDJAX_LAB_PROGRAMS``, or else
        ``fedjax_lab/programs`` in the user's cache folder (``XDG_CACHE_HOME`` or ``~/.cache``); in
        it, a folder for this kind of processor.

    Returns:
      True if this call turned the cache on.

    Raises:
      OSError: the folder is not writable, or it is None and the user has no home or the variable
        begins with a ~.
      ValueError: it begins with a ~.
    """
    check_tilde("folder", folder)
    config: Any = jax.config  # its attributes are made at run time
    is_chosen = config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache
    if is_chosen or os.environ.get(VARIABLE) == "off":
        return False
    path = Path(folder or _default()).resolve()
    # Others with write access could run code here.
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_ours = config.jax_compilation_cache_max_size == _JAX_MOST
    _delete_programs(path, _MOST_PROGRAMS if is_ours else None)
    config.update("jax_compilation_cache_dir", str(path))
    if config.jax_persistent_cache_min_compile_time_secs == _JAX_WORTH_KEEPING:
        config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)
    if is_ours:
        config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    return True


def _delete_programs(path: Path, most: int | None) -> None:
    """Delete incomplete programs, and the least recently used ones beyond ``most``.

    Args:
      path: folder of the cache.
      most: number of programs to keep; None: all.
    """
    from filelock import FileLock, Timeout

    try:
        with FileLock(path / _LOCK, timeout=0):
            names = {entry.name for entry in os.scandir(path)}
            programs = [name.removesuffix("cache") for name in names if name.endswith("-cache")]
            # JAX writes the time of last use after the program, and could not evict one without.
            complete = [name for name in programs if f"{name}atime" in names]
            surplus = {*programs} - {*complete}
            if most is not None and len(complete) > most:
                times = {name: (path / f"{name}atime").read_bytes() for name in complete}
                complete.sort(key=lambda name: int.from_bytes(times[name], "little"))
                surplus |= {*complete[:-most]}
            for name in surplus:
                (path / f"{name}cache").unlink(missing_ok=True)
                (path / f"{name}atime").unlink(missing_ok=True)
    except Timeout:
        return  # another process uses the folder; the next one will delete them


def keep_by_default(quiet: bool = False) -> None:
    """Call ``keep_programs``, and print the folder on stderr when it is new.

    ``simulate``, ``sweep``, ``tune``, the command line, ``build_evaluation`` and the ``init`` of
    flax models call it. ``FEDJAX_LAB_PROGRAMS=off`` turns it off; under pytest it is off unless
    that variable names a folder. A folder that cannot be used is warned of.

    Args:
      quiet: do not print the folder.
    """
    if not os.environ.get(VARIABLE) and "PYTEST_VERSION" in os.environ:
        return
    try:
        folder = _default()
        is_new = not folder.exists()
        if keep_programs() and is_new and not quiet:
            print(
                f"fedjax_lab: compiled programs are stored in {folder} ({VARIABLE}=off: never)",
                file=sys.stderr,
                flush=True,
            )
    except OSError as error:
        warn(f"compiled programs cannot be stored: {error} ({VARIABLE}=off: never)")


def _default() -> Path:
    return _folder_of(VARIABLE) or user_cache() / "programs" / processor()


def _folder_of(variable: str) -> Path | None:
    """Return the folder that an environment variable names; None: none."""
    chosen = os.environ.get(variable)
    try:
        check_tilde(variable, chosen)
    except ValueError as error:
        raise OSError(str(error)) from error
    return Path(chosen) if chosen else None


def user_cache() -> Path:
    """Return the library's folder in the user's cache, below ``XDG_CACHE_HOME`` or ~/.cache.

    Raises:
      OSError: the user has no home, as under a number without a name in a container; or the
        variable begins with a ~.
    """
    try:
        cache = _folder_of("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"the user has no home; set HOME or XDG_CACHE_HOME ({error})") from error
    return cache / "fedjax_lab"


@functools.cache
def processor() -> str:
    """Return the kind of processor, which JAX's own cache keys do not fully include.

    Without it, computers that share a home directory would run programs for another processor.
    """
    features = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    features += sorted(
        {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    )
    return hashlib.sha256("\n".join(features).encode()).hexdigest()[:12]
