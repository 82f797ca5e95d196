"""Run directories that somebody else has filled or named: one sentence, nothing else written."""

import errno
import gc
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from fedjax_lab import data, load_run
from fedjax_lab.command.cli import main
from fedjax_lab.command.config import RunConfig
from fedjax_lab.machine.atomic_files import new_file
from fedjax_lab.machine.json_file import parse_json
from fedjax_lab.machine.program_cache import keep_programs
from fedjax_lab.report import write_report
from fedjax_lab.simulation.loggers import CsvLogger, TensorBoardLogger, WandbLogger
from fedjax_lab.simulation.sweep_log import SweepFolder
from fedjax_lab.storage.checkpoint import Checkpoints
from fedjax_lab.storage.lock import HOLDER, LOCK, one_writer
from fedjax_lab.storage.rows import MetricsFile, read_metrics
from fedjax_lab.storage.run_dir import open_run_dir, write_json
from fedjax_lab.storage.run_path import check_run_dir
from fedjax_lab.storage.saved_run import export_params
from tests.report.by_hand import write_run
from tests.simulation.test_run import FEDAVG, first_params, run
from tests.storage.test_saved_run import checkpoint

SHORT = {"rounds": 2, "algorithm": FEDAVG}


@pytest.mark.parametrize("name", ["a[1]b", "a]b", "a\\b", "a*b", "a?b"])
def test_paths_that_the_storage_library_reads_otherwise_are_refused(tmp_path, name):
    for inner in (name, f"{name}/run"):
        with pytest.raises(ValueError, match=r"checkpoints cannot be read from a path that"):
            run(**SHORT, run_dir=tmp_path / inner)
    with pytest.raises(ValueError, match="run_dir is"):
        RunConfig.of(run_dir=str(tmp_path / name)).resolve()
    assert not [*tmp_path.iterdir()]


def test_what_is_no_path_of_a_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'gs://bucket/run', a URL; it must be a directory"):
        run(**SHORT, run_dir="gs://bucket/run")
    with pytest.raises(ValueError, match="whose path is no UTF-8 text"):
        run(**SHORT, run_dir=os.fsdecode(bytes(tmp_path) + b"/\xff"))
    with pytest.raises(TypeError, match="run_dir is 3; it must be the path of a directory"):
        run(**SHORT, run_dir=3)
    for plain in (None, "runs/x", tmp_path / "å b%20c:d{e}'f#~"):
        check_run_dir(plain)


