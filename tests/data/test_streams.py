"""Examples on the host: written whole or not at all, read as they were, known by their content."""

import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import data
from fedjax_lab.data import dtypes, stream_files
from tests.data.test_sources import tfds_dir, tfds_images  # noqa: F401

X = np.arange(60, dtype=np.uint8).reshape(20, 3)
Y = np.arange(20) % 4


def test_what_is_written_is_read(tmp_path):
    found = data.open_stream(data.write_stream(tmp_path / "a", (X, Y)))
    assert isinstance(found, data.Examples)
    assert isinstance(found.x, np.memmap)
    assert not found.x.flags.writeable
    np.testing.assert_array_equal(found.x, X)
    np.testing.assert_array_equal(found.y, Y)
    assert (found.x.dtype, found.y.dtype) == (np.uint8, np.int32)  # as on a device
    np.testing.assert_array_equal(np.load(tmp_path / "a/x.npy"), X)  # a file like any other


def test_large_arrays_are_read_in_pieces(monkeypatch, tmp_path):
    """Of two rows here: nothing is left out, whatever is read in pieces."""
    monkeypatch.setattr(dtypes, "_PIECE", 48)
    array = np.arange(63.0).reshape(21, 3)
    found = list(dtypes.pieces(array))
    assert [len(piece) for piece in found] == [2] * 10 + [1]
    np.testing.assert_array_equal(np.concatenate(found), array)
    assert [piece.tolist() for piece in dtypes.pieces(np.array(3.0))] == [[3.0]]
    read = data.open_stream(data.write_stream(tmp_path / "a", array))
    np.testing.assert_array_equal(read, array)
    array[20, 2] = 1e39
    with pytest.raises(ValueError, match=r"examples has the value 1e\+39; it must fit"):
        data.write_stream(tmp_path / "b", array)


def test_any_containers_in_parts(tmp_path):
    half = {"in": [X, X[:, 0] > 30], "out": (Y, (jnp.asarray(Y, jnp.bfloat16), X, Y))}
    folder = data.write_stream(tmp_path / "a", iter([half, half]))
    found = data.open_stream(folder)
    np.testing.assert_array_equal(found["in"][0], np.concatenate([X, X]))
    assert found["in"][1].dtype == bool
    assert isinstance(found["out"], data.Examples)
    assert type(found["out"].y) is tuple
    np.testing.assert_array_equal(
        found["out"].y[0].astype(np.float32), np.concatenate([Y, Y]).astype(np.float32)
    )
    assert found["out"].y[0].dtype == jnp.bfloat16


def test_nothing_half_written(tmp_path):
    def broken():
        yield X, Y
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        data.write_stream(tmp_path / "a", broken())
    assert list(tmp_path.iterdir()) == []
    data.write_stream(tmp_path / "a", (X, Y))
    with pytest.raises(FileExistsError, match="which is there and not empty"):
        data.write_stream(tmp_path / "a", (X, Y))
    np.testing.assert_array_equal(data.open_stream(tmp_path / "a").x, X)


@pytest.mark.parametrize(
    ("examples", "error", "said"),
    [
        ((X, Y[:3]), ValueError, "leading axes"),
        ((X, np.array(["a"] * 20)), ValueError, "it must be numeric"),
        ((X, Y + 2**40), ValueError, "must fit into int32"),
        (iter([(X, Y), (X[:, :2], Y)]), ValueError, "all must have the same structure"),
        (iter(()), ValueError, "is empty"),
        ((X[:0], Y[:0]), ValueError, "is empty"),
        ({1: X}, TypeError, "must be text"),
        ({"x": "words"}, TypeError, "has a str"),
    ],
)
def test_what_cannot_be_written(tmp_path, examples, error, said):
    with pytest.raises(error, match=said):
        data.write_stream(tmp_path / "a", examples)
    assert list(tmp_path.iterdir()) == []


def damage_shape(folder):
    np.save(folder / "x.npy", X[:5])


def damage_description(folder):
    (folder / "stream.json").write_text("{")


def name_another_folder(folder):
    np.save(folder.parent / "x.npy", X)
    file = folder / "stream.json"
    file.write_text(file.read_text().replace('"x"', '"../x"'))


def nest_deeply(folder):
    (folder / "stream.json").write_text("[" * 100_000)


def say_infinity(folder):
    file = folder / "stream.json"
    file.write_text(file.read_text().replace("20", "1e400"))


def damage_length(folder):
    os.truncate(folder / "x.npy", 150)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_shape, "says"),
        (damage_description, "stream.json is damaged"),
        (damage_length, "not readable"),
        (name_another_folder, r"'\.\./x' is no name of a file in its folder"),
        (nest_deeply, "stream.json is damaged: RecursionError"),
        (say_infinity, "says"),
    ],
)
def test_damage_is_noticed(tmp_path, damage, said):
    folder = data.write_stream(tmp_path / "a", (X, Y))
    damage(folder)
    with pytest.raises(ValueError, match=said):
        data.open_stream(folder)


