"""Several runs by one command: their directories and settings, what is skipped, and the table."""

import json
import re

import numpy as np
import pytest

from fedjax_lab.command import launch, runner
from fedjax_lab.command.cli import main
from fedjax_lab.command.combinations import list_runs
from fedjax_lab.command.commands import parse
from fedjax_lab.command.config import RunConfig
from fedjax_lab.report import load_runs
from tests.command.test_cli import Interrupt

SMALL = [
    *("--model", "linear", "--rounds", "4", "--eval-every", "2", "--cohort-size", "2"),
    *("--num-clients", "6", "--local-steps", "1", "--batch-size", "4", "--replace"),
    *("--client-map", "scan"),
]
GRID = [
    "--algorithm",
    "fedavg",
    "fedprox",
    "--partition",
    "iid",
    "dirichlet:1",
    "--seeds",
    "0",
    "1",
]
GRID += ["--option", "fedprox.prox_weight=0.5"]
NAMES = [
    f"{method}-digits-{partition}-{option}seed{seed}"
    for method, option in (("fedavg", ""), ("fedprox", "prox_weight0.5-"))
    for partition in ("iid", "dirichlet1")
    for seed in (0, 1)
]


def runs_of(*words):
    command = parse(["run", *words])
    return list_runs(command.settings, dict(command.lists), command.seeds)


