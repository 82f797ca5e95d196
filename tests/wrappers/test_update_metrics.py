"""Norms, cosines, diversity and drift of clients' updates, against NumPy twins of the methods."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    algorithms,
    data,
    simulate,
    sweep,
    with_attack,
    with_compression,
    with_dp,
    with_robust_aggregation,
    with_secure_aggregation,
    with_update_metrics,
)
from fedjax_lab.simulation.client_updates import ClientUpdates
from tests.federations import of_sizes
from tests.reference.base import ReferenceClient
from tests.reference.gradma_numpy import GradMA
from tests.reference.scaffold_numpy import Scaffold

N, S, D, B, STEPS, ROUNDS, LR = 5, 3, 4, 3, 2, 4, 0.2
# All of a client's examples are its mini-batch, and its loss is a quadratic of its own curvature.
CENTRES = np.random.default_rng(0).normal(size=(N, D))
CURVATURES = np.random.default_rng(1).uniform(0.5, 2, size=(N, D))
X = np.repeat(np.stack([CENTRES, CURVATURES], 1), B, 0).astype(np.float32)
CALL = {
    "rounds": ROUNDS, "cohort_size": S, "local_steps": STEPS, "batch_size": B, "eval_every": 1,
}  # fmt: skip


def loss_fn(params, examples, key):
    centres, curvatures = examples.x[:, 0], examples.x[:, 1]
    return 0.5 * (curvatures * jnp.square(params[None] - centres)).sum(-1)


@pytest.fixture(scope="module")
def clients():
    return of_sizes([B] * N, X)


def cohorts(clients):
    call = {name: CALL[name] for name in ("cohort_size", "local_steps", "batch_size")}
    draws = (data.draw_batch(clients, jax.random.key(0), t, **call) for t in range(ROUNDS))
    return [np.asarray(batch.client_ids) for batch in draws]


def updates_of(twin, clients):
    """Each round's updates {client: x - y_K}, by the twin run on one client after the other."""
    found = []
    for ids in cohorts(clients):
        everyone = [ReferenceClient(int(i), [int(i)] * STEPS) for i in ids]
        found.append({client.id: local_update(twin, client, len(found)) for client in everyone})
        twin.round(everyone, len(found) - 1)
    return found


def local_update(twin, client, t):
    if isinstance(twin, GradMA):
        return twin.x - twin.worker_update(client, t)
    y = twin.x
    for i in client.minibatches:
        y = y - LR * (twin.gradient(y, i) - twin.c_i[i] + twin.c)
    return twin.x - y


def gradient(y, i):
    return CURVATURES[i] * (y - CENTRES[i])


METHODS = {
    "scaffold": (algorithms.scaffold(loss_fn, client_lr=LR), Scaffold, {}),
    "gradma": (algorithms.gradma(loss_fn, client_lr=LR, memory_size=N), GradMA, {}),
}


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def by_hand(updates):
    """Rows of each round, and lines (round, client, cosine to the last, cosine, drift, norm)."""
    rows, lines, last = [], [], {}
    for t, of_round in enumerate(updates):
        mean = np.mean(list(of_round.values()), 0)
        norms = {i: np.linalg.norm(u) for i, u in of_round.items()}
        cosines = {i: cosine(u, mean) for i, u in of_round.items()}
        to_last = {i: cosine(u, last[i]) for i, u in of_round.items() if i in last}
        drifts = {i: norm**2 for i, norm in norms.items()}
        row = {"gradient_diversity": sum(drifts.values()) / np.sum(mean * S * mean * S)}
        of_metrics = {"update_norm": norms, "update_cosine": cosines, "cosine_to_last": to_last,
                      "client_drift": drifts}  # fmt: skip
        for name, values in of_metrics.items():
            values = list(values.values()) or [0.0]
            row[name] = np.mean(values)
            for percent in (10, 50, 90):
                row[f"{name}_p{percent}"] = np.quantile(values, percent / 100)
        rows.append(row)
        lines += [
            (t + 1, i, drifts[i], to_last.get(i, np.nan), cosines[i], norms[i]) for i in of_round
        ]
        last.update(of_round)
    return rows, lines


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("scaffold", {"client_map": "chunk:2", "client_store": "host"}),
        ("gradma", {"client_map": "scan"}),
        pytest.param("scaffold", {"client_map": "shard_map:2"}, marks=pytest.mark.methods),
        pytest.param("gradma", {"client_map": "vmap"}, marks=pytest.mark.methods),
    ],
)
def test_they_are_those_of_numpy(method, where, clients, tmp_path):
    algorithm, twin, options = METHODS[method]
    twin = twin(np.zeros(D), N, gradient, client_lr=LR, **options)
    rows, lines = by_hand(updates_of(twin, clients))
    measured = with_update_metrics(algorithm, to_last=True, per_client=True)
    # Resumed once, so that the file is continued.
    for rounds in (2, ROUNDS):
        call = CALL | {"rounds": rounds, "run_dir": tmp_path, **where}
        result = simulate(measured, jnp.zeros(D), clients, **call)
    np.testing.assert_allclose(result.params, twin.x, atol=1e-5)
    for row, expected in zip(result.history, rows, strict=True):
        found = {name: row[name] for name in expected}
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    with (tmp_path / "client_updates.csv").open() as file:
        header, *found = csv.reader(file)
    assert header == ["round", "client", "client_drift", "cosine_to_last", "update_cosine",
                      "update_norm"]  # fmt: skip
    found = [[value or "nan" for value in line] for line in found]  # a first round has no last one
    np.testing.assert_allclose(np.array(found, float), lines, rtol=1e-4, atol=1e-6)