def test_a_folder_without_a_stream(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no stream\.json"):
        data.stream(tmp_path, "iid", 4)
    folder = data.write_stream(tmp_path / "a", (X, Y))
    (folder / "y.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"y\.npy"):
        data.stream(folder, "iid", 4)


def test_an_archive_is_no_array(tmp_path):
    np.savez(tmp_path / "client.npz", x=X, y=Y)
    with pytest.raises(ValueError, match=r"client\.npz is an \.npz archive"):
        data.stream({"x": tmp_path / "client.npz"}, "iid", 4)


def test_a_stream_is_divided_as_resident_data_are(tmp_path):
    folder = data.write_stream(tmp_path / "a", (X, Y))
    resident = data.partition((X, Y), "dirichlet:0.5", 4, seed=3)
    given = [folder, str(folder), (X, Y), data.Examples(folder / "x.npy", str(folder / "y.npy"))]
    for train in given:
        clients = data.stream(train, "dirichlet:0.5", 4, seed=3)
        assert clients.partition == resident.partition
        np.testing.assert_array_equal(clients.label_histogram(), resident.label_histogram())
        assert clients.summary().splitlines()[:5] == resident.summary().splitlines()[:5]
    named = data.stream(folder, np.array(["bo", "al"] * 10))
    assert named.names == ("al", "bo")
    for part, expected in zip(
        data.split_examples(clients, 0.4), data.split_examples(resident, 0.4), strict=True
    ):
        assert part.partition == expected.partition
        assert part.examples is clients.examples


def test_a_window_holds_each_example_once(tmp_path):
    clients = data.stream(data.write_stream(tmp_path / "a", (X, Y)), "iid", 4)
    examples, window = clients.read(np.array([[7, 3], [19, 3]]), 5)
    none = np.iinfo(np.int32).max
    np.testing.assert_array_equal(window, [3, 7, 19, none, none])
    np.testing.assert_array_equal(examples.x, [X[3], X[7], X[19], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(examples.y, [3, 3, 3, 0, 0])


@pytest.mark.parametrize(("most_of_client", "expected"), [(9, 8 + 5), (4, 4 + 4), (6, 6 + 5)])
def test_most_examples_of_rounds(most_of_client, expected):
    owners = np.repeat(np.arange(4), (5, 3, 8, 4))
    clients = data.stream((X, Y), owners, 4)
    assert clients.most_examples(1, 2, most_of_client) == expected
    assert clients.most_examples(9, 2, most_of_client) == 20  # no more than there are


def test_content_is_that_of_the_examples(tmp_path):
    def content(*given):
        return data.stream(*given, "iid", 4).examples.content()

    folder = data.write_stream(tmp_path / "a", (X, Y.astype(np.int32)))
    whole = content(folder)
    assert whole == content(
        data.write_stream(tmp_path / "b", iter([(X[:9], Y[:9]), (X[9:], Y[9:])]))
    )
    assert whole == content((X, Y.astype(np.int32)))
    for other in ((X + 1, Y), (X.reshape(20, 3, 1), Y), (X.view(np.int8), Y), {"x": X, "y": Y}):
        assert content(data.write_stream(tmp_path / str(id(other)), other)) != whole
    part = data.Examples(*(leaf[:12] for leaf in data.open_stream(folder)))
    assert content(part) == content((X[:12], Y[:12].astype(np.int32)))  # a view is no whole file


def test_a_file_is_read_once_to_be_known(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", X)
    given = {"x": tmp_path / "x.npy"}
    before = data.stream(given, "iid", 4).examples.content()
    beside = json.loads((tmp_path / "x.npy.sha256").read_text())
    assert beside["size"] == (tmp_path / "x.npy").stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(stream_files.hashlib, "file_digest", None)
        assert data.stream(given, "iid", 4).examples.content() == before
    np.save(tmp_path / "x.npy", X[::-1])
    os.utime(tmp_path / "x.npy", ns=(0, 1))
    assert data.stream(given, "iid", 4).examples.content() != before
    (tmp_path / "x.npy.sha256").write_text("no JSON")
    assert data.stream(given, "iid", 4).examples.content() != before


def test_a_stream_needs_room_for_its_index():
    with pytest.raises(ValueError, match="the index of 20 examples takes 112"):
        data.stream((X, Y), "iid", 4, memory=100)
    with pytest.raises(ValueError, match="memory is 0"):
        data.stream((X, Y), "iid", 4, memory=0)


def test_records_are_read_by_number(tfds_dir):  # noqa: F811
    train, _ = data.load("tfds:small_shapes", data_dir=tfds_dir)
    clients = data.stream("tfds:small_shapes", "dirichlet:0.5", 4, seed=2, data_dir=tfds_dir)
    assert clients.partition == data.partition(train, "dirichlet:0.5", 4, seed=2).partition
    examples, _ = clients.read(np.array([4, 11, 4]), 3)
    np.testing.assert_array_equal(examples.x, [*train.x[[4, 11]], np.zeros_like(train.x[0])])
    np.testing.assert_array_equal(examples.y, [*train.y[[4, 11]], 0])
    assert len(clients.examples.content()) == 64
    assert len(train.x) == len(tfds_images("train", 3))
