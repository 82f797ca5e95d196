"""Checks of a run directory's path: the checkpoint library misreads some paths."""

import os
import re
from pathlib import Path
from typing import Any

from fedjax_lab.checks import check_tilde

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PATTERN = "*?[]\\"  # the checkpoint library reads these as patterns, or as a "/"


def check_run_dir(run_dir: Any) -> None:
    """Check that checkpoints can be written to a directory and read again.

    Raises:
      TypeError: it is not a path.
      FileExistsError: as ``check_no_file``.
      ValueError: its name, or that of a parent folder, contains characters that the checkpoint
        library misreads; it is a URL; or as ``check_no_file``.
    """
    if run_dir is None:
        return
    if not isinstance(run_dir, (str, os.PathLike)):
        raise TypeError(f"run_dir is {run_dir!r}; it must be the path of a directory.")
    shown = f"run_dir is {os.fspath(run_dir)!r}"
    if _ADDRESS.match(str(run_dir)):
        raise ValueError(
            f"{shown}, a URL; it must be a directory in the local file system. Mount the storage, "
            "or copy the directory there after the run."
        )
    path = str(Path(run_dir).absolute())
    if found := sorted(set(_PATTERN) & set(path)):
        raise ValueError(
            f"{shown}; checkpoints cannot be read from a path that contains {' or '.join(found)} "
            f"({path!r}). Choose another directory."
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{shown}, whose path is no UTF-8 text; checkpoints require that. Choose another "
            "directory."
        ) from None
    check_no_file(Path(run_dir))


def check_no_file(run_dir: Path) -> None:
    """Check that a directory exists or can be created.

    Raises:
      FileExistsError: it, or a parent folder, is a file or a link to nothing.
      ValueError: as ``check_tilde``.
    """
    check_tilde("run_dir", run_dir)
    path = run_dir.absolute()
    there = next(part for part in (path, *path.parents) if os.path.lexists(part))
    if not there.is_dir():
        raise FileExistsError(
            f"run_dir is {str(run_dir)!r}, and {str(there)!r} is no directory. Choose another one."
        )
