"""The study of Shakespeare's roles: divisions, rounds to a target, verdicts, the stored page."""

import json

import numpy as np
import pytest

from experiments.natural import __main__ as command
from experiments.natural import runs
from experiments.natural.report import page
from fedjax_lab import data
from fedjax_lab.recipes.shakespeare_roles import PLAY


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "the_well.txt").write_text(PLAY, encoding="utf-8")
    return tmp_path


def test_the_random_divisions_have_the_same_sequences(folder):
    roles, _ = data.load_federated("shakespeare", folder)
    random, sized = (runs.divided(roles, name, seed=3) for name in runs.DIVISIONS[1:])
    assert random.num_clients == sized.num_clients == roles.num_clients
    assert random.max_size - random.min_size <= 1
    np.testing.assert_array_equal(sized.sizes, roles.sizes)
    for division in (random, sized):
        both = [np.sort(runs.pooled(clients).x, axis=0) for clients in (roles, division)]
        np.testing.assert_array_equal(*both)
    held = [np.asarray(clients.indices) for clients in (roles, sized)]
    assert not np.array_equal(*held)


def cell(*curves):
    numbers = {str(seed): list(curve) for seed, curve in enumerate(curves)}
    return {"rounds": [5, 10, 15], "accuracy": numbers}


def test_rounds_to_a_target():
    found = runs.rounds_to(cell([31.0, 29.0, 40.0], [10.0, 20.0, 30.0]), 30)
    assert found == {"0": 5.0, "1": 15.0}
    assert runs.rounds_to(cell([31.0, 29.0, 40.0]), 41) == {"0": np.inf}


def test_the_verdict_is_at_the_highest_target_that_all_runs_reach():
    roles = cell([31.0, 36.0, 41.0], [31.0, 36.0, 41.0])
    slower = cell([20.0, 30.0, 36.0], [20.0, 30.0, 37.0])
    kept = {"roles, E = 1": roles, "random, E = 1": slower}
    decided, target, difference = runs.verdict(kept, 1)
    assert (decided, target, difference.mean) == ("shows", 35, 5.0)
    swapped = {"roles, E = 1": slower, "random, E = 1": roles}
    assert runs.verdict(swapped, 1)[:2] == ("contradicted", 35)
    same = {"roles, E = 1": roles, "random, E = 1": roles}
    assert runs.verdict(same, 1)[:2] == ("undecided", 40)
    never = {"roles, E = 1": cell([1.0, 2.0, 3.0]), "random, E = 1": roles}
    assert runs.verdict(never, 1) == ("undecided", None, None)


def test_the_page_is_that_of_the_stored_runs():
    kept = json.loads(command.STORED.read_text(encoding="utf-8"))
    for of_kind in kept.values():
        assert of_kind["accuracy"].keys() == set(map(str, runs.SEEDS))
        assert of_kind["rounds"][-1] == runs.Scale().rounds
    assert (command.STORED.parent / "RESULTS.md").read_text(encoding="utf-8") == page(kept)


@pytest.mark.methods
def test_the_smallest_form(folder, capsys):
    command.main(["--smoke", "--folder", str(folder)])
    assert "random, E = 1: client_lr" in capsys.readouterr().out
