"""Creates files and folders that get their names only when they are complete."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def new_file(path: Path, mode: str = "w", **options: Any) -> IO[Any]:
    """Open a new file in place of one of that name; a link is removed, not followed.

    Args:
      path: the file; its folder exists.
      mode: "w" or "wb".
    """
    path.unlink(missing_ok=True)
    options = options if "b" in mode else {"encoding": "utf-8", **options}
    return open(path, mode.replace("w", "x"), **options)


@contextlib.contextmanager
def write_atomically(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that gets its name only when it is complete and on disk.

    Readers find either the old file or the new one. After an error, the old one remains. A process
    that is killed leaves a temporary file, ``.NAME.*.tmp``. A link of that name is replaced, not
    followed.

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
    """
    with write_atomically(path) as file:
        file.write(text)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a folder that gets its name when all its files are written; an error leaves none.

    Args:
      folder: must not exist, or be empty; its parent exists. A link to such a folder is followed.

    Yields:
      The folder to write to.

    Raises:
      FileExistsError: the folder is not empty.
      ValueError: it is the working directory, which would be another one afterwards.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"folder is {str(folder)!r}, which is there and not empty.")
    place = folder.resolve()
    if place == Path.cwd():
        raise ValueError(
            f"folder is {str(folder)!r}, the working directory; it must be another folder, such as "
            f"{str(folder / 'new')!r}."
        )
    scratch = _beside(place)
    scratch.mkdir()
    try:
        yield scratch
        os.replace(scratch, place)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _beside(path: Path) -> Path:
    """Return a temporary name, unique for each call, so that two writers do not collide."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
