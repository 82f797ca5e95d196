"""export, run --seeds, sweep, rerun and the formats of a report, against what made the runs."""

import csv
import io
import json
import re
import shutil

import jax
import numpy as np
import pytest
from scipy import stats

from fedjax_lab.checks import is_traced
from fedjax_lab.command import launch, runner, setup
from fedjax_lab.command.cli import main
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.rerun import first_difference
from fedjax_lab.command.sweeping import sweep_points
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.report import load_runs
from fedjax_lab.report.formats import latex_escape, latex_table
from fedjax_lab.simulation import rounds
from fedjax_lab.simulation.stop import check_not_ended
from fedjax_lab.storage.saved_run import SavedRun, load_run
from tests.command.test_cli import FAST, Interrupt, read
from tests.report.by_hand import write_run

SMALL = [*FAST, "--client-lr", "0.05"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, result of seed 0 without the command line), with runs of seeds 0 and 1 in it."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["run", *SMALL, "--run-dir", str(folder), "--seeds", "0", "1", "--quiet"]) == 0
    config = RunConfig.from_file(folder / "seed0" / "config.json")
    directory = tmp_path_factory.mktemp("alone")
    alone = runner.run(
        RunConfig.from_dict({**config.to_dict(), "run_dir": str(directory)}), progress=False
    )
    return folder, alone


@pytest.mark.methods
def test_an_exported_model_is_that_of_the_run_bit_for_bit(finished, tmp_path, capsys):
    folder, alone = finished
    file = tmp_path / "model.npz"
    assert main(["export", str(folder / "seed0"), str(file)]) == 0
    said = capsys.readouterr().out
    assert "classifier/kernel  float32  64x10" in said
    assert f"{file}: 650 numbers, after round 6" in said
    expected = alone.params["classifier"]
    with np.load(file) as arrays:
        assert sorted(arrays.files) == [f"classifier/{name}" for name in sorted(expected)]
        for name, leaf in expected.items():
            assert arrays[f"classifier/{name}"].tobytes() == np.asarray(leaf).tobytes()


@pytest.mark.methods
def test_an_export_of_a_diverged_run_says_so(finished, tmp_path, capsys):
    folder, _ = finished
    shutil.copytree(folder / "seed0", tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    changed = {**summary, "stopped": "diverged", "round": 9}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(changed))
    main(["export", str(tmp_path / "run"), str(tmp_path / "model.npz"), "--quiet"])
    said = capsys.readouterr().err
    assert "diverged by round 9; the model is that of the checkpoint of round 6" in said


