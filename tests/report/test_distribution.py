"""How scores spread over the clients, against NumPy."""

import csv
import io
import json

import numpy as np
import pytest
from scipy import stats

from fedjax_lab.report import figures, group_runs, load_runs, summary_table, write_report
from fedjax_lab.report.cells import accuracy_table
from fedjax_lab.report.csv_text import clients_csv
from fedjax_lab.report.distribution import client_scores, clients_figure, spread_measures
from fedjax_lab.report.formats import format_report
from fedjax_lab.report.sections import sections_of
from tests.report.by_hand import groups_of, write_run

# 13 clients, of which two have no test examples: a tenth of 11 is two clients.
EACH = {
    ("even", 0): [0.5, 0.6, None, 0.55, 0.52, 0.58, 0.51, 0.59, 0.57, 0.53, 0.54, 0.56, None],
    ("even", 1): [0.6, 0.7, None, 0.65, 0.62, 0.68, 0.61, 0.69, 0.67, 0.63, 0.64, 0.66, None],
    ("uneven", 0): [0.1, 1.0, None, 0.2, 0.9, 0.3, 0.8, 0.4, 0.7, 0.5, 0.6, 0.95, None],
    ("uneven", 1): [0.0, 1.0, None, 0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.5, 0.85, None],
}
SPREAD = {
    "worst tenth (%)": lambda v: np.mean(v[:2]),
    "best tenth (%)": lambda v: np.mean(v[-2:]),
    "variance over clients (points²)": np.var,
}


def held(name, seed):
    """The scores in percent of the clients that have some, in order."""
    return np.sort([100 * value for value in EACH[name, seed] if value is not None])


@pytest.fixture
def runs(tmp_path):
    for (name, seed), each in EACH.items():
        path = tmp_path / "runs" / f"{name}{seed}"
        write_run(path, [0.4, 0.5], seed=seed, algorithm=name, each=each)
    return tmp_path / "runs"


def test_the_table_has_the_worst_and_the_best_tenth_and_the_variance(runs):
    head, *rows = accuracy_table(groups_of(runs))
    assert "worst 10 % of clients (%)" not in head
    for name, measure in SPREAD.items():
        for row in rows:
            values = [measure(held(row[0], seed)) for seed in (0, 1)]
            half = stats.sem(values) * stats.t.ppf(0.975, 1)
            assert row[head.index(name)] == f"{np.mean(values):,.2f} ± {half:,.2f}"
    text = summary_table(groups_of(runs))
    assert "are of the last model on each client's own test examples" in text
    assert "training data" not in text
    metrics = {row["metric"] for row in csv.DictReader(io.StringIO(format_report([runs], "csv")))}
    assert metrics > SPREAD.keys()


@pytest.mark.parametrize(("mode", "best"), [("max", 0.9), ("min", 0.1)])
def test_a_client_without_a_finite_score_is_the_worst(tmp_path, mode, best):
    """Of any score that the user names, whether more of it is better or less."""
    path = write_run(tmp_path / "run", [0.4])
    values = [0.1, 0.5, None, 0.9, 0.7]
    row = {"round": 5, "f1": 0.5, "personal_f1_each": values}
    (path / "metrics.jsonl").write_text(json.dumps(row))
    (path / "summary.json").write_text(json.dumps({"client_test_examples": [3] * 5}))
    runs = load_runs([path], metric="f1", mode=mode)
    found = {name: value(runs[0]) for name, value in spread_measures(runs).items()}
    assert np.isnan(found["worst tenth"])
    assert found["best tenth"] == best


