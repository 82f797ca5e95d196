"""Methods are compared within a setting, and by the models that the clients use."""

import csv
import io
import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from fedjax_lab.command.cli import main
from fedjax_lab.report import figures, load_runs, summary_table, write
from fedjax_lab.report.cells import accuracy_table, run_table, target_table
from fedjax_lab.report.curves import accuracy_figure, has, measure_of, ranking_figure
from fedjax_lab.report.formats import format_report
from fedjax_lab.report.pivot import pivots_of, score_rows, target_rows
from fedjax_lab.report.sections import runs_of, score_of, sections_of
from fedjax_lab.report.tables import default_target
from tests.report.by_hand import groups_of, write_run

SEEDS = (0, 1, 2)
# Last accuracies by partition, method and seed.
GRID = {
    "dirichlet:0.1": {"fedavg": (0.70, 0.72, 0.74), "scaffold": (0.75, 0.70, 0.79)},
    "dirichlet:1": {"fedavg": (0.90, 0.91, 0.92), "scaffold": (0.80, 0.81, 0.83)},
    "dirichlet:10": {"fedavg": (0.95, 0.94, 0.93)},
}


def partition(spec, seed=0):
    return {"partition": {"spec": spec, "seed": seed, "hash": f"{spec}-{seed}"}}


@pytest.fixture
def grid(tmp_path):
    for spec, methods in GRID.items():
        for name, values in methods.items():
            for seed, value in zip(SEEDS, values, strict=True):
                path = tmp_path / "runs" / spec / f"{name}{seed}"
                curve = [value - 0.2, value]
                write_run(path, curve, seed=seed, algorithm=name, **partition(spec, seed))
    return tmp_path / "runs"


def test_columns_are_in_the_order_of_their_numbers(tmp_path):
    numbers = (1e-05, 0.0001, 0.1, 2, 10)
    for number in reversed(numbers):
        write_run(tmp_path / str(number), **partition(f"dirichlet:{number}"))
    (pivot,) = pivots_of(sections_of(load_runs([tmp_path])), ("method", "partition"))
    assert pivot.settings == [f"dirichlet:{number}" for number in numbers]


def test_each_partition_is_a_section_with_a_ranking_and_a_target(grid):
    sections = sections_of(load_runs([grid]))
    titles = [f"digits, accuracy, 10 rounds, partition {spec}" for spec in GRID]
    assert [section.title for section in sections] == titles
    best_of = [section.groups[0].label for section in sections]
    assert best_of == ["scaffold", "fedavg", "fedavg"]
    for section, methods in zip(sections, GRID.values(), strict=True):
        top = max(np.mean(values) for values in methods.values())
        assert default_target(section.groups) == math.floor(950 * top) / 1000
        rows = accuracy_table(section.groups)
        if len(rows) > 2:
            first, second = (np.array(methods[group.label]) for group in section.groups)
            p = stats.ttest_rel(first, second).pvalue
            assert rows[2][-1] == ("< 0.001" if p < 0.001 else f"{p:.3f}")
    text = summary_table([group for section in sections for group in section.groups])
    assert re.findall("^## (.*)", text, re.M) == titles


