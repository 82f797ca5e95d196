"""Small files as people have them, against csv, json and struct; and those that are refused."""

import csv
import datetime
import io
import json
import re
import struct
from decimal import Decimal

import numpy as np
import pytest

from fedjax_lab import build_evaluation, data

pytest.importorskip("pyarrow", reason="tables need pyarrow")


def held(clients):
    """Name -> its rows (inputs, target) as lists, by the definition of ``FederatedArrays``."""
    x, y = (np.asarray(leaf) for leaf in clients.examples)
    found = {}
    for i, name in enumerate(clients.names):
        start, size = int(clients.starts[i]), int(clients.sizes[i])
        rows = np.asarray(clients.indices)[start : start + size]
        found[name] = [(np.ravel(x[row]).tolist(), np.ravel(y[row]).tolist()) for row in rows]
    return found


def by_hand(content, number=float, separator=",", encoding="utf-8", skip=lambda row: False):
    """The same from csv.DictReader and ``float``: columns u, a, b and y."""
    csv.field_size_limit(10**6)
    text = io.StringIO(content.decode(encoding), newline="")
    found = {}
    for row in csv.DictReader(text, delimiter=separator):
        if skip(row):
            continue
        x = [float(np.float32(number(row[name]))) for name in ("a", "b")]
        found.setdefault(row["u"], []).append((x, [float(np.float32(row["y"]))]))
    return found


def written(rows, separator=",", end="\n", header=("u", "a", "b", "y"), quoting=csv.QUOTE_MINIMAL):
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, lineterminator=end, quoting=quoting)
    writer.writerows([header, *rows])
    return text.getvalue().encode()


rng = np.random.default_rng(0)
ROWS = [
    (f"user {i % 3}", repr(float(a)), round(10 * b), i % 2)
    for i, (a, b) in enumerate(rng.normal(size=(12, 2)))
]
NOTES = [(*row[:3], f'line one\r\nline "two", {i}\n', row[3]) for i, row in enumerate(ROWS)]
LONG = ("u", "a", "b", "note", "y")
SPELLED = ["1", " 2 ", "+3", "-4.", ".5", "6e-3", "7E2", "00.8", "-0", "1e38", "1e-40", "12345678"]
IDS = ["007", "7", "1.0", "1", "1e3", "9007199254740993", "9007199254740992", "+1", "é, è"]
LINES = written(ROWS).decode().split("\n")
# Numbers and marks of missing values; a category with a few numbers; numbers that are categories.
MISSING = [3, "?", "", 5, "NA", -2, "null", 1, "-", ".", "n/a", 8]
LEVELS = {"3": 0, "high": 1, "low": 2}
POSTCODES = {"01234": 0, "1234": 1, "99999": 2}


def with_b(values):
    return written([(*row[:2], b, row[3]) for row, b in zip(ROWS, values, strict=True)])


def is_integer(cell):
    return cell.lstrip("-").isdigit()


def or_mean(cell):
    if cell not in map(str, MISSING) or is_integer(cell):
        return float(cell)
    return np.mean([b for b in MISSING if isinstance(b, int)])


def code(codes):
    return lambda cell: codes[cell] if cell in codes else float(cell)


