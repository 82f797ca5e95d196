"""One writer at a time: the lock on a run directory."""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from fedjax_lab.machine.atomic_files import new_file
from fedjax_lab.machine.json_file import read_json
from fedjax_lab.storage.run_path import check_no_file

LOCK, HOLDER = ".lock", ".lock-holder.json"


class RunDirLock:
    """An exclusive lock on a run directory, held until ``release`` or the end of the process.

    The operating system releases the lock of a process that dies, so a stale file blocks no one.

    Args:
      path: the run directory, which exists.

    Raises:
      BlockingIOError: another process, or another run of this process, holds it.
      OSError: the lock file is a link, which is not followed.
    """

    def __init__(self, path: Path):
        from filelock import FileLock, Timeout

        self._holder = path / HOLDER
        if (path / LOCK).is_symlink():
            raise OSError(errno.ELOOP, "a link, where a lock has to be a file", str(path / LOCK))
        self._lock = FileLock(path / LOCK, is_singleton=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise BlockingIOError(
                f"run_dir is {str(path)!r}, which {_described(self._holder)} is writing; wait for "
                "its end, or choose another directory."
            ) from None
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        # The content is used only in messages.
        with contextlib.suppress(OSError), new_file(self._holder) as file:
            json.dump(who, file)

    def release(self) -> None:
        """Release the lock."""
        with contextlib.suppress(OSError):
            self._holder.unlink(missing_ok=True)
        self._lock.release()


@contextlib.contextmanager
def one_writer(run_dir: str | Path | None) -> Iterator[None]:
    """Hold the lock on a directory, which is created; None: nothing is written.

    Args:
      run_dir: the directory.

    Raises:
      FileExistsError: as ``check_no_file``.
      BlockingIOError, OSError: as ``RunDirLock``.
    """
    if run_dir is None:
        yield
        return
    check_no_file(Path(run_dir))
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    lock = RunDirLock(Path(run_dir))
    try:
        yield
    finally:
        lock.release()


def _described(holder: Path) -> str:
    try:
        who = read_json(holder)
        return f"process {who['pid']} on {who['host']} (since {who['since']})"
    except (OSError, ValueError, KeyError):
        return "another process"