@pytest.mark.parametrize(
    "settings",
    [
        {"num_clients": 7},
        {"cohort_size": 7},
        {"local_steps": 7},
        {"local_epochs": 7},
        {"batch_size": 7},
        {"model": "cnn"},
        {"model_option": {"hidden": [7]}},
        {"dropout": 0.7},
        {"attack": "sign_flip:0.2"},
        {"compute_dtype": "bfloat16"},
        {"num_params": 7},
        {"devices": {"dropout": 0.7}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_setting_is_what_methods_are_compared_on(tmp_path, settings):
    of_python = settings.keys() & {"num_params", "devices"}
    asked = {} if of_python else {"dataset": "digits", "option": {}}
    usual = {"num_params": 5, "devices": None} if of_python else {}
    write_run(tmp_path / "a", run_config=asked, **usual)
    kept = {**usual, **settings} if of_python else usual
    changed = {"run_config": asked if of_python else {**asked, **settings}, **kept}
    if "num_clients" in settings:
        changed = {"num_clients": 7}
    write_run(tmp_path / "b", algorithm="scaffold", **changed)
    first, second = sections_of(load_runs([tmp_path]))
    assert first.title != second.title
    assert (
        "7" in second.title
        or "cnn" in second.title
        or "sign" in second.title
        or "bf" in (second.title)
    )


def test_a_run_of_python_may_name_its_model(tmp_path):
    names = {"model": ["convolutional", "recurrent"], "num_params": [1000, 2000]}
    for model in names["model"]:
        for count in names["num_params"]:
            path = tmp_path / f"{model}{count}"
            write_run(path, run_config={}, model=model, num_params=count, devices=None)
    sections = sections_of(load_runs([tmp_path]))
    assert {section.setting["model"] for section in sections} == {
        f"{model}, {count:,} parameters"
        for model in names["model"]
        for count in names["num_params"]
    }
    assert {len(section.groups) for section in sections} == {1}


@pytest.mark.parametrize("name", ["client_lr", "server_lr", "weight_decay", "compressor"])
def test_a_hyperparameter_is_none(tmp_path, name):
    for value in (0.1, 0.2):
        asked = {"dataset": "digits", "option": {}, name: value}
        write_run(tmp_path / str(value), hyperparameters={}, run_config=asked)
    (section,) = sections_of(load_runs([tmp_path]))
    assert [group.differs for group in section.groups] == [f"{name}=0.1", f"{name}=0.2"]


def paired(first, second):
    return stats.ttest_rel(first, second).pvalue


def test_a_table_of_methods_by_partitions_against_numpy(grid):
    (pivot,) = pivots_of(sections_of(load_runs([grid])), ("method", "partition"))
    assert pivot.settings == ["dirichlet:0.1", "dirichlet:1", "dirichlet:10"]
    assert pivot.methods == ["fedavg", "scaffold"]
    for spec, methods in GRID.items():
        means = {name: np.mean(values) for name, values in methods.items()}
        best = max(means, key=means.get)
        for name, values in methods.items():
            cell = pivot.cells[name, spec]
            half = stats.sem(values) * stats.t.ppf(0.975, 2)
            assert cell.score.mean == pytest.approx(100 * means[name])
            assert cell.score.half_width == pytest.approx(100 * half)
            tied = name != best and paired(methods[best], values) > 0.05
            assert cell.mark == ("best" if name == best else "tie" if tied else "")
            assert pivot.targets[spec] == math.floor(950 * means[best]) / 1000
    assert ("scaffold", "dirichlet:10") not in pivot.cells
    rows = score_rows(pivot, lambda text: f"<{text}>")
    assert rows[0] == ["method", *GRID]
    half = 100 * stats.sem(GRID["dirichlet:0.1"]["fedavg"]) * stats.t.ppf(0.975, 2)
    assert rows[1][1] == f"72.00 ± {half:.2f} ≈"
    half = 100 * stats.sem(GRID["dirichlet:1"]["fedavg"]) * stats.t.ppf(0.975, 2)
    assert rows[1][2] == f"<91.00 ± {half:.2f}>"
    assert rows[2][3] == "-"
    targets = target_rows(pivot)
    assert targets[0][1:] == ["dirichlet:0.1 (70.9 %)", "dirichlet:1 (86.4 %)",
                              "dirichlet:10 (89.3 %)"]  # fmt: skip
    assert targets[1][1:] == ["2 of 3 seeds", "10 ± 0", "10 ± 0"]
    assert targets[2][1:] == ["2 of 3 seeds", "-", "-"]


def test_a_setting_in_which_all_methods_diverged_has_no_target(tmp_path):
    for spec, stopped in (("iid", None), ("dirichlet:1", "diverged")):
        write_run(tmp_path / spec, stopped=stopped, partition={"spec": spec})
    (pivot,) = pivots_of(sections_of(load_runs([tmp_path])), ("method", "partition"))
    assert target_rows(pivot)[0] == ["method", "dirichlet:1", "iid (90.2 %)"]


def cells_of(latex):
    """The rows of each tabular, of a text that TeX accepts: of this form, escaped, rows of equal
    lengths."""
    text = re.sub(r"(?<!\\)%.*", "", latex)
    form = (
        r"\\begin\{tabular\}\{(lr+)\}\s+\\toprule(.*?)\\midrule(.*?)\\bottomrule\s+"
        r"\\end\{tabular\}"
    )
    assert not re.sub(form, "", text, flags=re.S).strip()
    found = []
    for columns, head, body in re.findall(form, text, re.S):
        *rows, rest = re.split(r"\\\\\n", head + body)
        assert not rest.strip()
        found.append([[c.strip() for c in re.split(r"(?<!\\)&", row)] for row in rows])
        assert {len(row) for row in found[-1]} == {len(columns)}
        for row in found[-1]:
            assert not row[0].startswith(("[", "*"))
            for cell in row:
                inner = re.sub(r"\\textbf\{(.*)\}", r"\1", cell)
                known = r"\$(\\pm|\\approx|\\dagger|<|>|\^2)\$|\\[&%$#_{}]|\\text\w+\{\}|^\{\}"
                assert not re.search(r"[&%$#_{}\\~^<>]", re.sub(known, "", inner)), cell
    return found


def test_latex_of_any_name_can_be_compiled(tmp_path):
    name = r"[a_b]* & 50% $x$ #1 {y} \z ^~ <2>"
    for seed, value in enumerate((0.5, 0.6)):
        write_run(tmp_path / f"a{seed}", [value], algorithm=name, seed=seed, each=[0.4, 0.6])
        write_run(tmp_path / f"b{seed}", [value + 0.1], algorithm="b", seed=seed)
    (table,) = cells_of(format_report([tmp_path], "latex"))
    assert [row[0][:2] for row in table] == ["me", "b", "{}"]
    assert table[0][-3:] == [r"variance over clients (points$^2$)", "behind the best (points)", "p"]
    tables = cells_of(format_report([tmp_path], "latex", rows="method", columns="partition"))
    assert [len(rows) for rows in tables] == [3, 3]


def test_every_format_prints_the_table(grid, capsys, monkeypatch):
    monkeypatch.setattr(write, "write_figures", lambda *arguments: [])

    def printed(*flags):
        words = ["report", str(grid), "--rows", "method", "--columns", "partition", *flags]
        assert main(words) == 0
        return capsys.readouterr().out

    half = f"± {100 * stats.sem((0.90, 0.91, 0.92)) * stats.t.ppf(0.975, 2):.2f}"
    assert f"**91.00 {half}**" in printed("--format", "markdown")
    latex = printed("--format", "latex")
    spread = half.replace("±", r"$\pm$")
    assert rf"\textbf{{91.00 {spread}}}" in latex
    assert latex.startswith("% Test accuracy in percent, mean over the last tenth")
    assert [[len(row) for row in rows] for rows in cells_of(latex)] == [[4] * 3] * 2
    assert f"<strong>91.00 {half}</strong>" in printed("--format", "html")
    lines = list(csv.DictReader(io.StringIO(printed("--format", "csv"))))
    (line,) = (
        row for row in lines
        if (row["method"], row["partition"], row["metric"])
        == ("fedavg", "dirichlet:1", "accuracy (%)")
    )  # fmt: skip
    assert (float(line["mean"]), line["mark"], line["n"]) == (pytest.approx(91), "best", "3")
    assert f"91.00 {half} *" in printed("--out", str(grid.parent / "out"))
    page = (grid.parent / "out" / "report.md").read_text()
    assert page.startswith("# Report\n\n## Method by partition\n\nTest accuracy in percent, mean")
    assert main(["report", str(grid), "--rows", "partition", "--columns", "method"]) == 0
    assert re.search(r"dirichlet:1 +91\.00", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["--rows", "method"], "rows is 'method' and columns None; give both"),
        (["--columns", "method"], "rows is None and columns 'method'; give both"),
        (["--rows", "method", "--columns", "method"], "one of them must be method"),
        (["--rows", "model", "--columns", "partition"], "one of them must be method"),
        (["--rows", "method", "--columns", "alpha"], "columns is 'alpha'; it must be one of"),
        (["--rows", "method", "--columns", "attack"], "attack is to be an axis of the table; no"),
    ],
)
def test_axes_that_do_not_exist(grid, capsys, axes, message):
    for form in ([], ["--format", "csv"]):
        assert main(["report", str(grid), *axes, *form]) == 2
        assert message in capsys.readouterr().err


def test_what_is_in_no_axis_makes_another_table(grid):
    for seed in SEEDS:
        settings = {"cohort_size": 9, **partition("dirichlet:1", seed)}
        write_run(grid / f"large{seed}", [0.5, 0.6], seed=seed, **settings)
    pivots = pivots_of(sections_of(load_runs([grid])), ("method", "partition"))
    assert [pivot.title for pivot in pivots] == ["", "cohort_size 9"]
    assert list(pivots[1].cells) == [("fedavg", "dirichlet:1")]
    text = format_report([grid], "markdown", rows="method", columns="partition")
    assert re.findall("^## (.*)", text, re.M) == ["cohort_size 9"]


def test_a_method_tuned_in_each_setting_is_one_row(tmp_path):
    for spec, rate in (("iid", 0.1), ("dirichlet:1", 0.3)):
        write_run(tmp_path / spec, [0.5], lr=rate, **partition(spec))
        for weight in (0.1, 1.0):
            settings = {"client_lr": 0.1, "prox_weight": weight}
            asked = {"dataset": "digits", "option": {}}
            path = tmp_path / f"{spec}{weight}"
            write_run(
                path, [0.4], algorithm="fedprox", hyperparameters=settings, run_config=asked,
                **partition(spec),
            )  # fmt: skip
    (pivot,) = pivots_of(sections_of(load_runs([tmp_path])), ("method", "partition"))
    assert pivot.methods == ["fedavg", "fedprox (prox_weight=0.1)", "fedprox (prox_weight=1)"]
    assert pivot.merged == {"fedavg": ["client_lr"]}
    text = format_report([tmp_path], "markdown", rows="method", columns="partition")
    assert "Hyperparameters that differ between the settings: fedavg: client_lr." in text


def test_a_table_names_each_group_of_a_setting(tmp_path):
    """Also by a setting that one of them lacks, and by the distance of the evaluations."""
    write_run(tmp_path / "plain", [0.5, 0.6], every=5, eval_every=5)
    write_run(tmp_path / "often", [0.5] * 9 + [0.7], every=1, eval_every=1)
    write_run(tmp_path / "clipped", [0.5, 0.8], every=5, eval_every=5, clip_norm=1.0)
    (pivot,) = pivots_of(sections_of(load_runs([tmp_path])), ("method", "num_clients"))
    assert {row: round(cell.score.mean) for (row, _), cell in pivot.cells.items()} == {
        "fedavg (eval_every=5)": 60,
        "fedavg (eval_every=1)": 70,
        "fedavg (eval_every=5, clip_norm=1)": 80,
    }
    assert pivot.merged == {}


def test_what_differs_between_settings_alone_makes_no_row(tmp_path):
    """It was tuned there, and one of the settings may lack it."""
    for spec, tuned in (("iid", {}), ("dirichlet:1", {"clip_norm": 1.0, "eval_every": 2})):
        for weight in (0.1, 1.0):
            given = {"hyperparameters": {"prox_weight": weight}, **tuned, **partition(spec)}
            write_run(tmp_path / f"{spec}{weight}", [0.5], algorithm="fedprox", **given)
    (pivot,) = pivots_of(sections_of(load_runs([tmp_path])), ("method", "partition"))
    assert pivot.methods == ["fedprox (prox_weight=0.1)", "fedprox (prox_weight=1)"]
    assert len(pivot.cells) == 4
    assert pivot.merged == {"fedprox": ["clip_norm"]}


def test_groups_that_a_table_cannot_tell_apart_are_refused(tmp_path):
    for name, weight in (("a", 0.12345678), ("b", 0.12345679)):
        write_run(tmp_path / name, hyperparameters={"prox_weight": weight})
    with pytest.raises(ValueError, match=r"prox_weight=0.123457\) and iid.*differ in prox_weight"):
        pivots_of(sections_of(load_runs([tmp_path])), ("method", "partition"))


def test_numbers_in_columns_are_in_their_order(tmp_path):
    for count in (100, 20, 3):
        write_run(tmp_path / str(count), [0.5], num_clients=count)
    (pivot,) = pivots_of(sections_of(load_runs([tmp_path])), ("method", "num_clients"))
    assert pivot.settings == ["3", "20", "100"]


# Personal methods. The global model of "head" is poor, and its clients' models are the best.
OWN = {
    "head": ([0.3, 0.4], [0.90, 0.98]),
    "ditto": ([0.8, 0.9], [0.85, 0.95]),
}
GLOBAL = ([0.7, 0.92], [0.75, 0.89])


@pytest.fixture
def personal(tmp_path):
    for seed in (0, 1):
        gap = 0.02 * seed
        for name, (of_global, own) in OWN.items():
            write_run(
                tmp_path / f"{name}{seed}", [v - gap for v in of_global], seed=seed,
                algorithm=name, own=[v - gap for v in own],
            )  # fmt: skip
        write_run(
            tmp_path / f"fedavg{seed}", [v - gap for v in GLOBAL[0]], seed=seed,
            clients=[v - gap for v in GLOBAL[1]],
        )  # fmt: skip
    return tmp_path


def column(rows, name):
    return {row[0]: row[rows[0].index(name)] for row in rows[1:]}


def test_clients_models_rank_and_the_global_model_stands_beside_them(personal):
    (section,) = sections_of(load_runs([personal]))
    assert [group.label for group in section.groups] == ["head", "ditto", "fedavg"]
    rows = accuracy_table(section.groups)
    spread = f"± {2 * stats.t.ppf(0.975, 1) / math.sqrt(2) / math.sqrt(2):.2f}"
    own = column(rows, "own models, mean of round 10 (%)")
    assert own == {
        "head": f"97.00 {spread}",
        "ditto": f"94.00 {spread}",
        "fedavg": f"88.00 {spread}",
    }
    assert column(rows, "worst tenth (%)")["fedavg"].startswith("44.00")
    beside = column(rows, "global model, mean of round 10 (%)")
    assert beside == {"head": f"39.00 {spread}", "ditto": f"89.00 {spread}",
                      "fedavg": f"91.00 {spread}"}  # fmt: skip
    behind = column(rows, "behind the best (points)")
    assert behind == {"head": "best", "ditto": "3.00 ± 0.00", "fedavg": "9.00 ± 0.00"}
    assert default_target(section.groups) == math.floor(950 * 0.97) / 1000
    reached = target_table(section.groups, 0.92)
    assert column(reached, "rounds") == {"head": "10 ± 0", "ditto": "10 ± 0", "fedavg": "-"}
    last = column(run_table(section.groups), "own models, accuracy (%)")
    assert last[str(personal / "fedavg1")] == "87.00"
    text = summary_table(section.groups)
    assert "All are compared by the models that the clients use" in text
    assert "first evaluation with a test accuracy of the own models of at least" in text
    (pivot,) = pivots_of(sections_of(load_runs([personal])), ("method", "partition"))
    assert [pivot.cells[name, "iid"].mark for name in pivot.methods] == ["best", "", ""]
    assert pivot.cells["fedavg", "iid"].score.mean == pytest.approx(88)


def test_the_main_figure_shows_the_clients_models(personal, tmp_path, monkeypatch):
    groups = groups_of(personal)
    axes = accuracy_figure(groups).axes[0]
    assert axes.get_ylabel() == "test accuracy of the own models (%)"
    thick = [line for line in axes.lines if line.get_linewidth() > 1]
    ends = sorted(line.get_ydata()[-1] for line in thick)
    np.testing.assert_allclose(ends, [88, 94, 97])
    ranking = ranking_figure(groups).axes[0]
    assert ranking.get_xlabel() == "top test accuracy of the own models (%)"
    names = [label.get_text() for label in ranking.get_yticklabels()]
    assert names == ["fedavg", "ditto", "head"]  # the best one at the top
    monkeypatch.setattr(figures, "save", lambda *arguments: None)
    shown = dict(figures.write_figures(groups, tmp_path))
    assert shown["accuracy.png"].startswith("Test accuracy of the own models against rounds")
    assert "global_model.png" in shown


def test_a_run_whose_clients_were_not_scored_is_named(personal):
    for seed in (0, 1):
        (personal / f"fedavg{seed}" / "clients.jsonl").unlink()
    (section,) = sections_of(load_runs([personal]))
    assert [group.label for group in section.groups] == ["head", "ditto", "fedavg"]
    assert accuracy_table(section.groups)[3][-2:] == ["-", "-"]
    assert column(target_table(section.groups, 0.5), "seeds that reach it")["fedavg"] == "-"
    assert "test examples, and so not compared: fedavg." in summary_table(section.groups)


def test_personal_methods_whose_models_were_not_scored_are_named(tmp_path):
    write_run(tmp_path / "a", [0.9], algorithm="ditto", personal_models=True)
    write_run(tmp_path / "b", [0.8])
    text = summary_table(groups_of(tmp_path))
    assert "because no run scored the clients' own models: ditto.**" in text
    assert "Compared by" not in summary_table(groups_of(tmp_path / "b"))


def test_rows_that_were_not_scored_hide_when_a_target_was_reached(personal):
    file = personal / "fedavg0" / "clients.jsonl"
    file.write_text(file.read_text().splitlines()[1] + "\n")
    (section,) = sections_of(load_runs([personal]))
    assert column(target_table(section.groups, 0.5), "seeds that reach it")["fedavg"] == "1 of 2"


def test_global_methods_alone_are_compared_by_the_test_set(tmp_path):
    write_run(tmp_path / "a", [0.9], clients=[0.1])
    write_run(tmp_path / "b", [0.8], clients=[0.9], algorithm="scaffold")
    (section,) = sections_of(load_runs([tmp_path]))
    assert [group.label for group in section.groups] == ["fedavg", "scaffold"]
    assert "own" not in " ".join(accuracy_table(section.groups)[0])


def test_errors_of_the_clients_models_rank_too(tmp_path):
    def write(name, of_global, own, file=False):
        error = {"mean_squared_error": 5 * of_global}
        path = write_run(tmp_path / name, [0.1], algorithm=name, more=error)
        rows = json.loads((path / "metrics.jsonl").read_text())
        scored = {"round": 5, f"{'client_test' if file else 'personal'}_mean_squared_error": own}
        if file:
            (path / "clients.jsonl").write_text(json.dumps(scored) + "\n")
        else:
            (path / "metrics.jsonl").write_text(json.dumps({**rows, **scored}) + "\n")

    write("ditto", 9.0, 1.0)
    write("fedavg", 3.0, 2.0, file=True)
    (section,) = sections_of(load_runs([tmp_path]))
    assert [group.label for group in section.groups] == ["ditto", "fedavg"]
    rows = accuracy_table(section.groups)
    assert column(rows, "own models, mean of round 5") == {"ditto": "1.00", "fedavg": "2.00"}
    assert column(rows, "global model, mean of round 5") == {"ditto": "9.00", "fedavg": "3.00"}
    assert rows[2][-2] == "1.00"
    (pivot,) = pivots_of(sections_of(load_runs([tmp_path])), ("method", "partition"))
    assert pivot.cells["ditto", "iid"].mark == "best"
    assert target_rows(pivot) is None


def test_a_run_that_diverged_has_no_score_of_any_name(tmp_path):
    scores = {"accuracy_recomputed": 6.0, "perplexity": 7.0, "test_loss": 8.0, "client_drift": 9.0}
    folder = write_run(tmp_path / "a", [0.6, 0.7], own=[0.7, 0.9], more=scores, stopped="diverged")
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"client_accuracy": [0.5], "client_accuracy_mean": 0.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "landscape.json").write_text(
        json.dumps({"eigenvalues": [1.0], "offsets": [0, 1], "losses": [[0, 1], [1, 2]]})
    )
    dead = write_run(tmp_path / "b", [0.6, 0.7], clients=[0.8, 0.9], stopped="diverged")
    write_run(tmp_path / "c", [0.6, 0.7], own=[0.7, 0.8], seed=1, algorithm="ditto", more=scores)
    (run,) = load_runs([folder])
    assert run.diverged
    assert not run.finished  # although it has the row of its last round
    assert run.landscape == {}
    assert {run.summary[name] for name in summary if name != "stopped"} == {None}
    no_scores = {"round", "loss", "bytes_up", "bytes_down", "gradients", "seconds",
                 "compile_seconds", "client_drift"}  # fmt: skip
    for row in (*run.rows, *load_runs([dead])[0].rows):
        assert {value for name, value in row.items() if name not in no_scores} == {None}
    for parts in ([folder], [dead], [folder, tmp_path / "c"]):
        groups = groups_of(*parts)
        shown = [
            cell for row in accuracy_table(groups)[1:] if row[0] != "ditto" for cell in row[2:]
        ]
        assert set(shown) == {"-"}
        lines = csv.DictReader(io.StringIO(format_report(parts, "csv")))
        scored = [r for r in lines if r["method"] == "fedavg" and "%" in r["metric"]]
        assert scored
        assert {row["mean"] for row in scored} == {""}
        assert not has(groups_of(*parts[:1]), measure_of(score_of(runs_of(groups))))


