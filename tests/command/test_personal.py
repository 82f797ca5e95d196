"""Methods with a model for each client, as the command line runs and scores them."""

import json

import jax
import numpy as np
import pytest

from fedjax_lab import data
from fedjax_lab.command.catalogue import SOURCES
from fedjax_lab.command.cli import main
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.grid import run_grid
from fedjax_lab.command.runner import build, run
from fedjax_lab.report import load_runs
from fedjax_lab.report.sections import tail_of
from fedjax_lab.report.tables import measures
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
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    on_training = accuracies(params_of, train, clients)
    np.testing.assert_allclose(summary["client_accuracy"], on_training, atol=1e-6)
    runs = load_runs([tmp_path / "own"])
    shown = measures(runs, tail_of(runs))["own models (%)"](runs[0])
    assert shown == pytest.approx(100 * row["personal_accuracy"])


def test_what_has_no_labels_or_no_rows_at_hand_says_so(tmp_path):
    rng = np.random.default_rng(0)
    examples = data.Examples(rng.normal(size=(60, 3)).astype(np.float32), rng.normal(size=60))
    examples = data.Examples(examples.x, examples.y.astype(np.float32))
    config = RunConfig.from_dict({**SETTING, "algorithm": "ditto", "partition": "iid"})
    with pytest.warns(UserWarning, match="no personal_accuracy of ditto: digits has no class"):
        assert build(config, (examples, examples)).diagnose is None
    hosted = RunConfig.from_dict({**SETTING, "algorithm": "ditto", "client_store": "host"})
    with pytest.warns(UserWarning, match="client_store is 'host', where no device holds"):
        assert build(hosted).diagnose is None
    assert build(RunConfig.from_dict(SETTING)).diagnose is None  # fedavg: nothing to say


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


def test_a_leaf_that_does_not_exist_is_named(capsys, tmp_path):
    command = ["run", "--algorithm", "fedbn", "--rounds", "1", "--run-dir", str(tmp_path / "a")]
    assert main([*command, "--model", "linear", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "needs normalisation layers" in said
    assert "classifier/bias" in said


@pytest.mark.methods
def test_a_sweep_says_what_it_does_not_see():
    config = RunConfig.from_dict({**SETTING, "algorithm": "local_only"}).resolve()
    with pytest.warns(UserWarning, match="a sweep evaluates only the global model"):
        run_grid(config, [{"client_lr": 0.1}], [0])


def test_the_catalogue_names_them():
    names = {"ditto", "apfl", "pfedme", "fedper", "lg_fedavg", "fedbn", "fedrep", "fedbabu"}
    assert {name for name, (method, _) in SOURCES.items() if "a model for each" in method} == {
        *names,
        "local_only",
    }
