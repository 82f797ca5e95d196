"""Each command uses every setting of a run, or refuses it: by what it reads, and by its errors."""

import inspect
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_lab.command import cli, runner, sweeping, tuning
from fedjax_lab.command.client_scores import ClientTests
from fedjax_lab.command.commands import SweepCommand, parse
from fedjax_lab.command.config import DEFAULTS, FACTS, VARIED, RunConfig
from fedjax_lab.command.setup import build
from fedjax_lab.simulation import plan as plan_module
from fedjax_lab.simulation import sweep as sweep_module
from fedjax_lab.tuning import tune as tune_module

FIELDS = set(DEFAULTS)
UNUSED = {
    command: [n for n, facts in FACTS.items() if command in facts.refused_by + facts.ignored_by]
    for command in ("run", "plan", "sweep", "tune")
}
# What reads every setting, whatever it is for: copies, checks and records.
GENERAL = {
    "dataclasses",
    "config_checks",
    "commands",
    "table_data.check_table",
}
GENERAL |= {"settings.check_ranges"}
GENERAL |= {f"config.{name}" for name in ("resolve", "_with_clients", "run_name")}
TUNED, SWEPT = ["tune", "--space", "client_lr=0.1,1"], ["sweep", "--point"]


@pytest.fixture
def reads(monkeypatch):
    """The settings that have been read since, except by what reads all."""
    found = set()

    def read(config, name):
        if name in FIELDS:
            code = sys._getframe(1).f_code
            module = code.co_filename.rpartition("/")[2].removesuffix(".py")
            name_of_code = code.co_qualname.removeprefix("RunConfig.").partition(".")[0]
            function = f"{module}.{name_of_code}"
            if not {module, function} & GENERAL:
                found.add(name)
        return object.__getattribute__(config, name)

    for group in vars(RunConfig()).values():
        monkeypatch.setattr(type(group), "__getattribute__", read, raising=False)
    return found


class Reached(Exception):
    pass


@pytest.fixture
def passed(monkeypatch):
    """Arguments that the functions behind the commands get; nothing is built or run."""
    given = {}
    setup = SimpleNamespace(
        algorithm=SimpleNamespace(personal=None),
        clients=None,
        params=None,
        init=None,
        vary=None,
        evaluate=lambda params: np.zeros(()),
        count_fn=None,
        client_tests=ClientTests(),
        data={},
    )

    def catch(name):
        def reached(*arguments, **named):
            given[name] = named
            raise Reached

        return reached

    monkeypatch.setattr(runner, "build", lambda *arguments: setup)
    monkeypatch.setattr(runner, "simulate", catch("run"))
    monkeypatch.setattr(plan_module, "plan", catch("plan"))
    monkeypatch.setattr(sweep_module, "sweep", catch("sweep"))
    monkeypatch.setattr(tune_module, "tune", catch("tune"))
    return given


def lines_of(command):
    return {"tune": TUNED, "sweep": [*SWEPT, "client_lr=0.1"]}.get(command, [command])


def act(command, directory, *flags):
    """What a command does after its flags are parsed, up to the function that does the work."""
    parsed = parse([*lines_of(command), *flags])
    config = parsed.settings.replace(run_dir=str(directory))
    work = {
        "run": lambda: runner.run(config, progress=False),
        "plan": lambda: cli.plan_command(parsed),
        "sweep": lambda: sweeping.run_sweep(
            sweeping.sweep_points(parsed.point, parsed.settings)[1], [], [0]
        ),
        "tune": lambda: tuning.run_search(parsed, {"fedavg": {"client_lr": [0.1]}}),
    }
    with pytest.raises(Reached):
        work[command]()


def of_build(tmp_path):
    """Configs with which ``build`` meets every setting that it may read."""
    table, text = tmp_path / "table.csv", tmp_path / "text"
    rows = [f"{user},{x},{x % 2}" for user in "abcd" for x in range(4)]
    table.write_text("\n".join(["user,x,y", *rows]))
    text.mkdir()
    for name in ("train.txt", "test.txt"):
        (text / name).write_text("a b c d e f g h\n" * 20)
    small = {"model": "linear", "rounds": 2, "num_clients": 4, "cohort_size": 2}
    private = {"dp_clip_norm": 1.0, "dp_noise_multiplier": 1.0, "client_map": "scan"}
    yield RunConfig.of(
        **small, compressor="sign", server_lr=0.5, concurrency=4, error_feedback=False
    )
    yield RunConfig.of(**small, **private)
    yield RunConfig.of(**small, secure_bits=24, secure_clip=1.0)
    columns = {"client": "user", "x": ("x",), "target": ("y",), "test_split": "examples:0.5"}
    yield RunConfig.of(**{**small, "num_clients": None}, dataset=f"csv:{table}", **columns)
    language = {"model": "lstm", "partition": "iid", "model_option": ("hidden=4", "embedding=4")}
    yield RunConfig.of(**{**small, **language}, dataset=f"text:{text}", sequence_length=4)