CHOSEN = {
    "dataset": "digits", "model": "mlp", "partition": "iid", "batch_size": 16, "option": {},
    "client_map": "auto", "client_store": "auto", "flip": False, "crop": 0, "dropout": 0.0,
    "sequence_length": 35, "tokens": "words", "error_feedback": True, "step_time": 1.0,
    "over_selection": 1.0, "weight_decay": 0.0, "on_nonfinite": "exclude", "as_published": False,
}  # fmt: skip


def test_settings_are_what_a_person_chose(tmp_path):
    asked = {"client_map": "auto", "client_store": "auto"}
    about = {"asked": asked, "client_map": "shard_map", "num_devices": 2, "devices": None}
    functions = {"loss_fn": {"function": "fedjax_lab.classification_loss"}}
    write_run(tmp_path / "a", run_config=CHOSEN, functions=functions, data={"hash": "x"}, **about)
    text = summary_table(groups_of(tmp_path / "a"))
    table = text[text.index("## Settings") : text.index("## Runs")]
    names = re.findall(r"(\w+) +\| `", table)
    expected = ["batch_size", "client_lr", "dataset", "model", "num_clients", "partition", "rounds"]
    assert sorted(names) == expected
    kept = {"crop": 4, "tokens": "bytes", "compressor": "sign", "dropout": 0.5, "option": {"mu": 0}}
    kept |= {"client_map": "scan"}
    about["asked"] = {**asked, "client_map": "scan"}
    more = {"perplexity": 3.0}
    write_run(tmp_path / "b", run_config={**CHOSEN, **kept}, more=more, **about)
    text = summary_table(groups_of(tmp_path / "b"))
    for name in ("error_feedback", "sequence_length", *(kept.keys() - {"option"}), "mu"):
        assert re.search(rf"\| {name} +\| `", text), name
    write_run(tmp_path / "c", run_config={**CHOSEN, "crop": 4}, algorithm="scaffold")
    titles = [section.title for section in sections_of(load_runs([tmp_path / "a", tmp_path / "c"]))]
    assert len(titles) == 2