# Content, options of from_table, and what by_hand does.
READ = {
    "plain": (written(ROWS), {}, {}),
    "quoted line breaks": (written(NOTES, header=LONG), {}, {}),
    "all quoted": (written(NOTES, header=LONG, quoting=csv.QUOTE_ALL), {}, {}),
    "semicolons": (written(ROWS, ";"), {}, {"separator": ";"}),
    "tabs": (written(NOTES, "\t", header=LONG), {}, {"separator": "\t"}),
    "bars": (written(ROWS, "|"), {}, {"separator": "|"}),
    "a comma in a name": (
        written(NOTES, ";", header=("u", "a", "b", "note, long", "y")),
        {},
        {"separator": ";"},
    ),
    "byte order mark": (b"\xef\xbb\xbf" + written(ROWS), {}, {"encoding": "utf-8-sig"}),
    "of Windows": (written(ROWS, end="\r\n"), {}, {}),
    "of an old Mac": (written(ROWS, end="\r"), {}, {}),
    "no line break at the end": (written(ROWS).rstrip(), {}, {}),
    "empty lines": ("\n\n".join(LINES).encode(), {}, {}),
    "a long cell": (written([(*r[:3], "n" * 300_000, r[3]) for r in ROWS], header=LONG), {}, {}),
    "more than one block": (
        written([(*ROWS[i % 12][:3], NOTES[i % 12][3] * 30, 1) for i in range(2000)], header=LONG),
        {},
        {},
    ),
    "numbers of all spellings": (with_b(SPELLED), {}, {}),
    "ids as written": (written([(name, 1.5, 2, 1) for name in IDS]), {}, {}),
    "ids with zeros in front": (written([(n, 1, 2, 1) for n in ("010", "09", "9")]), {}, {}),
    "ids that look like marks": (written([(n, 1, 2, 1) for n in ("DE", "NA", "None")]), {}, {}),
    "ids of numbers": (written([(name, 1.5, 2, 1) for name in (100, 9, -3, 100)]), {}, {}),
    "an index, and names twice": (
        written(
            [(i, *row[:3], "p", "q", row[3]) for i, row in enumerate(ROWS)],
            header=("", "u", "a", "b", "n", "n", "y"),
        ),
        {},
        {},
    ),
    "rows dropped": (
        with_b(MISSING),
        {"missing": "drop"},
        {"skip": lambda row: not is_integer(row["b"])},
    ),
    "the mean": (with_b(MISSING), {"missing": "mean"}, {"number": or_mean}),
    "a mark of one's own": (
        with_b([3, "unknown", *range(10)]),
        {"missing": {"unknown": -1}},
        {"number": code({"unknown": -1})},
    ),
    "a number as a mark": (
        with_b([-9, *range(10), "-9.0"]),
        {"missing": {"-9": "drop"}},
        {"skip": lambda row: float(row["b"]) == -9},
    ),
    "0 as a mark beside empty cells": (
        written([("p", 1.5, b, 1) for b in (0, "", 3, 0, "")]),
        {"missing": {"0": "drop", "": 7}},
        {"skip": lambda row: row["b"] == "0", "number": code({"": 7})},
    ),
    "truth values": (
        with_b(["true", "False"] * 6),
        {},
        {"number": code({"true": 1, "False": 0})},
    ),
    "categories": (with_b(["low", "high", "3"] * 4), {}, {"number": code(LEVELS)}),
    "postcodes": (
        with_b(["01234", "99999", "1234"] * 4),
        {"categories": {"b": None}},
        {"number": code(POSTCODES)},
    ),
    "a later table": (
        with_b(["1234", "99999"] * 6),
        {"categories": {"b": sorted(POSTCODES)}},
        {"number": code(POSTCODES)},
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_a_file_of_text(kind, tmp_path):
    content, options, about = READ[kind]
    path = tmp_path / f"table.{'tsv' if kind == 'tabs' else 'csv'}"
    path.write_bytes(content)
    clients = data.from_table(path, client="u", x=["a", "b"], y="y", **options)
    assert held(clients) == by_hand(content, **about)
    if kind == "ids of numbers":
        assert clients.names == ("-3", "9", "100")


def with_cell(cell):
    return with_b(["1"] * 7 + [cell] + ["2"] * 4)


@pytest.mark.parametrize(
    "mark", ["?", "", "NA", "NaN", "nan", "N/A", "null", "None", "-", ".", " "]
)
def test_a_mark_of_a_missing_value_among_numbers(mark, tmp_path):
    path = tmp_path / "marked.csv"
    path.write_bytes(with_cell(mark))
    with pytest.raises(
        ValueError, match=r"x: the column 'b' has missing values, .* row 7 \(line 9 of .*marked.csv"
    ):
        data.from_table(path, client="u", x=["a", "b"], y="y")


@pytest.mark.parametrize(
    "cell", ["2,5", "$25", "25%", "1,000", "1_000", "0x1F", "inf", "old", "12:30", "True", "٣"]
)
def test_text_among_numbers(cell, tmp_path):
    path = tmp_path / "stray.csv"
    message = rf"'b' must be numbers, and row 7 \(line 9 of .*stray.csv\) has '{re.escape(cell)}'"
    path.write_bytes(with_cell(cell))
    with pytest.raises(ValueError, match=message):
        data.from_table(path, client="u", x=["a", "b"], y="y")
    # It is text if it is said to be.
    found = data.from_table(path, client="u", x="a", y="b", categories={"b": None})
    assert dict(found.categories)["b"] == tuple(sorted({"1", "2", cell}))


@pytest.mark.parametrize(
    "values",
    [["1%", "2%"], ["2,5", "3,5"], ["$1", "$2"], ["1,000", "2,000"], ["\u22122", "\u22123"]],
)
def test_numbers_as_people_write_them(values, tmp_path):
    (tmp_path / "people.csv").write_bytes(with_b(values * 6))
    with pytest.raises(ValueError, match=f"row 0 .line 2 of .* has '{re.escape(values[0])}'"):
        data.from_table(tmp_path / "people.csv", client="u", x=["a", "b"], y="y")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"u,a,b,y\n", "no rows"),
        (with_b(range(12)) + b"p,1,2\n", "line 14 has 3 cells and the header 4 names"),
        (written(NOTES, header=LONG) + b"p,1\n", "line 38 has 2 cells and the header 5 names"),
        (with_b(range(12)) + b'p,1,"2,1\n', "line 14 is damaged"),
        (with_b(range(12)) + b'p,"1"2,1,1\n', "line 14 is damaged"),
        (with_b(range(12)) + b"\xe9,1,2,1\n", "no UTF-8 text: line 14 has the byte 0xe9"),
        (with_b(range(12)).decode().encode("utf-16"), "no UTF-8 text: line 1 begins as UTF-16"),
        (b"u a b y\np 1 2 1\n", "has the one column 'u a b y'; cells must be separated by commas"),
        (written(ROWS, header=("u", "a", "a", "y")), "x is 'a', the name of the columns 2 and 3"),
        (with_b(["2020-01-02"] * 12), "has dates or times, such as '2020-01-02' in row 0"),
        (with_b(["1/31/2020"] * 12), "has dates or times, such as '1/31/2020' in row 0"),
        (with_b(["31.01.2020 12:00"] * 12), "has dates or times, such as '31.01.2020 12:00'"),
        (with_b(["2020/01/31"] * 12), "has dates or times, such as '2020/01/31' in row 0"),
        (with_b(["9:30 PM"] * 12), "has dates or times, such as '9:30 PM' in row 0"),
        (with_b(["1e400"] * 12), "NaN or infinite, the first in row 0 .line 2"),
        (with_b(["?"] + ["low"] * 10 + ["NA"]), "missing values, the first in row 11 .line 13"),
        (written([("", 1, 2, 1)]), "client: the column 'u' has missing values, the first in row 0"),
        (written([("?", 1, 2, 1), (1, 1, 2, 1)]), "client: .* row 0 .line 2 of .*, '\\?'"),
    ],
)
def test_a_file_that_is_refused(content, message, tmp_path):
    path = tmp_path / "damaged.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        data.from_table(path, client="u", x=["a", "b"], y="y")
    assert "damaged.csv" in str(error.value) or "x is 'a'" in str(error.value)


