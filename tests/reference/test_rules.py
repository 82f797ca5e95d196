"""Rules that hold for every twin, whatever its equations."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import test_twins, test_twins_baselines_a, test_twins_baselines_b
from tests.reference.base import ReferenceClient
from tests.reference.fedspeed_numpy import FedSpeedIng
from tests.reference.problem import NUM_CLIENTS, make_rounds
from tests.reference.representation_numpy import LocalObjective
from tests.reference.test_twins import assert_same, run, snapshot
from tests.reference.test_twins_baselines_a import make

pytestmark = pytest.mark.methods  # `make check` runs these where a twin has changed

WITHOUT_ASCENT = test_twins.EVERY | test_twins_baselines_a.EVERY
EVERY = WITHOUT_ASCENT | test_twins_baselines_b.EVERY


@pytest.mark.parametrize("name", EVERY)
def test_absent_clients_and_empty_rounds(name):
    twin, options = EVERY[name]
    rounds = make_rounds(11, 8, 4, 3, 4, empty_round=5)
    full, reduced = make(twin, **options), make(twin, **options)
    start = full.x
    for t, (clients, _) in enumerate(rounds):
        before, visited = snapshot(full), dict(getattr(full, "visited", {}))
        full.round(clients, t)
        reduced.round([client for client in clients if client.minibatches], t)
        assert_same(full.x, reduced.x, atol=0)
        after = snapshot(full)
        present = {client.id for client in clients if client.minibatches}
        if not present:
            assert before.keys() == after.keys()
            for key in before:
                np.testing.assert_array_equal(before[key], after[key], err_msg=key)
        for key in before:
            if before[key].shape[:1] == (NUM_CLIENTS,) and key != "counter":
                for i in set(range(NUM_CLIENTS)) - present:
                    np.testing.assert_array_equal(before[key][i], after[key][i])
        if hasattr(full, "visited"):
            assert set(full.visited) == set(visited) | present
            for i, model in full.visited.items():
                expected = before["x"] if i in present else visited[i]
                np.testing.assert_array_equal(model, expected)
    assert np.isfinite(full.x).all()
    assert np.abs(full.x - start).max() > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_weights_of_equal_size_are_no_weights_and_order_does_not_matter(name):
    twin, options = EVERY[name]
    rounds = [clients for clients, _ in make_rounds(24, 4, 4, 3, 4, weighted=False)]
    heavy = [
        [ReferenceClient(c.id, c.minibatches, 3.0) for c in reversed(clients)] for clients in rounds
    ]
    assert_same(run(make(twin, **options), rounds), run(make(twin, **options), heavy))


@pytest.mark.parametrize("name", EVERY)
def test_a_zero_rate_moves_nothing(name):
    twin, options = EVERY[name]
    twin = make(twin, **{**options, "client_lr": 0.0})
    start = twin.x
    assert_same(run(twin, make_rounds(25, 3, 4, 3, 4)) - start, 0, atol=1e-15)


@pytest.mark.parametrize("name", WITHOUT_ASCENT)
def test_weight_decay_as_a_transform_is_weight_decay_in_the_gradient(name):
    twin, options = EVERY[name]
    if issubclass(twin, FedSpeedIng):  # the ascent takes the raw gradient
        options = {**options, "perturbation_weight": 0.0}
    rounds = make_rounds(26, 8, 4, 3, 4)
    outside = make(twin, **options, transform=lambda g, y: g + 0.3 * y)
    inside = make(twin, **options)
    method = "objective_gradient" if issubclass(twin, LocalObjective) else "gradient"
    raw = getattr(inside, method)
    setattr(inside, method, lambda y, *arguments: raw(y, *arguments) + 0.3 * y)
    path = run(outside, rounds)
    assert_same(path, run(inside, rounds))
    assert np.abs(path - run(make(twin, **options), rounds)).max() > 1e-3