def test_schedules_and_losses_of_python_runs_have_names(tmp_path):
    def rate(factor):
        arguments = {"decay_rate": factor, "init_value": 0.1}
        return {"function": "optax.exponential_decay", "arguments": arguments}

    for factor in (0.9, 0.998):
        given = {
            "client_lr": rate(factor),
            "gradient_transform": {
                "function": "optax.chain",
                "arguments": [{"function": "optax.clip", "arguments": {"max_delta": 10.0}}],
            },
        }
        write_run(tmp_path / str(factor), run_config={}, hyperparameters=given)  # fmt: skip
    groups = groups_of(tmp_path)
    assert [group.differs for group in groups] == [
        "client_lr.decay_rate=0.9",
        "client_lr.decay_rate=0.998",
    ]
    text = summary_table(groups)
    assert "`exponential_decay(decay_rate=0.998, init_value=0.1)`" in text
    assert "`chain(clip(max_delta=10))`" in text
    weights = {"array": "float32[100]", "hash": "of a seed"}
    for seed in (0, 1):
        loss = {"function": "loss", "arguments": {"w": {**weights, "hash": str(seed)}}}
        write_run(tmp_path / "s" / str(seed), seed=seed, functions={"loss_fn": loss}, run_config={})
    assert len(groups_of(tmp_path / "s")) == 1


