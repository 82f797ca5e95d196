import csv
import json
import re
import signal
import subprocess
import sys

import pytest

from fedjax_lab import __version__
from fedjax_lab.command import cli, runner
from fedjax_lab.command.catalogue import SOURCES
from fedjax_lab.command.cli import main
from fedjax_lab.command.config import RunConfig
from fedjax_lab.compressors import COMPRESSORS
from fedjax_lab.data import PARTITIONS

# Small, and with replacement: shuffled passes take longer to compile.
FAST = [
    *("--model", "linear", "--rounds", "6", "--eval-every", "2", "--cohort-size", "3"),
    *("--num-clients", "10", "--local-steps", "2", "--batch-size", "8", "--replace"),
    *("--client-map", "scan"),
]


def run(directory, *arguments):
    return main(["run", *FAST, "--run-dir", str(directory), *arguments])


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 6 rounds that nothing interrupted."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    assert run(directory, "--quiet") == 0
    return directory


def module(*arguments):
    """``python -m fedjax_lab`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fedjax_lab", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_mistake_is_one_line_and_exit_status_2():
    done = module("run", "--algorithm", "fedavgg")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("fedjax-lab: algorithm is 'fedavgg'; it must be one of ")
    assert "Did you mean 'fedavg'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_only_a_process_of_its_own_ends_at_once_when_interrupted(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    ends = []
    monkeypatch.setattr(cli, "parse", interrupted)
    monkeypatch.setattr("os._exit", ends.append)
    assert main(["run"]) == 130
    assert ends == []
    monkeypatch.setattr("sys.argv", ["fedjax-lab", "run"])
    main()
    assert ends == [130]
    assert capsys.readouterr().err == "fedjax-lab: interrupted.\n" * 2


@pytest.mark.slow
def test_a_process_of_its_own_may_divide_the_cpu(tmp_path):
    directory = tmp_path / "run"
    arguments = [*FAST[:-2], "--run-dir", str(directory), "--cpu-devices", "2"]
    done = module("run", *arguments, "--cohort-size", "4")
    assert done.returncode == 0, done.stderr
    assert read(directory / "config.json")["client_map"] == "shard_map"
    assert "clients mapped with shard_map (cpu, 2 of 2 devices" in done.stderr
    facts = dict(line.split("  ", 1) for line in done.stdout.splitlines() if line)
    assert facts["rounds"].strip() == "6 of 6"
    assert facts["run directory"].strip() == str(directory)


def test_help_shows_the_commands_and_all_settings(capsys):
    with pytest.raises(SystemExit) as left:
        main(["run", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--algorithm", "--option", "--config", "--partition-seed", "--cpu-devices"):
        assert flag in shown
    for group in vars(RunConfig()):
        assert f" {group} options " in shown
    assert shown.count("fedjax-lab run --") == 3  # examples
    # A paragraph is as wide as the screen, wherever the source breaks its lines.
    assert "None: one per core. (default: None)" in " ".join(re.sub("[│]", "", shown).split())
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    commands = ("run", "sweep", "report", "export", "rerun")
    for command in (*commands, "algorithms", "datasets", "partitions", "models"):
        assert f"• {command}" in shown


@pytest.mark.parametrize("place", ["pipe", "terminal", "terminal without colours"])
def test_an_unknown_flag_names_the_nearest(place, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: place != "pipe")
    if place == "terminal without colours":
        monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as left:
        main(["run", "--algoritm", "fedavg"])
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert "--algorithm" in shown
    assert ("\x1b" in shown) == (place == "terminal")


def test_lists(capsys):
    assert main(["algorithms"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line[0] != " "] == list(SOURCES)
    assert "options: memory_size (num_clients, at most 100), server_momentum=0.9" in shown
    assert "server_optimizer: adagrad, adam, momentum, sgd, yogi" in shown
    assert main(["partitions"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == [*PARTITIONS, "natural:ARRAY"]
    assert main(["models"]) == 0
    assert "options: hidden=200,100, norm=none" in capsys.readouterr().out
    assert main(["datasets"]) == 0
    assert capsys.readouterr().out.startswith("digits ")
    assert main(["compressors"]) == 0
    shown = capsys.readouterr().out
    names = [line for line in shown.splitlines()[1:] if line[0] != " "]
    assert names == sorted(COMPRESSORS)
    assert "as text: top_k:COMP (dropped), " in shown
    # 10,000 floats of 4 bytes, and as many indices of 20 bits.
    assert "top_k:0.99, d = 1,000,000: 65,000 bytes, 1/61.5 of float32" in shown


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fedjax-lab {__version__}\n"


def test_completion_knows_the_commands_and_flags(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--tyro-print-completion", "bash"])
    assert not left.value.code
    script = capsys.readouterr().out
    for word in ("compressors", "report", "--partition-seed", "--print-config"):
        assert word in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_run_leaves_its_files(finished):
    config, summary = read(finished / "config.json"), read(finished / "summary.json")
    partition = read(finished / "partition.json")
    assert config["run_config"]["model"] == "linear"
    assert config["run_config"]["seed"] == 0
    assert config["data"]["train"] == 1442
    assert summary["round"] == 6
    assert not summary["interrupted"]
    accuracies = summary["client_accuracy"]
    assert len(accuracies) == 10
    assert summary["worst_10_percent_accuracy"] == pytest.approx(min(accuracies))
    assert summary["client_accuracy_mean"] == pytest.approx(sum(accuracies) / 10)
    histogram = partition["label_histogram"]
    assert (len(histogram), len(histogram[0]), sum(map(sum, histogram))) == (10, 10, 1442)
    assert partition["hash"] == config["partition"]["hash"]
    assert partition["names"] is None


def test_the_end_is_a_table(finished, capsys):
    assert run(finished) == 0
    shown = capsys.readouterr()
    accuracy = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
    assert re.search(rf"^last accuracy \(%\) +{100 * accuracy:.2f}$", shown.out, re.MULTILINE)
    assert "going on with" in shown.err


def test_a_finished_run_keeps_its_numbers_and_quiet_prints_nothing(finished, capsys):
    before = {
        name: (finished / name).read_bytes()
        for name in ("metrics.jsonl", "times.jsonl", "summary.json", "partition.json")
    }
    assert run(finished, "--quiet") == 0
    assert {name: (finished / name).read_bytes() for name in before} == before
    assert capsys.readouterr() == ("", "")


@pytest.mark.methods
def test_another_config_in_the_same_directory_is_refused(finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    assert run(finished, "--quiet", "--batch-size", "4", "--clip-norm", "2") == 2
    message = capsys.readouterr().err
    assert "batch_size (there 8, now 4)" in message
    assert "run_config.clip_norm (there None, now 2.0)" in message
    assert "Choose another directory" in message
    assert (finished / "metrics.jsonl").read_bytes() == before


class Interrupt:
    """A logger that stops the run after two rounds."""

    def __init__(self, number):
        self.number = number

    def __call__(self, row):
        if row["round"] == 2:
            signal.raise_signal(self.number)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("number", "status"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_after_a_signal_the_same_command_goes_on(
    finished, tmp_path, capfd, monkeypatch, number, status
):
    directory = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "build_loggers", lambda *arguments: [Interrupt(number)])
        assert run(directory, "--quiet") == status
    said = capfd.readouterr().err
    assert "finishing this chunk of rounds, then saving; again to stop now" in said
    assert "stopped after round 2 of 6; the same command resumes it" in said
    assert read(directory / "summary.json")["interrupted"]
    part = read(directory / "summary.json")["seconds"]

    assert run(directory, "--quiet") == 0
    for name in ("metrics.jsonl", "partition.json"):
        assert (directory / name).read_bytes() == (finished / name).read_bytes()
    whole, other = read(directory / "summary.json"), read(finished / "summary.json")
    assert whole["client_accuracy"] == other["client_accuracy"]
    assert whole["seconds"] > part  # the part before the interruption is counted


@pytest.mark.filterwarnings("always")
def test_a_run_that_diverges_has_no_score(tmp_path, capsys):
    directory = tmp_path / "run"
    assert run(directory, "--client-lr", "3e38") == 3
    said = capsys.readouterr()
    assert "fedjax-lab: warning: diverged: " in said.err
    assert re.search(r"^top accuracy \(%\) +-$", said.out, re.MULTILINE)
    assert read(directory / "summary.json")["stopped"] == "diverged"
    assert main(["report", str(directory)]) == 0
    assert "Runs that diverged and have no score: 1" in (directory / "report.md").read_text()


@pytest.mark.methods
def test_flags_override_the_config_file(tmp_path):
    file = tmp_path / "settings.json"
    options = {"beta1": 0.8, "beta2": 0.5}
    settings = {"algorithm": "fedadam", "option": options, "flip": True, "server_lr": 0.1}
    file.write_text(json.dumps({**settings, "client_lr": 0.5}))
    directory = tmp_path / "run"
    flags = ["--config", str(file), "--client-lr", "0.25", "--option", "beta1=0.7", "--no-flip"]
    assert run(directory, "--quiet", *flags, "--rounds", "1", "--eval-every", "1") == 0
    config = read(directory / "config.json")
    assert config["algorithm"] == "fedadam"
    assert config["hyperparameters"]["client_lr"] == 0.25
    assert config["hyperparameters"]["beta1"] == 0.7
    assert config["hyperparameters"]["beta2"] == 0.5
    assert config["run_config"]["flip"] is False


@pytest.mark.slow
def test_a_run_from_yaml_writes_its_settings_and_loggers_their_files(finished, tmp_path, capsys):
    settings = read(finished / "config.json")["run_config"]
    file = tmp_path / "settings.yaml"
    lines = [f"{name}: {json.dumps(value)}" for name, value in settings.items()]
    file.write_text("\n".join([*lines, "log: [csv]  # beside metrics.jsonl"]))
    directory = tmp_path / "run"
    flags = ["--config", str(file), "--run-dir", str(directory), "--quiet"]
    for _ in range(2):  # the second goes on with a run that has ended
        assert main(["run", *flags, "--seed", "1"]) == 0
        written = RunConfig.from_file(directory / "config.yaml").record()
        assert written == settings | {"seed": 1}
        rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        with (directory / "metrics.csv").open(newline="") as table:
            assert [row["loss"] for row in csv.DictReader(table)] == [str(r["loss"]) for r in rows]
    assert not (finished / "config.yaml").exists()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_settings_are_printed_as_a_file_that_gives_them_back(form, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--algorithm", "gradma", "--client-lr", "1e-05", "--model-option", "hidden=8,"]
    assert main(["run", *flags, "--print-config", form]) == 0
    shown = capsys.readouterr().out
    (tmp_path / f"settings.{form}").write_text(shown)
    config = RunConfig.from_file(f"settings.{form}")
    assert config.method.option == ("memory_size=20",)
    assert (config.method.client_lr, config.model.model_option) == (1e-5, ("hidden=8,",))
    assert main(["run", "--config", f"settings.{form}", "--print-config", form]) == 0
    assert capsys.readouterr().out == shown
    assert [path.name for path in tmp_path.iterdir()] == [f"settings.{form}"]  # nothing was run
    assert main(["run", "--log", "csvv", "--print-config", form]) == 2
    assert "log is 'csvv'; it must be one of csv, tensorboard, wandb." in capsys.readouterr().err


@pytest.mark.methods
def test_a_run_may_be_repeated_with_another_seed_from_its_config(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs/fedavg-digits-dirichlet0.1-seed1"  # the default
    source = str(finished / "config.json")
    flags = ["--seed", "1", "--partition-seed", "0", "--quiet"]
    assert main(["run", "--config", source, *flags]) == 0
    config, before = read(directory / "config.json"), read(finished / "config.json")
    assert config["partition"]["hash"] == before["partition"]["hash"]
    assert (config["seed"], before["seed"]) == (1, 0)
    assert config["rounds"] == 6
    first = [(d / "metrics.jsonl").read_text().splitlines()[0] for d in (directory, finished)]
    assert first[0] != first[1]


def test_a_config_file_with_an_unknown_key(tmp_path, capsys):
    file = tmp_path / "bad.json"
    file.write_text('{"roundz": 3}')
    assert main(["run", "--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert f"{file}: roundz is not a setting of a run. Did you mean 'rounds'" in message
    file.write_text("{")
    assert main(["run", "--config", str(file)]) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err
    file = tmp_path / "bad.yaml"
    file.write_text("rounds: 3\nclient_lrr: 1e-3\n")
    assert main(["run", "--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert f"{file}: client_lrr is not a setting of a run. Did you mean 'client_lr'" in message
    file.write_text("rounds: [3")
    assert main(["run", "--config", str(file)]) == 2
    assert "cannot be read as YAML" in capsys.readouterr().err
    file.write_text("- rounds")
    assert main(["run", "--config", str(file)]) == 2
    assert "holds no object {setting: value}" in capsys.readouterr().err
    assert main(["run", "--config", str(tmp_path / "none.json")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_debug_shows_the_traceback(capsys):
    assert main(["run", "--rounds", "0", "--debug"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("Traceback")
    assert "ValueError: rounds is 0; it must be between 1 and " in message


def test_settings_refused_in_round_0_leave_no_directory(tmp_path, capsys):
    directory = tmp_path / "run"
    flags = ["--algorithm", "gradma_s", "--option", "memory_size=2", "--quiet"]
    assert run(directory, *flags) == 2
    shown = capsys.readouterr().err
    assert "memory_size is 2; it must be at least the cohort's 3 slots" in shown
    assert not directory.exists()


@pytest.mark.methods
def test_report(finished, tmp_path, capsys):
    out = tmp_path / "report"
    assert main(["report", str(finished), "--out", str(out), "--target", "0.2"]) == 0
    assert (out / "report.md").read_text().startswith("# Report\n")
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == str(out / "report.md")
    assert main(["report", str(finished), "--out", str(out), "--target", "90"]) == 2
    assert "target is 90.0; it must be" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "no run directory was given" in capsys.readouterr().err
