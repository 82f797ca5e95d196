"""Client rows in files: what was written is read, and nobody else's row is there."""

import errno
from collections import namedtuple

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab.clients.host_table import HostTable

N = 7
FIRST = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": jnp.ones(2, jnp.bfloat16),
    "seen": np.array(True),
    "none": np.zeros((0, 3), np.float32),
}


def rows_of(rng, count):
    return {
        "w": rng.normal(size=(count, 2, 3)).astype(np.float32),
        "half": jnp.asarray(rng.normal(size=(count, 2)), jnp.bfloat16),
        "seen": rng.integers(0, 2, count).astype(bool),
        "none": np.zeros((count, 0, 3), np.float32),
    }


def test_it_holds_what_a_dictionary_would(tmp_path):
    rng = np.random.default_rng(0)
    table, expected = HostTable(FIRST, N, tmp_path), {}
    for _ in range(20):
        ids = np.append(np.sort(rng.choice(N, 3, replace=False)), N)  # the last place is nobody's
        rows = rows_of(rng, 4)
        table.write(ids, rows)
        for place, client in enumerate(ids[:-1]):
            expected[client] = {name: np.asarray(leaf)[place] for name, leaf in rows.items()}
        asked = rng.integers(0, N + 1, 9)
        found = table.read(asked)
        for name in FIRST:
            said = [np.asarray(expected.get(client, FIRST)[name]) for client in asked]
            np.testing.assert_array_equal(found[name], np.stack(said))
            assert found[name].dtype == np.asarray(FIRST[name]).dtype
    np.testing.assert_array_equal(np.flatnonzero(table.seen), sorted(expected))
    other = HostTable(FIRST, N)
    other.load(table.seen_rows())
    for name in FIRST:
        everybody = np.arange(N)
        np.testing.assert_array_equal(other.read(everybody)[name], table.read(everybody)[name])


def test_rows_of_nobody_are_written_and_loaded(tmp_path):
    table, other = HostTable(FIRST, N, tmp_path), HostTable(FIRST, N, tmp_path)
    table.write(np.zeros(0, np.int32), rows_of(np.random.default_rng(0), 0))
    table.write([N, N], rows_of(np.random.default_rng(0), 2))
    other.load(table.seen_rows())
    assert not table.seen.any()
    assert not other.seen.any()
    np.testing.assert_array_equal(other.read([3])["w"][0], FIRST["w"])
    assert not [*tmp_path.iterdir()]


def test_ids_of_nobody_here_are_named(tmp_path):
    table = HostTable(FIRST, N, tmp_path)
    for ids, error, message in (
        ([0, N + 1], ValueError, r"ids\[1\] is 8; ids must be integers \[M\] in \[0, 7\]"),
        ([-1], ValueError, r"ids\[0\] is -1; ids must be"),
        (3, ValueError, r"ids has shape \(\); it must be"),
        ([1.0], TypeError, "ids has dtype float64; it must be"),
        ([True], TypeError, "ids has dtype bool; it must be"),
    ):
        for use in (table.read, lambda ids: table.write(ids, rows_of(np.random.default_rng(0), 2))):
            with pytest.raises(error, match=message):
                use(ids)
    found = table.read([])
    assert {name: leaf.shape for name, leaf in found.items()} == {
        "w": (0, 2, 3), "half": (0, 2), "seen": (0,), "none": (0, 0, 3)
    }  # fmt: skip


def test_a_million_large_rows_take_the_room_of_those_that_were_written(tmp_path):
    table = HostTable({"w": np.zeros(100_000, np.float32)}, 10**6, tmp_path)
    table.write([3, 999_999], {"w": np.ones((2, 100_000), np.float32)})
    (file,) = tmp_path.glob("client-rows-*/*.bin")
    assert file.stat().st_size == 4 * 10**11  # as if all were there
    assert file.stat().st_blocks * 512 < 2 * 10**6
    assert "1,000,000 clients, 2 of them seen, 373 GiB" in repr(table)
    np.testing.assert_array_equal(table.read([2, 3])["w"][:, 0], [0, 1])
    del table
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    table = HostTable(FIRST, N, tmp_path)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(free=10))
    with pytest.raises(OSError, match="No space left") as caught:
        table.write([1], rows_of(np.random.default_rng(0), 1))
    assert caught.value.errno == errno.ENOSPC
    assert not table.seen.any()


def test_what_a_killed_process_left_is_taken_away(tmp_path):
    (tmp_path / "client-rows-old").mkdir()
    (tmp_path / "client-rows-old" / "0.bin").write_bytes(b"1")
    table = HostTable(FIRST, N, tmp_path)
    assert len([*tmp_path.iterdir()]) == 1
    assert not table.seen.any()
