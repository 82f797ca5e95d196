"""The study of Shakespeare's roles: divisions, rounds to a target, verdicts, the stored page."""

import numpy as np
import pytest

from experiments.natural import __main__ as command
from experiments.natural import against_torch, methods, published, report, runs
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


def test_another_loop_gets_every_sequence_of_a_client_once(folder):
    roles, _ = data.load_federated("shakespeare", folder)
    held, starts = np.asarray(roles.indices), np.asarray(roles.starts)
    theirs = [
        np.sort(np.asarray(roles.examples.x)[held[start : start + size]], axis=0).tolist()
        for start, size in zip(starts, np.asarray(roles.sizes), strict=True)
    ]
    work = {"client_lr": 0.1, "rounds": 2, "seed": 0, "cohort_size": 2}
    arrays, params, losses = against_torch.rounds_of(roles, 4, **work)
    assert np.isfinite(losses).all()
    assert params.keys() <= {n.removeprefix("start/") for n in arrays}
    for t in range(2):
        steps = arrays[f"{t}/steps"]
        for i in range(2):
            rows = np.concatenate([arrays[f"{t}/{i}/{k}/x"] for k in range(steps[i])])
            assert np.sort(rows, axis=0).tolist() in theirs
            assert len(rows) == arrays[f"{t}/weights"][i]


def cell(*curves):
    numbers = {str(seed): list(curve) for seed, curve in enumerate(curves)}
    return {"rounds": [5, 10, 15], "accuracy": numbers}


def test_rounds_to_a_target():
    found = runs.rounds_to(cell([31.0, 29.0, 40.0], [10.0, 20.0, 30.0]), 30)
    assert found == {"0": 5.0, "1": 15.0}
    assert runs.rounds_to(cell([31.0, 29.0, 40.0]), 41) == {"0": np.inf}
    half = [100 * float(np.float32(right / 1000)) for right in (299, 350, 351)]
    assert half[1] < 35  # 350 of 1,000, as a run's float32 has it
    assert runs.rounds_to(cell(half), 35) == {"0": 10.0}


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
    kept = report.stored()
    for part, cells in kept.items():
        seeds, scale = runs.SEEDS, runs.Scale()
        if part == "published":
            seeds, scale = runs.SEEDS[:1], published.PUBLISHED
        for stored in cells.values():
            have = list(map(int, stored["accuracy"]))
            assert have in (list(seeds), list(range(11, 21)))
            assert stored["rounds"][-1] == scale.rounds
    shown = (report.HERE / "RESULTS.md").read_text(encoding="utf-8")
    assert shown == report.page(**kept)


def ended(*values):
    return {"accuracy": {str(seed): [0.0, *[value] * 5] for seed, value in enumerate(values)}}


def test_a_method_is_better_where_the_interval_of_the_paired_difference_says_so():
    fedavg = ended(40.0, 41.0, 42.0)
    assert methods.decide(methods.against(ended(42.0, 43.1, 43.9), fedavg)) == "better"
    assert methods.decide(methods.against(ended(38.0, 39.1, 39.9), fedavg)) == "worse"
    assert methods.decide(methods.against(ended(39.0, 44.0, 42.0), fedavg)) == "undecided"
    assert methods.decide(methods.against(ended(np.nan, 44.0, 42.0), fedavg)) == "undecided"


def test_adaptive_servers_within_a_point():
    rows = {name: ended(40.0, 41.0, 42.0) for name in methods.ADAPTIVE_SERVERS}
    rows["fedyogi"] = ended(40.8, 41.81, 42.79)
    assert methods.spread(rows)[::3] == ("fedyogi", "shows")
    rows["scaffold"] = ended(38.0, 39.0, 40.0)
    assert methods.spread(rows)[:2] == ("fedyogi", "scaffold")
    assert methods.spread(rows)[3] == "contradicted"
    rows["scaffold"] = ended(40.0, 37.0, 40.0)
    assert methods.spread(rows)[3] == "undecided"


def test_servers_of_two_rates_are_tried_at_five_points(monkeypatch):
    asked = []

    def train(clients, scored, scale, *, client_lr, server_lr, **rest):
        asked.append((client_lr, server_lr))
        return [1], [100 - abs(server_lr - 0.1) - abs(client_lr - 10)] * 3, 0.0

    roles = type("Roles", (), {"num_available": 2})
    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(runs.data, "split_clients", lambda *a, **k: (roles, roles))
    monkeypatch.setattr(runs, "pooled", lambda *a: None)
    tried = methods.tune(roles, methods.METHODS["fedadagrad"], "fedadagrad", runs.SMOKE, 10**0.5)
    assert len(asked) == 5
    assert {server for _, server in asked[3:]} == {0.1}
    np.testing.assert_allclose(methods.best_of(tried), (10, 0.1))


@pytest.mark.methods
def test_the_smallest_form(folder, capsys):
    command.main(["--smoke", "--folder", str(folder)])
    assert "random, E = 1: client_lr" in capsys.readouterr().out
