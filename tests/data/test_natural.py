"""Tables, records of TFDS, LEAF's and FedJAX's files against the rows that were written."""

import json
import sqlite3
import zlib

import msgpack
import numpy as np
import pytest

from fedjax_lab import data

rng = np.random.default_rng(0)
ROWS = 40
TABLE = {
    "user": [f"user{i}" for i in rng.integers(0, 12, ROWS)],
    "age": rng.integers(20, 90, ROWS),
    "dose": rng.normal(size=ROWS),
    "image": rng.integers(0, 256, (ROWS, 4, 4, 1), dtype=np.uint8),
    "response": rng.normal(size=ROWS),
    "note": ["-"] * ROWS,
    "uneven": [[0] * (i % 2) for i in range(ROWS)],
}


class Table:
    """What a ``datasets.Dataset`` has: column_names, columns as lists, and rows by number."""

    def __init__(self, columns):
        self._columns = columns
        self.column_names = list(columns)

    def __getitem__(self, key):
        if isinstance(key, int):
            return {name: column[key] for name, column in self._columns.items()}
        return [
            value.tolist() if hasattr(value, "tolist") else value for value in self._columns[key]
        ]


def check_rows(clients, x, y):
    """Everybody holds the rows with its id, in their order; x and y by plain NumPy."""
    users = np.array(TABLE["user"])
    assert clients.names == tuple(sorted(set(TABLE["user"])))
    for i, name in enumerate(clients.names):
        start, size = int(clients.starts[i]), int(clients.sizes[i])
        held = np.asarray(clients.indices)[start : start + size]
        np.testing.assert_array_equal(np.asarray(clients.examples.x)[held], x[users == name])
        np.testing.assert_array_equal(np.asarray(clients.examples.y)[held], y[users == name])


def as_datasets(columns):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict(
        {name: np.asarray(column).tolist() for name, column in columns.items() if name != "uneven"}
    )


@pytest.mark.parametrize("make", [dict, Table, as_datasets])
def test_a_table(make):
    table = make(TABLE)
    response = TABLE["response"].astype(np.float32)
    both = np.stack([TABLE["age"], TABLE["dose"]], 1).astype(np.float32)
    check_rows(
        data.from_table(table, client="user", x=["age", "dose"], y="response"), both, response
    )
    clients = data.from_table(table, client="user", x="image", y="age")
    check_rows(clients, TABLE["image"], TABLE["age"])
    assert clients.label_histogram().sum() == ROWS


FRAME = {
    "user": TABLE["user"],
    "age": TABLE["age"],
    "dose": TABLE["dose"],
    "arm": ["placebo" if age < 50 else "drug" for age in TABLE["age"]],
    "well": [bool(age % 2) for age in TABLE["age"]],
}


def as_file(ending):
    def make(tmp_path):
        frame = pytest.importorskip("pandas").DataFrame(FRAME)
        pytest.importorskip("pyarrow")
        path = tmp_path / f"users{ending}"
        frame.to_csv(path, index=False) if ending == ".csv" else frame.to_parquet(path)
        return path

    return make


def as_category(tmp_path):
    frame = pytest.importorskip("pandas").DataFrame(FRAME)
    return frame.astype({"arm": "category", "user": "category"})


