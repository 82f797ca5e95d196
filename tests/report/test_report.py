import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from fedjax_lab.command.cli import main
from fedjax_lab.estimates import format_estimate
from fedjax_lab.markdown import markdown_table
from fedjax_lab.report import (
    Estimate,
    default_folder,
    default_target,
    estimate,
    load_runs,
    summary_table,
    write_report,
)
from fedjax_lab.report.cells import accuracy_table, run_table, seed_table, target_table, time_table
from fedjax_lab.report.statistics import best, reach
from tests.report.by_hand import CURVE, groups_of, write_run

LONG = {"DEEP": "[" * 100_000, "HUGE": str(10**400)}  # in place of these words

LONG_NAMES = ("prox_weight", "perturbation_radius", "perturbation_weight")


def edited(**changes):
    """A config.json with other values."""
    return json.dumps({"algorithm": "fedavg", "seed": 0, "rounds": 60, **changes})


def test_the_interval_is_students():
    values = [0.91, 0.95, 0.90, 0.97]
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    mean, half_width, n = estimate(values)
    assert mean - half_width == pytest.approx(interval.low)
    assert mean + half_width == pytest.approx(interval.high)
    assert n == 4


def test_two_values_by_hand():
    # t(0.975, 1) = tan(0.475 pi) = 12.7062; s = sqrt(2), over sqrt(2) is 1.
    assert estimate([1.0, 3.0]).half_width == pytest.approx(math.tan(0.475 * math.pi))


def test_values_whose_squares_are_beyond_a_float_have_an_interval():
    """A loss in float64 that is about to diverge."""
    small, large = estimate([1.0, 3.0, 7.0]), estimate([1e200, 3e200, 7e200])
    assert large.half_width == pytest.approx(1e200 * small.half_width)


def test_one_value_has_no_interval():
    assert estimate([0.5]) == Estimate(0.5, None, 1)
    with pytest.raises(ValueError, match="empty"):
        estimate([])


def test_numbers_of_a_curve():
    assert best(CURVE) == 0.95
    assert best([math.nan, 0.3]) == 0.3
    assert math.isnan(best([math.nan]))


def test_the_last_value_of_a_run(tmp_path):
    (run,) = load_runs([write_run(tmp_path / "run")])
    assert (run.last("accuracy"), run.last("seconds")) == (0.94, 6.0)
    assert math.isnan(run.last("nothing"))


def test_the_first_row_at_the_target_counts():
    rows = [{"round": r, "accuracy": a} for r, a in [(1, 0.1), (2, None), (3, 0.5), (4, 0.4)]]
    assert reach(rows, 0.5)["round"] == 3
    assert reach(rows, 0.51) is None


def test_an_accuracy_of_float32_reaches_the_share_of_examples_that_it_is():
    """252 right of 360 are 70 %, and the nearest float32 is below 0.7; 251 are not."""
    scores = [float(np.float32(251 / 360)), float(np.float32(252 / 360))]
    assert scores[1] < 0.7
    rows = [{"round": r, "accuracy": a} for r, a in enumerate(scores, 1)]
    assert reach(rows, 0.7)["round"] == 2
    assert reach(rows[:1], 0.7) is None


def test_95_percent_of_an_accuracy_of_float32(tmp_path):
    groups = groups_of(write_run(tmp_path / "a", [0.5, float(np.float32(0.7))]))
    assert default_target(groups) == 0.665


def test_one_run_by_hand(tmp_path):
    groups = groups_of(write_run(tmp_path / "a"))
    # The last tenth of 60 rounds begins at 55: 0.92 and 0.94.
    row = ["fedavg", "1", "95.00", "94.00", "93.00", "40.00", "best", "-"]
    assert accuracy_table(groups)[1] == row
    # 0.9 is reached first in the 6th evaluation, round 30; 95 % of 0.95 is 0.9025.
    assert target_table(groups, 0.9)[1] == ["fedavg", "1 of 1", "30", "30.0", "3,000", "3.00"]
    assert default_target(groups) == 0.902
    assert time_table(groups)[1] == ["fedavg", "3.00", "6.00", "10.0"]