def test_a_home_that_no_shell_has_replaced_is_no_folder(tmp_path, monkeypatch):
    """As in a settings file, or after --run-dir=; rm -r ~ is how one would tidy up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/homes/ann")
    told = "in which only shells replace the ~. Write '/homes/ann/run', or"
    message = f"run_dir is '~/run', {told} '{tmp_path}/~/run' if"
    with pytest.raises(ValueError, match=message):
        run(**SHORT, run_dir="~/run")
    with pytest.raises(ValueError, match=message):
        RunConfig.of(run_dir="~/run").resolve()
    with pytest.raises(ValueError, match=message), one_writer("~/run"):
        pass  # of a search
    assert not [*tmp_path.iterdir()]
    (tmp_path / "~" / "run").mkdir(parents=True)  # as earlier versions made it
    for folder in ("~/run", tmp_path / "~" / "new", "a~", "~nobody-of-this-name"):
        check_run_dir(folder)


@pytest.mark.parametrize(
    ("argument", "write"),
    [
        ("path", CsvLogger),
        ("folder", TensorBoardLogger),
        ("folder", WandbLogger),
        ("folder", lambda folder: data.write_stream(folder, {"x": np.zeros((2, 3))})),
        ("folder", keep_programs),
        ("out", lambda out: write_report([write_run(Path("run"))], out)),
        ("profile_dir", lambda folder: run(**SHORT, profile_dir=folder)),
    ],
)
def test_other_places_to_write_to_need_no_shell_either(argument, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/homes/ann")
    monkeypatch.delenv("FEDJAX_LAB_PROGRAMS", raising=False)
    told = f"{argument} is '~/new', in which only shells replace the ~. Write '/homes/ann/new', or"
    with pytest.raises(ValueError, match=told):
        write("~/new")
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("name", ["file", "file/run", "link", "link/run"])
def test_a_file_in_place_of_the_directory_is_named(tmp_path, name):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    path = tmp_path / name
    message = rf"run_dir is '{path}', and '{tmp_path / name.split('/')[0]}' is no directory"
    with pytest.raises(FileExistsError, match=message):
        run(**SHORT, run_dir=path)
    with pytest.raises(FileExistsError, match=message), one_writer(path):
        pass  # of a search
    with pytest.raises(FileExistsError, match=message):
        RunConfig.of(run_dir=str(path)).resolve()
    assert (tmp_path / "file").read_text() == "kept"


def test_a_checkpoint_is_written_and_read_under_every_other_name(tmp_path):
    strange = "å b%20c:d{e}'f#~!@&;=,+^|<>\"`$()\n"
    checkpoint(tmp_path / strange, 2)
    assert load_run(tmp_path / strange).round == 2


def test_one_damaged_letter_in_a_row_is_mended_from_the_checkpoint(tmp_path):
    whole = run(**SHORT, run_dir=tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace('"round"', '"roune"'))
    with pytest.warns(UserWarning, match=r"metrics.jsonl lacks some of the 1 rows"):
        assert run(**SHORT, run_dir=tmp_path).history == whole.history
    assert metrics.read_text() == text


DEEP = "[" * 100_000
ROW = '{"round": 2, "loss": 1.5}\n'


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"roune": 2}', "no row of a round: round is None"),
        ('{"round": "2"}', "no row of a round: round is '2'"),
        ('{"round": -1}', "no row of a round: round is -1"),
        ("[1, 2]", "no JSON object"),
        ("3", "no JSON object"),
        ('{"round": 2, "loss": "low"}', "no row: loss is 'low', no number"),
        ('{"round": 2, "loss": {}}', r"no row: loss is {}, no number"),
        ('{"round": 2, "loss": 1e400}', r"not valid JSON \(the number 1e400 is out of range"),
        ('{"round": 2, "loss": NaN}', "NaN is no number of JSON"),
        ('{"round": 2, "loss": ' + "9" * 400 + "}", "is out of range"),
        ('{"round": 2, "loss": ' + DEEP, "nested too deeply"),
    ],
)
def test_what_is_no_row_is_told_by_its_line(tmp_path, line, told):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{ROW}{line}\n{ROW}")
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 2, is .*{told}.*repairs it"):
        read_metrics(path)


CONFIG = {"seed": 0, "rounds": 4, "eval_every": 2, "versions": {}, "content": {"params": "1"}}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"content": []}, r"'content' is \[\]; it must be an object"),
        ({"versions": "1"}, "'versions' is '1'; it must be an object"),
        ({"rounds": "4"}, "'rounds' is '4'; it must be an integer"),
        ({"eval_every": True}, "'eval_every' is True; it must be an integer"),
        ({"client_map": 3}, "'client_map' is 3; it must be text"),
        ({"seed": float("inf")}, "Infinity is no number of JSON"),
        (None, "it is nested too deeply"),
        (1e400, "the number 1e400 is out of range"),
    ],
)
def test_a_damaged_config_is_one_sentence_and_exit_status_2(tmp_path, capsys, changed, told):
    checkpoint(tmp_path, 2)
    file = tmp_path / "config.json"
    text = DEEP if changed is None else '{"seed": 1e400}'
    file.write_text(json.dumps({**CONFIG, **changed}) if isinstance(changed, dict) else text)
    with pytest.raises(ValueError, match=rf"config\.json.*{told}.* another run_dir"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match=rf"config\.json.*{told}.* another run_dir"):
        open_run_dir(tmp_path, CONFIG)
    assert main(["export", str(tmp_path), str(tmp_path / "model.npz")]) == 2
    said = capsys.readouterr().err
    assert re.search(told, said)
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "has no 'runs_at_once'"),
        ('{"runs_at_once": 1.5}', "'runs_at_once' is 1.5; it must be an integer"),
    ],
)
def test_a_damaged_sweep_names_the_file_and_the_remedy(tmp_path, text, told):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match=rf"sweep\.json.*{told}.*Choose another run_dir"):
        SweepFolder(tmp_path, 1, {})


def test_content_that_this_version_does_not_know_is_another_run(tmp_path):
    open_run_dir(tmp_path, {**CONFIG, "content": {}})
    write_json(tmp_path / "config.json", {**CONFIG, "content": {"labels": "b", "evaluate": 5}})
    with pytest.raises(FileExistsError, match=r"labels \(content.labels: there b, now None\)"):
        open_run_dir(tmp_path, {**CONFIG, "content": {"evaluate": "2:a"}})


def test_numbers_of_json_are_finite():
    text = '{"a": [1, -2.5e300, null, true, "x"], "b": {"c": 12345678901234567890}}'
    assert parse_json(text) == json.loads(text)


def test_planted_links_are_replaced_and_not_followed(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.write_text("kept")
    folder.mkdir()
    names = ["config.json", "metrics.jsonl", "metrics.csv", HOLDER, "model.npz", "new"]
    for name in names:
        (folder / name).symlink_to(outside)
    write_json(folder / "config.json", CONFIG)
    MetricsFile(folder / "metrics.jsonl", [{"round": 2}]).close()
    CsvLogger(folder / "metrics.csv")({"round": 2})
    with one_writer(folder):
        assert json.loads((folder / HOLDER).read_text())["pid"] == os.getpid()
    export_params(first_params(), folder / "model.npz")
    with new_file(folder / "new", "wb") as file:
        file.write(b"1")
    assert outside.read_text() == "kept"
    assert not any((folder / name).is_symlink() for name in names)
    (folder / LOCK).unlink()
    (folder / LOCK).symlink_to(outside)
    with pytest.raises(OSError, match=LOCK) as found, one_writer(folder):
        pass
    assert found.value.errno == errno.ELOOP
    assert outside.read_text() == "kept"


def test_a_damaged_checkpoint_costs_one_warning_and_no_trace(tmp_path, caplog):
    state = {f"layer_{i}": np.full((300, 300), i, np.float32) for i in range(12)}
    saved = Checkpoints(tmp_path, "run")
    for round in (1, 2):
        saved.save(round, {}, {"rows": []}, state)
    saved.close()
    for file in (tmp_path / "2/params").rglob("d/*"):
        file.unlink()
    for _ in range(8):  # what is still being read when the first array fails differs
        reader = Checkpoints(tmp_path, "run", read_only=True)
        with pytest.warns(UserWarning, match="last intact checkpoint is that of round 1"):
            assert reader.restore_params()[0] == 1
        reader.close()
    # A trace would be an exception that nobody caught, which pytest makes an error, or a line of
    # asyncio when a task is collected.
    gc.collect()
    assert "never retrieved" not in caplog.text