def test_the_figure_has_a_step_for_each_client(runs, tmp_path, monkeypatch):
    axes = clients_figure(groups_of(runs)).axes[0]
    thick = [line for line in axes.lines if line.get_linewidth() > 1]
    for name, line in zip(("even", "uneven"), thick, strict=True):
        pooled = np.sort(np.concatenate([held(name, 0), held(name, 1)]))
        np.testing.assert_allclose(line.get_ydata(), [*pooled, pooled[-1]])
        np.testing.assert_allclose(line.get_xdata(), np.arange(23) / 22 * 100)
    thin = next(line for line in axes.lines if line.get_linewidth() < 1)
    np.testing.assert_allclose(thin.get_ydata()[:-1], held("even", 0))
    monkeypatch.setattr(figures, "save", lambda *arguments: None)
    assert "clients.png" in dict(figures.write_figures(groups_of(runs), tmp_path))


def test_a_score_with_the_name_of_a_formula_is_text(tmp_path):
    name = r"$\frac$"
    run = write_run(tmp_path / "a", more={name: 1.0})
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, f"client_test_{name}": [0.1, 0.2]}))
    axes = clients_figure(group_runs(load_runs([run], metric=name))).axes[0]
    assert axes.get_ylabel() == r"\$\frac\$ of a client"


def test_a_file_has_the_score_of_each_client(runs, tmp_path, monkeypatch):
    partition = json.loads((runs / "even0" / "partition.json").read_text())
    names = [f"user {place}" for place in range(13)]
    (runs / "even0" / "partition.json").write_text(json.dumps({**partition, "names": names}))
    monkeypatch.setattr("fedjax_lab.report.write.write_figures", lambda *arguments: [])
    text = (write_report([runs]).parent / "clients.csv").read_text()
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == 4 * 11
    of_run = [line for line in lines if line["run"] == str(runs / "even0")]
    assert [line["client"] for line in of_run] == [names[i] for i in (0, 1, *range(3, 12))]
    first = {"method": "even", "dataset": "digits", "rounds": "10", "seed": "0", "examples": "5"}
    assert of_run[0].items() >= {**first, "metric": "accuracy (%)", "value": "50.0"}.items()
    numbered = [line["client"] for line in lines if line["run"] == str(runs / "uneven1")]
    assert numbered == [str(i) for i in (0, 1, *range(3, 12))]


def test_a_report_leaves_nothing_of_an_earlier_one_in_its_folder(runs, tmp_path, monkeypatch):
    """Files of the user's stay, also figures as vectors, of which nothing says who wrote them."""

    def drawn(groups, folder, prefix, form):
        scored = any(map(client_scores, (run for group in groups for run in group.runs)))
        names = ["accuracy.png", *["clients.png"] * scored]
        for name in names:
            (folder / name).write_bytes(b"figure")
        return [(name, f"What [{name}] shows (in `%`).") for name in names]

    def there():
        return {file.name for file in out.iterdir()}

    monkeypatch.setattr("fedjax_lab.report.write.write_figures", drawn)
    out, written = tmp_path / "out", {"report.md", "report.html", "accuracy.png"}
    out.mkdir()
    (out / "report.md").write_text("# Mine\n\n![a loss](loss.png)\n\nMy loss.\n")
    own = {"loss.png", "clients.csv.old", "accuracy.pdf", "notes.csv", "a%20:b.png"}
    for name in own:
        (out / name).write_text("mine")
    write_report([runs], out)
    assert there() == {*own, *written, "clients.png", "clients.csv"}
    with (out / "report.md").open("a") as page:  # edited by the user, with a figure of theirs
        page.write("\n![My loss.](loss.png)\n\nMy loss.\n")
    plain = write_run(tmp_path / "plain", [0.4, 0.5])
    write_report([plain], out)
    assert there() == {*own, *written}
    (out / "clients.csv").write_text("mine")
    write_report([plain], out)
    assert there() == {*own, *written, "clients.csv"}


def test_runs_without_scores_of_clients_have_no_column_of_them(tmp_path):
    """As simulate leaves them: summary.json has no scores of clients."""
    write_run(tmp_path / "a", [0.4, 0.5])
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    summary = {name: value for name, value in summary.items() if "worst" not in name}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    groups = groups_of(tmp_path)
    assert not [name for name in accuracy_table(groups)[0] if "worst" in name]
    assert "on whose own training data" not in summary_table(groups)


