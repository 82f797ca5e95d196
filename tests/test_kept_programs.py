"""Programs of one run of the tests are there in the next one, and a broken one is not."""

import os
import zlib
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests import kept_programs
from tests.kept_programs import KeptPrograms, use_programs

PACKED = zlib.compress(b"a program" * 100)
as_zlib = pytest.mark.skipif("sys.version_info >= (3, 14)", reason="JAX packs with zstd there")


def names(folder):
    return {file.name for file in Path(folder).glob("*-cache")}


@as_zlib
def test_programs_of_a_run_are_in_the_next_one_and_halves_are_not(tmp_path):
    first, beside = KeptPrograms(tmp_path), KeptPrograms(tmp_path)
    (first.folder / "whole-cache").write_bytes(PACKED)
    (first.folder / "half-cache").write_bytes(PACKED[:-3])
    assert names(beside.folder) == set()  # a run at the same time sees nothing of it
    first.close()
    assert not first.folder.exists()
    (beside.folder / "whole-cache").write_bytes(PACKED)
    beside.close()
    last = KeptPrograms(tmp_path)
    assert names(last.folder) == {"whole-cache"}
    assert (last.folder / "whole-cache").read_bytes() == PACKED


@as_zlib
def test_too_many_programs_and_folders_of_killed_runs_are_thrown_away(tmp_path, monkeypatch):
    killed = KeptPrograms(tmp_path)
    os.utime(killed.folder, (0, 0))
    (tmp_path / "old-cache").write_bytes(PACKED)
    assert names(KeptPrograms(tmp_path).folder) == {"old-cache"}
    assert not killed.folder.exists()
    monkeypatch.setattr(kept_programs, "_MOST_BYTES", len(PACKED) - 1)
    assert names(KeptPrograms(tmp_path).folder) == set()
    assert names(tmp_path) == set()


def test_without_a_folder_that_can_be_written_nothing_is_kept(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    run = KeptPrograms(tmp_path / "file" / "below")
    assert run.folder.exists()
    run.close()
    assert not run.folder.exists()
    monkeypatch.setenv(kept_programs.VARIABLE, "off")
    assert kept_programs.common_folder() is None
    monkeypatch.setenv(kept_programs.VARIABLE, str(tmp_path))
    assert kept_programs.common_folder().parent == tmp_path


def test_a_program_has_the_same_name_in_any_folder(tmp_path):
    """Else nothing would be found that another run has kept."""

    def compiled_in(folder):
        def program_that_no_other_test_has(x):
            return x + 27182818

        use_programs(str(folder))
        compilation_cache.reset_cache()
        jax.jit(program_that_no_other_test_has).lower(1.0).compile()
        return names(folder)

    before = jax.config.jax_compilation_cache_dir
    try:
        assert compiled_in(tmp_path / "a") == compiled_in(tmp_path / "b") != set()
    finally:
        use_programs(before)
        compilation_cache.reset_cache()
