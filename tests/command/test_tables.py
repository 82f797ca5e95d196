"""The command line on tables: columns by name, clients that training never sees, categories."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_lab import data, load_run
from fedjax_lab.command import cli, tuning
from fedjax_lab.command.commands import parse
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.setup import build
from fedjax_lab.command.table_data import load_table
from fedjax_lab.tuning import tune as module

pytest.importorskip("narwhals", reason="tables need narwhals")
parquet = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow")

QUICK = ["--rounds", "4", "--eval-every", "2", "--cohort-size", "3", "--batch-size", "4"]
QUICK += ["--client-map", "scan", "--model", "linear"]
COLUMNS = ["user", "age", "dose", "sex", "response", "group"]


def rows_of(seed, users, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        age, dose = rng.normal(size=2).round(3)
        sex = ["f", "m"][rng.integers(2)]
        response = round(age - 2 * dose + (sex == "m") + 0.1 * rng.normal(), 4)
        group = ["low", "high", "mid"][rng.integers(3)]
        yield [users[rng.integers(len(users))], age, dose, sex, response, group]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Ten users with text ids; a second file with rows of two of them and of a third."""
    monkeypatch.chdir(tmp_path)
    users = [f"user {i}" for i in range(10)]
    for name, rows in (
        ("users.csv", rows_of(0, users, 120)),
        ("later.csv", rows_of(1, ["user 3", "user 7", "nobody"], 30)),
    ):
        with open(name, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    from pyarrow import csv as arrow

    parquet.write_table(arrow.read_csv("users.csv"), "users.parquet")
    return tmp_path


def read(name="users.csv"):
    with open(name, newline="") as file:
        return list(csv.DictReader(file))


def run(*words):
    return cli.main(["run", *QUICK, *words])


TABLE = ["--dataset", "csv:users.csv", "--client", "user"]
OF_NUMBERS = [*TABLE, "--x", "age", "dose", "sex", "--target", "response"]


@pytest.mark.methods
def test_a_regression_with_users_that_training_never_sees(folder, capsys):
    assert run(*OF_NUMBERS, "--run-dir", "runs/one") == 0
    said = capsys.readouterr()
    assert "8 clients" in said.err
    assert "last mean squared error" in said.out
    rows, names = read(), json.loads(Path("runs/one/partition.json").read_text())["names"]
    users = sorted({row["user"] for row in rows})
    assert len(names) == 8
    assert set(names) < set(users)

    def arrays(of):
        chosen = [row for row in rows if (row["user"] in names) == of]
        x = [[float(r["age"]), float(r["dose"]), float(r["sex"] == "m")] for r in chosen]
        return np.array(x), np.array([float(row["response"]) for row in chosen])

    (x, _), (x_test, y_test) = arrays(True), arrays(False)
    saved = load_run("runs/one")
    bias, kernel = sorted((np.asarray(v) for v in jax.tree.leaves(saved.params)), key=np.ndim)
    foretold = ((x_test - x.mean(0)) / x.std(0) @ kernel + bias)[:, 0]
    expected = np.square(foretold - y_test).mean()
    assert saved.history[-1]["mean_squared_error"] == pytest.approx(expected, rel=1e-3)
    # The run goes on, and is repeated, like any other.
    assert run(*OF_NUMBERS, "--run-dir", "runs/one") == 0
    assert cli.main(["rerun", "runs/one", "--quiet"]) == 0
    other = [*TABLE, "--x", "age", "dose", "--target", "response", "--run-dir", "runs/one"]
    assert run(*other) == 2
    assert "x" in capsys.readouterr().err


def table_of(**settings):
    settings = {"dataset": "csv:users.csv", "client": "user", "target": ("response",)} | settings
    config = RunConfig.of(**settings, cohort_size=2).resolve()
    return load_table(config.data, config.partition_seed)


def test_the_seed_of_the_partition_decides_who_is_held_out(folder):
    parts = [table_of(**{"seed": 0} | about).clients.names for about in SEEDS]
    assert parts[0] == parts[1]
    assert parts[0] != parts[2]


SEEDS = ({}, {"seed": 5, "partition_seed": 0}, {"seed": 5})


def test_all_other_columns_are_inputs(folder):
    found = table_of(test_split="clients:3")
    assert found.train.x.shape[1] == 4  # age, dose, sex, group
    assert found.clients.num_clients == 7
    assert found.tests is None
    assert len(found.train.y) + len(found.test.y) == 120


def test_a_share_of_each_users_rows(folder):
    found = table_of(test_split="examples:0.25")
    assert found.clients.names == found.tests.names == tuple(f"user {i}" for i in range(10))
    rows = read()
    for i, name in enumerate(found.clients.names):
        own = sorted(float(row["response"]) for row in rows if row["user"] == name)
        parts = []
        for federation in (found.clients, found.tests):
            start, size = int(federation.starts[i]), int(federation.sizes[i])
            held = np.asarray(federation.indices)[start : start + size]
            parts.append(np.asarray(federation.examples.y)[held])
        assert len(parts[1]) == max(1, round(0.25 * len(own)))
        np.testing.assert_allclose(np.sort(np.concatenate(parts)), own, rtol=1e-6)


def test_another_file_tests(folder):
    found = table_of(test_split="later.csv")
    assert found.clients.num_clients == 10
    assert len(found.train.y) == 120
    assert len(found.test.y) == 30
    counts = dict(zip(found.tests.names, np.asarray(found.tests.sizes).tolist(), strict=True))
    later = [row["user"] for row in read("later.csv")]
    assert counts == {name: later.count(name) for name in found.clients.names}


def write(name, **columns):
    with open(name, "w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])


AGES = [60, 51, 9, 100, 47, 38, 29, 73]


def small(**changes):
    return {"user": ["p", "q"] * 4, "age": AGES, "ill": [0, 1] * 4, **changes}


def later_of(columns, **settings):
    write("train.csv", **small())
    write("later.csv", **columns)
    about = {"dataset": "csv:train.csv", "target": ("ill",), "test_split": "later.csv"}
    return table_of(**about | settings)


def test_a_later_file_is_read_by_the_first_ones_types(folder):
    message = r"'age' has missing values, the first in row 7 \(line 9 of later.csv\), '\?'"
    for ages in ([*AGES[:7], "?"], ["?"] * 7 + [7, "?"]):
        with pytest.raises(ValueError, match=message if len(ages) == 8 else "row 0 .line 2"):
            later_of(small(age=ages, user=["p"] * len(ages), ill=[0] * len(ages)))
    with pytest.raises(ValueError, match=r"'age' must be numbers, and row 0 .line 2 of later.csv"):
        later_of(small(age=["old"] * 7 + [7]))  # most cells are text
    found = later_of(small(age=[7, *["NA"] * 7]), missing=("mean",))
    mean = np.float32(np.mean(AGES))  # of the training set
    np.testing.assert_array_equal(found.test.x[:, 0], [7, *[mean] * 7])
    found = later_of(small(age=[7, *["?"] * 7]), missing=("?=drop", "NA=0"))
    assert found.test.x.tolist() == [[7]]
    found = later_of(small(age=[7, *["NA"] * 7]), missing=("mean", "keep"))
    np.testing.assert_array_equal(found.test.x[:, 0], [7, *[mean] * 7])
    # Categories that are numbers in the later file have the codes of the first one.
    write("train.csv", **small(age=["3", "10", *"abcdef"]))
    write("later.csv", **small(age=["3", "10"] * 4))
    found = table_of(dataset="csv:train.csv", target=("ill",), test_split="later.csv")
    assert found.test.x[:, 0].tolist() == [1] * 4 + [0] * 4  # by client: p has the 3s


def test_the_training_file_does_not_test(folder):
    with pytest.raises(ValueError, match=r"test_split is './train.csv', the file that is trained"):
        later_of(small(), test_split="./train.csv")


def test_a_later_file_spells_the_clients_as_the_first_one(folder):
    write("train.csv", **small(user=[7, 8] * 4))
    write("later.csv", **small(user=["7.0", "8.0"] * 4))
    about = {"dataset": "csv:train.csv", "target": ("ill",), "test_split": "later.csv"}
    message = r"user has '7\.0', '8\.0'; none .*train.csv, which has '7', '8': spell them"
    with pytest.raises(ValueError, match=message):
        table_of(**about)
    write("later.csv", **small(user=[9] * 8))
    with pytest.warns(UserWarning, match=r"has '9'; none is .*: the clients have no test examples"):
        found = table_of(**about)
    assert (found.tests, len(found.test.y)) == (None, 8)
    write("later.csv", **small(user=[7, 9] * 4))
    assert np.asarray(table_of(**about).tests.sizes).tolist() == [4, 0]


def test_a_later_file_has_the_first_ones_task(folder):
    doses = [0.5, 1.25, 2, 3, 4, 5, 6, 7]
    write("train.csv", **small(ill=doses))
    write("later.csv", **small(ill=[9, 8, 7, 6, 5, 4, 3, 2]))  # whole numbers
    about = {"dataset": "csv:train.csv", "target": ("ill",), "test_split": "later.csv"}
    found = table_of(**about)
    assert found.classes is None
    assert (found.train.y.dtype, found.test.y.dtype) == (np.float32, np.float32)
    assert found.test.y.tolist() == [9, 7, 5, 3, 8, 6, 4, 2]  # by client
    with pytest.raises(
        ValueError, match=r"target \('ill',\) holds floats in test_split 'later.csv'"
    ):
        later_of(small(ill=doses))


def test_a_class_of_the_later_file_alone_has_a_place(folder):
    write("train.csv", **small(ill=["no", "yes"] * 4))
    write("later.csv", **small(ill=["no", "yes"] * 3 + ["maybe", "no"]))
    message = (
        r"'ill' has the value 'maybe', .*: no, yes\. The first is in row 6 \(line 8 of later.csv"
    )
    with pytest.raises(ValueError, match=message):
        table_of(dataset="csv:train.csv", target=("ill",), test_split="later.csv")


def test_columns_of_categories_and_missing_values(folder):
    write("train.csv", **small(age=["0123", "99"] * 4, ill=[0, 1] * 3 + ["?", 1]))
    about = {"dataset": "csv:train.csv", "target": ("ill",), "test_split": "examples:0.5"}
    with pytest.raises(ValueError, match=r"target: the column 'ill' has missing .* \(line 8 of"):
        table_of(**about)
    found = table_of(**about, categories=("age",), missing=("drop",))
    assert sorted(np.concatenate([found.train.x, found.test.x])[:, 0].tolist()) == [0] * 3 + [1] * 4
    with pytest.raises(ValueError, match="categories names 'user'; it must be columns of text"):
        table_of(**about, categories=("user",), missing=("drop",))
    write("train.csv", **{"": range(8), **small()})
    with pytest.raises(
        ValueError, match=r"x is empty, so that .* column 1 of csv:train.csv has no"
    ):
        table_of(**about)


GAPS = ["NA", 51, 9, 100, 47, "NA", 29, 73]


@pytest.mark.parametrize(
    ("client", "split"),
    [("user", "clients:1"), ("user", "examples:0.5"), (None, "examples:0.5")],
)
def test_a_mean_that_fills_gaps_is_that_of_the_training_rows(folder, client, split):
    write("train.csv", **small(age=GAPS))
    about = {"dataset": "csv:train.csv", "target": ("ill",), "x": ("age",), "missing": ("mean",)}
    if client is None:
        about |= {"client": None, "num_clients": 2}
    found = table_of(**about, test_split=split)
    ages = [age for age in found.train.x[:, 0].tolist() if age in GAPS]
    everything = np.concatenate([found.train.x, found.test.x])[:, 0].tolist()
    filled = [age for age in everything if age not in GAPS]
    assert sorted(set(everything) - set(filled)) == sorted(set(GAPS) - {"NA"})
    assert filled == [np.float32(np.mean(ages))] * 2
    # Another seed holds out others; the table is the same.
    assert table_of(**about, test_split=split, seed=5).table == found.table


def test_training_rows_without_a_number_have_no_mean(folder):
    about = {"dataset": "csv:train.csv", "target": ("ill",), "missing": ("mean",)}
    about |= {"x": ("age",), "test_split": "clients:1"}
    write("train.csv", **small())
    (seen,) = table_of(**about).clients.names
    ages = ["NA" if user == seen else 7 for user in ["p", "q"] * 4]
    write("train.csv", **small(age=ages))
    with pytest.raises(ValueError, match="'age' has no other numbers, or none in a training row"):
        table_of(**about)


@pytest.mark.parametrize("split", ["later.csv", "clients:1"])
@pytest.mark.parametrize("hold_out", ["examples", "clients"])
def test_rows_that_a_search_holds_out_do_not_count_in_its_inputs(
    folder, monkeypatch, split, hold_out
):
    rng = np.random.default_rng(0)
    users, ages = [f"u{i}" for i in range(5)] * 4, list(rng.normal(50, 20, 20).round(1))
    table = {"user": users, "age": ages, "dose": rng.normal(size=20), "y": rng.normal(size=20)}
    table["age"] = ["NA" if i in (3, 8) else age for i, age in enumerate(ages)]
    write("train.csv", **table)
    write("later.csv", **table)
    searches = []
    monkeypatch.setattr(module, "tune", lambda *given, **named: searches.append((given, named)))
    line = ["tune", "--space", "client_lr=0.1", "--dataset", "csv:train.csv", "--client", "user"]
    line += ["--target", "y", "--missing", "mean", "--test-split", split, "--model", "linear"]
    line += ["--validation", "0.5", "--hold-out", hold_out, "--seeds", "2", "3"]
    tuning.run_search(parse(line), {"fedavg": {"client_lr": [0.1]}})
    ((methods, _, _, clients), _) = searches[0]
    divide = data.split_clients if hold_out == "clients" else data.split_examples
    train, _ = divide(clients, 0.5, 2)
    y = np.asarray(clients.examples.y)
    rows = np.array([np.flatnonzero(np.float32(table["y"]) == value)[0] for value in y])
    trained = rows[np.asarray(train.indices)]

    def normalised(column):
        column = np.array([np.nan if value == "NA" else value for value in column])
        column[np.isnan(column)] = np.nanmean(column[trained])
        return (column - column[trained].mean()) / column[trained].std()

    x = np.stack([normalised(table[name]) for name in ("age", "dose")], 1)[rows]
    params = {"classifier": {"kernel": np.float32([[2], [-3]]), "bias": np.float32([0.5])}}
    loss_fn = methods["fedavg"](client_lr=0.1).loss_fn
    found = loss_fn(params, clients.examples, None)
    np.testing.assert_allclose(found, (x @ [2, -3] + 0.5 - y) ** 2, rtol=1e-4)


@pytest.mark.methods
def test_classes_of_text_from_parquet(folder, capsys):
    words = ["--dataset", "parquet:users.parquet", "--client", "user", "--target", "group"]
    words += ["--x", "age", "dose", "--test-split", "examples:0.3", "--run-dir", "runs/classes"]
    assert run(*words, "--algorithm", "ditto") == 0
    said = capsys.readouterr()
    assert "3 classes" in said.err
    assert "own models (%)" in said.out
    assert "10 clients" in said.err


def test_personal_methods_say_why_unseen_clients_have_no_model(folder):
    config = RunConfig.of(dataset="csv:users.csv", client="user", target=("group",), x=("age",))
    config = config.replace(algorithm="fedper", cohort_size=2)
    with pytest.warns(UserWarning, match=r"of other clients; examples:0.2 is of these"):
        assert build(config).client_tests.diagnose is None


@pytest.mark.methods
def test_rows_without_clients_are_divided_by_a_scheme(folder, capsys):
    words = ["--dataset", "csv:users.csv", "--target", "response", "--x", "age", "dose"]
    words += ["--test-split", "examples:0.1", "--partition", "iid", "--num-clients", "4"]
    assert run(*words, "--run-dir", "runs/iid") == 0
    assert "108 + 12 examples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (TABLE, "target is missing"),
        ([*TABLE, "--target", "reponse"], "target is 'reponse'; it must be one of"),
        ([*TABLE, "--target", "response", "--x", "weight"], "x is 'weight'; it must be one of"),
        ([*OF_NUMBERS, "--x", "age", "age"], "x names the column 'age' twice"),
        (["--dataset", "csv:users.csv", "--target", "response"], "to hold out clients, set"),
        (["--dataset", "csv:none.csv", "--client", "u", "--target", "y"], "there is no such file"),
        (["--dataset", "csv:users.parquet"], "the file must end in .csv"),
        (["--test-split", "examples:0.1"], "dataset 'digits', which has a test set of its own"),
        (["--missing", "drop"], "dataset 'digits'; columns are those of csv:FILE"),
        (["--categories", "user"], "dataset 'digits'; columns are those of csv:FILE"),
        ([*OF_NUMBERS, "--missing", "dorp"], "missing is 'dorp'; it must be 'drop', 'mean'"),
        ([*OF_NUMBERS, "--missing", "?=drop", "?=mean"], "it has the mark '?' twice"),
        ([*OF_NUMBERS, "--missing", "NA=drop", "na=mean"], "'na' has two meanings"),
        ([*OF_NUMBERS, "--missing", "?=drop", "0"], "it must be drop, mean, keep or a number, two"),
        (["--client", "user"], "dataset 'digits'; columns are those of csv:FILE"),
        ([*OF_NUMBERS, "--partition", "iid"], "partition is 'iid' and client 'user'"),
        ([*OF_NUMBERS, "--test-split", "clients:2.5"], "test_split is 'clients:2.5'; it must be"),
        ([*OF_NUMBERS, "--test-split", "users:0.2"], "test_split is 'users:0.2'; it must be"),
        ([*OF_NUMBERS, "--test-split", "clients:1e400"], "test_split is 'clients:1e400'; it must"),
        ([*OF_NUMBERS, "--test-split", "clients:nan"], "test_split is 'clients:nan'; it must be"),
        ([*OF_NUMBERS, "--test-split", "clients:10"], "held_out is 10; it must be between"),
        ([*OF_NUMBERS, "--task", "classify"], "task is 'classify'; it must be one of"),
        ([*OF_NUMBERS, "--task", "classification"], "holds floats; it must be one"),
        (["--dataset", "users.csv"], "one of cifar10, cifar100, cifar100:PATH, cifar10:PATH, csv:"),
        ([*TABLE, "--target", "group", "--task", "regression"], "a column of text; it must be"),
    ],
)
def test_mistakes(words, message, folder, capsys):
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_plan_names_its_own_flag_of_the_target(folder, capsys):
    assert cli.main(["plan", *TABLE, "--target", "response"]) == 2
    assert "whose --target is a machine: --target-column) to" in capsys.readouterr().err
