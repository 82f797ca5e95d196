"""Compiled programs that one run of the tests keeps for the next one.

A run works in a folder of its own, which begins with links to the programs of earlier runs, so that
runs at the same time do not disturb each other. At its end the new programs move to the common
folder. A program is found by its text, the compiler's flags and JAX's version: a change to the code
under test makes another program.
"""

import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jax

from fedjax_lab.machine.program_cache import processor, user_cache

# A folder in place of the user's cache; "off": nothing is kept.
VARIABLE = "FEDJAX_LAB_TEST_PROGRAMS"
_MOST_BYTES = 2**31
_DAY = 86_400  # seconds, after which a run's folder was left by one that was killed
_RUN = "run-"


def common_folder() -> Path | None:
    """The folder of the programs that are kept, for this kind of processor; None: none are."""
    chosen = os.environ.get(VARIABLE)
    if chosen == "off":
        return None
    return Path(chosen or user_cache() / "tests") / processor()


class KeptPrograms:
    """The folder of a run, and the common one.

    Args:
      common: the common folder; None, or one that cannot be written: nothing is kept.

    Attributes:
      folder: where the run's JAX is to look for programs and to put them.
    """

    def __init__(self, common: Path | None):
        self._common = common
        try:
            if common is not None:
                common.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=_RUN, dir=common))
        except OSError:
            self._common, self.folder = None, Path(tempfile.mkdtemp(prefix=_RUN))
        if self._common is None:
            return
        self._throw_away()
        for program in self._common.glob("*-cache"):
            try:
                os.link(program, self.folder / program.name)
            except FileNotFoundError:
                continue  # another run threw it away
            except OSError:  # a file system without links
                shutil.copy(program, self.folder)

    def _throw_away(self) -> None:
        """Delete all programs if they have become too many, and what killed runs left."""
        assert self._common is not None
        programs = list(self._common.glob("*-cache"))
        if sum(program.stat().st_size for program in programs) > _MOST_BYTES:
            for program in programs:
                program.unlink(missing_ok=True)
        for left in self._common.glob(f"{_RUN}*"):
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)

    def close(self) -> None:
        """Move the run's complete new programs to the common folder, and delete the run's."""
        if self._common is not None:
            for program in self.folder.glob("*-cache"):
                kept = self._common / program.name
                if not kept.exists() and is_complete(program):
                    program.replace(kept)
        shutil.rmtree(self.folder, ignore_errors=True)


def use_programs(folder: str) -> None:
    """Have JAX read its programs from a folder, and write there what it compiles.

    Args:
      folder: that of the run.
    """
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # XLA's own caches, of GPUs, would make the folder a part of each program's key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def is_complete(program: Path) -> bool:
    """Whether a program was written to its end; a process may be killed before.

    Args:
      program: a file of JAX's cache.
    """
    # JAX packs with the better one of the standard library's.
    packer = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "zlib")
    broken = packer.ZstdError if hasattr(packer, "ZstdError") else packer.error
    try:
        packer.decompress(program.read_bytes())
    except (broken, EOFError):
        return False
    return True
