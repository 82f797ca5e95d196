"""What a table compares: runs of one data set, metric and length, over the same rounds."""

import csv
import io
import math
import re

import numpy as np
import pytest

from fedjax_lab.command.cli import main
from fedjax_lab.report import group_runs, load_runs, summary_table, write_report
from fedjax_lab.report.cells import accuracy_table, seed_table
from fedjax_lab.report.formats import format_report
from fedjax_lab.report.sections import sections_of, tail_of
from fedjax_lab.report.statistics import tail_start
from tests.report.by_hand import CURVE, groups_of, write_run

TAIL = "mean of rounds 91 to 100 (%)"


def column(rows, name):
    return [row[rows[0].index(name)] for row in rows[1:]]


def accuracy_at(round, seed):
    """A curve that grows and swings, seeds apart."""
    return 0.8 * (1 - math.exp(-round / 30)) + 0.02 * math.sin(round + seed)


@pytest.mark.parametrize(
    ("rounds", "start"), [(1, 1), (4, 4), (10, 10), (11, 10), (60, 55), (100, 91), (500, 451)]
)
def test_the_last_tenth_has_a_round_at_least(rounds, start):
    assert tail_start(rounds) == start


def test_equal_runs_are_equal_however_often_they_are_evaluated(tmp_path):
    for every in (1, 5, 50):
        for seed in (0, 1, 2):
            curve = [accuracy_at(r, seed) for r in range(every, 101, every)]
            folder = tmp_path / f"every{every}-{seed}"
            write_run(folder, curve, seed=seed, every=every, eval_every=every)
    rows = accuracy_table(groups_of(tmp_path))
    assert len(set(column(rows, TAIL))) == 1
    assert sorted(column(rows, "behind the best (points)")) == ["0.00 ± 0.00 ≈"] * 2 + ["best"]
    assert "over the one evaluation that all runs have there," in summary_table(groups_of(tmp_path))


def test_the_tail_by_hand(tmp_path):
    """Evaluations at 95 and 100, of which the mean is 0.65."""
    run = write_run(tmp_path / "a", [0.1] * 18 + [0.6, 0.7])
    rows = accuracy_table(groups_of(run))
    assert column(rows, TAIL) == ["65.00"]
    assert column(seed_table(load_runs([run])), TAIL) == ["65.00", "65.00"]
    assert "over the 2 evaluations that all runs have there," in summary_table(groups_of(run))


def test_a_run_that_did_not_get_there_has_no_tail(tmp_path):
    write_run(tmp_path / "cut", [0.9] * 19, algorithm="cut", rounds=100)
    write_run(tmp_path / "whole", [0.5] * 20, algorithm="whole")
    (section,) = sections_of(load_runs([tmp_path]))
    assert [group.label for group in section.groups] == ["whole", "cut"]
    assert column(accuracy_table(section.groups), TAIL) == ["50.00", "-"]
    alone = load_runs([tmp_path / "cut"])
    assert math.isnan(tail_of(alone).mean(alone[0]))


def test_what_cannot_be_compared_has_parts_of_its_own(tmp_path):
    def write(name, *arguments, dataset="digits", **more):
        asked = {"dataset": dataset, "option": {}}
        write_run(tmp_path / name, *arguments, run_config=asked, **more)

    write("a", CURVE, algorithm="scaffold")
    write("b", CURVE, dataset="fashion_mnist")
    write("c", CURVE[:6])
    write("d", CURVE, more={"perplexity": 60.0})
    write("e", [0.1], more={"mean_squared_error": 5.0})
    write("f", [0.1], lr=0.2, more={"mean_squared_error": 50.0})
    write("g", [0.1] * 12, algorithm="fedprox")
    titles = [section.title for section in sections_of(load_runs([tmp_path]))]
    assert titles == [
        *("digits, accuracy, 60 rounds", "fashion_mnist, accuracy, 60 rounds"),
        *("digits, accuracy, 30 rounds", "digits, perplexity, 60 rounds"),
        "digits, mean squared error, 5 rounds",
    ]
    with pytest.raises(ValueError, match=r"digits, accuracy, 60 rounds; fashion_mnist,.*: a tab"):
        accuracy_table(group_runs(load_runs([tmp_path])))

    text = summary_table(group_runs(load_runs([tmp_path])))
    parts = dict(zip(titles, re.split(r"^## .*\n", text, flags=re.M)[1:], strict=True))
    assert re.findall("^## (.*)", text, re.M) == titles
    first = parts["digits, accuracy, 60 rounds"]
    assert "scaffold" in first
    assert "fedavg (" not in first  # labels name what differs here, not what does elsewhere
    errors = parts["digits, mean squared error, 5 rounds"]
    assert "accuracy in percent" not in errors
    rows = re.findall(r"^\| fedavg \(client_lr=0.\d\) .*\d \|.*", errors, re.M)
    assert re.search(r"0\.1\).* 1\.00 \|.* best ", rows[0])  # 5 / 5 is less than 50 / 5
    assert re.search(r"0\.2\).* 10\.00 \|.* 9\.00 ", rows[1])

    lines = format_report([tmp_path], "csv").splitlines()
    assert lines[0] == "method,settings,dataset,rounds,metric,mean,half_width,n"
    assert "fedavg,,fashion_mnist,60,mean of the last tenth (%),93.0,,1" in lines
    assert format_report([tmp_path], "latex").count(r"\begin{tabular}") == len(titles)


