"""Methods with a model for each client, as the command line runs and scores them."""

import json
import warnings

import jax
import numpy as np
import pytest

from fedjax_lab import data
from fedjax_lab.command.catalogue import SOURCES
from fedjax_lab.command.cli import main
from fedjax_lab.command.client_model import read_client_model
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.runner import run
from fedjax_lab.command.setup import build
from fedjax_lab.command.sweeping import run_sweep
from fedjax_lab.report import load_runs
from fedjax_lab.report.cells import accuracy_table, measures
from fedjax_lab.report.sections import sections_of, tail_of
from fedjax_lab.simulation.evaluate import build_evaluation
from fedjax_lab.storage.run_dir import read_config
from fedjax_lab.wrappers import client_params
from tests.experiments.test_personal import accuracies

SETTING = {
    "dataset": "digits",
    "model": "linear",
    "partition": "dirichlet:0.3",
    "num_clients": 6,
    "cohort_size": 3,
    "batch_size": 8,
    "local_steps": 2,
    "replace": True,
    "rounds": 2,
    "eval_every": 2,
    "client_map": "scan",
    "seed": 11,
}


def assert_each(summary, expected, sizes):
    """summary.json has the score of each client on its test examples, null where it has none."""
    found = np.array(summary["client_test_accuracy"], float)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert summary["client_test_examples"] == sizes.tolist()


@pytest.mark.methods
def test_rows_and_summary_score_the_clients_own_models(tmp_path):
    settings = {**SETTING, "algorithm": "ditto", "option": {"prox_weight": 0.5}}
    config = RunConfig.from_dict({**settings, "run_dir": str(tmp_path / "own")})
    result = run(config, progress=False)
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.3", num_clients=6, seed=11)
    tests = data.divide_like(clients, test, seed=11)

    def params_of(client):
        return jax.tree.map(lambda table: table[client], result.state.clients)

    expected, sizes = accuracies(params_of, train, tests), np.asarray(tests.sizes)
    row = result.history[-1]
    assert row["personal_accuracy"] == pytest.approx(np.nanmean(expected), abs=1e-6)
    held = sizes > 0
    weighted = np.average(expected[held], weights=sizes[held])
    assert row["personal_accuracy_weighted"] == pytest.approx(weighted, abs=1e-6)
    assert row["personal_accuracy_worst"] == pytest.approx(np.nanmin(expected), abs=1e-6)
    assert read_config(tmp_path / "own")["personal_models"] is True
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    on_training = accuracies(params_of, train, clients)
    np.testing.assert_allclose(summary["client_accuracy"], on_training, atol=1e-6)
    assert_each(summary, expected, sizes)
    runs = load_runs([tmp_path / "own"])
    shown = measures(runs, tail_of(runs))["own models (%)"](runs[0])
    assert shown == pytest.approx(100 * row["personal_accuracy"])
    before = {file: file.read_bytes() for file in (tmp_path / "own").rglob("*") if file.is_file()}
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "4.npz"), "--client", "4"]) == 0
    with np.load(tmp_path / "4.npz") as exported:
        for name, leaf in params_of(4)["classifier"].items():
            np.testing.assert_array_equal(exported[f"classifier/{name}"], leaf)
    assert before == {file: file.read_bytes() for file in before}


@pytest.mark.methods
def test_a_global_model_is_scored_on_the_same_test_examples(tmp_path):
    """In a file of its own: rows, and the identity of older directories, do not depend on it."""
    folder = tmp_path / "global"
    config = RunConfig.from_dict({**SETTING, "run_dir": str(folder)})
    result = run(config, progress=False)
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.3", num_clients=6, seed=11)
    tests = data.divide_like(clients, test, seed=11)
    expected, sizes = (
        accuracies(lambda client: result.params, train, tests),
        np.asarray(tests.sizes),
    )
    (row,) = map(json.loads, (folder / "clients.jsonl").read_text().splitlines())
    held = sizes > 0
    assert row == {
        "round": 2,
        "client_test_accuracy": pytest.approx(np.nanmean(expected), abs=1e-6),
        "client_test_accuracy_weighted": pytest.approx(
            np.average(expected[held], weights=sizes[held]), abs=1e-6
        ),
        "client_test_accuracy_worst": pytest.approx(np.nanmin(expected), abs=1e-6),
    }
    assert_each(json.loads((folder / "summary.json").read_text()), expected, sizes)
    assert not [name for name in result.history[-1] if "client_test" in name or "personal" in name]
    assert read_config(folder)["content"]["diagnose"] is None
    assert "personal_models" not in read_config(folder)