def test_arrays_of_local_work_are_settings_and_those_of_seeds_are_none(tmp_path):
    """Two arrays of local steps are two settings; constants that follow from a seed are one."""
    for name, shown in (("few", "1 to 20, mean 2.6"), ("many", "1 to 20, mean 18")):
        for seed in (0, 1):
            arrays = {"local_epochs": {"array": shown, "hash": f"{name}{seed}"}}
            arrays["client_constants"] = {"array": "float32[12, 3]", "hash": str(seed)}
            derived = {"local_steps": 20 + seed, "client_constants": str(seed), "arrays": arrays}
            derived["client_local_steps"] = {"mean": seed, "array": str(seed)}
            write_run(tmp_path / f"{name}{seed}", seed=seed, run_config={}, **derived)
    sections = sections_of(load_runs([tmp_path]))
    assert [len(group.runs) for section in sections for group in section.groups] == [2, 2]
    assert [section.setting for section in sections] == [
        {"local_epochs": {"array": "1 to 20, mean 2.6"}},
        {"local_epochs": {"array": "1 to 20, mean 18"}},
    ]
    assert "local_epochs 1 to 20, mean 2.6" in sections[0].title


def test_runs_of_other_data_are_no_seeds(tmp_path):
    """Runs from Python have no name of their data: one seed cannot divide one set in two ways."""
    for name, examples in (("a", "digits"), ("b", "noise")):
        held = {
            "partition": {"spec": "iid", "seed": 0, "hash": name},
            "content": {"examples": name},
        }
        write_run(tmp_path / examples, run_config={}, **held)
    with pytest.raises(ValueError, match=r"have equal settings and seeds \(0\), but other data"):
        groups_of(tmp_path)
    for name in "ab":  # equal sizes: the partitions are the same
        held = {"partition": {"spec": "iid", "seed": 0, "hash": "p"}, "content": {"examples": name}}
        write_run(tmp_path / "equal" / name, run_config={}, **held)
    with pytest.raises(ValueError, match="but other data"):
        groups_of(tmp_path / "equal")
    for seed in (0, 1):  # natural clients, whose split is drawn
        held = {"partition": {"spec": "natural", "seed": 0, "hash": str(seed)}}
        write_run(tmp_path / "natural" / str(seed), run_config={}, **held)
    assert len(groups_of(tmp_path / "natural")) == 1