def test_seeds_are_one_row_with_an_interval(tmp_path):
    a = write_run(tmp_path / "a", [0.5, 0.7], seed=1, worst=0.2)
    b = write_run(tmp_path / "b", [0.7, 0.9], seed=0, worst=0.4)
    groups = groups_of(a, b)
    assert [run.seed for run in groups[0].runs] == [0, 1]
    # Differences of 20 points: 80 +- 12.706 * 10.
    row = ["fedavg", "2", *["80.00 ± 127.06"] * 3, "30.00 ± 127.06"]
    assert accuracy_table(groups)[1] == [*row, "best", "-"]
    # One is there at round 5, the other at round 10.
    reached = target_table(groups, 0.7)[1]
    assert reached[:3] == ["fedavg", "2 of 2", "8 ± 32"]
    # No mean where a seed does not reach it: it would leave the worst ones out.
    assert target_table(groups, 0.8)[1] == ["fedavg", "1 of 2", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (34_560, "0.0346"),
        (12, "0.0000120"),
        (9_876_543, "9.88"),
        (10_000_000, "10.0"),
        (1_234_567_890, "1,234.6"),
        (0, "0.00"),
    ],
)
def test_a_small_uplink_has_its_digits(sent, shown, tmp_path):
    head, row = target_table(groups_of(write_run(tmp_path / "a", [0.9], up=sent, every=1)), 0.5)
    assert dict(zip(head, row, strict=True))["uplink (MB)"] == shown


def test_small_costs_and_speeds_have_their_digits(tmp_path):
    """By hand: epsilon 0.03 / 10, 10 rounds in 300 s, 0.02 s of compilation, 0.3 / 10 s to 0.7."""
    costs = {"epsilon": 0.03, "simulated_seconds": 0.3}
    path = write_run(tmp_path / "a", [0.5, 0.7], more=costs)
    times = [{"round": 5, "seconds": 9}, {"round": 10, "seconds": 300, "compile_seconds": 0.02}]
    (path / "times.jsonl").write_text("".join(json.dumps(row) + "\n" for row in times))
    groups = groups_of(path)
    assert time_table(groups)[1] == ["fedavg", "0.0200", "300.0", "0.0333"]
    for rows, name in ((accuracy_table(groups), "top (%)"),
                       (seed_table(groups[0].runs), "top accuracy (%)")):  # fmt: skip
        assert rows[1][rows[0].index("epsilon")] == "0.00300"
        assert rows[1][rows[0].index(name)] == "70.00"
    head, row = target_table(groups, 0.7)
    assert row[head.index("simulated seconds")] == "0.0300"


def test_simulated_seconds_to_the_target(tmp_path):
    """A column where a run counts them: 600 / round is 60 in round 10, the first of 0.7."""
    timed = write_run(tmp_path / "a", [0.5, 0.7], more={"simulated_seconds": 600.0})
    head, row, other = target_table(groups_of(timed, write_run(tmp_path / "b", lr=0.2)), 0.7)
    assert dict(zip(head, row, strict=True))["simulated seconds"] == "60.0"
    assert other[-1] == "-"
    assert len(target_table(groups_of(tmp_path / "b"), 0.7)[0]) == len(head) - 1


def test_language_models_show_their_lowest_perplexity(tmp_path):
    # 600 / round: 120 at round 5, 60 at round 10.
    text = write_run(tmp_path / "a", [0.1, 0.2], more={"perplexity": 600.0})
    head, row = accuracy_table(groups_of(text))
    assert row[head.index("lowest perplexity")] == "60.00"
    images = write_run(tmp_path / "b", [0.1, 0.2])
    assert "lowest perplexity" not in accuracy_table(groups_of(images))[0]