def test_without_cosines_no_update_is_stacked_and_shares_are_the_aggregations():
    """Clients of 1, 2 and 3 examples, weighted by these."""
    owners, sizes = np.array([0, 1, 1, 2, 2, 2]), np.array([1, 2, 3])
    people = data.partition(data.Examples(X[owners * B], np.zeros(6, int)), owners, 3)
    fedavg = algorithms.fedavg(loss_fn, client_lr=LR)
    without, measured = with_update_metrics(fedavg, cosines=False), with_update_metrics(fedavg)
    assert without.phases[0].reduce == {"delta": "mean", "measured_numbers": "stack"}
    ends = CENTRES[:3] * (1 - (1 - LR * CURVATURES[:3]) ** STEPS)
    parts = sizes[:, None] / 6 * ends
    expected = np.square(parts).sum() / np.square(parts.sum(0)).sum()
    call = CALL | {"rounds": 1, "weights": "examples", "client_map": "scan"}
    rows = [simulate(m, jnp.zeros(D), people, **call).history[0] for m in (without, measured)]
    assert [row["gradient_diversity"] for row in rows] == pytest.approx([expected] * 2, rel=1e-4)
    assert [row["bytes_up"] for row in rows] == [3 * 4 * D] * 2
    assert "update_cosine" not in rows[0]


@pytest.mark.methods
@pytest.mark.parametrize(
    "build",
    [
        lambda fedavg: with_compression(fedavg, "top_k:0.5"),
        lambda fedavg: with_robust_aggregation(fedavg, "median"),
        lambda fedavg: with_attack(fedavg, "sign_flip", share=0.4),
        lambda fedavg: with_dp(fedavg, clip_norm=0.1, noise_multiplier=0.0),
        lambda fedavg: algorithms.mifa(loss_fn, client_lr=LR),
        lambda fedavg: algorithms.mime(loss_fn, client_lr=LR, momentum=0.9),
        lambda fedavg: algorithms.stem(loss_fn, client_lr=LR, momentum=0.5),
    ],
)
def test_around_wrappers_and_methods_of_several_exchanges(build, clients):
    method = build(algorithms.fedavg(loss_fn, client_lr=LR))
    call = CALL | {"rounds": 2, "client_map": "scan"}
    plain = simulate(method, jnp.zeros(D), clients, **call)
    measured = simulate(with_update_metrics(method, to_last=True), jnp.zeros(D), clients, **call)
    np.testing.assert_allclose(measured.params, plain.params, atol=1e-6)
    assert measured.history[0]["bytes_up"] == plain.history[0]["bytes_up"]
    assert all(-1.0001 <= row["update_cosine"] <= 1.0001 for row in measured.history)


def test_wrong_uses_are_refused(clients):
    fedavg = algorithms.fedavg(loss_fn, client_lr=LR)
    measured = with_update_metrics(fedavg)
    with pytest.raises(ValueError, match="apply it last, with_update_metrics"):
        with_compression(measured, "top_k:0.5")
    with pytest.raises(ValueError, match="masked messages"):
        with_update_metrics(with_secure_aggregation(fedavg, bits=16, clip=1.0))
    each = with_update_metrics(fedavg, per_client=True)
    with pytest.raises(ValueError, match="run_dir is None"):
        simulate(each, jnp.zeros(D), clients, **CALL)
    with pytest.raises(ValueError, match="leave per_client out of a sweep"):
        sweep(lambda: each, jnp.zeros(D), clients, points={}, seeds=[0], **CALL)


def test_a_line_that_a_killed_run_left_unfinished_is_dropped(tmp_path):
    file = tmp_path / "client_updates.csv"
    file.write_text("round,client,x\n1,0,5\n12,3,7\n1")  # the last one began as "13,..."
    slots = {"client": [[2, 0]], "participates": [[True, False]], "x": [[0.5, 9.0]]}
    numbers = {f"per_client/{name}": np.array(values) for name, values in slots.items()}
    metrics = ClientUpdates(tmp_path).take(1, {**numbers, "loss": np.ones(1)})
    assert file.read_text() == "round,client,x\n1,0,5\n2,2,0.5\n"
    assert metrics.keys() == {"loss"}
    file.write_text("round,client,x\nno number\n")
    with pytest.raises(ValueError, match=r"client_updates\.csv is damaged"):
        ClientUpdates(tmp_path).take(1, dict(numbers))