@pytest.mark.parametrize("x", ["a", ["a", "b"]])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.6e9 + i for i in range(12)], "'a' has values around 1600000006 that differ by about"),
        (["", *(1_600_000_000 + i for i in range(10)), 1_600_000_011], "around .* that differ by"),
        (
            [1e39, *range(11)],
            "'a' has the value 1e.39; it must fit into float32, which holds numbers up to",
        ),
    ],
)
def test_numbers_that_float32_does_not_hold(x, values, message, tmp_path):
    table = {"u": [0] * 12, "a": values, "b": range(12), "y": [0, 1] * 6}
    rows = [table, *zip(*table.values(), strict=True)]
    text = "\n".join(",".join(map(str, row)) for row in rows)
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        data.from_table(tmp_path / "t.csv", client="u", x=x, y="y", missing="mean")


def test_targets_that_are_true_or_false_are_classes(tmp_path):
    (tmp_path / "t.csv").write_text("u,a,y\n0,1,true\n0,2,false\n1,3,true")
    y = data.from_table(tmp_path / "t.csv", client="u", x="a", y="y").examples.y
    assert y.dtype == np.int32
    assert y.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("dorp", "missing is 'dorp'; it must be 'drop', 'mean', 'keep' or a finite number"),
        (float("nan"), "missing is nan"),
        (True, "missing is True"),
        (("mean",), r"missing is \('mean',\); it must be .* a pair of these"),
        (("mean", "kept"), r"missing is \('mean', 'kept'\); it must be"),
        ({"?": "mean"}, "y: the column 'y' is no input of numbers; it must be 'drop'"),
        ({"NA": "drop"}, r"row 7 \(line 9"),
        (
            "keep",
            r"'keep' for '\?', which row 7 .* one of numbers; it must be 'drop' or, of an input",
        ),
        (("keep", "mean"), r"one of numbers; .* as in \('mean', 'keep'\)"),
    ],
)
def test_a_meaning_of_missing_values_that_does_not_fit(missing, message, tmp_path):
    content = written([*ROWS[:7], ("user 0", "1.5", "?", "?"), *ROWS[7:]])
    (tmp_path / "marked.csv").write_bytes(content)
    columns = ("a", "y") if missing == {"?": "mean"} else (["a", "b"], ["b", "a"])
    with pytest.raises(ValueError, match=message):
        data.from_table(
            tmp_path / "marked.csv", client="u", x=columns[0], y=columns[1], missing=missing
        )