@pytest.mark.methods
def test_a_report_of_both_kinds_is_ordered_by_the_clients_models(tmp_path):
    """The order and the numbers of the table by hand, from the saved params and rows."""
    own = {"partition": "classes_per_client:2", "rounds": 20, "eval_every": 20}
    train, test = data.load("digits")
    clients = data.partition(train, own["partition"], num_clients=6, seed=11)
    tests = data.divide_like(clients, test, seed=11)
    expected, accuracy = {}, {}
    for name in ("fedavg", "local_only"):
        folder = str(tmp_path / name)
        config = RunConfig.from_dict({**SETTING, **own, "algorithm": name, "run_dir": folder})
        result = run(config, progress=False)
        accuracy[name] = result.history[-1]["accuracy"]
        algorithm = build(config).algorithm
        models = [
            client_params(algorithm, result.state, i) if algorithm.personal else result.params
            for i in range(6)
        ]
        expected[name] = 100 * np.nanmean(accuracies(models.__getitem__, train, tests))
    assert expected["local_only"] > expected["fedavg"]
    assert accuracy["local_only"] < accuracy["fedavg"]  # the global model alone would mislead
    (section,) = sections_of(load_runs([tmp_path]))
    assert [group.runs[0].algorithm for group in section.groups] == ["local_only", "fedavg"]
    head, first, second = accuracy_table(section.groups)
    shown = head.index("own models, mean of rounds 19 to 20 (%)")
    assert float(first[shown]) == pytest.approx(expected["local_only"], abs=0.006)
    assert float(second[shown]) == pytest.approx(expected["fedavg"], abs=0.006)
    gap = expected["local_only"] - expected["fedavg"]
    assert float(second[head.index("behind the best (points)")]) == pytest.approx(gap, abs=0.006)


def test_what_has_no_labels_or_no_rows_at_hand_says_so(tmp_path):
    rng = np.random.default_rng(0)
    examples = data.Examples(rng.normal(size=(60, 3)).astype(np.float32), rng.normal(size=60))
    examples = data.Examples(examples.x, examples.y.astype(np.float32))
    config = RunConfig.from_dict({**SETTING, "algorithm": "ditto", "partition": "iid"})
    with pytest.warns(UserWarning, match="no personal_accuracy of ditto: digits has no class"):
        assert build(config, (examples, examples)).client_tests.diagnose is None
    for algorithm in ("ditto", "fedavg"):
        config = RunConfig.from_dict({**SETTING, "algorithm": algorithm, "partition": "iid"})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert build(config, (examples, examples)).client_tests.score_clients is None
    hosted = RunConfig.from_dict({**SETTING, "algorithm": "ditto", "client_store": "host"})
    with pytest.warns(UserWarning, match="client_store is 'host', where no device holds"):
        assert build(hosted).client_tests.diagnose is None
    assert (
        build(RunConfig.from_dict(SETTING)).client_tests.diagnose is None
    )  # fedavg: nothing to say