def test_every_line_of_the_csv_says_of_which_part_it_is(tmp_path):
    """Parts of one name that differ in their metric, or only in the data behind the name."""
    losses = {"a": 60.0, "b": 120.0, "c": 180.0}  # over the rounds
    for name, data in (("a", "11"), ("b", "22"), ("c", "11")):
        more = {"loss": losses[name]} | ({"mean_squared_error": 5.0} if name == "c" else {})
        write_run(tmp_path / name, CURVE, more=more, data={"hash": data})
    lines = list(csv.DictReader(io.StringIO(format_report([tmp_path], "csv"))))
    found = {line["settings"]: float(line["mean"]) for line in lines if line["metric"] == "loss"}
    assert found == {
        "metric=accuracy, data=11": 1.0,
        "metric=accuracy, data=22": 2.0,
        "metric=mean_squared_error, data=11": 3.0,
    }
    about = ["method", "settings", "dataset", "rounds", "metric"]
    assert len({tuple(line[key] for key in about) for line in lines}) == len(lines)


@pytest.mark.slow
def test_each_part_has_its_figures(tmp_path):
    write_run(tmp_path / "a", CURVE)
    write_run(tmp_path / "b", CURVE[:6])
    text = write_report([tmp_path]).read_text()
    figures = re.findall(r"^## (.*)|\]\((.*accuracy.png)\)", text, re.M)
    assert figures == [
        *(("digits, accuracy, 60 rounds", ""), ("", "part1_accuracy.png")),
        *(("digits, accuracy, 30 rounds", ""), ("", "part2_accuracy.png")),
    ]
    assert (tmp_path / "report" / "part2_partition.png").exists()


def test_other_data_of_the_same_name_are_other_data(tmp_path):
    for name in ("one", "other"):
        write_run(tmp_path / name, algorithm=name, data={"hash": name})
    titles = [section.title for section in sections_of(load_runs([tmp_path]))]
    assert titles == [f"digits, accuracy, 60 rounds, data {name}" for name in ("one", "other")]


def test_a_run_that_diverged_at_once_is_judged_like_the_others(tmp_path):
    write_run(tmp_path / "a", [0.5, 0.6])
    dead = write_run(tmp_path / "b", [0.1], algorithm="scaffold", rounds=10)
    (dead / "metrics.jsonl").write_text('{"round": 5, "loss": null, "bytes_up": 1}\n')
    (section,) = sections_of(load_runs([tmp_path]))
    assert [group.label for group in section.groups] == ["fedavg", "scaffold"]