FRAMES = {
    "pandas": lambda _: pytest.importorskip("pandas").DataFrame(FRAME),
    "category": as_category,
    "polars": lambda _: pytest.importorskip("polars").DataFrame(FRAME),
    "pyarrow": lambda _: pytest.importorskip("pyarrow").table(FRAME),
    "datasets": lambda _: pytest.importorskip("datasets").Dataset.from_dict(FRAME),
    "csv": as_file(".csv"),
    "parquet": as_file(".parquet"),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_and_files(kind, tmp_path):
    table = FRAMES[kind](tmp_path)
    clients = data.from_table(table, client="user", x=["dose", "arm"], y="well")
    arm = np.array([0 if word == "drug" else 1 for word in FRAME["arm"]], np.int32)
    check_rows(
        clients, np.stack([FRAME["dose"], arm], 1).astype(np.float32), np.array(FRAME["well"])
    )
    assert dict(clients.categories) == {"arm": ("drug", "placebo")}
    turned = data.from_table(
        table, client="user", x="dose", y="arm", categories={"arm": ["placebo", "drug"]}
    )
    check_rows(turned, np.float32(FRAME["dose"]), 1 - arm)


def test_missing_values_of_a_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": ["a", "b"], "x": [1.0, None], "t": ["u", None]})
    for column in ("x", "t"):
        with pytest.raises(ValueError, match=f"x: the column '{column}' has .*missing.* row 1"):
            data.from_table(frame, client="id", x=column, y="id")
    pytest.importorskip("pyarrow")
    (tmp_path / "users.csv").write_text("id,x,t\na,1,u\nb,2,\n")
    with pytest.raises(ValueError, match=r"y: the column 't' has missing values, .* row 1"):
        data.from_table(tmp_path / "users.csv", client="id", x="x", y="t")
    with pytest.raises(FileNotFoundError, match="no such file"):
        data.from_table("none.csv", client="id", x="x", y="t")


def test_a_target_among_the_inputs_is_warned_of():
    """Not of an autoencoder, whose targets are its inputs."""
    table = {"id": [1, 2], "a": [1.0, 2.0], "y": [0.5, 0.0]}
    with pytest.warns(UserWarning, match="x has 'y', which is in y, too: .* Leave it out of x"):
        data.from_table(table, client="id", x=["a", "y"], y="y")
    both = data.from_table(table, client="id", x=["a", "y"], y=["a", "y"]).examples
    np.testing.assert_array_equal(both.x, both.y)
    data.from_table(table, client="id", x="a", y="a")


def test_ids_that_are_numbers_are_in_their_order():
    table = {"id": np.array([100, 9, 100, 20]), "x": np.arange(4.0), "y": np.arange(4)}
    clients = data.from_table(table, client="id", x="x", y="y")
    assert clients.names == ("9", "20", "100")
    np.testing.assert_array_equal(clients.indices, [1, 3, 0, 2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client": "usr"}, "client is 'usr'; .* Did you mean 'user'"),
        ({"x": ["age", "rsponse"]}, "x is 'rsponse'; .* Did you mean 'response'"),
        ({"client": "dose"}, "client='dose' has client ids of shape .* float64"),
        ({"y": "lacking"}, "y: the column 'lacking' has missing values, the first in row 1"),
        ({"y": "gap"}, "y: the column 'gap' has values that are missing, NaN .* in row 2"),
        ({"x": "mixed"}, "x: the column 'mixed' has int, str; it must have only numbers"),
        ({"x": "note", "categories": {"note": ["+"]}}, "'note' has the value '-', which is not in"),
        ({"categories": {"dose": ["1"]}}, "categories names 'dose'; it must be columns of text"),
        ({"x": "uneven"}, "x: the column 'uneven' is no array"),
        ({"x": ["age", "large"]}, "the column .large. has the value 16777217. .* float32, which"),
        ({"x": ["age", "image"]}, r"x is \['age', 'image'\], columns of shapes"),
        ({"x": "short"}, r"x has shape \(3,\) and the clients' ids \(40,\)"),
        ({"min_size": 9}, r"client='user' gives client 'user\d+' \d examples; .* min_size, .* 9"),
    ],
)
def test_bad_tables(changes, message):
    table = {**TABLE, "short": np.arange(3)}
    table["lacking"] = ["a", None] * (ROWS // 2)
    table["gap"] = np.where(np.arange(ROWS) == 2, np.nan, 1.0)
    table["large"] = np.full(ROWS, 2**24 + 1)
    table["mixed"] = np.array([1, "a"] * (ROWS // 2), object)
    with pytest.raises(ValueError, match=message):
        data.from_table(table, **{"client": "user", "x": "age", "y": "response", **changes})


def test_no_table():
    with pytest.raises(TypeError, match="table is a ndarray"):
        data.from_table(np.zeros((3, 2)), client="user", x="x", y="y")


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    """A prepared set of TFDS with ids, written by TFDS."""
    tfds = pytest.importorskip("tensorflow_datasets")
    folder = tmp_path_factory.mktemp("tfds")

    class Ratings(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"user": tfds.features.Text(), "age": np.int64, "response": np.float32}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}  # and no other

        def _generate_examples(self):
            for i in range(ROWS):
                yield i, {name: TABLE[name][i] for name in ("user", "age", "response")}

    Ratings(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_tfds(ratings):
    clients = data.from_tfds("ratings", client="user", x=["age"], y="response", data_dir=ratings)
    assert clients.names == tuple(sorted(set(TABLE["user"])))
    found = {name: set() for name in clients.names}
    for i, name in enumerate(clients.names):
        for place in clients.indices[int(clients.starts[i]) :][: int(clients.sizes[i])].tolist():
            found[name].add((int(clients.examples.x[place, 0]), float(clients.examples.y[place])))
    expected = {name: set() for name in clients.names}
    for user, age, response in zip(TABLE["user"], TABLE["age"], TABLE["response"], strict=True):
        expected[user].add((int(age), float(np.float32(response))))
    assert found == expected


def test_bad_tfds(ratings, tmp_path):
    wanted = {"client": "user", "x": "age", "y": "response"}
    with pytest.raises(ValueError, match="feature of tfds:ratings is 'usr'"):
        data.from_tfds("ratings", **{**wanted, "client": "usr"}, data_dir=ratings)
    with pytest.raises(ValueError, match="split of tfds:ratings is 'test'"):
        data.from_tfds("ratings", **wanted, split="test", data_dir=ratings)
    with pytest.raises(ValueError, match="knows no such data set"):
        data.from_tfds("ratings", **wanted, data_dir=tmp_path)


USERS = {
    "f0_1": ([[0, 1], [2, 3.5]], [1, 0]),
    "f9_7": ([[4, 5]], [2]),
    "f2_2": ([[6, 7], [8, 9], [1, 1]], [0, 0, 1]),
}


def write_leaf(folder, given=USERS, **changes):
    """Two files in LEAF's layout: the first user, and the others."""
    names = list(given)
    for i, part in enumerate((names[:1], names[1:])):
        content = {
            "users": part,
            "num_samples": [len(given[user][1]) for user in part],
            "user_data": {user: dict(zip("xy", given[user], strict=True)) for user in part},
        }
        (folder / f"all_data_{i}.json").write_text(json.dumps({**content, **changes}))
    return folder


def test_leaf(tmp_path):
    clients = data.load_leaf(write_leaf(tmp_path))
    assert clients.names == ("f0_1", "f9_7", "f2_2")
    assert clients.sizes.tolist() == [2, 1, 3]
    # f9_7 and f2_2 have whole numbers, f0_1 has not: all are floats.
    np.testing.assert_array_equal(
        clients.examples.x, np.concatenate([x for x, _ in USERS.values()]).astype(np.float32)
    )
    np.testing.assert_array_equal(clients.examples.y, [1, 0, 2, 0, 0, 1])
    assert clients.examples.y.dtype == np.int32
    np.testing.assert_array_equal(clients.label_histogram(), [[1, 1, 0], [0, 0, 1], [2, 1, 0]])


def test_leaf_of_text(tmp_path):
    write_leaf(tmp_path, {"romeo": (["ab", "bc"], ["c", "d"]), "julia": (["xy"], ["z"])})
    with pytest.raises(ValueError, match=r"convert is None, so that .* numbers .* <U2"):
        data.load_leaf(tmp_path)
    clients = data.load_leaf(
        tmp_path,
        convert=lambda x, y: {"words": np.array([[ord(c) for c in a + b] for a, b in zip(x, y)])},  # noqa: B905
    )
    words = [[97, 98, 99], [98, 99, 100], [120, 121, 122]]
    np.testing.assert_array_equal(clients.examples["words"], words)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_samples": [5]},
            r"all_data_0\.json: num_samples is 5 for the user 'f0_1', who has 2 examples",
        ),
        ({"num_samples": 5}, r"all_data_0\.json: num_samples is 5; .* a list of 1 numbers"),
        ({"users": []}, r"_0\.json: user_data has 'f0_1', who is not among users"),
        ({"users": [], "num_samples": [], "user_data": {}}, "whose files have no users"),
        ({"users": ["nobody"]}, r"all_data_0\.json: not in LEAF's layout .* KeyError 'nobody'"),
        ({"user_data": 3}, "not in LEAF's layout .* TypeError"),
    ],
)
def test_bad_leaf(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        data.load_leaf(write_leaf(tmp_path, **changes))


def test_damaged_leaf(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file \*\.json"):
        data.load_leaf(tmp_path)
    write_leaf(tmp_path, {**USERS, "f9_7": ([[4, 5], [6]], [1, 2])})
    with pytest.raises(ValueError, match="numbers of one shape; found"):
        data.load_leaf(tmp_path)
    for large in (2**63, 2**64):
        for other in (1, -1):  # of which NumPy makes uint64, float64 or objects
            write_leaf(tmp_path, {**USERS, "f9_7": ([[4, 5], [6, 7]], [large, other])})
            with pytest.raises(ValueError, match=r"f9_7.*found: (integers beyond int64|object)"):
                data.load_leaf(tmp_path)
    write_leaf(tmp_path, {**USERS, "f9_7": ([], [])})
    with pytest.raises(ValueError, match=r"clients\['f9_7'\] has 0 examples"):
        data.load_leaf(tmp_path)
    (tmp_path / "all_data_1.json").write_text('{"users": [')
    with pytest.raises(ValueError, match=r"all_data_1\.json: not in LEAF's layout"):
        data.load_leaf(tmp_path)
    (tmp_path / "all_data_1.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"all_data_1\.json: not in LEAF's layout .*Recursion"):
        data.load_leaf(tmp_path)
    write_leaf(tmp_path)
    (tmp_path / "more.json").write_text((tmp_path / "all_data_0.json").read_text())
    with pytest.raises(ValueError, match=r"more\.json: the user 'f0_1' occurs twice"):
        data.load_leaf(tmp_path)


def test_leaf_with_a_user_twice_in_one_object(tmp_path):
    user = '"u": {"x": [[1]], "y": [0]}'
    content = f'{{"users": ["u"], "num_samples": [1], "user_data": {{{user}, {user}}}}}'
    (tmp_path / "twice.json").write_text(content)
    with pytest.raises(ValueError, match=r"twice\.json: .* 'u' is given twice"):
        data.load_leaf(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"twice\.json; there is no such folder"):
        data.load_leaf(tmp_path / "twice.json")
    with pytest.raises(TypeError, match=r"convert is 5; it must be a function of \(x, y\)"):
        data.load_leaf(tmp_path, convert=5)


def packed(arrays):
    """As FedJAX's documentation says: arrays are (shape, name of the dtype, bytes), type 1."""

    def extension(array):
        parts = (array.shape, array.dtype.name, array.tobytes())
        return msgpack.ExtType(1, msgpack.packb(parts))

    return zlib.compress(msgpack.packb(arrays, default=extension))


def write_fedjax(path, clients):
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, "
            "num_examples INTEGER NOT NULL)"
        )
        for name, blob in clients.items():
            connection.execute("INSERT INTO federated_data VALUES (?, ?, 0)", (name, blob))
    connection.close()


def test_fedjax(tmp_path):
    pixels = rng.random((5, 3, 3)).astype(np.float32)
    label = np.arange(5, dtype=np.int32)
    parts = {b"z\xff": slice(0, 2), b"f0001": slice(2, 5)}
    path = tmp_path / "mine.sqlite"
    write_fedjax(
        path, {n: packed({"pixels": pixels[s], "label": label[s]}) for n, s in parts.items()}
    )
    clients = data.load_fedjax(path, convert=lambda d: (d["pixels"], d["label"]))
    assert clients.names == ("z\\xff", "f0001")
    assert clients.sizes.tolist() == [2, 3]
    np.testing.assert_array_equal(clients.examples.x, pixels)
    np.testing.assert_array_equal(clients.examples.y, label)
    assert set(data.load_fedjax(path).examples) == {"pixels", "label"}


def test_ids_of_fedjax(tmp_path):
    """Text is its own name; what would be one name, or is no id, is refused."""
    one, other = (packed({"x": np.full(n, n, np.int32)}) for n in (1, 2))
    write_fedjax(tmp_path / "text", {"é": one, "b": other})
    clients = data.load_fedjax(tmp_path / "text")
    assert (clients.names, clients.sizes.tolist()) == (("é", "b"), [1, 2])
    write_fedjax(tmp_path / "same", {b"\xff": one, rb"\xff": other})
    with pytest.raises(
        ValueError, match=r"same: two clients have ids with the text .* must differ"
    ):
        data.load_fedjax(tmp_path / "same")
    write_fedjax(tmp_path / "numbers", {3: one, 4: other})
    with pytest.raises(ValueError, match="a client has the id 3; ids must be bytes or text"):
        data.load_fedjax(tmp_path / "numbers")
    with pytest.raises(TypeError, match="convert is 5; it must be a function of a client's dict"):
        data.load_fedjax(tmp_path / "text", convert=5)


def test_text_of_fedjax_must_be_converted(tmp_path):
    text = msgpack.ExtType(4, msgpack.packb(((1,), [b"to be"])))  # as FedJAX packs it
    write_fedjax(tmp_path / "text", {b"a": zlib.compress(msgpack.packb({"snippets": text}))})
    with pytest.raises(ValueError, match=r"'a' has arrays of text, .* convert must return arrays"):
        data.load_fedjax(tmp_path / "text")


def test_damaged_fedjax(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        data.load_fedjax(tmp_path / "none")
    (tmp_path / "text").write_text("text" * 1000)
    with pytest.raises(ValueError, match="text: no federated data set of FedJAX's"):
        data.load_fedjax(tmp_path / "text")
    sqlite3.connect(tmp_path / "empty").close()
    with pytest.raises(ValueError, match="no such table"):
        data.load_fedjax(tmp_path / "empty")
    for i, blob in enumerate((b"", b"xyz", zlib.compress(b"\xc1"), packed({})[:-3])):
        write_fedjax(tmp_path / f"{i}", {b"a": blob})
        with pytest.raises(ValueError, match=f"{i}: no federated data set"):
            data.load_fedjax(tmp_path / f"{i}")