def test_a_table_that_a_seed_divides_is_one_data_set(tmp_path):
    for seed in (0, 1):
        table = {"data": {"hash": f"split {seed}", "table": "rows"}}
        write_run(tmp_path / str(seed), [0.1, 0.2 + seed / 10], seed=seed, **table)
    (section,) = sections_of(load_runs([tmp_path]))
    (group,) = section.groups
    assert len(group.runs) == 2


@pytest.mark.parametrize("other", ["fedavg", "scaffold"])
def test_two_sections_never_share_a_column(tmp_path, other):
    """They have no common best one, whether or not they have a method in common."""
    write_run(tmp_path / "a", [0.5], data={"hash": "a"})
    write_run(tmp_path / "b", [0.9], data={"hash": "b"}, algorithm=other)
    for axes in (("method", "dataset"), ("dataset", "method")):
        with pytest.raises(ValueError, match=r"/a and .*/b are both of dataset digits.*data_hash"):
            pivots_of(sections_of(load_runs([tmp_path])), axes)


def test_columns_of_a_tables_target_are_other_tables(tmp_path):
    asked = {"run_config": {"dataset": "csv:t.csv", "seed": 0, "client_lr": 0.1, "option": {}}}
    for target in ("y", "z"):
        asked["run_config"]["target"] = [target]
        write_run(tmp_path / "t" / target, data={"hash": target}, **asked)
    pivots = pivots_of(sections_of(load_runs([tmp_path / "t"])), ("method", "dataset"))
    assert [pivot.title for pivot in pivots] == ["target y", "target z"]


