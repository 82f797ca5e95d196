"""A study of models of which each client has its own: who is scored on what."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.catalogue.personal import METHODS, fine_tuned
from experiments.studies.personal import run_personal
from experiments.studies.runs import Problem
from experiments.studies.study import Column
from fedjax_lab import data
from fedjax_lab.command.setup import build

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
}
COLUMN = Column(SETTING, tuning_rounds=2)


@pytest.fixture(scope="module")
def problem():
    return Problem(COLUMN, held_out=200)


def accuracies(params_of, clients, tests):
    """Of each client's softmax regression on its own test digits, in NumPy."""
    found = []
    x, y = np.asarray(tests.examples.x, np.float64), np.asarray(tests.examples.y)
    mean, std, scale = data.normalization(data.Examples(clients.x, clients.y))
    x = ((x / scale - mean) / std).reshape(len(x), -1)
    for i in range(tests.num_clients):
        start, size = int(tests.starts[i]), int(tests.sizes[i])
        mine = np.asarray(tests.indices)[start : start + size]
        bias, kernel = sorted(map(np.asarray, jax.tree.leaves(params_of(i))), key=np.ndim)
        found.append(np.mean((x[mine] @ kernel + bias).argmax(1) == y[mine]) if size else np.nan)
    return np.array(found)


@pytest.mark.methods
@pytest.mark.parametrize("name", [pytest.param("FedAvg", marks=pytest.mark.slow), "Ditto"])
def test_each_client_is_scored_on_its_own_test_images(name, problem, tmp_path):
    method, point = METHODS[name], {"client_lr": 0.1}
    point |= {"prox_weight": 0.5} if name == "Ditto" else {}
    config = method.config(COLUMN, point, seed=11)
    examples = (problem.train, problem.test)
    result = run_personal(config, method.personal, point, examples, tmp_path)
    clients = data.partition(problem.train, "dirichlet:0.3", num_clients=6, seed=11)
    tests = data.divide_like(clients, problem.test, seed=11)

    def params_of(client):
        if name == "FedAvg":
            return result.params
        return jax.tree.map(lambda table: table[client], result.state.clients)

    expected = accuracies(params_of, problem.train, tests)
    assert result.history[-1]["accuracy"] == pytest.approx(np.nanmean(expected), abs=1e-6)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["worst_10_percent_accuracy"] == pytest.approx(np.nanmin(expected), abs=1e-6)


@pytest.mark.methods
def test_tuning_reads_held_out_images_alone(problem):
    blind = Problem.__new__(Problem)
    blind.column, blind.fit, blind.validation = COLUMN, problem.fit, problem.validation
    (score,) = blind.scores(METHODS["FedAvg"], [{"client_lr": 0.1}], rounds=2)
    assert 0 < score < 1


@pytest.mark.methods
def test_fine_tuning_descends_on_the_clients_own_data(problem):
    """One step from zero weights moves the bias by the labels of a mini-batch of its own."""
    config = METHODS["FedAvg"].config(COLUMN, {}, seed=11).resolve()
    setup = build(config, (problem.train, problem.test))
    method = METHODS["FedAvg, fine-tuned"]
    algorithm = method.personal.build(setup.loss_fn, client_lr=0.1, steps=1)
    zero = jax.tree.map(jnp.zeros_like, setup.params)
    state = algorithm.init(zero, 6)
    model_of = fine_tuned(algorithm, setup, {"client_lr": 0.1, "steps": 1})
    held = np.asarray(setup.clients.label_histogram()) > 0
    for client in range(6):
        (bias,) = (x for x in jax.tree.leaves(model_of(state, client)) if x.ndim == 1)
        share = np.asarray(bias, np.float64) / 0.1 + 0.1  # the labels' shares in the mini-batch
        np.testing.assert_allclose(share.sum(), 1, atol=1e-5)
        np.testing.assert_allclose(share * 64, np.rint(share * 64), atol=1e-3)
        assert not (share > 1e-6)[~held[client]].any()