def test_scores_that_no_report_ranks_by_are_told(tmp_path):
    write_run(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"accuracy"', '"auc"'))
    with pytest.warns(UserWarning, match="no run has .* The rows have auc"):
        assert "fedavg" in format_report([tmp_path / "run"], "csv")
    file.write_text(file.read_text().replace('"auc"', '"personal_auc"'))
    with pytest.warns(UserWarning, match="The rows have personal_auc: name one as metric"):
        format_report([tmp_path / "run"], "csv")


@pytest.mark.filterwarnings("ignore:no run has")
def test_a_table_of_scores_needs_a_score(tmp_path):
    rename_accuracy(write_run(tmp_path / "run"), "auc")
    with pytest.raises(ValueError, match=r"a table of scores; no run has one .*: give metric"):
        format_report([tmp_path / "run"], "csv", rows="method", columns="partition")


def rename_accuracy(path, name):
    file = path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"accuracy"', f'"{name}"'))


def test_runs_without_a_known_score_have_no_chapter_of_it(tmp_path):
    rename_accuracy(write_run(tmp_path / "run"), "auc")
    text = summary_table(groups_of(tmp_path / "run"), 0.5)
    headings = re.findall("^## (.*)", text, re.M)
    assert headings == ["Time", "Settings", "Runs"]
    assert "accuracy" not in text
    with pytest.warns(UserWarning, match="The rows have auc"):
        assert format_report([tmp_path / "run"], "latex") == ""


@pytest.mark.parametrize("mode", ["max", "min"])
def test_runs_are_compared_by_the_metric_that_is_named(mode, tmp_path):
    curves = {
        (name, seed): [level + 0.01 * seed * i for i in range(12)]
        for name, level in (("fedavg", 0.5), ("scaffold", 0.6))
        for seed in (0, 1, 2)
    }
    for (name, seed), curve in curves.items():
        rename_accuracy(
            write_run(tmp_path / f"{name}{seed}", curve, algorithm=name, seed=seed), "f1"
        )
    (section,) = sections_of(load_runs([tmp_path], metric="f1", mode=mode))
    assert section.title == "digits, f1, 60 rounds"
    table = accuracy_table(section.groups)
    order = ["scaffold", "fedavg"] if mode == "max" else ["fedavg", "scaffold"]
    assert column(table, "method") == order
    extreme, of_all = ("highest f1", np.max) if mode == "max" else ("lowest f1", np.min)
    for name, statistic in (
        ("last f1", lambda curve: curve[-1]),
        (extreme, of_all),
        ("mean of rounds 55 to 60", lambda curve: np.mean(curve[-2:])),
    ):
        means = [
            np.mean([statistic(curves[method, seed]) for seed in (0, 1, 2)]) for method in order
        ]
        shown = [float(cell.split(" ")[0]) for cell in column(table, name)]
        np.testing.assert_allclose(shown, means, atol=5e-4)
    behind = column(table, "behind the best")
    assert behind[0] == "best"
    np.testing.assert_allclose(float(behind[1].split(" ")[0]), 0.1, atol=1e-6)


def test_a_report_by_the_metric_that_is_named(tmp_path, capsys):
    for name, level in (("fedavg", 0.5), ("scaffold", 0.6)):
        rename_accuracy(write_run(tmp_path / name, [level] * 12, algorithm=name), "mae")
    words = ["report", str(tmp_path), "--metric", "mae", "--mode", "min"]
    words += ["--out", str(tmp_path / "out"), "--rows", "method", "--columns", "partition"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("fedavg")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## Method by partition\n\nMae, mean over the last tenth" in text
    shown = re.findall(r"^## (.*)|^!\[.*\]\((.*)\)", text, re.M)[1:3]
    assert shown == [("", "score.png"), ("Mae", "")]
    assert "Up to the target" not in text
    assert "less is better" in text


def test_a_metric_that_cannot_compare_is_refused(tmp_path):
    write_run(tmp_path / "run")
    for chosen, message in (
        ({"metric": "auc"}, "metric is 'auc'; .*run has round, .*accuracy"),
        ({"mode": "min"}, "mode is 'min' and metric None"),
        ({"metric": "loss", "mode": "less"}, "mode is 'less'"),
        ({"compare": ["rounds"]}, "compare is 'rounds'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_runs([tmp_path / "run"], **chosen)
    write_run(tmp_path / "dead", [0.9, None], algorithm="scaffold", stopped="diverged", rounds=60)
    rename_accuracy(tmp_path / "dead", "f1")
    rename_accuracy(tmp_path / "run", "f1")
    _, dead = accuracy_table(sections_of(load_runs([tmp_path], metric="f1"))[0].groups)[1:]
    assert dead[0] == "scaffold"
    assert set(dead[2:]) == {"-"}


def test_a_metric_that_is_not_defined_at_the_end_is_a_metric(tmp_path):
    """As an F1 score without positive predictions, which is null in the file."""
    write_run(tmp_path / "run", [0.5, 0.6, None])
    rename_accuracy(tmp_path / "run", "f1")
    (run,) = load_runs([tmp_path / "run"], metric="f1")
    np.testing.assert_equal(run.values("f1"), [0.5, 0.6, math.nan])


def test_settings_that_are_compared_share_a_section(tmp_path):
    """As FedBuff and rounds with a deadline: also where it is part of the clients' times."""
    shared = {"dataset": "digits", "times": "times.npz", "option": {}}
    write_run(tmp_path / "fedbuff", run_config={**shared, "concurrency": 10})
    write_run(tmp_path / "deadline", run_config={**shared, "deadline": 9.0})
    write_run(tmp_path / "other", run_config={**shared, "times": "other.npz"})
    for name, times in (("python", {}), ("python_deadline", {"deadline": 5.0})):
        write_run(tmp_path / name, run_config={}, times={"upload": 2.0, **times})
    assert len(sections_of(load_runs([tmp_path]))) == 5
    sections = sections_of(load_runs([tmp_path], compare=["deadline"]))
    found = sorted(sorted(g.runs[0].path.name for g in section.groups) for section in sections)
    assert found == [["deadline", "fedbuff"], ["other"], ["python", "python_deadline"]]
    labels = {group.label for section in sections for group in section.groups}
    assert {"fedavg (deadline=9)", "fedavg (concurrency=10)"} <= labels
