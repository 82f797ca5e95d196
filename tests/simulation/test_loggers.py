"""Hooks see every row once, whatever happens; what the loggers write is read back here."""

import csv
import gzip
import json
import math
import struct
import sys
import types

import pytest

from fedjax_lab.simulation.loggers import (
    CsvLogger,
    Hooks,
    TensorBoardLogger,
    WandbLogger,
    build_loggers,
)
from tests.simulation.test_run import interrupt, run

ROWS = [
    {"round": 2, "loss": 2.5, "bytes_up": 300, "accuracy": 0.25},
    {"round": 4, "loss": float("nan"), "bytes_up": 600, "accuracy": 0.5},
    {"round": 6, "loss": 1.5, "bytes_up": 900, "accuracy": 0.75},
]
# What a run that goes on reads from metrics.jsonl: NaN is null there.
KEPT = [ROWS[0], ROWS[1] | {"loss": None}]


def feed(logger, rows):
    for row in rows:
        logger(dict(row))
    logger.close()


@pytest.mark.slow
def test_hooks_see_every_row_of_a_run_that_goes_on(tmp_path):
    first, second, broken = [], [], []

    def fails(row):
        broken.append(row.copy())
        row.clear()
        raise KeyError("no such place")

    with pytest.warns(RuntimeWarning, match=r"fails.* failed after round 2 with KeyError"):
        cut = run(run_dir=tmp_path, on_row=[fails, second.append, interrupt])
    assert cut.interrupted
    assert second == cut.history
    assert broken == cut.history[:1]
    result = run(run_dir=tmp_path, on_row=first.append)
    assert first == result.history
    assert [row["round"] for row in first] == [2, 4, 6, 7]
    again = []
    run(run_dir=tmp_path, on_row=again.append)  # nothing is left to run
    assert again == first


def test_a_hook_must_be_a_function():
    with pytest.raises(TypeError, match="on_row holds 'csv'; it must be a function"):
        Hooks(["csv"])
    with pytest.raises(TypeError, match="on_row"):
        run(on_row=[3])


def test_csv(tmp_path):
    file = tmp_path / "folder" / "metrics.csv"
    feed(CsvLogger(file), KEPT)
    feed(CsvLogger(file), [*KEPT, ROWS[2]])
    resumed = file.read_text()
    feed(CsvLogger(file), ROWS)
    assert file.read_text() == resumed
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["loss"] for row in rows] == ["2.5", "", "1.5"]
    assert [int(row["bytes_up"]) for row in rows] == [300, 600, 900]
    with pytest.raises(ValueError, match="surprise"):
        feed(CsvLogger(file), [ROWS[0], {"surprise": 1}])


def test_the_numbers_of_an_array_have_columns_of_their_own(tmp_path):
    rows = [{"round": 1, "loss": 2.5, "each": [0.5, [1.0, math.nan]], "none": []}]
    feed(CsvLogger(tmp_path / "a.csv"), rows)
    assert (tmp_path / "a.csv").read_text().splitlines() == [
        "round,loss,each/0,each/1/0,each/1/1",
        "1,2.5,0.5,1.0,",
    ]
    feed(TensorBoardLogger(tmp_path), rows)
    assert {name for name, *_ in read_events(tmp_path)} == {"loss", "each/0", "each/1/0"}


def read_events(folder):
    """(name, round, value) of all event files, whose records are length, check, bytes, check."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in folder.glob("events.*"):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard(tmp_path):
    stranger = tmp_path / "events.out.tfevents.1.host"
    stranger.write_bytes(b"")
    feed(TensorBoardLogger(tmp_path), KEPT)
    feed(TensorBoardLogger(tmp_path), [*KEPT, ROWS[2]])
    assert sorted(read_events(tmp_path)) == [
        ("accuracy", 2, 0.25),
        ("accuracy", 4, 0.5),
        ("accuracy", 6, 0.75),
        ("bytes_up", 2, 300),
        ("bytes_up", 4, 600),
        ("bytes_up", 6, 900),
        ("loss", 2, 2.5),
        ("loss", 6, 1.5),
    ]
    assert stranger.exists()


class FakeWandb(types.ModuleType):
    """Keeps runs by id, and like the real one takes steps in ascending order only."""

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.settings, self.finished = {}, [], 0

    def init(self, **settings):
        self.settings.append(settings)
        logged = self.runs.setdefault(settings.get("id"), [])
        run = types.SimpleNamespace(step=logged[-1][0] + 1 if logged else 0)

        def log(values, step, commit):
            assert step >= run.step
            assert commit
            run.step = step + 1
            logged.append((step, values))

        def finish():
            self.finished += 1

        run.log, run.finish = log, finish
        return run


def test_wandb(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (logger,) = build_loggers(["wandb", "wandb"], tmp_path / "run", {"seed": 3})
    assert wandb.settings == []  # nothing happens before the first row
    feed(logger, KEPT)
    feed(*build_loggers(["wandb"], tmp_path / "run", {"seed": 3}), [*KEPT, ROWS[2]])
    ((id, logged),) = wandb.runs.items()
    assert id == (tmp_path / "run" / "wandb_id.txt").read_text()
    assert [step for step, _ in logged] == [2, 4, 6]
    assert logged[1][1] == {"bytes_up": 600, "accuracy": 0.5}
    assert wandb.settings[0]["name"] == "run"
    assert wandb.settings[0]["config"] == {"seed": 3}
    assert wandb.settings[0]["resume"] == "allow"
    assert wandb.finished == 2
    feed(WandbLogger(project="mine"), ROWS)
    assert wandb.settings[-1] == {"project": "mine"}


def test_a_missing_package_is_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"wandb needs wandb: `pip install 'wandb[<>]"):
        build_loggers(["wandb"], tmp_path, {})
    with pytest.raises(ValueError, match=r"log is 'cvs'.*Did you mean 'csv'"):
        build_loggers(["cvs"], tmp_path, {})


@pytest.mark.methods
def test_a_profile_is_written_once(tmp_path):
    run(profile_dir=tmp_path, rounds=4)
    (folder,) = (tmp_path / "plugins" / "profile").iterdir()
    (trace,) = folder.glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert len({event.get("name") for event in events}) > 10
    assert len(list(folder.glob("*.xplane.pb"))) == 1
