"""A cache of compiled programs on disk, so that a script does not compile twice."""

import functools
import hashlib
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import jax

VARIABLE = "FEDJAX_LAB_PROGRAMS"
# Seconds; programs that compile faster are not stored.
_WORTH_KEEPING = 0.1
_JAX_WORTH_KEEPING, _JAX_MOST = 1.0, -1  # JAX's defaults, which the user has not chosen
_MOST_BYTES = 2**30
_PATIENCE = 10.0  # seconds that JAX waits for the lock

_SAID = ".said"  # file in the folder, written when its location has been printed

_tried: list[bool] = []  # not empty once ``keep_by_default`` has been called in this process
# Messages for ``say_where``, each with the file that marks it as printed.
_to_say: list[tuple[str, Path | None]] = []


def keep_programs(folder: str | Path | None = None) -> bool:
    """Let JAX store compiled programs on disk and read them back.

    At most 1 GiB is kept; the least recently used programs are deleted. Several processes may share
    the folder: a lock is held while a file is read or written. Incomplete files of killed processes
    are deleted here. A file that turns out to be damaged is replaced, with a warning. The files may
    be deleted at any time.

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
      OSError: the folder is not writable, or another process does not release it.
    """
    config: Any = jax.config  # its attributes are made at run time
    is_chosen = config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache
    if is_chosen or _chosen() == "off":
        return False
    path = Path(folder or _chosen() or _default()).resolve()
    path.mkdir(
        mode=0o700, parents=True, exist_ok=True
    )  # others with write access could run code here
    _throw_halves_away(path)
    _replace_damaged()
    config.update("jax_compilation_cache_dir", str(path))
    if config.jax_persistent_cache_min_compile_time_secs == _JAX_WORTH_KEEPING:
        config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)
    if config.jax_compilation_cache_max_size == _JAX_MOST:
        config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    return True


def keep_by_default(quiet: bool = False) -> None:
    """Call ``keep_programs`` once per process; ``say_where`` prints the folder later.

    ``simulate``, ``sweep``, the command line, ``build_evaluation`` and the ``init`` of flax models
    call it. ``FEDJAX_LAB_PROGRAMS=off`` turns it off; under pytest it is off unless that variable
    names a folder.

    Args:
      quiet: whether ``say_where`` prints nothing.
    """
    chosen = _chosen()
    if _tried or chosen == "off" or (chosen is None and "PYTEST_VERSION" in os.environ):
        return
    _tried.append(True)
    config: Any = jax.config
    try:
        kept = keep_programs()
    except OSError as error:  # includes a lock that is not released
        message, said = f"compiled programs cannot be stored: {error}", None
    else:
        if not kept:
            return
        folder = config.jax_compilation_cache_dir
        message, said = f"compiled programs are stored in {folder}", Path(folder) / _SAID
    if not quiet:
        _to_say.append((f"fedjax_lab: {message} ({VARIABLE}=off: never)", said))


def say_where() -> None:
    """Print the folder of the cache on stderr, once for each folder.

    It is called after all arguments have been checked. A folder that cannot be used is reported by
    each process.
    """
    while _to_say:
        line, said = _to_say.pop()
        try:
            if said is not None:
                said.touch(exist_ok=False)
        except FileExistsError:
            continue
        except OSError:
            pass  # the folder is missing or full
        print(line, file=sys.stderr, flush=True)


def _chosen() -> str | None:
    return os.environ.get(VARIABLE) or None


def _default() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "fedjax_lab" / "programs" / processor()


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


def _throw_halves_away(path: Path) -> None:
    """Delete incomplete programs: those without a time of last use, which JAX writes last.

    JAX could not decide which of them to evict.
    """
    with _locked(path):
        for program in path.glob("*-cache"):
            time = _time_of(program)
            if not time.exists() or time.stat().st_size != 8:
                program.unlink(missing_ok=True)
                time.unlink(missing_ok=True)


def _locked(path: Path) -> Any:
    import filelock  # only runs need it, not a single round

    return filelock.FileLock(path / ".lockfile", timeout=_PATIENCE)  # JAX's lock


def _time_of(program: Path) -> Path:
    """Return the file with the time of last use of a program."""
    return program.with_name(program.name.removesuffix("-cache") + "-atime")


def _replace_damaged() -> None:
    """Let JAX delete a program that cannot be read, so that it is compiled and written again.

    JAX itself warns of the file in every run, because it never overwrites one.
    """
    from jax._src import compilation_cache  # there is no public way

    cache: Any = compilation_cache
    read = getattr(cache, "get_executable_and_time", None)
    if read is None or hasattr(read, "__wrapped__"):
        return

    @functools.wraps(read)
    def read_or_delete(key: str, *others: Any, **named: Any) -> Any:
        try:
            return read(key, *others, **named)
        except OSError:  # nothing is wrong with the file
            raise
        except Exception:
            config: Any = jax.config
            program = Path(config.jax_compilation_cache_dir) / f"{key}-cache"
            with _locked(program.parent):
                program.unlink(missing_ok=True)
                _time_of(program).unlink(missing_ok=True)
            warnings.warn(
                f"{program.parent} has damaged programs; they are compiled again and replaced.",
                UserWarning,
                stacklevel=2,
            )
            return None, None

    replacing: Any = read_or_delete
    cache.get_executable_and_time = replacing