def test_runs_without_them_keep_the_worst_on_training_data(tmp_path):
    write_run(tmp_path / "a", [0.4, 0.5])
    assert "worst 10 % of clients (%)" in accuracy_table(groups_of(tmp_path))[0]
    assert "on whose own training data" in summary_table(groups_of(tmp_path))
    write_run(tmp_path / "b", [0.4, 0.5], algorithm="scaffold", each=[0.2, 0.4])
    head, first, second = accuracy_table(groups_of(tmp_path))
    assert [first[head.index(name)] for name in SPREAD] == ["-"] * 3
    assert [second[head.index(name)] for name in SPREAD] == ["20.00", "40.00", "100.00"]


def test_rows_of_python_runs_may_have_them(tmp_path):
    """A list in the last row; null where a client has no test examples."""
    path = write_run(tmp_path / "a", [0.4, 0.5], own=[0.2, 0.3])
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["personal_accuracy_each"] = [0.2, None, 0.4]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {
        name: f(load_runs([path])[0]) for name, f in spread_measures(load_runs([path])).items()
    }
    np.testing.assert_allclose(list(found.values()), [20, 40, 100])


def test_an_error_that_is_not_finite_is_among_the_worst(tmp_path):
    path = write_run(tmp_path / "a", [0.1], more={"mean_squared_error": 5.0})
    summary = {"client_test_mean_squared_error": [3.0, None, 1.0, None]}
    summary["client_test_examples"] = [5, 5, 5, 0]
    (path / "summary.json").write_text(json.dumps(summary))
    (section,) = sections_of(load_runs([path]))
    head, row = accuracy_table(section.groups)
    cells = dict(zip(head, row, strict=True))
    assert [cells[n] for n in ("worst tenth", "best tenth", "variance over clients")] == [
        *("-", "1.00", "-")
    ]
    values = [line["value"] for line in csv.DictReader(io.StringIO(clients_csv([section])))]
    assert values == ["3.0", "", "1.0"]


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ([3, 4, 5], ["-", "1.00", "-"]),
        ([3, 0, 5], ["2.00", "1.00", "0.250"]),
        (None, ["2.00", "1.00", "0.250"]),
    ],
)
def test_the_sizes_tell_an_infinite_error_in_a_row_from_a_client_without_tests(
    tmp_path, sizes, shown
):
    """JSON has null for both: [1, null, 2]. Of two clients the variance is 0.25."""
    path = write_run(tmp_path / "a", [0.1], more={"mean_squared_error": 5.0})
    row = json.loads((path / "metrics.jsonl").read_text())
    row |= {"personal_mean_squared_error": 1.5, "personal_mean_squared_error_each": [1, None, 2]}
    (path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (path / "summary.json").write_text(json.dumps({"client_test_examples": sizes}))
    head, cells = accuracy_table(groups_of(path))
    names = ("worst tenth", "best tenth", "variance over clients")
    assert [cells[head.index(name)] for name in names] == shown


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"client_test_accuracy": 3}, "client_test_accuracy.* is 3; it must be a list"),
        ({"client_test_accuracy": ["a"]}, "'client_test_accuracy' has the value 'a'"),
        ({"client_test_accuracy": [0.5]}, "must have equal lengths"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, changed, message):
    path = write_run(tmp_path / "a", [0.4], each=[0.2, 0.4])
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, **changed}))
    with pytest.raises(ValueError, match=message):
        load_runs([path])


def test_a_seed_without_scores_draws_nothing(runs):
    """As one that was killed, or diverged."""
    write_run(runs / "even2", [0.4], seed=2, algorithm="even", rounds=10)
    axes = clients_figure(groups_of(runs)).axes[0]
    assert len([line for line in axes.lines if line.get_linewidth() < 1]) == len(EACH)
