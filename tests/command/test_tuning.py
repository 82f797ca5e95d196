"""``fedjax-lab tune``: how a command line becomes a search, and how the command ends."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_lab.command import cli, tuning
from fedjax_lab.command import setup as building
from fedjax_lab.command.commands import parse
from fedjax_lab.tuning.search_result import Diverged, SearchResult, Trial
from fedjax_lab.tuning.space import Range

LINE = ["tune", "--algorithm", "fedavg", "scaffold", "--space", "client_lr=log:0.001:1"]


def result():
    space = {name: {"client_lr": Range(0.1, 9.0)} for name in ("fedavg", "scaffold")}
    trials = [Trial(name, {"client_lr": 0.1}, 0, 9, 0.25) for name in space]
    return SearchResult(trials, 9, "min", space)


@pytest.fixture
def ended(monkeypatch):
    """The command with another end of its search."""
    monkeypatch.setattr(tuning, "start", lambda *arguments: None)

    def run(end, *more):
        def search(command, spaces):
            if isinstance(end, SearchResult):
                return end
            raise end

        monkeypatch.setattr(tuning, "run_search", search)
        return cli.main([*LINE, *more])

    return run


def test_algorithm_takes_several_methods():
    assert parse(LINE).methods == ("fedavg", "scaffold")
    assert parse(["tune", "--methods", "fedavg", "scaffold"]).methods == ("fedavg", "scaffold")
    assert parse(["sweep", "--algorithm", "scaffold"]).settings.method.algorithm == "scaffold"


def test_a_range_is_given_once_and_that_of_a_method_counts():
    texts, methods = ["client_lr=0.1,0.2", "scaffold.client_lr=0.3"], ("fedavg", "scaffold")
    for given in (texts, texts[::-1]):
        assert tuning.space_of(given, "fedavg", methods) == {"client_lr": [0.1, 0.2]}
        assert tuning.space_of(given, "scaffold", methods) == {"client_lr": [0.3]}
    for twice in (["client_lr=0.5"], ["scaffold.client_lr=0.5"]):
        with pytest.raises(ValueError, match="scaffold has a value for client_lr already"):
            tuning.space_of([*texts, *twice], "scaffold", methods)


def test_a_start_point_of_each_method():
    spaces = {
        "fedavg": {"client_lr": [0.1, 0.2]},
        "scaffold": {"client_lr": [0.1], "server_lr": [1.0]},
    }
    texts = parse(
        [*LINE, "--start-point", "client_lr=0.3", "--start-point", "scaffold.server_lr=1"]
    )
    assert tuning.start_points(texts.start_point, spaces) == {
        "fedavg": [{"client_lr": 0.3}],
        "scaffold": [{"client_lr": 0.3, "server_lr": 1.0}],
    }
    assert tuning.start_points(["scaffold.server_lr=1"], spaces) == {
        "scaffold": [{"server_lr": 1.0}]
    }
    for wrong, message in (
        ("client_lr=0.1,0.2", "'client_lr=0.1,0.2'; it must be of the form name=value"),
        ("fedprox.client_lr=0.1", "'fedprox' is none of fedavg, scaffold"),
        ("scaffold.momentum=0.1", "the name in start_point is 'momentum'"),
    ):
        with pytest.raises(ValueError, match=message):
            tuning.start_points([wrong], spaces)


def test_an_option_can_be_of_one_method(monkeypatch):
    from fedjax_lab.tuning import tune as module

    built = []

    def build(config, **_):
        built.append((config.method.algorithm, config.method.option))
        return SimpleNamespace(vary=None, params=None, clients=None, count_fn=None)

    monkeypatch.setattr(building, "build", build)
    monkeypatch.setattr(module, "tune", lambda *arguments, **named: None)
    spaces = {name: {"client_lr": [0.1]} for name in ("fedavg", "fafed")}
    line = ["tune", "--algorithm", *spaces, "--space", "client_lr=0.1"]
    own = ["fafed.momentum=0.5", "fafed.second_moment_decay=0.9"]
    tuning.run_search(parse([*line, "--option", own[0], "--option", own[1]]), spaces)
    assert dict(built) == {"fedavg": (), "fafed": ("momentum=0.5", "second_moment_decay=0.9")}
    with pytest.raises(ValueError, match=r"such as --option fafed\.momentum=0\.5"):
        parse([*line, "--option", "momentum=0.5"])
    with pytest.raises(ValueError, match="'scaffold' is none of fedavg, fafed"):
        parse([*line, "--option", "scaffold.mixing=0.5"])
    with pytest.raises(ValueError, match=r"option momentum is 0\.5, and --space varies it"):
        parse([*line, "--space", "fafed.momentum=0.1,0.2", "--option", "fafed.momentum=0.5"])
    parse([*line, "--space", "fafed.momentum=0.1", "--option", "fafed.second_moment_decay=0.5"])


def test_the_options_of_the_server_optimizer_are_in_the_space(monkeypatch):
    searched = []
    monkeypatch.setattr(tuning, "start", lambda *arguments: None)
    monkeypatch.setattr(
        tuning, "run_search", lambda command, spaces: searched.append(spaces) or result()
    )
    line = ["tune", "--algorithm", "fedavg", "fedopt", "--server-lr", "0.1"]
    line += ["--space", "client_lr=0.1,0.2", "--space", "fedopt.momentum=0.5,0.9"]
    assert cli.main([*line, "--option", "fedopt.server_optimizer=momentum"]) == 0
    rates = {"client_lr": [0.1, 0.2]}
    assert searched == [{"fedavg": rates, "fedopt": {**rates, "momentum": [0.5, 0.9]}}]
    assert cli.main([*line, "--option", "fedopt.server_optimizer=adam"]) == 2


def test_the_table_and_the_files_are_written(ended, tmp_path, capsys):
    files = [tmp_path / "trials.csv", tmp_path / "trials.png"]
    assert ended(result(), "--out", str(files[0]), "--figure", str(files[1])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| fedavg")
    assert lines[-2:] == list(map(str, files))
    assert files[0].read_text().splitlines()[1] == "fedavg,0.1,0,9,0.25"
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags", [(), ("--quiet",)])
def test_the_table_ends_with_a_line(ended, flags, capsys):
    assert ended(result(), *flags) == 0
    assert capsys.readouterr().out == result().table() + "\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [("tune", "Print the table and errors only."), ("rerun", "Print whether they differ, and")],
)
def test_the_help_says_what_quiet_prints(command, said, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert said in capsys.readouterr().out


def test_the_status_says_how_the_search_ended(ended, capsys):
    assert ended(Diverged("all points of 'fedavg' diverged")) == 3
    assert capsys.readouterr().err == "fedjax-lab: all points of 'fedavg' diverged\n"
    assert ended(KeyboardInterrupt(), "--keep-in", "found") == 130
    assert "found has the finished batches; the same command resumes." in capsys.readouterr().err
    assert ended(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "fedjax-lab: interrupted.\n"


def test_flags_reach_the_search(monkeypatch):
    from fedjax_lab.tuning import tune as module

    def count_fn(params, examples):
        return params + examples, None

    setup = SimpleNamespace(vary=None, params=None, clients=None, count_fn=count_fn)
    monkeypatch.setattr(building, "build", lambda config, **_: setup)
    given = []
    monkeypatch.setattr(module, "tune", lambda *arguments, **named: given.append(named))
    spaces = {"fedavg": {"client_lr": [0.1]}}
    more = ["--average", "3", "--sampler", "tpe", "--budget", "7", "--seeds", "4", "5"]
    tuning.run_search(parse([*LINE, *more, "--score", "accuracy"]), spaces)
    tuning.run_search(parse(LINE), spaces)
    by_accuracy, by_loss = given
    attacked = parse([*LINE, "--attack", "sign_flip:0.2", "--seed", "3"])
    with pytest.warns(UserWarning, match="all runs of a search have the attackers of seed 3"):
        tuning.run_search(attacked, spaces)
    assert by_accuracy["score"](np.float32(1), np.float32(2)) == 3
    chosen = {name: by_accuracy[name] for name in ("mode", "average", "sampler", "budget", "seeds")}
    assert chosen == {
        "mode": "max",
        "average": 3,
        "sampler": "tpe",
        "budget": 7,
        "seeds": (4, 5),
    }
    assert (by_loss["score"], by_loss["mode"], by_loss["sampler"]) == (None, "min", None)
    count_fn.score = "mean_squared_error"
    with pytest.raises(ValueError, match="this data set has mean_squared_error: use loss"):
        tuning.run_search(parse([*LINE, "--score", "accuracy"]), spaces)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "fedavg", "fedavg"], "it has a method twice"),
        (["--methods", "fedavg", "--algorithm=scaffold"], r"--methods \(or --algorithm\) twice"),
        (["--methods", "fedavg", "--space", "client_lr=0.1,0.1"], "it has a value twice"),
    ],
)
def test_nothing_is_given_twice(arguments, message, capsys):
    space = [] if "--space" in arguments else ["--space", "client_lr=0.1,0.2"]
    assert cli.main(["tune", "--dataset", "digits", *arguments, *space]) != 0
    assert re.search(message, capsys.readouterr().err)


def test_a_space_of_one_method_of_your_own(monkeypatch):
    """Its name has a dot, as METHOD.NAME=VALUE has one."""
    monkeypatch.setattr(tuning, "may_vary", lambda settings: ["client_lr"])
    methods = ("fedavg", "my.module:method")
    texts = ["client_lr=0.1,0.2", "my.module:method.client_lr=0.5"]
    assert tuning.space_of(texts, "fedavg", methods) == {"client_lr": [0.1, 0.2]}
    assert tuning.space_of(texts, "my.module:method", methods) == {"client_lr": [0.5]}
