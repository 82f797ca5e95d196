"""The machinery of the studies: resuming, tuning without the test set, the report."""

import dataclasses
import importlib
import json

import jax
import numpy as np
import pytest
from scipy import stats

from experiments import study as machinery
from experiments.study import Method, Problem, Scale, Study, run_study, settle, tune
from experiments.study_report import table, write_report
from fedjax_lab import algorithms, data, models, simulate
from fedjax_lab.simulation.rounds import Schedule

PAPERS = ("catalogue", "cfedavg", "fafed", "fedswa", "gradma")
SCALE = Scale(
    dataset="digits",
    model="mlp",
    model_options={"hidden": (8,)},
    num_clients=6,
    schedule=Schedule(cohort_size=3, batch_size=8, local_steps=2),
    rounds=4,
    tuning_rounds=2,
    eval_every=2,
    finalists=2,
    seeds=(1, 2),
    held_out=100,
    client_map="scan",
)
STUDY = Study(
    name="tiny/digits",
    title="A tiny study",
    notes="Six clients.",
    partitions=("iid",),
    methods={"FedAvg": Method("fedavg", {"client_lr": (0.01, 0.3)}, paper={"iid": 50.0})},
    scales={"smoke": SCALE},
)


@pytest.fixture(scope="module")
def problem():
    return Problem(SCALE)


@pytest.fixture(scope="module")
def finished(problem, tmp_path_factory):
    """The file of a finished study."""
    path = tmp_path_factory.mktemp("study") / "results.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machinery, "Problem", lambda scale: problem)
        run_study(STUDY, SCALE, path)
    return path


def entry_of(path):
    return json.loads(path.read_text())["entries"]["iid"]["FedAvg"]


def test_final_runs_are_those_of_simulate_on_all_training_data(problem, finished):
    entry = entry_of(finished)
    assert [run["seed"] for run in entry["runs"]] == [1, 2]
    train, test = data.load("digits")
    clients = data.partition(train, "iid", num_clients=6, seed=2)
    run = entry["runs"][1]
    assert run["partition_hash"] == clients.partition.hash

    algorithm = algorithms.fedavg(
        models.classification_loss(problem.model.apply, problem.preprocess), **entry["chosen"]
    )

    def accuracy(params):
        return {"accuracy": problem.counts(params, test)[0].mean()}

    result = simulate(
        algorithm,
        problem.model.init(jax.random.key(2), train.x[:1]),
        clients,
        rounds=4,
        cohort_size=3,
        local_steps=2,
        batch_size=8,
        seed=2,
        evaluate=accuracy,
        eval_every=2,
        client_map="scan",
    )
    expected = [row["accuracy"] for row in result.history]
    np.testing.assert_allclose(run["accuracy"], expected, atol=1e-4)
    assert run["metrics"]["bytes_up"] == 3 * sum(p.nbytes for p in jax.tree.leaves(result.params))


def test_tuning_never_reads_the_test_set(problem, finished, monkeypatch):
    monkeypatch.setattr(problem, "test", None)
    chosen, trials = tune(problem, "FedAvg", STUDY.methods["FedAvg"], "iid", STUDY.allowed)
    entry = entry_of(finished)
    assert trials == entry["validation"]
    assert trials[json.dumps(chosen)] == max(trials.values())
    finals = settle(problem, "FedAvg", STUDY.methods["FedAvg"], "iid", trials)
    assert finals == entry["finalists"]
    assert finals[json.dumps(entry["chosen"])] == max(finals.values())
    assert len(trials) == len(finals) == 2

    # Validation data and what tuning trains on are the training set, cut in two.
    rows = [
        np.asarray(part.x).reshape(len(part.y), -1) for part in (problem.fit, problem.validation)
    ]
    assert len(rows[1]) == 100
    both = np.concatenate(rows)
    whole = np.asarray(problem.train.x).reshape(len(both), -1)
    np.testing.assert_array_equal(both[np.lexsort(both.T)], whole[np.lexsort(whole.T)])


def test_finished_entries_are_skipped_and_stale_ones_are_not(problem, finished, monkeypatch):
    before = finished.read_bytes()
    ran = []

    def run_entry(problem, name, method, partition, allowed):
        ran.append(name)
        return {**entry_of(finished), "declared": method.declared()}

    monkeypatch.setattr(machinery, "Problem", lambda scale: problem)
    monkeypatch.setattr(machinery, "run_entry", run_entry)
    run_study(STUDY, SCALE, finished)
    assert ran == []
    assert finished.read_bytes() == before

    wider = dataclasses.replace(STUDY.methods["FedAvg"], grid={"client_lr": (0.01, 0.3, 1.0)})
    methods = {**STUDY.methods, "FedAvg": wider, "other": wider}
    run_study(dataclasses.replace(STUDY, methods=methods), SCALE, finished)
    assert ran == ["FedAvg", "other"]
    finished.write_bytes(before)

    with pytest.raises(SystemExit, match="another scale"):
        run_study(STUDY, dataclasses.replace(SCALE, rounds=6), finished)


def test_tuning_tries_the_grid_and_then_one_after_the_other():
    def run(name, method, rounds, hyper, seed, clients, examples):
        loss = (hyper["a"] - 2) ** 2 + (hyper["b"] - 3) ** 2 + (hyper["c"] - hyper["a"]) ** 2
        return np.array([np.nan, 1 - loss / 100]), {}

    class Stub:
        scale = SCALE
        fit = validation = None
        clients = staticmethod(lambda *arguments: None)

    Stub.run = staticmethod(run)
    method = Method("fedavg", {"a": (1, 2), "b": (3, 4)}, then={"c": (0, 1, 2)}, start={"c": 1})
    best, trials = tune(Stub, "any", method, "iid", lambda hyper: hyper["b"] == 3)
    assert best == {"a": 1, "b": 3, "c": 1}  # (2, 3, 1) is as good and comes later
    assert len(trials) == 2 + 2
    best, _ = tune(Stub, "any", dataclasses.replace(method, start={"c": 2}), "iid", lambda h: True)
    assert best == {"a": 2, "b": 3, "c": 2}
    alone = dataclasses.replace(method, grid={"a": (1,), "b": (3,)}, then={})
    assert tune(Stub, "any", alone, "iid", lambda hyper: True) == ({"a": 1, "b": 3, "c": 1}, {})


