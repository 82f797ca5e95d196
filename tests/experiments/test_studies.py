"""The machinery of the studies: tuning, resuming, results and report; what is declared."""

import dataclasses
import importlib
import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import experiments
from experiments.studies import runs as machinery
from experiments.studies.command import main
from experiments.studies.paper_numbers import paper_accuracies
from experiments.studies.runs import Problem, gather, run_study, tune
from experiments.studies.study import Column, Method, Scale, Study
from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.command.build import build_algorithm
from fedjax_lab.qp.residuals import LARGEST_RESIDUAL, QP_RESIDUALS
from fedjax_lab.report.cells import UNSOLVED
from tests.tiers import few

ROOT = Path(experiments.__file__).parent
PAPERS = sorted(file.parent.name for file in ROOT.glob("*/discussion.md"))
BROKEN = 1e30  # a learning rate with which nothing stays finite

COLUMN = Column(
    {
        "dataset": "digits",
        "model": "linear",
        "partition": "iid",
        "num_clients": 6,
        "cohort_size": 3,
        "batch_size": 8,
        "local_steps": 2,
        "replace": True,  # soonest compiled
        "rounds": 4,
        "eval_every": 2,
        "client_map": "scan",
    },
    tuning_rounds=2,
)
SCALE = Scale(
    {"iid": COLUMN},
    hardware="any",
    minutes=1,
    finalists=2,
    seeds=(1, 2),
    held_out=100,
    landscape=("FedAvg",),
)
METHOD = Method("fedavg", {"client_lr": (0.01, 0.3, BROKEN)})
STUDY = Study("tiny/digits", "A tiny study", "Six clients.", {"FedAvg": METHOD}, {"smoke": SCALE})


@pytest.fixture(scope="module")
def problem():
    return Problem(COLUMN, SCALE.held_out)


@pytest.fixture(scope="module")
def runs(problem, tmp_path_factory):
    """Where the tiny study has been run, tuned by an eye that has no test set."""

    def blindfolded(problem, *arguments):
        test, problem.test = problem.test, None
        try:
            return tune(problem, *arguments)
        finally:
            problem.test = test

    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machinery, "Problem", lambda column, held_out: problem)
        patch.setattr(machinery, "tune", blindfolded)
        run_study(STUDY, SCALE, folder / STUDY.name / "smoke")
    return folder


def cell_of(runs):
    return runs / STUDY.name / "smoke" / "iid" / "FedAvg"


def tuning_of(runs):
    return json.loads((cell_of(runs) / "tuning.json").read_text())


def plain_run(train, test, client_lr, seed):
    """The rows of ``simulate`` on these data, by parts of the public interface alone."""
    clients = data.partition(train, "iid", num_clients=6, seed=seed)
    mean, std, scale = data.normalization(train)
    prepare = data.preprocess(mean, std, scale=scale)
    model = models.build("linear", 10)
    first = prepare(data.Examples(train.x[:1], train.y[:1]), None).x

    def accuracy(params):
        shown = prepare(data.Examples(test.x, test.y), None)
        return {"accuracy": (model.apply(params, shown.x).argmax(-1) == shown.y).mean()}

    return simulate(
        algorithms.fedavg(models.classification_loss(model.apply, prepare), client_lr=client_lr),
        model.init(jax.random.key(seed), first),
        clients,
        rounds=4,
        cohort_size=3,
        local_steps=2,
        batch_size=8,
        replace=True,
        seed=seed,
        evaluate=accuracy,
        eval_every=2,
        client_map="scan",
    )


@pytest.mark.slow
def test_final_runs_are_those_of_simulate_on_all_training_data(problem, runs):
    train, test = data.load("digits")
    rate = tuning_of(runs)["chosen"]["client_lr"]
    expected = plain_run(train, test, rate, seed=2)
    folder = cell_of(runs) / "seed2"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [2, 4]
    np.testing.assert_allclose(
        [row["accuracy"] for row in rows],
        [row["accuracy"] for row in expected.history],
        atol=1e-6,
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(expected.params))
    assert rows[-1]["bytes_up"] == 4 * 3 * size
    assert sorted(path.name for path in cell_of(runs).glob("seed*")) == ["seed1", "seed2"]
    assert not (folder / "checkpoints").exists()


