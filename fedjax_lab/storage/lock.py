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


@contextlib.contextmanager
def one_writer(run_dir: str | Path | None) -> Iterator[None]:
    """Hold an exclusive lock on a directory, which is created; None: nothing is written.

    The operating system releases the lock of a process that dies, so a stale file blocks no one.

    Raises:
      FileExistsError, ValueError: as ``check_no_file``.
      BlockingIOError: another process, or another run of this process, holds it.
      OSError: the lock file is a link, which is not followed.
    """
    if run_dir is None:
        yield
        return
    from filelock import FileLock, Timeout

    path = Path(run_dir)
    check_no_file(path)
    path.mkdir(parents=True, exist_ok=True)
    if (path / LOCK).is_symlink():
        raise OSError(errno.ELOOP, "a link, where a lock has to be a file", str(path / LOCK))
    lock, holder = FileLock(path / LOCK, is_singleton=False), path / HOLDER
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(
            f"run_dir is {str(path)!r}, which {_described(holder)} is writing; wait for its end, "
            "or choose another directory."
        ) from None
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
    # The content is used only in messages.
    with contextlib.suppress(OSError), new_file(holder) as file:
        json.dump(who, file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink(missing_ok=True)
        lock.release()


def _described(holder: Path) -> str:
    try:
        who = read_json(holder)
        return f"process {who['pid']} on {who['host']} (since {who['since']})"
    except (OSError, ValueError, KeyError):
        return "another process"