def test_labels_name_what_differs(tmp_path):
    paths = [write_run(tmp_path / f"lr{lr}", lr=lr) for lr in (0.1, 0.01)]
    labels = [group.label for group in groups_of(*paths)]
    assert labels == ["fedavg (client_lr=0.1)", "fedavg (client_lr=0.01)"]
    other = write_run(tmp_path / "s", algorithm="scaffold")
    assert [group.label for group in groups_of(paths[0], other)] == ["fedavg", "scaffold"]


def test_long_labels_become_numbers_with_a_list(tmp_path):
    paths = [
        write_run(tmp_path / str(n), hyperparameters=dict.fromkeys(("client_lr", *LONG_NAMES), n))
        for n in (10, 20)
    ]
    groups = groups_of(*paths)
    assert [group.label for group in groups] == ["fedavg #1", "fedavg #2"]
    assert "| fedavg #2 | client_lr `20`, prox_weight `20`" in summary_table(groups)


def test_labels_name_what_one_of_them_lacks(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", clip_norm=1.0)
    write_run(tmp_path / "c", clip_norm=1.0, compressor="sign")
    other = {"client_lr": 0.1, "prox_weight": 0.5}  # an argument of the other method
    write_run(tmp_path / "d", algorithm="fedprox", hyperparameters=other)
    groups = groups_of(tmp_path)
    differs = ["", "clip_norm=1", "clip_norm=1, compressor=sign", ""]
    assert [group.differs for group in groups] == differs
    shown = [group.label for group in groups]
    assert shown == ["fedavg", *(f"fedavg ({text})" for text in differs[1:3]), "fedprox"]


def test_a_schedule_and_a_constant_differ_by_name(tmp_path):
    arguments = {"decay_rate": 0.9, "init_value": 0.1}
    rate = {"function": "optax.exponential_decay", "arguments": arguments}
    for name, lr in (("a", 0.1), ("b", rate)):
        write_run(tmp_path / name, run_config={}, hyperparameters={"client_lr": lr})
    differs = [group.differs for group in groups_of(tmp_path)]
    assert differs == ["client_lr=0.1", "client_lr=exponential_decay"]


def test_no_two_groups_have_one_label(tmp_path):
    """Their values agree in the digits that a label has."""
    for name, lr in (("a", 0.12345678), ("b", 0.12345679)):
        write_run(tmp_path / name, lr=lr)
    assert [group.label for group in groups_of(tmp_path)] == ["fedavg #1", "fedavg #2"]


def test_options_and_other_maps_make_other_rows(tmp_path):
    run_config = {"option": {"server_optimizer": "yogi"}}
    a = write_run(tmp_path / "a", run_config=run_config)
    b = write_run(tmp_path / "b", run_config={"option": {"server_optimizer": "adam"}})
    c = write_run(tmp_path / "c", run_config=run_config, client_map="vmap")
    assert len(groups_of(a, b, c)) == 3


def test_the_same_run_twice_is_no_second_seed(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    with pytest.raises(ValueError, match=r"a and .*b hold the same run"):
        groups_of(a, b)
    assert len(load_runs([a, tmp_path / "b" / ".." / "a"])) == 1


@pytest.mark.slow
def test_null_is_not_a_number(tmp_path):
    groups = groups_of(write_run(tmp_path / "a", [0.5, 0.6, None], worst=None))
    assert accuracy_table(groups)[1] == ["fedavg", "1", "60.00", "-", "-", "-", "-"]
    assert default_target(groups) == 0.57
    assert math.isnan(groups[0].runs[0].values("loss")[-1])
    out = tmp_path / "out"
    write_report([tmp_path / "a"], out)
    nothing = write_run(tmp_path / "b", [None, None])
    assert "Up to the target" not in write_report([nothing], out).read_text()


def test_a_diverged_run_comes_last(tmp_path):
    a = write_run(tmp_path / "a", [0.5, None])
    b = write_run(tmp_path / "b", [0.1, 0.2], algorithm="scaffold")
    text = summary_table(groups_of(a, b))
    assert text.index("| scaffold") < text.index("| fedavg")


def test_runs_are_found_below_a_directory(tmp_path):
    write_run(tmp_path / "x" / "a")
    write_run(tmp_path / "b", seed=1)
    empty = write_run(tmp_path / "c", [])
    (empty / "metrics.jsonl").unlink()
    (tmp_path / ".hidden").mkdir()
    assert [run.path.name for run in load_runs([tmp_path])] == ["b", "a"]
    with pytest.raises(ValueError, match="has no evaluation yet"):
        load_runs([empty])


def test_a_run_without_times_and_summary_is_shown(tmp_path):
    path = write_run(tmp_path / "a", rounds=100)
    for name in ("times.jsonl", "summary.json", "partition.json"):
        (path / name).unlink()
    groups = groups_of(path)
    assert time_table(groups)[1] == ["fedavg", "-", "-", "-"]
    assert target_table(groups, 0.9)[1][-1] == "-"
    assert run_table(groups)[1][-2] == "60 of 100, unfinished"
    assert "**Unfinished runs: 1**" in summary_table(groups)


def test_a_run_that_ended_by_stop_when_says_why_it_has_no_tail(tmp_path):
    whole = write_run(tmp_path / "a")
    path = write_run(tmp_path / "b", CURVE[:6], algorithm="scaffold", rounds=60)
    (path / "summary.json").write_text(json.dumps({"stopped": "stop_when", "round": 30}))
    groups = groups_of(whole, path)
    head, _, row = accuracy_table(groups)
    assert row[head.index("mean of rounds 55 to 60 (%)")] == "-"
    assert [row[-2] for row in run_table(groups)[1:]] == ["60", "30 of 60, ended by stop_when"]
    text = summary_table(groups)
    why = "**Runs that ended by stop_when before round 60 and have no mean of the last tenth: 1**"
    assert why in text
    assert "Unfinished" not in text
    assert "stop_when" not in summary_table(groups_of(whole))
    (path / "summary.json").write_text(json.dumps({"stopped": "stop_when", "round": 20}))
    later = summary_table(groups_of(path))  # it has gone on since
    assert "**Unfinished runs: 1**" in later
    assert "stop_when" not in later


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("config.json", "[]", "config.json holds no JSON object"),
        ("config.json", '{"seed": 1}', "config.json has no 'algorithm'"),
        ("metrics.jsonl", '{"round": 1}\n{\n{"round": 2}\n', "metrics.jsonl, line 2"),
        ("metrics.jsonl", "3\n", "line 1, is no JSON object"),
        ("metrics.jsonl", "", "has no evaluation yet"),
        ("metrics.jsonl", "[5]\n", "line 1, is no JSON object"),
        ("metrics.jsonl", '{"roune": 5}\n', "line 1, is no row of a round: round is None"),
        ("metrics.jsonl", '{"round": true}\n', "line 1, is no row of a round: round is True"),
        ("metrics.jsonl", '{"round": 5, "a": DEEP}\n{"round": 6}\n', "metrics.jsonl, line 1"),
        (
            "metrics.jsonl",
            '{"round": 5, "loss": 1e400}\n{"round": 6}\n',
            "metrics.jsonl, line 1",
        ),
        ("metrics.jsonl", '{"round": 5, "a": [1, HUGE]}\n{"round": 6}\n', "metrics.jsonl, line 1"),
        (
            "metrics.jsonl",
            '{"round": 5, "loss": "0"}\n',
            "line 1, is no row: loss is '0', no number",
        ),
        ("metrics.jsonl", '{"round": 5}\n{"round": 5}\n', "line 2: round 5 comes after 5"),
        ("metrics.jsonl", '{"round": 65}\n', "has round 65, and config.json 60 rounds"),
        ("times.jsonl", "[5]\n", "times.jsonl, line 1, is no JSON object"),
        ("config.json", "DEEP", "config.json cannot be read as JSON"),
        ("config.json", edited(seed="1"), "'seed' is '1'; it must be an integer"),
        ("config.json", edited(rounds=True), "'rounds' is True; it must be an integer"),
        ("config.json", edited(algorithm="\x1b[2J"), "'algorithm' is .*; not printable"),
        ("config.json", edited(partition=3), "'partition' is 3; it must be an object"),
        ("config.json", edited(partition=None), "'partition' is None; it must be an object"),
        ("config.json", edited(hyperparameters=[1]), r"'hyperparameters' is \[1\]; it must be an"),
        ("config.json", edited(run_config={"option": "x"}), "'run_config.option' is 'x'; it must"),
        ("config.json", edited(run_config={"init_seed": [1]}), "'run_config.init_seed' is"),
        ("config.json", edited(versions=[]), r"'versions' is \[\]; it must be an object"),
        ("summary.json", "{", "summary.json cannot be read"),
        ("summary.json", '{"round": 5, "round": 6}', "cannot be read .*'round' is given twice"),
        ("partition.json", '{"hash": "h", "more": NaN}', "cannot be read .*NaN is no number of"),
        ("summary.json", '{"stopped": 3}', "'stopped' is 3; it must be text or null"),
        (
            "summary.json",
            '{"worst_10_percent_accuracy": "a"}',
            "'worst_10_percent_acc.*' has the value 'a'",
        ),
        ("partition.json", '{"spec": "iid", "seed": 0, "label_histogram": [[1], [1, 2]]}', "equal"),
        ("partition.json", '{"label_histogram": [[1]]}', "a spec and a seed"),
        ("landscape.json", '{"eigenvalues": ["a"]}', "'eigenvalues' has the value 'a'"),
    ],
)
def test_damaged_files_are_named(tmp_path, capsys, file, text, message):
    path = write_run(tmp_path / "a")
    for word, long in LONG.items():
        text = text.replace(word, long)
    (path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_runs([path])
    assert main(["report", str(path), "--format", "csv"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(message, said)


def test_missing_directories_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*none"):
        load_runs([tmp_path / "none"])
    with pytest.raises(FileNotFoundError, match="holds no run"):
        load_runs([tmp_path])
    with pytest.raises(FileNotFoundError, match="no run directory was given"):
        load_runs([])


@pytest.mark.slow
def test_what_a_pattern_names_besides_runs_is_passed_over(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", seed=seed)
    write_report(tmp_path.glob("*"))
    (tmp_path / "table.tex").write_text("")
    (write_run(tmp_path / "a0-rerun") / "rerun.json").write_text("{}")
    named = sorted(tmp_path.glob("*"))  # as a shell expands runs/*
    assert [path.name for path in named] == ["a0", "a0-rerun", "a1", "report", "table.tex"]
    first = write_report(named).read_text()
    assert write_report(named).read_text() == first
    assert [run.path.name for run in load_runs(named)] == ["a0", "a1"]
    assert [run.path.name for run in load_runs([tmp_path])] == ["a0", "a1"]
    with pytest.raises(FileNotFoundError, match=r"report is the folder of a report, .* is a file"):
        load_runs([tmp_path / "report", tmp_path / "table.tex"])
    with pytest.raises(FileNotFoundError, match="a0-rerun repeats another run"):
        load_runs([tmp_path / "a0-rerun"])


def test_what_follows_from_the_seed_is_no_setting(tmp_path):
    content = [{"params": f"p{seed}", "examples": f"e{seed}", "program": "p"} for seed in (0, 1)]
    paths = [write_run(tmp_path / str(s), seed=s, content=content[s]) for s in (0, 1)]
    (group,) = groups_of(*paths)
    assert (group.label, len(group.runs)) == ("fedavg", 2)


def test_settings_that_differ_come_before_those_in_common(tmp_path):
    a = write_run(tmp_path / "a", hyperparameters={"client_lr": 0.1, "momentum": 0.9})
    text = summary_table(groups_of(a, write_run(tmp_path / "b", lr=0.2)))
    assert re.search(r"^\| fedavg .*\| client_lr `0.1`, momentum `0.9` +\|$", text, re.M)
    assert re.search(r"^\| fedavg .*\| client_lr `0.2` +\|$", text, re.M)
    common = text.index("Common to all:")
    assert text.index("## Acc") < text.index("client_lr `0.1`") < common < text.index("`digits`")
    assert "What differs" not in summary_table(groups_of(a))


def test_markdown_aligns_and_escapes():
    table = markdown_table([["a", "b"], ["x|y", "10"]])
    assert table == "| a    |  b |\n| :--- | -: |\n| x\\|y | 10 |"


def test_estimates_as_text():
    assert format_estimate(Estimate(1234.567, 8.9, 3), 1) == "1,234.6 ± 8.9"
    assert format_estimate(Estimate(1.0, None, 1), 2) == "1.00"
    assert format_estimate(Estimate(-0.004, 0.3, 3), 2) == "0.00 ± 0.30"
    assert format_estimate(Estimate(math.nan, math.nan, 2), 2) == "-"


def test_errors_too_small_for_decimals_are_powers_of_ten(tmp_path):
    for path, errors in (("a", (8.4e-14, 5.2e-14)), ("b", (0.0931, 0.1418))):
        for seed, error in enumerate(errors):
            more = {"mean_squared_error": 5 * error}  # in round 5
            write_run(tmp_path / f"{path}{seed}", [0.1], algorithm=path, seed=seed, more=more)
    head, tiny, small = accuracy_table(groups_of(tmp_path))
    place = head.index("last mean squared error")
    # t(0.975, 1) = 12.706 standard errors, which are half the difference of two values.
    assert tiny[place] == f"{6.8e-14:.3g} ± {12.7062 * 1.6e-14:.3g}"
    assert small[place] == f"{0.11745:.3g} ± {12.7062 * 0.02435:.3g}"
    assert run_table(groups_of(tmp_path))[1][-1] == "8.4e-14"


def test_the_report_states_target_settings_and_versions(tmp_path):
    a = write_run(tmp_path / "a", seed=0)
    b = write_run(tmp_path / "b", seed=1, versions={"jax": "9.9"})
    text = summary_table(groups_of(a, b))
    assert "the target is 90.2 %: 95 % of the best method's best accuracy" in text
    assert re.search(r"\| dataset +\| `digits` +\|", text)
    assert "made with different versions" in text
    assert "jax `9.9`" in text
    assert "hash1" in text
    assert "the target is 50 %." in summary_table(groups_of(a), target=0.5)


def test_write_report(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", seed=seed)
        write_run(tmp_path / f"b{seed}", CURVE[::-1], seed=seed, algorithm="scaffold")
    path = write_report([tmp_path], title="A title")
    assert path == tmp_path / "report" / "report.md"
    text = path.read_text()
    assert text.startswith("# A title\n\n![Test accuracy against rounds, ")
    headings = re.findall("^## (.*)", text, re.M)
    results = ["Accuracy", "Up to the target", "Time"]
    assert headings == [*results, "Settings", "Runs", "More figures"]
    figures = ["accuracy.png", "loss.png", "partition.png"]
    for name in figures:
        assert f"]({name})" in text
        assert (path.parent / name).read_bytes().startswith(b"\x89PNG\r\n")
    # Written again, from a directory that now holds a report; and nothing half-written stays.
    assert write_report([tmp_path], title="A title").read_text() == text
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(
        [*figures, "report.md", "report.html"]
    )


def test_one_runs_report_is_in_its_directory(tmp_path):
    path = write_run(tmp_path / "a")
    assert default_folder(load_runs([path])) == path
    with pytest.raises(ValueError, match=r"target is 1\.5"):
        write_report([path], target=1.5)
