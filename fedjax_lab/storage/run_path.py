"""Checks of a run directory's path: the checkpoint library misreads some paths."""

import os
import re
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PATTERN = "*?[]\\"  # what the storage library of checkpoints takes for patterns, or for a "/"


def check_run_dir(run_dir: Any) -> None:
    """Check that checkpoints can be written to a directory and read again.

    Args:
      run_dir: argument of ``simulate``.

    Raises:
      TypeError: it is not a path.
      ValueError: its name, or that of a parent folder, contains characters that the checkpoint
        library misreads; or it is a URL.
    """
    if run_dir is None:
        return
    if not isinstance(run_dir, (str, os.PathLike)):
        raise TypeError(f"run_dir is {run_dir!r}; it must be the path of a directory.")
    told = f"run_dir is {os.fspath(run_dir)!r}"
    if _ADDRESS.match(str(run_dir)):
        raise ValueError(
            f"{told}, a URL; it must be a directory of this machine's file system. Mount the "
            "storage, or copy the directory there once the run has ended."
        )
    path = str(Path(run_dir).absolute())
    if found := sorted(set(_PATTERN) & set(path)):
        raise ValueError(
            f"{told}; checkpoints cannot be read again from a path with {' or '.join(found)} in it "
            f"({path!r}). Choose another directory."
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{told}, whose path is no UTF-8 text, as that of checkpoints has to be. Choose "
            "another directory."
        ) from None