@pytest.mark.parametrize("missing", [("mean", "keep"), (7, "keep"), ("mean", "drop")])
def test_numbers_and_text_have_meanings_of_their_own(missing, tmp_path):
    lines = ["u,age,ward,y", "p,50,er,0", "p,,icu,1", "q,40,,0", "q,NA,er,1", "q,30,,0"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    found = data.from_table(
        tmp_path / "t.csv", client="u", x=["age", "ward"], y="y", missing=missing
    )
    rows = [line.split(",")[1:3] for line in lines[1:]]
    rows = [row for row in rows if missing[1] == "keep" or row[1]]
    ages = [float(age) for age, _ in rows if age not in ("", "NA")]
    filled = np.mean(ages) if missing[0] == "mean" else missing[0]
    wards = sorted({ward for _, ward in rows})
    expected = [
        [filled if age in ("", "NA") else float(age), wards.index(ward)] for age, ward in rows
    ]
    np.testing.assert_array_equal(found.examples.x, np.float32(expected))
    assert dict(found.categories)["ward"] == tuple(wards)


def test_one_meaning_that_does_not_fit_text_says_what_does(tmp_path):
    (tmp_path / "t.csv").write_text("u,age,ward,y\np,50,er,0\np,,,1")
    message = r"'ward' is one of text; it must be 'drop' or 'keep', as in \('mean', 'keep'\)"
    with pytest.raises(ValueError, match=message):
        data.from_table(tmp_path / "t.csv", client="u", x=["age", "ward"], y="y", missing="mean")


FRAMES = {
    "mapping": dict,
    "pandas": lambda columns: pytest.importorskip("pandas").DataFrame(columns),
    "polars": lambda columns: pytest.importorskip("polars").DataFrame(columns),
    "pyarrow": lambda columns: pytest.importorskip("pyarrow").table(columns),
    "datasets": lambda columns: pytest.importorskip("datasets").Dataset.from_dict(columns),
}


@pytest.mark.parametrize("missing", [None, "drop", "mean", "keep"])
@pytest.mark.parametrize("library", FRAMES)
def test_a_column_of_a_frame_without_a_value_is_named(library, missing):
    table = FRAMES[library]({"u": ["p", "q"], "a": [1, 2], "empty": [None, None], "y": [0, 1]})
    with pytest.raises(ValueError, match="x: the column 'empty' has no value in any row; leave it"):
        data.from_table(table, client="u", x=["a", "empty"], y="y", missing=missing)


def test_a_column_without_a_value_is_named(tmp_path):
    (tmp_path / "t.csv").write_text("u,age,empty,y\np,50,,0\np,7,NA,1")
    with pytest.raises(ValueError, match="every row has a missing value; leave out 'empty', which"):
        data.from_table(tmp_path / "t.csv", client="u", x=["age", "empty"], y="y", missing="drop")


@pytest.mark.parametrize("library", FRAMES)
def test_text_and_missing_values_of_frames(library):
    def read(values, **options):
        table = FRAMES[library]({"u": ["p", "q", "p", "q"], "a": values, "y": [0, 1, 0, 1]})
        return held(data.from_table(table, client="u", x=["a"], y="y", **options))

    for values in ([60, 51, None, 7], ["60", "51", "?", "7"]):  # as pandas reads a "?"
        with pytest.raises(ValueError, match=r"x: the column 'a' has .*missing.* in row 2"):
            read(values)
        assert read(values, missing="drop") == {"p": [([60], [0])], "q": [([51], [1]), ([7], [1])]}
        assert read(values, missing=0)["p"] == [([60], [0]), ([0], [0])]
    for values in (["60", "51", "2,5", "7"], ["25%", "5%", "1%", "7%"]):
        with pytest.raises(ValueError, match="'a' must be numbers, and row"):
            read(values)
    assert read(["low", "3", "high", "low"])["p"] == [([2], [0]), ([1], [0])]
    assert read(["low", None, "high", "low"], missing="keep")["q"] == [([0], [1]), ([2], [1])]
    with pytest.warns(UserWarning, match="'a' is text whose cells are numbers"):
        assert read(["60", "51", "9", "100"])["p"] == [([2], [0]), ([3], [0])]
    assert read(["60", "51", "9", "100"], categories={"a": None})["p"] == [([2], [0]), ([3], [0])]
    assert read(["60", "51", "9", "100"], categories={})["p"] == [([60], [0]), ([9], [0])]
    assert read([3, 10, 3, 5], categories={"a": ["10", "3", "5"]})["q"] == [([0], [1]), ([2], [1])]


NOON = datetime.datetime(2020, 1, 2, 12)
TIMES = {
    "instants": [NOON, NOON + datetime.timedelta(hours=1), NOON],
    "dates": [NOON.date()] * 3,
    "durations": [datetime.timedelta(minutes=30)] * 3,
    "a gap": [NOON, None, NOON],
}


@pytest.mark.parametrize("gap", [None, float("nan")])
def test_a_gap_in_a_list_of_text_is_one(gap):
    """NumPy makes the text "nan" of it, which would be a client."""
    table = {"u": ["p", gap, "q"], "a": ["x", "y", gap], "y": [0, 1, 1]}
    with pytest.raises(ValueError, match=r"client: the column 'u' has missing values, .* in row 1"):
        data.from_table(table, client="u", x="y", y="y")
    clients = data.from_table(table, client="u", x="a", y="y", missing="drop")
    assert (clients.names, dict(clients.categories)) == (("p",), {"a": ("x",)})
    for kinds in (["p", 1, "q"], ["p", True, "q"], [b"p", "q", "q"]):
        with pytest.raises(ValueError, match=r"client: the column 'u' has .*; it must have only"):
            data.from_table(table | {"u": kinds}, client="u", x="y", y="y")


@pytest.mark.parametrize("library", FRAMES)
def test_a_category_that_looks_like_numbers_may_be_missing(library):
    """pandas makes floats of such a column; with "keep" a gap is one more category."""
    table = FRAMES[library]({"u": ["p", "q", "p"], "area": [20, None, 3], "y": [0, 1, 1]})
    chosen = {"client": "u", "x": "area", "y": "y", "categories": {"area": None}}
    kept = data.from_table(table, missing="keep", **chosen)
    assert dict(kept.categories) == {"area": ("", "20", "3")}
    assert kept.examples.x.tolist() == [1, 0, 2]
    dropped = data.from_table(table, missing="drop", **chosen)
    assert dict(dropped.categories) == {"area": ("20", "3")}
    assert (dropped.names, dropped.examples.x.tolist()) == (("p",), [0, 1])
    with pytest.raises(ValueError, match=r"'area' has missing values, the first in row 1"):
        data.from_table(table, **chosen)
    table = FRAMES[library]({"u": ["p", "q"], "area": [2.5, 3.0], "y": [0, 1]})
    with pytest.raises(ValueError, match=r"categories names 'area'; it must be columns of text"):
        data.from_table(table, **chosen)


@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("library", FRAMES)
def test_times_say_what_to_do(library, kind):
    table = FRAMES[library]({"u": ["p", "q", "p"], "a": [1, 2, 3], "when": TIMES[kind]})
    for argument in ("client", "x", "y"):
        names = {"client": "u", "x": "a", "y": "a", argument: "when"}
        message = (
            rf"{argument}: the column 'when' has dates or times, such as "
            "'.*(2020-01-02|0:30:00).*'; leave the column out, or convert .* such as seconds"
        )
        with pytest.raises(ValueError, match=message):
            data.from_table(table, **names)


@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("library", FRAMES)
def test_times_may_be_categories(library, kind):
    """As the guide says of `categories`; a Parquet file's column cannot be made text first."""
    values = [*TIMES[kind][:2], TIMES[kind][0] + datetime.timedelta(days=400)]
    table = FRAMES[library]({"u": ["p", "q", "p"], "when": values, "y": [0, 1, 1]})
    chosen = {"client": "u", "x": "when", "y": "y", "categories": {"when": None}}
    clients = data.from_table(table, missing="keep", **chosen)
    places = {
        value: place for place, value in enumerate(sorted({*values} - {None}), None in values)
    }
    found = clients.examples.x.tolist()
    assert found == [places.get(value, 0) for value in values]
    again = FRAMES[library]({"u": ["p"], "when": values[2:], "y": [0]})
    second = data.from_table(again, **chosen | {"categories": dict(clients.categories)})
    assert second.examples.x.tolist() == found[2:]


@pytest.mark.parametrize("dtype", ["M8[ns]", "M8[D]", "m8[s]"])
def test_arrays_of_times_say_what_to_do(dtype):
    table = {"u": ["p", "q"], "when": np.zeros(2, dtype), "y": [0, 1]}
    with pytest.raises(ValueError, match=r"x: the column 'when' has dates or times, .* seconds"):
        data.from_table(table, client="u", x="when", y="y")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"x": ["a", "a"]}, "x names the column 'a' twice; name it once"),
        ({"x": ["a", "b", "a"]}, "x names the column 'a' twice"),
        ({"y": ["y", "y"]}, "y names the column 'y' twice"),
    ],
)
def test_a_column_that_is_named_twice(names, message):
    table = {"u": ["p", "q"], "a": [1.5, 2.5], "b": [3.0, 4.0], "y": [0, 1]}
    with pytest.raises(ValueError, match=message):
        data.from_table(table, **{"client": "u", "x": "a", "y": "y", **names})


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow", "datasets"])
def test_ids_of_frames_are_exact(library):
    ids = [2**60 + 1, None, 2**60, 7]
    table = FRAMES[library]({"u": ids, "a": [1, 2, 3, 4], "y": [0, 1, 0, 1]})
    with pytest.raises(ValueError, match=r"client: the column 'u' has .*missing.* in row 1"):
        data.from_table(table, client="u", x="a", y="y")
    table = FRAMES[library]({"u": [*ids[:1], 8, *ids[2:]], "a": [1, 2, 3, 4], "y": [0, 1, 0, 1]})
    names = data.from_table(table, client="u", x="a", y="y").names
    assert names == ("7", "8", str(2**60), str(2**60 + 1))
    table = FRAMES[library]({"u": [9, None, 10], "a": [1, 2, 3], "y": [0, 1, 0]})
    names = data.from_table(table, client="u", x="a", y="y", missing="drop").names
    assert names == ("9", "10")


