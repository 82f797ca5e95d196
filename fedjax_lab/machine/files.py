"""Files and folders that appear under their name when they are complete."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def new_file(path: Path, mode: str = "w", **options: Any) -> IO[Any]:
    """A new file to write to, in place of what has the name: a link is taken away, not followed.

    Args:
      path: the file; its folder exists.
      mode: "w" or "wb".
      **options: as in ``open``.
    """
    path.unlink(missing_ok=True)
    options = options if "b" in mode else {"encoding": "utf-8", **options}
    return open(path, mode.replace("w", "x"), **options)


@contextlib.contextmanager
def write_atomically(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that gets its name when it is complete and on the disk.

    Readers find the old file or the new one. An error leaves the old one; only a killed process
    leaves a scratch file, ``.NAME.*.tmp``. A link under the name is replaced, not followed.

    Args:
      path: the file; its folder exists.
      mode: "w" (UTF-8) or "wb".

    Raises:
      OSError: the folder does not exist, or the disk is full.
    """
    scratch = _beside(path)
    try:
        with new_file(scratch, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; see ``write_atomically``.

    Args:
      path: the file; its folder exists.
      text: its content.
    """
    with write_atomically(path) as file:
        file.write(text)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that gets its name when all its files are written; an error leaves none.

    Args:
      folder: must not exist, or be empty; its parent exists.

    Yields:
      The folder to write to.

    Raises:
      FileExistsError: the folder holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"folder is {str(folder)!r}, which is there and not empty.")
    scratch = _beside(folder)
    scratch.mkdir()
    try:
        yield scratch
        os.replace(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _beside(path: Path) -> Path:
    """A name of its own for each call, so that two writers of one file do not meet."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