@pytest.mark.parametrize("words", [("--seeds", "0", "1"), ("--algorithm", "fedavg", "scaffold")])
def test_several_runs_have_no_directory_inside_of_a_run(words, tmp_path):
    where = ("--run-dir", str(tmp_path))
    assert len(runs_of(*words, *where)) == 2
    (tmp_path / "config.json").write_text("{}")
    assert len(runs_of(*where)) == 1  # which goes on there
    with pytest.raises(ValueError, match=r"run_dir is .*, the directory of one run, inside of"):
        runs_of(*words, *where)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(the folder of a grid of which a signal stopped the third run, exit status)."""
    folder = tmp_path_factory.mktemp("grid")
    build, calls = runner.build_loggers, []

    def third(*arguments):
        calls.append(arguments)
        return [Interrupt(2)] if len(calls) == 3 else build(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "build_loggers", third)
        status = main(["run", *SMALL, *GRID, "--run-dir", str(folder), "--quiet"])
    return folder, status


def test_a_grid_goes_on_where_it_stopped_and_ends_with_a_table(finished, capsys, monkeypatch):
    folder, status = finished
    assert status == 130
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES[:3])
    ran, run = [], runner.run
    monkeypatch.setattr(
        runner, "run", lambda config, **more: ran.append(config) or run(config, **more)
    )
    command = ["run", *SMALL, *GRID, "--run-dir", str(folder)]
    assert main(command) == 0
    assert [config.output.run_dir for config in ran] == [str(folder / name) for name in NAMES[2:]]
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("[")]
    assert [line.split(":")[0] for line in lines] == [
        f"[{place}/8] {name}" for place, name in enumerate(NAMES, 1)
    ]
    runs = {run.path.name: run for run in load_runs([folder])}
    assert sorted(runs) == sorted(NAMES)
    for name, line in zip(NAMES, lines, strict=True):
        assert f": accuracy {100 * runs[name].rows[-1]['accuracy']:.2f} %" in line
        assert line.endswith("finished before") == (name in NAMES[:2])
    assert runs[NAMES[-1]].config["hyperparameters"]["prox_weight"] == 0.5
    assert "prox_weight" not in runs[NAMES[0]].config["hyperparameters"]
    # The mean of the last evaluation over the seeds, of each method and partition.
    table = dict(re.split("  +", line, maxsplit=1) for line in said.out.splitlines() if "±" in line)
    assert sorted(table) == ["fedavg", "fedprox"]
    for place, method in enumerate(("fedavg", "fedprox")):
        cells = re.findall(r"([\d.]+) ±", table[method])
        for column, cell in enumerate(cells):  # columns in the order of names: dirichlet:1, iid
            of = [runs[name] for name in NAMES[4 * place :][:4][2 - 2 * column :][:2]]
            mean = np.mean([100 * run.rows[-1]["accuracy"] for run in of])
            assert float(cell) == pytest.approx(mean, abs=0.006)
    assert "report" in said.out.splitlines()[-1]
    ran.clear()
    assert main(command) == 0
    assert not ran
    assert capsys.readouterr().out == said.out


def test_what_has_changed_runs_again(finished):
    folder, _ = finished
    done = RunConfig.from_file(folder / NAMES[0] / "config.json")
    config = done.replace(run_dir=str(folder / NAMES[0])).resolve()
    assert launch.finished_before(config) is not None
    assert launch.finished_before(config.replace(rounds=5)) is None
    file = folder / NAMES[0] / "config.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps(before | {"data": before["data"] | {"hash": "of other examples"}}))
    assert launch.finished_before(config) is None
    file.write_text(json.dumps(before))
    scored = folder / NAMES[0] / "partition.json"  # which is written after the clients' scores
    scored.rename(scored.with_suffix(".away"))
    assert launch.finished_before(config) is None
    scored.with_suffix(".away").rename(scored)
    assert launch.finished_before(config) is not None
    summary = folder / NAMES[0] / "summary.json"
    whole = summary.read_text()
    known = json.loads(whole)
    del known["worst_10_percent_accuracy"]  # a longer run that was killed before it was scored
    summary.write_text(json.dumps(known))
    assert launch.finished_before(config) is None
    summary.write_text(whole)


def test_other_clients_or_times_of_the_same_examples_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.normal(size=(30, 3)), "y_train": np.arange(30) % 2}
    arrays |= {"x_test": rng.normal(size=(6, 3)), "y_test": np.arange(6) % 2}
    np.savez("a.npz", **arrays, owner=np.arange(30) % 5)
    np.savez("times.npz", availability=np.full(5, 0.9))
    words = ["run", *SMALL[:6], "--local-steps", "1", "--batch-size", "4", "--cohort-size", "3"]
    words += ["--dataset", "npz:a.npz", "--partition", "natural:owner", "--seeds", "0", "1"]
    for more in ([], ["--times", "times.npz"]):
        command = [*words, *more, "--run-dir", f"runs{len(more)}", "--quiet"]
        assert main(command) == main(command) == 0
        np.savez("times.npz", availability=rng.random(5))
        if not more:
            np.savez("a.npz", **arrays, owner=np.arange(30) % 3)
        assert main(command) == 2  # the directory has other data
        np.savez("a.npz", **arrays, owner=np.arange(30) % 5)


def test_one_value_each_is_the_run_of_before(tmp_path):
    one = runs_of("--algorithm", "scaffold", "--partition", "iid")
    assert one == [RunConfig.of(algorithm="scaffold", partition="iid").resolve()]
    assert one[0].output.run_dir == "runs/scaffold-digits-iid-seed0"
    seeds = runs_of("--run-dir", "here", "--seeds", "3", "1")
    assert [config.output.run_dir for config in seeds] == ["here/seed3", "here/seed1"]
    assert [config.rounds.seed for config in seeds] == [3, 1]
    seeds = runs_of("--seeds", "3")
    assert seeds == [RunConfig.of(seed=3).resolve()]


def test_names_say_what_differs():
    lists = ["--client-lr", "0.1", "0.01", "--local-steps", "1", "2", "--model", "mlp", "linear"]
    names = [config.output.run_dir for config in runs_of(*lists)]
    assert len(set(names)) == 8
    assert names[0] == "runs/fedavg-digits-dirichlet0.1-mlp-client_lr0.1-local_steps1-seed0"


def test_a_file_may_have_lists(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text(
        "algorithm: [fedavg, gradma]\ncohort_size: [2, 3]\nrounds: 7\nseeds: [4, 5]\n"
        "client_lr_schedule: step:2:0.5\n"
    )
    configs = runs_of("--config", str(file), "--cohort-size", "4")
    assert [(c.method.algorithm, c.rounds.seed) for c in configs] == [
        *(("fedavg", 4), ("fedavg", 5), ("gradma", 4), ("gradma", 5))
    ]
    assert {(c.rounds.cohort_size, c.rounds.rounds) for c in configs} == {(4, 7)}


def test_a_printed_grid_gives_itself_back(tmp_path, capsys):
    assert main(["run", *GRID, "--print-config", "yaml"]) == 0
    file = tmp_path / "grid.yaml"
    file.write_text(capsys.readouterr().out)
    assert runs_of("--config", str(file)) == runs_of(*GRID)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--algorithm", "fedavg", "fedprox", "scaffold", "--option", "prox_weight=0.1"],
            "prox_weight is not an option of fedavg, scaffold; give it to one method alone, such "
            "as --option fedprox.prox_weight=0.1",
        ),
        (["--option", "fedprox.prox_weight=1"], "'fedprox' is none of fedavg"),
        (["--algorithm", "fedavg", "fedprox", "--option", "a=1"], "a is not an option of fedavg"),
        (["--algorithm", "fedavg", "fedavg"], "algorithm is ['fedavg', 'fedavg']; it has a value"),
        (["--cohort-size"], "cohort_size has no value"),
        (["--cohort-size", "5", "30"], "cohort_size is 30; it must be between 1 and 20"),
        (["--algorithm", "fedavg", "fedavgg"], "algorithm is 'fedavgg'"),
        (["--seeds", "0", "0"], "seeds is [0, 0]"),
        (["--dataset", "npz:a/x.npz", "npz:b/x.npz"], "two runs would have the directory runs/"),
    ],
)
def test_what_a_grid_refuses(words, message, capsys):
    assert main(["run", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("gradma", "algorithm is gradma, whose server needs the delta of each client"),
        ("fednova", "algorithm is fednova, whose server uses the number of local steps"),
    ],
)
def test_a_method_that_refuses_a_wrapper_stops_the_grid_first(method, message, tmp_path, capsys):
    folder = tmp_path / "grid"
    private = ["--dp-clip-norm", "1", "--dp-noise-multiplier", "1"]
    words = [*SMALL, "--algorithm", "fedavg", method, *private, "--run-dir", str(folder)]
    assert main(["run", *words]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: []", "algorithm has no value"),
        ("cohort_size: [2, x]", "cohort_size is 'x'; it must be an integer"),
        ("flip: [true, false]", "flip is [True, False]; it must be true or false"),
        ("seeds: 3", "seeds is 3; it must be a list of integers"),
    ],
)
def test_a_list_in_a_file_is_checked(text, message, tmp_path, capsys):
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    assert main(["run", "--config", str(file)]) == 2
    assert message in capsys.readouterr().err
