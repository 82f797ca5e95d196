"""A report believes a run directory as far as its last checkpoint agrees."""

import json
import shutil

import pytest

from fedjax_lab.command.cli import main
from fedjax_lab.report import load_runs
from fedjax_lab.report.formats import format_report
from tests.report.by_hand import write_run
from tests.simulation.test_run import FEDAVG, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 7 rounds with rows at 2, 4, 6 and 7."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    run(FEDAVG, run_dir=folder)
    return folder


def lines(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def with_lines(folder, changed):
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in changed))


def with_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def lower_loss(folder):
    row = json.loads(lines(folder)[1])
    with_lines(folder, [lines(folder)[0], json.dumps({**row, "loss": 0.0}), *lines(folder)[2:]])


def other_rate(folder):
    with_config(folder, lambda config: config["hyperparameters"].update(client_lr=0.1))


def two_rows(folder):
    with_lines(folder, lines(folder)[:2])


def fewer_rounds(folder):
    with_config(folder, lambda config: config.update(rounds=6))


EDITS = {
    "loss": (lower_loss, r"round 4, differs from the checkpoint of round 7: loss \(there .*here 0"),
    "rate": (other_rate, "and the config.json next to it belong to different runs"),
    "rows": (two_rows, "has 2 rows up to round 7, and the checkpoint of that round 4"),
    "rounds": (fewer_rounds, "has round 7, and config.json 6 rounds"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_was_edited_is_no_result(whole, tmp_path, capsys, edit):
    change, message = EDITS[edit]
    folder = shutil.copytree(whole, tmp_path / "edited")
    (before,) = load_runs([folder])
    assert [row["round"] for row in before.rows] == [2, 4, 6, 7]
    change(folder)
    with pytest.raises(ValueError, match=message):
        load_runs([folder])
    assert main(["report", str(folder), "--format", "csv"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_rows_after_the_last_checkpoint_and_runs_without_any_are_read(whole, tmp_path):
    """A run that was killed after a row, and one whose checkpoints were deleted."""
    killed = shutil.copytree(whole, tmp_path / "killed")
    shutil.rmtree(killed / "checkpoints" / "7")
    assert [row["round"] for row in load_runs([killed])[0].rows] == [2, 4, 6, 7]
    bare = shutil.copytree(whole, tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints")
    lower_loss(bare)
    assert load_runs([bare])[0].values("loss")[1] == 0


def test_null_in_place_of_metrics_of_local_steps_is_none_of_them(tmp_path):
    null = write_run(tmp_path / "null", client_metrics=None)
    none = write_run(tmp_path / "none")
    assert load_runs([null])[0].rows == load_runs([none])[0].rows
    assert format_report([null], "csv") == format_report([none], "csv")