@pytest.mark.parametrize("library", [*FRAMES, "parquet"])
def test_ids_that_are_whole_floats_are_integers(library, tmp_path):
    """As pandas makes them of integers in a merge, also where no row lacks one."""

    def names_of(ids, **options):
        table = {"u": np.asarray(ids), "a": [1, 2, 3, 4], "y": [0, 1, 0, 1]}
        if library == "parquet":
            pytest.importorskip("pandas").DataFrame(table).to_parquet(tmp_path / "a.parquet")
            table = tmp_path / "a.parquet"
        else:
            table = FRAMES[library](table)
        return data.from_table(table, client="u", x="a", y="y", **options).names

    assert names_of([10.0, 9.0, -3.0, 10.0]) == ("-3", "9", "10")
    assert names_of([2.0**53 - 1, 0.0, 0.0, 0.0]) == ("0", str(2**53 - 1))
    assert names_of([10.0, 9.0, -9.0, 10.0], missing={"-9": "drop"}) == ("9", "10")
    message = "client='u' has client ids of .* float"
    for ids in ([1.5, 2.0, 1.0, 2.0], [2.0**53, 0, 1, 2], [np.inf, 0, 1, 2]):
        with pytest.raises(ValueError, match=message):
            names_of(np.asarray(ids))
    if library == "datasets":  # has float32 as Python's numbers
        return
    assert names_of(np.float32([2**24 - 1, 0, 1, 2]))[-1] == str(2**24 - 1)
    with pytest.raises(ValueError, match=message):  # 2**24 + 1 is the same float32
        names_of(np.float32([2**24 + 1, 0, 1, 2]))