def test_small_errors_have_their_digits(tmp_path):
    """In every table of a regression, three digits of the smallest mean."""
    for name, errors in (("fedavg", (3.68e-6, 3.70e-6)), ("scaffold", (4.11e-6, 4.15e-6))):
        for seed, error in enumerate(errors):
            more = {"mean_squared_error": 10 * error}
            path = tmp_path / f"{name}{seed}"  # ``more`` is divided by the round, the last is 10
            write_run(path, [0.1, 0.2], seed=seed, algorithm=name, more=more)
    groups = groups_of(tmp_path)
    rows = accuracy_table(groups)
    column = rows[0].index("last mean squared error")
    half = stats.t.ppf(0.975, 1) * 0.01e-6
    assert rows[1][column] == f"{3.69e-6:.8f} ± {half:.8f}"
    assert rows[2][rows[0].index("behind the best")].startswith(f"{0.44e-6:.9f}")
    shown = [row[-1] for row in run_table(groups)[1:]]
    assert shown == [f"{error:.8f}" for error in (3.68e-6, 3.70e-6, 4.11e-6, 4.15e-6)]
    (pivot,) = pivots_of(sections_of(load_runs([tmp_path])), ("method", "dataset"))
    assert score_rows(pivot, str)[1][1].startswith(f"{3.69e-6:.8f}")