def by_hand(accuracies, up):
    runs = [
        {"seed": i, "accuracy": row, "metrics": {"bytes_up": up, "bytes_down": 2e6}}
        for i, row in enumerate(accuracies, start=1)
    ]
    times = {"tuning_seconds": 30.0, "final_seconds": 60.0}
    return {"chosen": {"client_lr": 0.3}, "validation": {"{}": 0.1}, "runs": runs, **times}


def test_report_from_json(tmp_path):
    methods = {**STUDY.methods, "slow": Method("fedavg", {"client_lr": (0.3,)})}
    study = dataclasses.replace(STUDY, methods=methods)
    fast = by_hand([[0.5, 0.9, 0.8], [0.5, 0.7, 0.94], [0.9, 0.89, 0.8]], up=1e6)
    slow = by_hand([[0.1, 0.2, None], [0.1, 0.3, 0.2], [0.1, 0.1, 0.1]], up=5e5)
    result = {
        "study": study.name,
        "scale": SCALE.declared(),
        "versions": {"jax": "1"},
        "entries": {"iid": {"FedAvg": fast, "slow": slow}},
    }
    source, folder = tmp_path / "made.json", tmp_path / "report"
    source.write_text(json.dumps(result))
    folder.mkdir()
    (folder / "discussion.md").write_text("## What showed\n\nNothing.\n")

    head, _, first, second = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table(study, result).splitlines()
        if line.startswith("|")
    )
    tops, lasts = np.array([90, 94, 90.0]), np.array([80, 94, 80.0])
    for cell, values in zip(first[1:3], (tops, lasts), strict=True):
        half = stats.t.interval(0.95, 2, scale=stats.sem(values))[1]
        assert cell == f"{values.mean():.2f} ± {half:.2f}"
    target = np.floor(9.5 * tops.mean()) / 10
    assert head[3] == f"rounds to {target:.1f} %" == "rounds to 86.7 %"
    half = stats.t.interval(0.95, 2, scale=stats.sem([4, 6, 2]))[1]
    # 4, 6 and 2 rounds at 1 MB; 6 rounds up and down.
    assert first[3:7] == [f"4 ± {half:.0f}", "4.00", "6.00", "12.0"]
    assert first[7:] == ["50.00", "client_lr 0.3", "1.5"]
    assert second[2:6] == ["-", "-", "-", "3.00"]

    write_report(study, source, folder)
    text = (folder / "RESULTS.md").read_bytes()
    assert text.decode().endswith("## What showed\n\nNothing.\n")
    assert json.loads((folder / "results.json").read_text()) == result
    assert 1_000 < (folder / "iid.png").stat().st_size < 100_000
    for name in ("RESULTS.md", "iid.png"):
        (folder / name).unlink()
    compact = (folder / "results.json").read_bytes()
    write_report(study, folder / "results.json", folder)
    assert (folder / "RESULTS.md").read_bytes() == text
    assert (folder / "results.json").read_bytes() == compact


@pytest.mark.parametrize("paper", PAPERS)
def test_studies_are_declared_consistently(paper):
    study = importlib.import_module(f"experiments.{paper}.fashion_mnist").STUDY
    assert study.module == f"experiments.{paper}.fashion_mnist"
    assert set(study.scales) >= {"paper", "machine", "smoke"}
    for scale in study.scales.values():
        assert scale.model in models.MODELS
        assert scale.rounds % scale.eval_every == scale.tuning_rounds % scale.eval_every == 0
        assert machinery.TUNING_SEED not in scale.seeds
        assert set(scale.partitions or ()) <= set(study.partitions)
    for method in study.methods.values():
        assert method.factory in algorithms.ALGORITHMS
        assert set(method.paper) <= set(study.partitions)
        hyper = {**{key: values[0] for key, values in method.grid.items()}, **method.start}
        assert set(hyper) >= set(method.then)
        method.build(models.build("mlp", num_classes=10), lambda examples, key: examples, hyper)


def test_what_diverges_later_is_passed_over():
    class Unstable:
        """Learning rate 1 is best early and diverges late; 0.5 diverges at once."""

        scale = dataclasses.replace(SCALE, rounds=4, tuning_rounds=2, finalists=1)
        fit = validation = None

        def clients(self, *arguments):
            return None

        def run(self, name, method, rounds, hyper, seed, clients, examples):
            lr = hyper["client_lr"]
            finite = lr != 0.5 and not (lr == 1.0 and rounds == 4)
            return np.asarray([lr, 0.1]), {"loss": 1.0 if finite else np.nan}

    method = Method("fedavg", {"client_lr": (0.2, 0.5, 1.0, 0.3)})
    chosen, trials = tune(Unstable(), "m", method, "iid", lambda hyper: True)
    assert chosen == {"client_lr": 1.0}
    assert np.isnan(trials['{"client_lr": 0.5}'])
    finals = settle(Unstable(), "m", method, "iid", trials)
    assert list(finals) == ['{"client_lr": 1.0}', '{"client_lr": 0.3}']
    assert np.isnan(finals['{"client_lr": 1.0}'])
    assert finals['{"client_lr": 0.3}'] == 0.3