@pytest.mark.parametrize("numbers", ["drop", "mean", 0])
def test_meanings_that_ids_like_numbers_cannot_have_say_what_fits(numbers, tmp_path):
    (tmp_path / "t.csv").write_text("u,a,y\n001,1,0\n,2,1\n002,3,0\n")

    def names_of(missing):
        return data.from_table(tmp_path / "t.csv", client="u", x="a", y="y", missing=missing).names

    message = rf"'u' is one of ids that look like numbers; it must be \({numbers!r}, 'drop'\)"
    with pytest.raises(ValueError, match=message + ", .*, or 'keep' for both"):
        names_of((numbers, "keep"))
    assert names_of((numbers, "drop")) == ("001", "002")  # what the error proposes
    assert names_of("keep") == ("", "001", "002")


@pytest.mark.parametrize("library", ["csv", "mapping", "pandas", "polars"])
@pytest.mark.parametrize("ids", [[7, -9, 10, 7], ["7", "-9", "ten", "7"]])
def test_marks_of_ones_own_among_ids(library, ids, tmp_path):
    """Of integers as of text; 10 is another id than 1."""
    columns = {"u": np.array(ids), "a": [1, 2, 3, 4], "y": [0, 1, 0, 1]}
    if library == "csv":
        table = tmp_path / "a.csv"
        table.write_bytes(written(zip(*columns.values(), strict=True), header=columns))
    else:
        table = FRAMES[library](columns)

    def read(missing):
        return held(data.from_table(table, client="u", x=["a"], y="y", missing=missing))

    expected = {"7": [([1], [0]), ([4], [1])], str(ids[2]): [([3], [0])]}
    assert read({"-9": "drop", "8": "drop"}) == expected
    assert read({"-9": "keep"}) == expected | {"-9": [([2], [1])]}
    with pytest.raises(ValueError, match=r"missing is 0 for '-9', which row 1.*client: the column"):
        read({"-9": 0})


def test_a_mark_of_ones_own_among_ids_with_gaps(tmp_path):
    table = {"u": np.array([7.0, np.nan, -9.0, 0.0]), "a": [1, 2, 3, 4], "y": [0, 1, 0, 1]}
    (tmp_path / "a.csv").write_bytes(b"u,a,y\n7,1,0\n?,2,1\n-9,3,0\n0,4,1\n")
    for of, gap in ((table, ""), (tmp_path / "a.csv", "?")):
        clients = data.from_table(
            of, client="u", x=["a"], y="y", missing={"-9": "drop", gap: "drop"}
        )
        assert held(clients) == {"0": [([4], [1])], "7": [([1], [0])]}


def test_names_of_columns():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([["p", 2.0, 0], ["q", 3.0, 1]])  # as header=None names columns
    expected = {"p": [([2], [0])], "q": [([3], [1])]}
    assert held(data.from_table(frame, client=0, x=[1], y=2)) == expected
    assert held(data.from_table(frame, client=0, x=1, y=2)) == expected
    with pytest.raises(ValueError, match=r"x is 7; it must be one of 0, 1, 2"):
        data.from_table(frame, client=0, x=[7], y=2)
    with pytest.raises(ValueError, match=r"client is '0'; it must be one of 0, 1, 2"):
        data.from_table(frame, client="0", x=[1], y=2)
    frame.columns = ["u", "a", "a"]
    with pytest.raises(ValueError, match="columns of the same name; rename them"):
        data.from_table(frame, client="u", x="a", y="a")