def test_a_seeds_attackers_are_no_setting_and_strengths_are_columns(tmp_path):
    for seed in (3, 4):
        for strength in (1, 5):
            given = {"attack": "sign_flip", "attack_share": 0.2, "attack_strength": strength}
            write_run(
                tmp_path / f"{strength}-{seed}",
                seed=seed,
                hyperparameters={"client_lr": 0.1, **given, "attack_seed": seed},
                run_config={"dataset": "digits", "attack": f"sign_flip:0.2:{strength}"},
            )
    (pivot,) = pivots_of(sections_of(load_runs([tmp_path])), ("method", "attack"))
    assert pivot.settings == ["sign_flip:0.2:1", "sign_flip:0.2:5"]
    assert [cell.score.n for cell in pivot.cells.values()] == [2, 2]
    fixed = {"attack": "sign_flip", "attack_share": 0.2, "attack_seed": 7}
    for seed in (0, 1):
        write_run(tmp_path / f"p{seed}", seed=seed, hyperparameters=fixed, run_config={})
    runs = [run for run in load_runs([tmp_path]) if run.path.name[0] == "p"]
    assert [run.settings["attack_seed"] for run in runs] == [7, 7]


def test_a_run_that_diverged_before_its_first_evaluation_counts(tmp_path):
    for seed, curve in ((0, [0.5, 0.6]), (1, [])):
        stopped = None if curve else "diverged"
        write_run(tmp_path / str(seed), curve, seed=seed, stopped=stopped, rounds=10)
    write_run(tmp_path / "other", [], seed=0, algorithm="fedprox", stopped="diverged", rounds=10)
    runs = load_runs([tmp_path])
    assert len(runs) == 3
    table = accuracy_table(groups_of(tmp_path))
    assert [row[1] for row in table[1:]] == ["2", "1"]
    assert [row[2] for row in table[1:]] == ["-", "-"]
    assert "Runs that diverged" in format_report([tmp_path], "markdown")
    assert load_runs([tmp_path / "1"])[0].diverged
    write_run(tmp_path / "unfinished", [], seed=2)
    assert len(load_runs([tmp_path])) == 3
    with pytest.raises(ValueError, match="unfinished has no evaluation yet"):
        load_runs([tmp_path / "unfinished"])


def test_a_table_of_settings_marks_unsolved_programs(tmp_path):
    write_run(tmp_path / "a", [0.5, 0.6], more={"client_qp_residual": 1.0})
    write_run(tmp_path / "b", [0.5, 0.55], algorithm="fedprox")
    for form, mark in (("markdown", "60.00 †"), ("latex", r"60.00 $\dagger$"), ("csv", "unsolved")):
        text = format_report([tmp_path], form, rows="method", columns="partition")
        assert mark in text
        assert form == "csv" or "were not solved" in text


def test_a_target_of_regressions_is_refused(tmp_path):
    path = write_run(tmp_path / "a", [0.5, 0.6])
    file = path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"accuracy"', '"mean_squared_error"'))
    with pytest.raises(ValueError, match=r"target is 0\.5, an accuracy; these runs have none"):
        format_report([path], "markdown", target=0.5)