@pytest.mark.slow
def test_seeds_are_runs_of_their_own(finished, tmp_path, capsys, monkeypatch):
    folder, alone = finished
    rows = [json.loads(x) for x in (folder / "seed0" / "metrics.jsonl").read_text().splitlines()]
    assert rows == alone.history
    monkeypatch.chdir(tmp_path)
    assert main(["run", *SMALL, "--seeds", "1", "0"]) == 0
    names = [f"fedavg-digits-dirichlet0.1-client_lr0.05-seed{seed}" for seed in (1, 0)]
    shown = capsys.readouterr().out
    assert shown.splitlines()[-2:] == [f"runs/{name}" for name in names]
    for seed, name in zip((1, 0), names, strict=True):
        here, there = tmp_path / "runs" / name, folder / f"seed{seed}"
        assert (here / "metrics.jsonl").read_bytes() == (there / "metrics.jsonl").read_bytes()
    last = [100 * run.rows[-1]["accuracy"] for run in load_runs([folder])]
    interval = stats.ttest_1samp(last, 0).confidence_interval(0.95)
    half = (interval.high - interval.low) / 2
    mean = next(line for line in shown.splitlines() if line.startswith("mean ± 95 %"))
    assert f"{np.mean(last):.2f} ± {half:.2f}" in mean
    # The seeds of real runs are one group, although their data and first models differ.
    assert main(["report", str(folder), "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    (line,) = [line for line in lines if line["metric"] == "last (%)"]
    assert (line["method"], line["n"]) == ("fedavg", "2")
    assert float(line["mean"]) == pytest.approx(np.mean(last))
    assert float(line["half_width"]) == pytest.approx(half)


@pytest.mark.filterwarnings("always")
def test_of_several_seeds_the_worst_status_counts(tmp_path, capsys, monkeypatch):
    statuses = iter([0, 3, 0])
    monkeypatch.setattr(launch, "_run_of_several", lambda *arguments: next(statuses))
    command = ["run", *SMALL, "--run-dir", str(tmp_path / "a"), "--quiet", "--seeds"]
    assert main([*command, "0", "1", "2"]) == 3
    monkeypatch.undo()
    monkeypatch.setattr(runner, "build_loggers", lambda *arguments: [Interrupt(2)])
    assert main([*command, "0", "1"]) == 130
    assert "stopped after round 2 of 6" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["seed0"]  # the next did not begin
    check_not_ended()  # the exit status has said it, and another command may run


@pytest.mark.slow
def test_a_sweep_is_the_runs_of_its_points(finished, tmp_path, capsys):
    folder, _ = finished
    out = tmp_path / "sweep.csv"
    points = ["--point", "client_lr=0.05,0.2", "--point", "clip_norm=0.5,1e6"]
    sweep = ["sweep", *FAST, *points, "--seeds", "0", "1", "--run-dir", str(tmp_path / "grid")]
    assert main([*sweep, "--out", str(out)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert main(sweep) == 0  # from the directory, which has all
    assert capsys.readouterr().out.splitlines() == shown[:-2]
    assert re.split("  +", shown[0]) == [
        *("client_lr", "clip_norm", "accuracy (%)", "best (%)", "test loss")
    ]
    assert [line.split()[:2] for line in shown[1:5]] == [
        *(["0.05", "0.5"], ["0.05", "1e+06"], ["0.2", "0.5"], ["0.2", "1e+06"])
    ]
    assert max(map(len, shown[:5])) <= 80  # the rest names the file
    lines = list(csv.DictReader(io.StringIO(out.read_text())))
    # Clipped to 1e6 nothing is clipped; seed 1 on the partition of seed 0, all runs by run.
    run_dir = str(tmp_path / "seed1")
    flags = ["--seed", "1", "--partition-seed", "0", "--quiet", "--run-dir", run_dir]
    assert main(["run", *SMALL, *flags]) == 0
    runs = load_runs([folder / "seed0", run_dir])
    for name in ("accuracy", "test_loss", "loss", "bytes_up"):
        (line,) = [
            line
            for line in lines
            if (line["client_lr"], line["clip_norm"], line["metric"]) == ("0.05", "1000000.0", name)
        ]
        values = [run.rows[-1][name] for run in runs]
        assert line["n"] == "2"
        assert float(line["mean"]) == pytest.approx(np.mean(values), rel=1e-3)


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([], {}, "point is missing; add at least one"),
        (["client_lr"], {}, r"point is 'client_lr'; it must be of the form name=value,value"),
        (["client_lr=a,b"], {}, "with numbers"),
        (["client_lr=0.1,0.1"], {}, "has a value twice"),
        (["client_lr=0.1", "client_lr=0.2"], {}, "point names client_lr twice"),
        (["client_lr=0.1,-1"], {}, "client_lr is -1"),
        (["clip_norm=0"], {}, "clip_norm is 0"),
        (["rounds=1,2"], {}, "the name in point is 'rounds'; it must be one of client_lr, clip_"),
        (["momentum=0.1"], {}, "the name in point is 'momentum'"),
        (["memory_size=2,3"], {"algorithm": "gradma"}, "the name in point is 'memory_size'"),
        (["server_lr=1,2"], {"algorithm": "feddyn"}, "the name in point is 'server_lr'"),
        (["client_lr=1"], {"algorithm": "fedavgg"}, "algorithm is 'fedavgg'"),
    ],
)
def test_what_a_grid_refuses(texts, settings, message):
    with pytest.raises(ValueError, match=message):
        sweep_points(texts, RunConfig.of(**settings))


def test_a_grid_fills_in_what_a_method_requires():
    points, config = sweep_points(
        ["server_lr=0.1,0.01", "beta1=0.5", "tau=1e-3,1"], RunConfig.of(algorithm="fedadam")
    )
    assert points[:2] == [
        {"server_lr": 0.1, "beta1": 0.5, "tau": 0.001},
        {"server_lr": 0.1, "beta1": 0.5, "tau": 1.0},
    ]
    assert len(points) == 4
    assert config.method.server_lr == 0.1
    points, config = sweep_points(["momentum=0.1,0.2"], RunConfig.of(algorithm="stem"))
    assert config.method.option == ("momentum=0.1",)


@pytest.mark.slow
def test_a_run_repeated_has_equal_bits(finished, tmp_path, capsys):
    old = tmp_path / "old"
    shutil.copytree(finished[0] / "seed0", old)
    assert main(["rerun", str(old), "--quiet"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["equal bits: 3 rows of metrics.jsonl, 650 numbers of params", "equal versions"]
    assert read(tmp_path / "old-rerun" / "rerun.json")["equal"]
    assert [run.path.name for run in load_runs([tmp_path])] == ["old"]
    assert main(["rerun", str(old), "--quiet"]) == 2
    assert "old-rerun', which has a finished run" in capsys.readouterr().err

    # Another number in the old metrics, and other versions.
    rows = (old / "metrics.jsonl").read_text().splitlines()
    rows[1] = json.dumps(json.loads(rows[1]) | {"loss": 0.5})
    (old / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    config = read(old / "config.json")
    config["versions"]["numpy"] = "1.0"
    (old / "config.json").write_text(json.dumps(config))
    assert main(["rerun", str(old), "--out", str(tmp_path / "new"), "--quiet"]) == 1
    first, versions = capsys.readouterr().out.splitlines()
    assert first.startswith("different bits, first at metrics.jsonl, round 4: loss (there 0.5, now")
    assert versions == f"versions that differ: numpy (there '1.0', now '{np.__version__}')"
    assert not read(tmp_path / "new" / "rerun.json")["equal"]


def test_two_leaves_whose_paths_have_one_text_are_both_compared(tmp_path):
    (tmp_path / "metrics.jsonl").touch()

    def saved(first, second):
        params = {"a/b": np.array([first, 1.0]), "a": {"b": np.array([1.0, second])}}
        return SavedRun(params, [], {}, 1)

    before = saved(0.0, 0.0)
    assert first_difference(tmp_path, tmp_path, before, saved(0.0, 0.0)) is None
    for changed, place in ((saved(2.0, 0.0), 0), (saved(0.0, 2.0), 1)):
        found = first_difference(tmp_path, tmp_path, before, changed)
        assert found == f"params, a/b[{place}] (there 0.0, now 2.0)"


@pytest.mark.slow
def test_other_params_are_found(finished, tmp_path):
    here, other = finished[0] / "seed1", tmp_path / "other"
    assert main(["run", *FAST, "--run-dir", str(other), "--seed", "1", "--quiet"]) == 0
    before, after = load_run(here), load_run(other)
    found = first_difference(here, here, before, after)  # the same rows, and another model
    bias = [run.params["classifier"]["bias"] for run in (before, after)]
    place = int(np.flatnonzero(bias[0] != bias[1])[0])
    there, now = (str(leaf[place]) for leaf in bias)
    assert found == f"params, classifier/bias[{place}] (there {there}, now {now})"
    assert first_difference(here, here, before, before) is None


@pytest.mark.methods
def test_a_run_that_did_not_end_is_not_repeated(finished, tmp_path, capsys):
    old = tmp_path / "old"
    shutil.copytree(finished[0] / "seed0", old)
    (old / "summary.json").unlink()
    assert main(["rerun", str(old)]) == 2
    assert "an unfinished run; resume it first" in capsys.readouterr().err
    assert not (tmp_path / "old-rerun").exists()


def test_the_formats_of_a_report(tmp_path, capsys):
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", [0.1, 0.5 + seed / 10], seed=seed)
        write_run(tmp_path / f"b{seed}", [0.1, 0.4], seed=seed, algorithm="my_method")
    runs = [str(path) for path in tmp_path.glob("*")]
    assert main(["report", *runs, "--format", "latex"]) == 0
    latex = capsys.readouterr().out
    # 55 % with deviations of 5 points: t(0.975, 1) = 12.706 times sqrt(50) / sqrt(2).
    assert r"  fedavg & 2 & 55.00 $\pm$ 63.53 & " in latex
    assert r"  my\_method & 2 & 40.00 $\pm$ 0.00 & " in latex
    assert latex.count(r"\\") == 3  # a head and two methods
    assert [latex.count(f"\\{rule}") for rule in ("toprule", "midrule", "bottomrule")] == [1, 1, 1]
    assert latex.isascii()
    out = tmp_path / "out"
    out.mkdir()
    assert main(["report", *runs, "--format", "csv", "--out", str(out / "t.csv")]) == 0
    assert main(["report", *runs, "--format", "markdown"]) == 0
    markdown = capsys.readouterr().out
    assert markdown.startswith("# Report\n\n## Accuracy\n")
    assert "](" not in markdown  # no images
    lines = list(csv.DictReader(io.StringIO((out / "t.csv").read_text())))
    found = {(x["method"], x["metric"]): (x["mean"], x["half_width"], x["n"]) for x in lines}
    assert float(found["fedavg", "top (%)"][0]) == pytest.approx(55)
    assert found["my_method", "bytes_up"] == ("10000000.0", "0.0", "2")
    assert found["fedavg", "test_loss"] == ("", "", "2")  # not measured
    assert main(["report", *runs, "--format", "html", "--out", str(out / "p.html")]) == 0
    page = (out / "p.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("data:image/png;base64,") == 3
    assert sorted(path.name for path in out.iterdir()) == ["p.html", "t.csv"]
    assert not (tmp_path / "report").exists()
    assert main(["report", *runs, "--format", "csv", "--out", str(out)]) == 2
    assert "a directory; it must be a file" in capsys.readouterr().err
    assert main(["report", *runs, "--format", "csv", "--out", str(out / "no" / "t.csv")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_latex_is_escaped():
    assert latex_escape("a_b & 5 % of #1, x^2 ~ {y} \\ $") == (
        r"a\_b \& 5 \% of \#1, x\textasciicircum{}2 \textasciitilde{} \{y\} "
        r"\textbackslash{} \$"
    )
    assert r"  a & --" in latex_table([["m", "n"], ["a", "-"]])


@pytest.mark.slow
def test_client_rows_stand_where_the_setting_says(tmp_path):
    settings = ["--algorithm", "scaffold", "--client-map", "scan", *FAST]
    finals = []
    for store in ("device", "host"):
        directory = tmp_path / store
        where = ["--client-store", store, "--run-dir", str(directory)]
        assert main(["run", *settings, *where]) == 0
        assert read(directory / "config.json")["client_store"] == store
        finals.append((directory / "metrics.jsonl").read_text())
    assert finals[0] == finals[1]


def traced(monkeypatch):
    """A list that grows by each trace of a round in the runs from now on."""
    calls, draw = [], Schedule.draw
    monkeypatch.setattr(Schedule, "draw", lambda *given: calls.append(given) or draw(*given))
    return calls


@pytest.mark.methods
def test_another_seed_is_not_traced_again_and_has_the_same_results(monkeypatch, tmp_path):
    def run(name, **changed):
        config = RunConfig.of(
            rounds=2, eval_every=1, num_clients=6, cohort_size=2, local_steps=2, batch_size=4
        )
        config = config.replace(run_dir=str(tmp_path / name), **changed)
        calls.clear()
        return runner.run(config, progress=False), sum(is_traced(call[3]) for call in calls)

    calls = traced(monkeypatch)
    rounds._kept.clear()
    setup._last_task.clear()
    _, first = run("0", seed=0)
    again, second = run("1", seed=1)
    assert second < first
    _, other = run("2", seed=1, client_lr=0.05)
    assert other == first
    setup._last_task.clear()
    rounds._kept.clear()
    alone, third = run("3", seed=1)
    assert third == first
    assert [row["loss"] for row in again.history] == [row["loss"] for row in alone.history]
    jax.tree.map(np.testing.assert_array_equal, again.params, alone.params)


@pytest.mark.methods
def test_attackers_of_another_seed_are_others_and_own_code_is_never_shared(monkeypatch, tmp_path):
    def method(seed, **changed):
        config = RunConfig.of(num_clients=6, cohort_size=2, local_steps=1, seed=seed, **changed)
        return setup.build(config.replace(run_dir=str(tmp_path))).algorithm

    assert method(0) is method(1)
    assert method(0) is method(0, partition="iid")
    assert method(0) is not method(0, client_lr=0.2)
    assert method(0, attack="sign_flip:0.3") is not method(1, attack="sign_flip:0.3")
    monkeypatch.setattr(setup, "sources", lambda config: {"own.py": "1234"})
    assert method(0) is not method(1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"accuracy": 0.5}, "accuracy 50.00 %"),
        ({"accuracy": 0.5, "personal_accuracy": 0.75}, "own models, accuracy 75.00 %"),
        ({"accuracy": 0.5, "perplexity": 60.0}, "accuracy 50.00 %"),
        ({"mean_squared_error": 0.125}, "mean squared error 0.125"),
        (
            {"mean_squared_error": 0.125, "personal_mean_squared_error": 0.25},
            "own models, mean squared error 0.25",
        ),
        ({"accuracy": None}, "no score"),
        ({"loss": 1.0}, "no score"),
    ],
)
def test_a_run_of_several_says_the_score_that_a_report_compares(row, said):
    assert launch.last_score([{"round": 1, "accuracy": 0.0}, {"round": 2, **row}]) == said


def test_the_summary_of_a_text_run_without_a_perplexity_has_a_dash(tmp_path):
    """As that of a diverged run, whose row has null."""
    path = write_run(tmp_path / "run", [0.5], more={"perplexity": 1.0})
    file = path / "metrics.jsonl"
    row = json.loads(file.read_text()) | {"perplexity": None}
    file.write_text(json.dumps(row) + "\n")
    facts = dict(map(tuple, launch.facts_of(load_runs([path])[0])))
    assert facts["lowest perplexity"] == "-"
    assert facts["test loss"] == "-"