def test_masked_values_are_missing():
    table = {"u": ["p", "q"], "a": np.ma.array([1.5, 2.5], mask=[0, 1]), "y": [0, 1]}
    with pytest.raises(ValueError, match=r"'a' has .*missing.* in row 1"):
        data.from_table(table, client="u", x="a", y="y")
    assert data.from_table(table, client="u", x="a", y="y", missing="drop").names == ("p",)


def test_damaged_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.table({"u": ["p"] * 99, "a": range(99), "y": range(99)}), path)
    content = path.read_bytes()
    for damaged in (b"", b"text", content[:-1], content[: len(content) // 2], content[40:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"table\.parquet.* get or write the file again"):
            data.from_table(path, client="u", x="a", y="y")


def test_leaf_of_integers_and_floats_and_nobody(tmp_path):
    users = {
        "new": {"x": [], "y": []},
        "w1": {"x": [[1, 2], [0.5, 4]], "y": [3, 6]},
        "w2": {"x": [[5, 6]], "y": [1]},
    }
    content = {"users": list(users), "num_samples": [0, 2, 1], "user_data": users}
    (tmp_path / "all_data.json").write_text("\ufeff" + json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"clients\['new'\] has 0 examples; .*min_size=0 takes it"):
        data.load_leaf(tmp_path)
    clients = data.load_leaf(tmp_path, min_size=0)
    read = json.loads((tmp_path / "all_data.json").read_text(encoding="utf-8-sig"))["user_data"]
    assert held(clients) == {
        name: [(x, [y]) for x, y in zip(user["x"], user["y"], strict=True)]
        for name, user in read.items()
    }
    assert clients.examples.y.dtype == np.int32  # an empty list has no say
    read["w2"]["x"] = [["five", "six"]]
    content["user_data"] = read
    (tmp_path / "all_data.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"all_data\.json, user 'w2': convert is None"):
        data.load_leaf(tmp_path)


def big_endian(values):
    """A .npy file of float32 in the other byte order, by struct alone."""
    header = f"{{'descr': '>f4', 'fortran_order': False, 'shape': ({len(values)},), }}"
    header = header.ljust(117) + "\n"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    return start + struct.pack(f">{len(values)}f", *values)


def test_big_endian_files(tmp_path):
    values = [1.5, -2.0, 3e10, 0.25]
    for name in ("x", "y"):
        (tmp_path / f"{name}.npy").write_bytes(big_endian(values))
    x, y = (np.load(tmp_path / f"{name}.npy") for name in ("x", "y"))
    rows = [([value], [value]) for value in struct.unpack(">4f", struct.pack(">4f", *values))]
    expected = {"p": rows[::2], "q": rows[1::2]}
    assert held(data.partition((x, y), np.array(["p", "q"] * 2))) == expected
    assert held(
        data.from_clients({"p": (x[::2], y[::2]), "q": (x[1::2], y[1::2].astype("f4"))})
    ) == (expected)
    table = {"u": ["p", "q"] * 2, "x": x, "y": y}
    assert held(data.from_table(table, client="u", x="x", y="y")) == expected
    data.write_stream(tmp_path / "stream", (x, y))
    np.testing.assert_array_equal(data.open_stream(tmp_path / "stream").x, x)
    files = data.Examples(tmp_path / "x.npy", tmp_path / "y.npy")
    found = data.stream(files, np.array(["p", "q"] * 2)).examples.read(np.arange(4), 4)
    np.testing.assert_array_equal(found.x, np.float32(values))
    assert found.x.dtype.isnative
    np.savez(tmp_path / "set.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert data.load(f"npz:{tmp_path}/set.npz")[0].x.dtype == np.dtype("<f4")
    np.testing.assert_array_equal(
        data.preprocess()(data.Examples(x, y), None).x, np.float32(values)
    )


@pytest.mark.parametrize("dtype", ["g", "O", "M8[s]", "m8[s]", "G", "U3", [("a", "f4")]])
def test_arrays_that_no_device_has(dtype, tmp_path):
    x, y = np.zeros((4, 2), dtype), np.arange(4) % 2
    for read in (
        lambda: data.partition((x, y), "iid", num_clients=2),
        lambda: data.from_clients({"p": (x, y)}),
        lambda: data.stream((x, y), "iid", num_clients=2),
        lambda: data.write_stream(tmp_path / "stream", (x, y)),
        lambda: build_evaluation(lambda params, examples: None, (x, y)),
    ):
        with pytest.raises(ValueError, match="has an array of dtype"):
            read()


def test_complex_numbers_beyond_float32_are_refused():
    def stored(value):
        x = np.full((2, 1), value, complex)
        return np.asarray(data.from_clients({"a": (x, np.zeros(2, int))}).examples[0])

    for value in (1e300, 1e300j, 1 - 1e300j, complex(np.nan, 1e300)):
        with pytest.raises(ValueError, match=r"has the value -?1e.300; it must fit into float32"):
            stored(value)
    for value in (3e38 + 3e38j, complex(np.inf, 1)):  # the former's absolute value would not fit
        np.testing.assert_array_equal(stored(value), np.full((2, 1), value, np.complex64))


def test_masked_arrays_are_refused():
    x = np.ma.array(np.ones((4, 2)), mask=np.eye(4, 2))
    for read in (
        lambda: data.partition((x, np.zeros(4)), "iid", num_clients=2),
        lambda: data.from_clients({"p": (x, np.zeros(4))}),
        lambda: data.stream((x, np.zeros(4)), "iid", num_clients=2),
    ):
        with pytest.raises(ValueError, match="has an array with masked values"):
            read()


def test_half_of_a_surrogate_pair(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    letters = {chr(code): code for code in range(32, 127)} | {"<|im_start|>": 1, "<|im_end|>": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    lines = [{"u": "p", "prompt": "hi", "completion": "\U0001f600"}] * 2
    lines[1] = {**lines[0], "prompt": "half an emoji \ud83d"}
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(
        ValueError, match=r"chats.jsonl, line 2: prompt has half of a surrogate .*ud83d"
    ):
        data.from_chats(tmp_path / "chats.jsonl", tokenizer, client="u", length=64)
    with pytest.raises(ValueError, match="clients has an id that has half of a surrogate pair"):
        data.from_clients({"\ud83d": (np.ones(2), np.ones(2))})


def test_texts_of_other_encodings(tmp_path):
    (tmp_path / "plain.txt").write_bytes(b"to be or not to be\n" * 9)
    (tmp_path / "text.txt").write_bytes("\ufeff".encode() + (tmp_path / "plain.txt").read_bytes())
    found, plain = (
        data.load(f"text:{tmp_path}/{name}.txt", sequence_length=4)[0] for name in ("text", "plain")
    )
    np.testing.assert_array_equal(found.x, plain.x)
    (tmp_path / "text.txt").write_bytes(b"to be\nor not\nt\xe9 be\n" * 9)
    with pytest.raises(ValueError, match=r"text.txt is no UTF-8 text: line 3 has the byte 0xe9"):
        data.load(f"text:{tmp_path}/text.txt")


@pytest.mark.parametrize(
    ("column", "mark", "number", "expected"),
    [
        (["true", "", "false", "true"], "", -1, [1, -1, 0, 1]),
        (["true", "", "false", "true"], "", 1, [1, 1, 0, 1]),
        (["true", "", "false", "true"], "", 0.5, [1, 0.5, 0, 1]),
        (np.array([1, 255, 3, 4], np.uint8), "255", -1, [1, -1, 3, 4]),
        (np.array([1, -9, 3, 4], np.int8), "-9", 200.0, [1, 200, 3, 4]),
    ],
)
def test_a_number_that_is_filled_in_stays_what_it_is(tmp_path, column, mark, number, expected):
    table = {"id": np.array([0, 0, 1, 1]), "a": column, "y": np.arange(4.0)}
    if isinstance(column, list):
        table = tmp_path / "a.csv"
        lines = [f"{i // 2},{cell},{i}" for i, cell in enumerate(column)]
        table.write_text("\n".join(["id,a,y", *lines]))
    clients = data.from_table(table, client="id", x=["a"], y="y", missing={mark: number})
    np.testing.assert_array_equal(np.ravel(clients.examples.x), expected)


@pytest.mark.parametrize("kind", ["mapping", "pandas", "parquet"])
def test_a_table_without_rows_is_named(kind, tmp_path):
    table = {name: np.array([]) for name in ("id", "a", "y")}
    name = "table"
    if kind != "mapping":
        pandas = pytest.importorskip("pandas")
        table = pandas.DataFrame(table)
    if kind == "parquet":
        table.to_parquet(name := str(tmp_path / "empty.parquet"))
        table = name
    with pytest.raises(ValueError, match=re.escape(f"{name} has no rows; there must be")):
        data.from_table(table, client="id", x=["a"], y="y")


@pytest.mark.parametrize("is_frame", [False, True])
def test_decimals_of_a_database_are_numbers(is_frame):
    """NUMERIC columns arrive as objects of Python's decimal; None is a missing value."""
    doses = ["0.1", "2.50", "-3", "1e-2"]
    table = {
        "id": [1, 2, 1, 2, 1],
        "a": [*map(Decimal, doses), None],
        "y": [*map(Decimal, range(5))],
    }
    if is_frame:
        table = pytest.importorskip("pandas").DataFrame(table)
    clients = data.from_table(table, client="id", x="a", y="y", missing="drop")
    np.testing.assert_array_equal(clients.examples.x, np.array(doses, np.float32))
    np.testing.assert_array_equal(clients.examples.y, np.arange(4, dtype=np.float32))
