"""Errors of control variates against their definitions in NumPy."""

import numpy as np
import pytest

from fedjax_lab import algorithms, data, simulate
from fedjax_lab.recipes.control_error import build_control_error
from tests.algorithms import problem
from tests.reference import problem as reference


def loss_fn(params, examples, key):
    return problem.loss_fn(params, examples._asdict(), key)


@pytest.mark.methods
def test_control_error():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, reference.FEATURES)).astype(np.float32)
    y = rng.integers(reference.CLASSES, size=60).astype(np.int32)
    clients = data.partition(data.Examples(x, y), "quantity:0.5", num_clients=6, seed=0)
    algorithm = algorithms.fedmoswa(loss_fn, client_lr=0.1)
    result = simulate(
        algorithm,
        problem.initial_params(),
        clients,
        rounds=4,
        cohort_size=3,
        batch_size=4,
        local_steps=3,
        replace=True,  # soonest compiled
        client_map="scan",
        eval_every=4,
        diagnose=build_control_error(loss_fn, clients, batch_size=4),
    )
    point = problem.flat(result.params)
    gradients, controls = [], []
    for i in range(6):
        start, size = int(clients.starts[i]), int(clients.sizes[i])
        places = np.asarray(clients.indices[start : start + size])
        gradients.append(reference.gradient(point, (x[places], y[places])))
        rows = result.state.clients
        controls.append(reference.pack(np.asarray(rows["W"][i]), np.asarray(rows["b"][i])))
    gradients, controls = np.array(gradients), np.array(controls)
    server = problem.flat(result.state.server.control)
    row = result.history[-1]
    assert row["control_error"] == pytest.approx(
        ((controls - gradients) ** 2).sum(1).mean(), rel=1e-4
    )
    assert row["server_control_error"] == pytest.approx(
        ((server - gradients.mean(0)) ** 2).sum(), rel=1e-4
    )
    assert row["gradient_dissimilarity"] == pytest.approx((gradients**2).sum(1).mean(), rel=1e-4)