@pytest.mark.methods
@pytest.mark.usefixtures("passed")
def test_every_setting_is_read_or_refused(reads, tmp_path):
    for config in of_build(tmp_path):
        build(config)
    of_all = set(reads)
    assert len(of_all) > 40
    for command, refused in UNUSED.items():
        reads.clear()
        act(command, tmp_path / command)
        assert (of_all | reads | set(refused)) == FIELDS, command


def test_the_schedule_reaches_every_command(passed, tmp_path):
    path = tmp_path / "times.npz"
    np.savez(path, step_seconds=np.arange(1.0, 21.0))
    for command in UNUSED:
        act(command, tmp_path, "--times", str(path), "--deadline", "9", "--over-selection", "1.5")
        times = passed[command]["times"]
        assert (times.deadline, times.over_selection) == (9.0, 1.5)
        np.testing.assert_array_equal(times.step_seconds, np.arange(1.0, 21.0))
        dropped = RunConfig().schedule().keys() - passed[command].keys()
        # The rounds of a plan are in its method's schedule.
        assert dropped <= {*UNUSED[command], *(["rounds"] if command == "plan" else [])}


def test_the_help_of_a_sweep_names_the_settings_that_it_varies():
    about = inspect.getsource(SweepCommand)
    names = re.search(r"name=value,value: (.*?), or a float option", about, re.DOTALL)
    assert re.split(r",\s+", names[1]) == [*VARIED]


def unused():
    return [(command, setting) for command, names in UNUSED.items() for setting in names]


@pytest.mark.parametrize(("command", "setting"), unused())
def test_a_command_has_no_flag_for_what_it_does_not_use(command, setting, capsys):
    flag = "--" + setting.replace("_", "-")
    with pytest.raises(SystemExit) as end:
        cli.main([*lines_of(command), flag, "3"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"{flag} (applied to fedjax-lab {command})" in said
    assert "in fedjax-lab run --help" in said


def test_a_file_says_what_its_run_does(tmp_path, capsys):
    """What does not change the results may stand in a file; what does is refused there, too."""
    file = tmp_path / "config.json"
    file.write_text('{"client_map": "scan", "eval_every": 3, "seed": 4, "client_lr": 0.5}')
    for command in UNUSED:
        assert parse([*lines_of(command), "--config", str(file)]).settings.rounds.eval_every == 3
    assert parse(["run", "--config", str(file), "--seeds", "0", "1"]).seeds == (0, 1)
    file.write_text('{"on_nonfinite": "keep"}')
    assert cli.main([*TUNED, "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"{file}: on_nonfinite is 'keep'; `fedjax-lab tune` does not use it" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["run", "--seed", "3", "--seeds", "0", "1"], "seed is 3 and seeds [0, 1]; "),
        (["run", "--print-config", "yaml", "--quiet"], "--print-config` does not use --quiet"),
        (["run", "--print-config", "json", "--process-id", "0"], "does not use --process-id: it"),
        ([*SWEPT, "client_lr=1", "--client-lr", "0.5"], "client_lr is 0.5, and --point varies it"),
        (
            [*SWEPT, "prox_weight=1", "--algorithm", "fedprox", "--option", "prox_weight=0.5"],
            "option prox_weight is 0.5, and --point varies it",
        ),
        ([*TUNED, "--client-lr", "0.5"], "client_lr is 0.5, and --space varies it"),
        (["report", ".", "--format", "csv", "--quiet"], "quiet is True; with --format"),
        (["run", "--no-error-feedback"], "error_feedback is False and compressor None"),
        (["run", "--tokens", "bytes"], "tokens is 'bytes'; digits is no text"),
        (["run", "--sequence-length", "9"], "sequence_length is 9; digits is no text"),
        (["run", "--vocabulary-size", "9"], "vocabulary_size is 9; digits is no text"),
        (["run", "--data-dir", "."], "data_dir is '.'; digits is read from no folder"),
        (["run", "--test-split", "examples:0.5"], "test_split is 'examples:0.5' and dataset"),
        (
            [
                "run",
                "--dataset",
                "npz:a.npz",
                "--partition",
                "natural:user",
                "--partition-seed",
                "1",
            ],
            "partition_seed is 1 and partition 'natural:user'",
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_a_flag_without_effect_beside_others_is_an_error(line, message, capsys):
    assert cli.main(line) == 2
    assert message in capsys.readouterr().err


def test_a_space_of_one_method_leaves_the_setting_of_the_others():
    methods = ["tune", "--methods", "fedavg", "fedprox", "--client-lr", "0.5"]
    space = ["--space", "fedavg.client_lr=0.1,1", "--space", "prox_weight=0.1,1"]
    assert parse([*methods, *space]).settings.method.client_lr == 0.5