@pytest.mark.methods
def test_tuning_scores_held_out_training_images(problem, runs):
    found = tuning_of(runs)  # ``runs`` tunes without a test set
    assert found["tried"].keys() == {json.dumps({"client_lr": lr}) for lr in (0.01, 0.3, BROKEN)}
    assert found["tried"][json.dumps({"client_lr": BROKEN})] is None
    assert len(found["finalists"]) == 2
    key = json.dumps(found["chosen"])
    assert found["finalists"][key] == max(found["finalists"].values())

    fit, validation = problem.fit, problem.validation
    again = plain_run(fit, validation, found["chosen"]["client_lr"], machinery.TUNING_SEED)
    best = max(row["accuracy"] for row in again.history)
    np.testing.assert_allclose(found["finalists"][key], best, atol=1e-6)

    # Both together are the training set.
    assert len(validation.y) == SCALE.held_out
    both, whole = (
        np.concatenate(
            [np.column_stack([np.reshape(part.x, (len(part.y), -1)), part.y]) for part in parts]
        )
        for parts in ((fit, validation), (problem.train,))
    )
    np.testing.assert_array_equal(both[np.lexsort(both.T)], whole[np.lexsort(whole.T)])


@pytest.mark.methods
def test_finished_cells_are_skipped_and_other_settings_refused(problem, runs, monkeypatch):
    folder = runs / STUDY.name / "smoke"
    before = {path: path.read_bytes() for path in folder.rglob("*.json*")}
    ran = []

    def fake_run(config, **rest):
        ran.append(config.rounds.seed)
        return SimpleNamespace(interrupted=False)

    monkeypatch.setattr(machinery, "Problem", lambda column, held_out: problem)
    monkeypatch.setattr(machinery, "tune", None)
    monkeypatch.setattr(machinery, "run", fake_run)
    run_study(STUDY, SCALE, folder)
    assert ran == []
    more = dataclasses.replace(SCALE, seeds=(1, 2, 7), landscape=())
    run_study(STUDY, more, folder)
    assert ran == [7]
    wider = dataclasses.replace(METHOD, grid={"client_lr": (0.01, 0.3, 1.0)})
    for study, scale in (
        (dataclasses.replace(STUDY, methods={"FedAvg": wider}), SCALE),
        (STUDY, dataclasses.replace(SCALE, held_out=200)),
    ):
        with pytest.raises(SystemExit, match="other settings"):
            run_study(study, scale, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*.json*")} == before


@pytest.mark.methods
def test_an_interrupted_run_is_no_result_and_goes_on(problem, runs, tmp_path, monkeypatch):
    scale = dataclasses.replace(SCALE, landscape=())
    cell = tmp_path / "iid" / "FedAvg"
    cell.mkdir(parents=True)
    shutil.copy(cell_of(runs) / "tuning.json", cell)
    shutil.copytree(cell_of(runs) / "seed1", cell / "seed1")
    real_run = machinery.run

    def stopped_run(config, **rest):
        return real_run(config, on_row=lambda row: signal.raise_signal(signal.SIGINT), **rest)

    monkeypatch.setattr(machinery, "Problem", lambda column, held_out: problem)
    monkeypatch.setattr(machinery, "run", stopped_run)
    with pytest.raises(KeyboardInterrupt):
        run_study(STUDY, scale, tmp_path)
    names = {file.name for file in (cell / "seed2").iterdir()}
    assert names >= {"partition.json", "summary.json", "metrics.jsonl"}  # as a whole run has them

    def seeds():
        gathered = gather(STUDY, "smoke", scale, tmp_path)
        return [run["seed"] for run in gathered["columns"]["iid"]["methods"]["FedAvg"]["runs"]]

    assert seeds() == [1]
    monkeypatch.setattr(machinery, "run", real_run)
    run_study(STUDY, scale, tmp_path)
    assert seeds() == [1, 2]
    whole, resumed = cell_of(runs) / "seed2", cell / "seed2"
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.methods
def test_cells_that_are_not_run_again_stay_as_they_are_kept(runs):
    found = gather(STUDY, "smoke", SCALE, runs / STUDY.name / "smoke")
    cell = found["columns"]["iid"]["methods"]["FedAvg"]

    def with_methods(**methods):
        column = {**found["columns"]["iid"], "methods": methods}
        return {**found, "columns": {"iid": column}, "versions": versions}

    versions = [{"fedjax_lab": "0.1"}, {"fedjax_lab": "0.0"}]  # of the latter no cell is left
    of_before = {**cell["code"], "fedjax_lab": "0.1"}
    old, half = {**cell, "seconds": 1.0, "code": of_before}, {**cell, "runs": cell["runs"][:1]}
    merged = machinery.with_kept(found, with_methods(FedAvg=old, FedSAM=old), SCALE.seeds)
    assert merged["columns"]["iid"]["methods"] == {"FedAvg": cell, "FedSAM": old}
    assert merged["versions"] == [versions[0], *found["versions"]]
    begun = {**found, "columns": with_methods(FedAvg=half, FedProx=half)["columns"]}
    merged = machinery.with_kept(begun, with_methods(FedAvg=old), SCALE.seeds)
    assert merged["columns"]["iid"]["methods"] == {"FedAvg": old, "FedProx": half}

    second = {**cell, "runs": cell["runs"][1:]}  # further seeds alone
    further = {**found, "columns": with_methods(FedAvg=second)["columns"]}
    first = {**found, "columns": with_methods(FedAvg=half)["columns"]}
    first["columns"]["iid"] = {**first["columns"]["iid"], "label_histogram": [[1, 2]]}
    merged = machinery.with_kept(further, first, SCALE.seeds)["columns"]["iid"]
    assert merged["methods"] == {"FedAvg": cell}
    assert merged["label_histogram"] == [[1, 2]]
    changed = {**cell, "runs": [{**cell["runs"][0], "stopped": "again"}]}  # one of two, run again
    again = {**found, "columns": with_methods(FedAvg=changed)["columns"]}
    merged = machinery.with_kept(again, found, SCALE.seeds[:1])["columns"]["iid"]["methods"]
    assert merged["FedAvg"]["runs"] == [changed["runs"][0], cell["runs"][1]]
    of_before = {**half, "chosen": {"client_lr": 0.01}}  # another point is no earlier seed
    merged = machinery.with_kept(further, with_methods(FedAvg=of_before), SCALE.seeds)
    assert merged["columns"]["iid"]["methods"] == {"FedAvg": of_before}

    other = with_methods(FedSAM=old)
    other["columns"]["iid"]["settings"] = {**COLUMN.settings, "rounds": 8}
    assert machinery.with_kept(found, other, SCALE.seeds)["columns"] == found["columns"]
    assert machinery.with_kept(found, {**other, "scale": "machine"}, SCALE.seeds) == found


@pytest.mark.parametrize(
    "file",
    [f for paper in PAPERS for f in sorted((ROOT / paper / "results").glob("*.json"))],
    ids=lambda file: file.stem,
)
def test_kept_results_are_of_whole_runs(file):
    """A run that ends before its last round has diverged, and has no loss there."""
    for name, column in json.loads(file.read_text())["columns"].items():
        for method, cell in column["methods"].items():
            for run in cell["runs"]:
                last = run["curves"]["round"][-1]
                diverged = "loss" in run["curves"] and run["curves"]["loss"][-1] is None
                whole = last == column["settings"]["rounds"]
                assert whole or diverged, f"{name}, {method}, seed {run['seed']}: round {last}"
                twice = [name for name in run["curves"] if name.startswith("own_")]
                assert not twice  # ``with_own`` makes them of others


@pytest.mark.parametrize("paper", PAPERS)
def test_kept_programs_that_were_not_solved_are_marked(paper):
    """In the tables of RESULTS.md, a line of which begins with the method."""
    page = (ROOT / paper / "RESULTS.md").read_text()
    for file in (ROOT / paper / "results").glob("*.json"):
        for column in json.loads(file.read_text())["columns"].values():
            for method, cell in column["methods"].items():
                curves = [
                    run["curves"].get(name, []) for run in cell["runs"] for name in QP_RESIDUALS
                ]
                worst = max((value or 0 for curve in curves for value in curve), default=0)
                is_marked = f"\n| {method} {UNSOLVED} " in page
                assert is_marked or worst <= LARGEST_RESIDUAL, f"{file.stem}, {method}: {worst}"


@pytest.mark.methods
def test_the_report_is_the_same_from_runs_and_from_the_results_alone(runs, tmp_path):
    out = tmp_path / "report"
    out.mkdir()
    (out / "discussion.md").write_text("## What showed\n\nNothing.\n")
    arguments = ["--report", "--scale", "smoke", "--out", str(out)]
    main((STUDY,), [*arguments, "--runs", str(runs)])
    written = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    names = {str(path.relative_to(out)) for path in written}
    assert names > {"results/digits.json", "RESULTS.md", "RESULTS.html"}
    text = (out / "RESULTS.md").read_text()
    assert text.endswith("## What showed\n\nNothing.\n")
    result = json.loads((out / "results" / "digits.json").read_text())
    assert result == gather(STUDY, "smoke", SCALE, runs / STUDY.name / "smoke")
    cell = result["columns"]["iid"]["methods"]["FedAvg"]
    first, second = (run["landscape"] for run in cell["runs"])
    assert np.shape(first["losses"]) == (len(first["offsets"]),) * 2
    assert set(second) == {"eigenvalues", "examples"}
    assert first["eigenvalues"] != second["eigenvalues"]
    tops = [100 * max(run["curves"]["accuracy"]) for run in cell["runs"]]
    assert f"{np.mean(tops):.2f} ± " in text

    for path in written:
        if path.suffix in (".md", ".html", ".png") and path.name != "discussion.md":
            path.unlink()
    main((STUDY,), [*arguments, "--runs", str(tmp_path / "nothing")])
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == written

    other = dataclasses.replace(STUDY, name="tiny/other")
    main((STUDY, other), ["other", *arguments, "--runs", str(tmp_path / "nothing")])
    assert (out / "RESULTS.md").read_text() == text  # the page keeps the studies not named


class Stub:
    """A problem whose scores are a formula of the point and the rounds; keeps what was asked."""

    column = COLUMN

    def __init__(self, score):
        self.score, self.asked = score, []

    def scores(self, method, points, rounds):
        self.asked.append((rounds, [tuple(point.values()) for point in points]))
        return [float(self.score(rounds=rounds, **point)) for point in points]


def test_tuning_tries_the_grid_and_then_one_after_the_other():
    def score(rounds, a, b, c):
        return 1 - ((a - 2) ** 2 + (b - 3) ** 2 + (c - a) ** 2) / 100

    alone = dataclasses.replace(SCALE, finalists=1)
    method = Method("fedavg", {"a": (1, 2), "b": (3, 4)}, then={"c": (0, 1, 2)}, start={"c": 1})
    stub = Stub(score)
    chosen, tried, finals = tune(stub, method, alone, lambda point: point["b"] == 3)
    assert chosen == {"a": 1, "b": 3, "c": 1}  # (2, 3, 1) is as good and comes later
    assert stub.asked == [(2, [(1, 3, 1), (2, 3, 1)]), (2, [(1, 3, 0), (1, 3, 2)])]
    assert (len(tried), finals) == (4, {})
    later = dataclasses.replace(method, start={"c": 2})
    assert tune(Stub(score), later, alone, lambda point: True)[0] == {"a": 2, "b": 3, "c": 2}
    single = dataclasses.replace(method, grid={"a": (1,), "b": (3,)}, then={}, start={"c": 1})
    assert tune(None, single, alone, lambda point: True) == ({"a": 1, "b": 3, "c": 1}, {}, {})
    one = dataclasses.replace(alone, grid_points=1)
    assert tune(None, method, one, lambda point: True)[0] == {"a": 1, "b": 3, "c": 1}


def test_what_diverges_later_is_passed_over():
    def score(rounds, lr):
        """1 is best early and diverges late; 0.5 diverges at once."""
        return np.nan if lr == 0.5 or (lr == 1.0 and rounds == 4) else lr

    method = Method("fedavg", {"lr": (0.2, 0.5, 1.0, 0.3, 0.1)})
    stub = Stub(score)
    chosen, tried, finals = tune(stub, method, SCALE, lambda point: True)
    assert chosen == {"lr": 0.3}
    assert stub.asked[1:] == [(4, [(1.0,), (0.3,)]), (4, [(0.2,)])]
    assert np.isnan(tried['{"lr": 0.5}'])
    assert np.isnan(finals['{"lr": 1.0}'])
    assert list(finals) == ['{"lr": 1.0}', '{"lr": 0.3}', '{"lr": 0.2}']


def test_the_command_names_what_there_is(capsys):
    main((STUDY,), ["--list"])
    assert "--scale smoke: iid; 2 seeds" in capsys.readouterr().out
    for arguments in (["table_9"], ["--scale", "smoke", "--methods", "FedSGD"]):
        with pytest.raises(SystemExit):
            main((STUDY,), arguments)
        assert re.search("there are: digits|it has FedAvg", capsys.readouterr().err)


def test_every_paper_has_a_make_target():
    makefile = (ROOT.parent / "Makefile").read_text()
    (named,) = re.findall(r"^STUDIES := (.*)$", makefile, re.MULTILINE)
    assert sorted(named.split()) == PAPERS


def scales_of(paper):
    studies = importlib.import_module(f"experiments.{paper}.__main__").STUDIES
    return [(study, name, scale) for study in studies for name, scale in study.scales.items()]


def no_loss(params, examples, key):
    """Nothing is trained."""


@pytest.mark.parametrize("paper", few(1, PAPERS))
def test_declared_runs_are_valid(paper):
    for study, _, scale in scales_of(paper):
        for column in scale.columns.values():
            for name in scale.methods or study.methods:
                method = study.methods[name]
                assert set(method.start) <= set(method.then)
                first = {key: values[0] for key, values in {**method.grid, **method.then}.items()}
                config = method.config(column, {**first, **method.start}).resolve()
                assert config.rounds.rounds % config.rounds.eval_every == 0
                assert column.tuning_rounds % config.rounds.eval_every == 0
                assert column.tuning_rounds <= config.rounds.rounds
                model = models.build(config.model.model, 10)
                if method.personal is not None:
                    assert method.personal.build(no_loss, **first).phases
                    continue
                for key, values in {**method.grid, **method.then}.items():
                    for value in values:
                        build_algorithm(config, no_loss, model, len, {key: value})


@pytest.mark.parametrize("paper", PAPERS)
def test_declared_studies_are_consistent(paper):
    for study, name, scale in scales_of(paper):
        assert study.paper == paper
        assert {"machine", "smoke"} <= set(study.scales) <= {"paper", "machine", "smoke"}
        assert set(scale.methods or ()) | set(scale.landscape) <= set(study.methods)
        assert scale.seeds
        assert machinery.TUNING_SEED not in scale.seeds
        assert (scale.grid_points == 1 and scale.seeds == (1,)) == (name == "smoke")
        for column in scale.columns.values():  # raises where the paper's file has no such number
            assert bool(column.paper) == bool(paper_accuracies(paper, column.paper, study.methods))