@pytest.mark.methods
@pytest.mark.parametrize(
    "option",
    [
        {"algorithm": "fedper"},
        {"algorithm": "lg_fedavg", "option": {"personal": "bias"}},
        {"algorithm": "fedbn", "model_option": {"norm": "group", "hidden": 8}, "model": "mlp"},
        {"algorithm": "fedrep", "option": {"head_steps": 1}},
        {"algorithm": "fedbabu", "option": {"fine_tune": "head"}},
        {"algorithm": "local_only"},
        {"algorithm": "pfedme"},
        {"algorithm": "apfl", "compressor": "top_k:0.5"},
        {"algorithm": "fedper", "option": {"personal": "nothing"}},
    ],
    ids=str,
)
def test_every_personal_method_runs(option, tmp_path):
    given = {"model": "mlp", "model_option": {"hidden": 8}, "run_dir": str(tmp_path)}
    config = RunConfig.from_dict({**SETTING, "local_steps": 2, **given, **option})
    row = run(config, progress=False).history[-1]
    assert 0 < row["personal_accuracy"] <= 1
    if option["algorithm"] == "local_only":
        assert row["bytes_up"] == row["bytes_down"] == 0
    train, test = data.load("digits")
    clients = data.partition(train, "dirichlet:0.3", num_clients=6, seed=11)
    tests = data.divide_like(clients, test, seed=11)
    mine = tests.indices[int(tests.starts[5]) : int(tests.starts[5] + tests.sizes[5])]
    own = jax.tree.map(lambda leaf: leaf[mine], tests.examples)
    evaluate = build_evaluation(build(config).count_fn, own)
    scored = json.loads((tmp_path / "summary.json").read_text())["client_test_accuracy"][5]
    found = evaluate(read_client_model(tmp_path, 5))["accuracy"]
    assert scored == pytest.approx(float(found), abs=1e-6)


def test_no_model_of_a_client_is_read_where_there_is_none(tmp_path):
    folder = tmp_path / "global"
    run(RunConfig.from_dict({**SETTING, "run_dir": str(folder)}), progress=False)
    with pytest.raises(ValueError, match="fedavg has one global model"):
        read_client_model(folder, 0)
    (folder / "summary.json").unlink()
    with pytest.raises(ValueError, match="an unfinished run"):
        read_client_model(folder, 0)


@pytest.mark.methods
def test_the_model_of_a_client_is_read_by_id_or_name(tmp_path):
    """A name counts first: client "1" is not client 1."""
    table = tmp_path / "table.csv"
    rows = [f"{name},{i},{i % 2}" for i, name in enumerate(["ann", "bob", "cy", "dan", "1"] * 8)]
    table.write_text("\n".join(["user,a,label", *rows]))
    settings = {name: SETTING[name] for name in SETTING if name not in ("partition", "num_clients")}
    settings |= {"dataset": f"csv:{table}", "client": "user", "target": ["label"]}
    settings |= {"algorithm": "local_only", "test_split": "examples:0.2"}
    config = RunConfig.from_dict(settings)
    result = run(config.replace(run_dir=str(tmp_path / "named")), progress=False)
    names = load_runs([tmp_path / "named"])[0].partition["names"]
    assert sorted(names) == ["1", "ann", "bob", "cy", "dan"]
    for asked, place in (("cy", names.index("cy")), ("1", names.index("1")), ("0", 0)):
        found = read_client_model(tmp_path / "named", asked)
        rows = jax.tree.map(lambda table, place=place: table[place], result.state.clients)
        jax.tree.map(np.testing.assert_array_equal, found, rows)
    with pytest.raises(
        ValueError, match=r"client is 'eve'; it must be 0 to 4, or one of the names"
    ):
        read_client_model(tmp_path / "named", "eve")


def test_a_leaf_that_does_not_exist_is_named(capsys, tmp_path):
    command = ["run", "--algorithm", "fedbn", "--rounds", "1", "--run-dir", str(tmp_path / "a")]
    assert main([*command, "--model", "linear", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "needs normalisation layers" in said
    assert "classifier/bias" in said


@pytest.mark.methods
def test_a_sweep_says_what_it_does_not_see(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it keeps its runs
    config = RunConfig.from_dict({**SETTING, "algorithm": "local_only"}).resolve()
    with pytest.warns(UserWarning, match="a sweep evaluates only the global model"):
        run_sweep(config, [{"client_lr": 0.1}], [0])


def test_the_catalogue_names_them():
    names = {"ditto", "apfl", "pfedme", "fedper", "lg_fedavg", "fedbn", "fedrep", "fedbabu"}
    assert {name for name, (method, _) in SOURCES.items() if "a model for each" in method} == {
        *names,
        "local_only",
    }
