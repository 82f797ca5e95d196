"""The twins against golden trajectories, closed forms and exact reductions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import problem
from tests.reference.base import ReferenceClient
from tests.reference.cfedavg_numpy import CFedAvg, random_drop, top_k
from tests.reference.fafed_numpy import FAFED, NaiveAdaptiveFedAvg
from tests.reference.fedavg_numpy import FedAvg
from tests.reference.fedopt_numpy import (
    FedAdagrad,
    FedAdam,
    FedAMS,
    FedAvgM,
    FedOptAdam,
    FedOptSGD,
    FedYogi,
)
from tests.reference.fedspeed_numpy import FedSpeed, FedSpeedIng
from tests.reference.fedswa_numpy import FedMo, FedMoSWA, FedSWA, step_sizes
from tests.reference.gradma_numpy import (
    GradMA,
    GradMAS,
    GradMAW,
    kkt_residual,
    mem_red,
    project_to_cone,
)
from tests.reference.problem import (
    LEAVES,
    NUM_CLIENTS,
    TOY_A,
    TOY_B,
    TOY_COHORTS,
    TOY_OPTIMUM,
    TOY_SIZES,
    TOY_X0,
    make_rounds,
    toy_clients,
    toy_gradient,
)
from tests.reference.scaffold_numpy import Scaffold

pytestmark = pytest.mark.methods  # `make check` runs these where a twin has changed

ALL = (0, 1, 2, 3)
ADAPTIVE = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99}


def toy(twin, **options):
    return twin(TOY_X0, 4, toy_gradient, **{"client_lr": 0.1, **options})


def softmax(twin, **options):
    options = {"client_lr": 0.2, **options}
    return twin(problem.initial_point(), NUM_CLIENTS, problem.gradient, **options)


def run(twin, rounds):
    """x after every round; rounds are lists of clients, or pairs with padded arrays."""
    path = []
    for t, clients in enumerate(rounds):
        twin.round(clients[0] if isinstance(clients, tuple) else clients, t)
        path.append(twin.x.copy())
    return np.array(path)


def toy_rounds(cohorts=TOY_COHORTS, **options):
    return [toy_clients(cohort, **options) for cohort in cohorts]


def snapshot(twin):
    """Everything a twin holds that is an array, a number, a list or a dict of arrays."""
    state = {}
    for name, value in vars(twin).items():
        if isinstance(value, dict):
            state |= {f"{name}[{key}]": np.array(row) for key, row in value.items()}
        elif isinstance(value, np.ndarray | float | int) or (name == "counter"):
            state[name] = np.array(value)
    return state


def assert_same(first, second, atol=1e-12):
    np.testing.assert_allclose(first, second, rtol=0, atol=atol)


UNEQUAL = {"steps": (1, 2, 3, 4)}
GOLDEN = {
    "fedavg": (FedAvg, {}, {}),
    "fedavg samples": (FedAvg, {}, {"weights": TOY_SIZES}),
    "fedavg full": (FedAvg, {}, {"cohorts": (ALL,) * 3}),
    "fedavg K_i": (FedAvg, {}, UNEQUAL),
    "fedavgm": (FedAvgM, {"momentum": 0.9}, {}),
    "scaffold I": (Scaffold, {"control_update": "I"}, {}),
    "scaffold II": (Scaffold, {}, {}),
    "scaffold II K_i": (Scaffold, {}, UNEQUAL),
    "fedadam": (FedAdam, {**ADAPTIVE, "tau": 0.01}, {}),
    "fedyogi": (FedYogi, {**ADAPTIVE, "tau": 0.01}, {}),
    "fedadagrad": (FedAdagrad, {"server_lr": 0.1, "tau": 0.01}, {}),
    "fedams 1": (FedAMS, {**ADAPTIVE, "tau": 1e-3}, {}),
    "fedams 2": (FedAMS, {**ADAPTIVE, "tau": 1e-3, "option": 2}, {}),
    "naive adaptive": (
        NaiveAdaptiveFedAvg,
        {"second_moment_decay": 0.5, "initial_second_moment": 1.0},
        {"cohorts": (ALL,) * 3},
    ),
}
TRAJECTORIES = """
fedavg:          0.4457500000 -0.1747500000  0.6425230625  0.1859901875  0.5738287616  0.4905990999
fedavg samples:  0.3825000000 -0.1476666667  0.6546534375  0.1380385417  0.5010544572  0.6600611229
fedavg full:     0.5640937500 -0.1140312500  0.6075573242  0.1477038086  0.6370310605  0.3251928952
fedavg K_i:      0.4350000000 -0.3075000000  0.7066966719  0.0734760703  0.5996530319  0.4378271740
fedavgm:         0.4457500000 -0.1747500000  0.5936980625  0.4787151875  0.6682546382  1.2435402390
scaffold I:      0.4457500000 -0.1747500000  0.6086168125  0.3555214375  0.6593601855  0.3796445707
scaffold II:     0.4457500000 -0.1747500000  0.6179975417  0.3330302917  0.6578418604  0.4043358232
scaffold II K_i: 0.4350000000 -0.3075000000  0.6765010469  0.2639105625  0.6838809529  0.3724963346
fedadam:         0.4745695857 -0.4261011683  0.5183938754 -0.3144865478  0.5441524217 -0.1772752579
fedyogi:         0.4746219704 -0.4261258369  0.5183727784 -0.3147100773  0.5440036191 -0.1779466100
fedadagrad:      0.4167484605 -0.4030273047  0.5089415095 -0.3253616659  0.4907452264 -0.2558528306
fedams 1:        0.4828446437 -0.4000000000  0.5265301823 -0.2655817433  0.5517100393 -0.1085631641
fedams 2:        0.4155642023 -0.4029828486  0.4858812228 -0.2710585167  0.5323686998 -0.1161870743
naive adaptive:  0.5017923104 -0.2972555539  0.4993348544 -0.1615083139  0.4988350566 -0.0526991762
"""


def golden(table, name):
    """x_1, x_2, x_3 of one row of a table."""
    rows = dict(line.split(":") for line in table.strip().splitlines())
    return np.array(rows[name].split(), dtype=float).reshape(3, 2)


def assert_golden(table, name, twin, options, rounds):
    path = run(toy(twin, **options), toy_rounds(**rounds))
    assert_same(path, golden(table, name), atol=1e-9)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_trajectory(name):
    assert_golden(TRAJECTORIES, name, *GOLDEN[name])


# the test problem


def test_problem_gradient_is_the_derivative_of_the_loss():
    y, data = problem.initial_point(), problem.client_data()[2]
    eye = 1e-6 * np.eye(problem.DIMENSION)
    numeric = [(problem.loss(y + e, data) - problem.loss(y - e, data)) / 2e-6 for e in eye]
    assert_same(problem.gradient(y, data), numeric, atol=1e-8)


def test_rounds_cover_the_special_cases_and_agree_in_both_forms():
    rounds = make_rounds(1, 12, 4, 5, 3, full=True, empty_round=5)
    seen = set()
    for clients, padded in rounds:
        for slot, client in enumerate(clients):
            assert client.id == padded["client_ids"][slot]
            assert client.weight == padded["weights"][slot]
            if client.id == NUM_CLIENTS:
                assert not padded["participates"][slot]
                seen.add("padded slot")
            taken = []
            for step in range(padded["num_steps"][slot]):
                mask = padded["example_mask"][slot, step]
                if mask.any():
                    taken.append((padded["x"][slot, step, mask], padded["y"][slot, step, mask]))
                elif step + 1 < padded["num_steps"][slot]:
                    seen.add("empty step in the middle")
            if padded["num_steps"][slot] == 0:
                seen.add("no steps")
            elif not taken:
                seen.add("no examples")
            if not padded["participates"][slot]:
                seen.add("absent" if client.id < NUM_CLIENTS else "padded slot")
                taken = []
            assert len(taken) == len(client.minibatches)
            for ours, theirs in zip(client.minibatches, taken, strict=True):
                assert_same(np.sort(ours[0], axis=0), np.sort(theirs[0], axis=0))
                np.testing.assert_array_equal(np.sort(ours[1]), np.sort(theirs[1]))
        ids = padded["client_ids"][padded["client_ids"] < NUM_CLIENTS]
        assert len(set(ids.tolist())) == len(ids)
    assert not any(client.minibatches for client in rounds[5][0])
    assert seen == {
        "padded slot",
        "empty step in the middle",
        "no steps",
        "no examples",
        "absent",
    }


# FedAvg and the server optimisers


def test_fedavg_with_one_full_step_is_gradient_descent():
    path = run(toy(FedAvg), toy_rounds((ALL,), steps=1))
    gradient = np.mean(TOY_A * (TOY_X0 - TOY_B), axis=0)
    assert_same(path[0], TOY_X0 - 0.1 * gradient)


def test_transform_is_applied_to_the_raw_gradient():
    decayed = toy(FedAvg, transform=lambda g, y: np.clip(g, -0.5, 0.5) + 0.1 * y)
    clients = [ReferenceClient(0, [(np.ones((1, 2)), np.array([[0.0, 9.0]]))])]
    decayed.round(clients, 0)
    assert_same(decayed.x, TOY_X0 - 0.1 * (np.array([0.5, -0.5]) + 0.1 * TOY_X0))


def test_schedules_are_called_with_the_round():
    twin = toy(FedAvg, client_lr=lambda t: 0.1 / (t + 1), server_lr=lambda t: 1.0 + t)
    fixed = toy(FedAvg)
    fixed.round(toy_clients(ALL), 0)
    fixed.client_lr, fixed.server_lr = 0.05, 2.0
    fixed.round(toy_clients(ALL), 1)
    assert_same(run(twin, toy_rounds((ALL, ALL)))[-1], fixed.x)


def test_fedavgm_without_momentum_and_fedopt_sgd_are_fedavg():
    rounds = make_rounds(2, 6, 4, 3, 4)
    plain = run(softmax(FedAvg, server_lr=0.7), rounds)
    assert_same(run(softmax(FedAvgM, momentum=0.0, server_lr=0.7), rounds), plain)
    assert_same(run(softmax(FedOptSGD, learning_rate=0.7), rounds), plain)


@pytest.mark.parametrize("twin", [FedAdam, FedYogi])
def test_beta2_of_one_is_server_momentum_with_a_smaller_step(twin):
    rounds = make_rounds(3, 6, 4, 3, 4)
    adaptive = softmax(twin, server_lr=0.1, beta1=0.9, beta2=1.0, tau=0.05)
    heavy_ball = softmax(FedAvgM, momentum=0.9, server_lr=0.1 * (1 - 0.9) / (2 * 0.05))
    assert_same(run(adaptive, rounds), run(heavy_ball, rounds))


def test_fedams_with_a_high_floor_is_server_momentum():
    rounds = make_rounds(3, 6, 4, 3, 4)
    adaptive = softmax(FedAMS, server_lr=0.1, tau=100.0)
    heavy_ball = softmax(FedAvgM, momentum=0.9, server_lr=0.1 * (1 - 0.9) / 10)
    assert_same(run(adaptive, rounds), run(heavy_ball, rounds))


def test_fedopt_adam_moves_by_the_learning_rate_at_first():
    twin = toy(FedOptAdam, learning_rate=0.3)
    path = run(twin, toy_rounds((ALL,)))
    d = TOY_X0 - run(toy(FedAvg), toy_rounds((ALL,)))[0]
    assert_same(path[0], TOY_X0 - 0.3 * d / (np.abs(d) + 1e-8))


# SCAFFOLD


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_first_round_is_fedavg_and_c_is_the_mean_of_all(option):
    rounds = make_rounds(4, 8, 4, 3, 4, full=True)
    twin = softmax(Scaffold, control_update=option)
    path = []
    for t, (clients, _) in enumerate(rounds):
        twin.round(clients, t)
        path.append(twin.x)
        assert_same(twin.c, twin.c_i.mean(axis=0))
    assert_same(path[0], run(softmax(FedAvg), rounds[:1])[0])
    assert np.abs(path[1] - run(softmax(FedAvg), rounds[:2])[1]).max() > 1e-3


def test_scaffold_one_step_full_cohort_is_fedavg():
    rounds = toy_rounds((ALL,) * 5, steps=1)
    assert_same(run(toy(Scaffold), rounds), run(toy(FedAvg), rounds))


def test_scaffold_converges_where_fedavg_stalls():
    rounds = toy_rounds((ALL,) * 2000)
    assert_same(run(toy(Scaffold), rounds)[-1], TOY_OPTIMUM)
    stalled = np.abs(run(toy(FedAvg), rounds)[-1] - TOY_OPTIMUM).max()
    assert 1e-4 < stalled < 1e-2


def test_scaffold_with_a_zero_rate_has_no_zero_division():
    twin = toy(Scaffold, client_lr=0.0)
    assert_same(run(twin, toy_rounds())[-1], TOY_X0)
    assert_same(twin.c_i, 0)


# the quadratic program


def random_cone(rng, case):
    d, c = 12, 5
    p, rows = rng.normal(size=d), rng.normal(size=(c, d))
    if case == "opposed":
        rows = -p + 0.3 * rng.normal(size=(c, d))
    if case == "nearly parallel":
        rows = -p + 0.01 * rng.normal(size=(c, d))
    if case == "duplicates":
        rows[1], rows[2], rows[3] = rows[0], 3 * rows[0], 0
    if case == "contradicting":
        rows[1] = -rows[0]
    if case == "more rows than dimensions":
        rows = rng.normal(size=(30, d))
    if case == "tiny":
        p, rows = 1e-20 * p, 1e-200 * rows
    if case == "huge":
        p, rows = 1e15 * p, 1e200 * rows
    return p, rows


CASES = (
    "random",
    "opposed",
    "nearly parallel",
    "duplicates",
    "contradicting",
    "more rows than dimensions",
    "tiny",
    "huge",
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_projection_satisfies_kkt(case, margin):
    rng = np.random.default_rng(5)
    solved = 0
    for _ in range(20):
        p, rows = random_cone(rng, case)
        q, z, feasible = project_to_cone(p, rows, margin)
        if not feasible:
            assert margin > 0
            assert case in ("contradicting", "more rows than dimensions")
            np.testing.assert_array_equal(q, p)
            continue
        solved += 1
        assert kkt_residual(p, rows, z, margin) < 1e-12
        np.testing.assert_allclose(q, p + rows.T @ z, rtol=1e-9, atol=1e-12 * np.abs(p).max())
    assert solved == (0 if case == "contradicting" and margin > 0 else solved)
    assert solved > 0 or margin > 0


def test_projection_of_degenerate_inputs_is_the_input():
    p = np.array([1.0, 2.0])
    for rows in (np.zeros((0, 2)), np.zeros((3, 2)), [[1.0, 0.0], [2.0, 1.0]]):
        q, z, feasible = project_to_cone(p, rows)
        assert feasible
        np.testing.assert_array_equal(q, p)
        np.testing.assert_array_equal(z, 0)
    q, _, _ = project_to_cone(0 * p, [[-1.0, 0.0]], margin=0.5)
    np.testing.assert_array_equal(q, 0)


def test_projection_of_one_row_in_closed_form():
    p, row = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, 0.0])
    for margin in (0.0, 0.4):
        bound = margin * np.linalg.norm(p) * np.linalg.norm(row)
        expected = p + (bound - row @ p) / (row @ row) * row
        q, _, _ = project_to_cone(p, [row], margin)
        assert_same(q, expected)


# GradMA


def test_mem_red_counts_evicts_and_breaks_ties_by_age():
    memory, counter = {}, [0] * 6
    assert mem_red(memory, counter, [0, 1], 3) == {0, 1}
    assert mem_red(memory, counter, [1, 2], 3) == {2}
    assert counter == [1, 2, 1, 0, 0, 0]
    assert mem_red(memory, counter, [3], 3) == {3}  # 0 and 2 tie: 0 entered first
    assert list(memory) == [1, 2, 3]
    assert counter == [0, 2, 1, 1, 0, 0]
    assert mem_red(memory, counter, [2, 4, 0], 3) == {4, 0}  # 3, then 1: 2 is in the cohort
    assert list(memory) == [2, 4, 0]
    assert counter == [1, 0, 2, 0, 1, 0]


def test_gradma_memory_rows_follow_the_recursion():
    rounds = make_rounds(6, 8, 4, 3, 4, weighted=False)
    twin = softmax(GradMAS, memory_size=NUM_CLIENTS, memory_decay=0.5)
    rows = {}
    for t, (clients, _) in enumerate(rounds):
        moves = {c.id: twin.local_sgd(c, t) for c in clients if c.minibatches}
        rows = {i: 0.5 * rows.get(i, 0) + moves.get(i, 0) for i in {*rows, *moves}}
        twin.round(clients, t)
        assert set(twin.memory) == set(rows)
        for i, row in rows.items():
            assert_same(twin.memory[i], row)
            assert twin.memory[i] @ twin.momentum > -1e-12


@pytest.mark.parametrize("twin", [GradMA, GradMAS])
def test_gradma_never_evicts_when_all_clients_fit(twin):
    twin = softmax(twin, memory_size=NUM_CLIENTS)
    run(twin, make_rounds(7, 6, NUM_CLIENTS, 3, 4, equal_steps=True))
    assert twin.counter == [6] * NUM_CLIENTS


@pytest.mark.parametrize("option", ["global", "per_leaf"])
def test_gradma_s_without_memory_is_fedavgm(option):
    rounds = make_rounds(7, 8, 4, 3, 4)
    options = {"memory_size": 0, "qp_scope": option, "leaves": LEAVES}
    memoryless = run(softmax(GradMAS, server_momentum=0.5, **options), rounds)
    assert_same(memoryless, run(softmax(FedAvgM, momentum=0.5), rounds))


def test_gradma_s_with_satisfied_constraints_is_fedavgm():
    clients = [ReferenceClient(i, [(np.ones((1, 2)), np.array([[9.0, 9.0]]))]) for i in ALL]
    rounds = [clients] * 5
    memory = run(toy(GradMAS, server_momentum=0.5), rounds)
    assert_same(memory, run(toy(FedAvgM, momentum=0.5), rounds))


def test_gradma_w_with_one_step_is_fedavg_and_with_more_is_not():
    one, more = make_rounds(8, 6, 4, 1, 4), make_rounds(8, 6, 4, 5, 2)
    assert_same(run(softmax(GradMAW), one), run(softmax(FedAvg), one))
    assert np.abs(run(softmax(GradMAW), more) - run(softmax(FedAvg), more)).max() > 1e-4


@pytest.mark.parametrize("keep", [False, True])
def test_gradma_worker_projects_on_the_stated_vectors(keep):
    points = []

    def gradient(y, minibatch):
        points.append(y.copy())
        return toy_gradient(y, minibatch)

    twin = GradMAW(TOY_X0, 4, gradient, client_lr=1.2, server_lr=0.5, keep_local_model=keep)
    bent, end = 0, TOY_X0
    for t in range(3):
        x, last = twin.x, end
        points.clear()
        twin.round(toy_clients((0,)), t)
        end = x + (twin.x - x) / 0.5  # one client: the local model before the server step
        visited = [*points[::3], end]
        assert_same(points[2::3], [x] * 3)
        assert_same(points[1::3], [last if keep else x, *visited[:2]])
        for k in range(3):
            y, g = visited[k], TOY_A[0] * (visited[k] - TOY_B[0])
            rows = [TOY_A[0] * (point - TOY_B[0]) for point in (points[3 * k + 1], x)]
            q, z, _ = project_to_cone(g, [*rows, y - x])
            assert_same(visited[k + 1], y - 1.2 * q)
            bent += (z > 0).any()
    assert bent > 0


def test_gradma_options_change_the_trajectory():
    rounds = make_rounds(9, 12, 4, 4, 8)
    options = {"client_lr": 2.0, "memory_size": 5, "memory_decay": 0.9}
    default = run(softmax(GradMA, **options), rounds)
    for change in (
        {"keep_local_model": True},
        {"margin": 0.1},
        {"qp_scope": "per_leaf", "leaves": LEAVES},
        {"memory_size": 4},
        {"memory_decay": 0.1},
    ):
        other = run(softmax(GradMA, **{**options, **change}), rounds)
        assert np.abs(other - default).max() > 1e-6, change
    one_leaf = softmax(GradMA, **options, qp_scope="per_leaf", leaves=[slice(0, 18)])
    assert_same(run(one_leaf, rounds), default)


def test_gradma_does_not_depend_on_the_order_of_a_cohort():
    rounds = [clients for clients, _ in make_rounds(10, 6, 4, 3, 4)]
    backwards = [clients[::-1] for clients in rounds]
    options = {"memory_size": NUM_CLIENTS}
    assert_same(run(softmax(GradMA, **options), rounds), run(softmax(GradMA, **options), backwards))


def test_gradma_rejects_bad_memory_sizes():
    with pytest.raises(ValueError, match="larger"):
        toy(GradMA, memory_size=5)
    with pytest.raises(ValueError, match="smaller"):
        toy(GradMA, memory_size=1).round(toy_clients((0, 1)), 0)


# FedSWA and FedMoSWA


def test_fedswa_step_sizes_and_reduction_to_fedavg():
    assert_same(step_sizes(0.2, 4, 0.5), [0.2, 0.175, 0.15, 0.125])
    rounds = make_rounds(13, 6, 4, 4, 4)
    constant = softmax(FedSWA, final_lr_ratio=1.0, server_lr=1.0)
    assert_same(run(constant, rounds), run(softmax(FedAvg), rounds))
    decayed = run(softmax(FedSWA), rounds)
    assert np.abs(decayed - run(softmax(FedAvg, server_lr=1.5), rounds)).max() > 1e-3


def test_fedswa_counts_only_the_steps_taken():
    # linear losses: the move is the sum of the K_i step sizes
    clients = [ReferenceClient(0, [(np.zeros((1, 2)), np.zeros((1, 2)))] * 3)]
    twin = FedSWA(TOY_X0, 4, lambda y, _: np.ones(2), client_lr=0.1, server_lr=1.0)
    twin.round(clients, 0)
    assert_same(twin.x, TOY_X0 - 0.1 * (1 + 0.7 + 0.4))


@pytest.mark.parametrize("option", ["I", "II"])
def test_fedmoswa_first_round_is_fedswa(option):
    rounds = make_rounds(14, 4, 4, 4, 4, full=True)
    control = run(softmax(FedMoSWA, control_update=option), rounds)
    plain = run(softmax(FedSWA), rounds)
    assert_same(control[0], plain[0])
    assert np.abs(control[1] - plain[1]).max() > 1e-3


def test_fedmoswa_controls_are_mean_gradients():
    clients = toy_clients((0, 1))
    seen = []

    def gradient(y, minibatch):
        seen.append(toy_gradient(y, minibatch))
        return seen[-1]

    twin = FedMoSWA(TOY_X0, 4, gradient, client_lr=0.1, final_lr_ratio=0.3)
    twin.round(clients, 0)
    rates = np.array(step_sizes(0.1, 3, 0.3))
    expected = [rates @ np.array(seen[:3]) / rates.sum(), rates @ np.array(seen[3:]) / rates.sum()]
    assert_same(twin.c_i[:2], expected)
    assert_same(twin.m, 0.2 * np.mean(expected, axis=0))
    first = toy(FedMoSWA, control_update="I")
    first.round(clients, 0)
    assert_same(first.c_i[:2], TOY_A[:2] * (TOY_X0 - TOY_B[:2]))


def test_fedmo_and_scaffold_part_in_the_stated_round():
    rounds = make_rounds(15, 4, 4, 3, 4, equal_steps=True, weighted=False)
    scaffold = run(softmax(Scaffold), rounds)
    for gamma, agreeing in ((0.2, 1), (4 / NUM_CLIENTS, 2)):
        difference = np.abs(run(softmax(FedMo, momentum=gamma), rounds) - scaffold).max(axis=1)
        assert (difference[:agreeing] < 1e-12).all()
        assert (difference[agreeing:] > 1e-5).all()


# CFedAvg


def test_cfedavg_without_compression_is_fedavg():
    rounds = make_rounds(16, 6, 4, 3, 4)
    plain = run(softmax(FedAvg, server_lr=0.5), rounds)
    assert_same(run(softmax(CFedAvg, server_lr=0.5), rounds), plain)
    assert_same(run(softmax(CFedAvg, server_lr=0.5, compressor=top_k(0.0)), rounds), plain)


def test_top_k_keeps_the_largest_and_breaks_ties_by_index():
    v = np.array([1.0, -3.0, 2.0, 3.0, -2.0, 0.0])
    assert_same(top_k(0.5)(v), [0, -3, 2, 3, 0, 0])
    assert_same(top_k(0.99)(v), [0, -3, 0, 0, 0, 0])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["top", "drop"])
def test_error_feedback_telescopes(kind, normalize):
    rounds = make_rounds(17, 8, 4, 3, 4)
    masks = np.random.default_rng(0).random((8, NUM_CLIENTS, problem.DIMENSION)) < 0.3
    compressor = top_k(0.8) if kind == "top" else random_drop(lambda i, t: masks[t, i])
    twin = softmax(CFedAvg, compressor=compressor, normalize_by_steps=normalize)
    changes, messages = twin.client_rows(), twin.client_rows()
    for t, (clients, _) in enumerate(rounds):
        twin.round(clients, t)
        for i, (u, message, _) in twin.sent.items():
            changes[i] += u
            messages[i] += message
            assert np.count_nonzero(message) <= (4 if kind == "top" else masks[t, i].sum())
    assert_same(messages + twin.e, changes)
    assert np.abs(twin.e).max() > 1e-3


def test_cfedavg_without_feedback_forgets_what_was_dropped():
    twin = softmax(CFedAvg, compressor=top_k(0.8), error_feedback=False)
    run(twin, make_rounds(17, 4, 4, 3, 4))
    assert_same(twin.e, 0)
    for u, message, _ in twin.sent.values():
        assert_same(message, top_k(0.8)(u))


def test_cfedavg_normalised_equal_steps_only_rescale_the_server_step():
    rounds = make_rounds(18, 6, 4, 3, 4, equal_steps=True)
    divided = softmax(CFedAvg, compressor=top_k(0.8), normalize_by_steps=True, server_lr=3.0)
    assert_same(run(divided, rounds), run(softmax(CFedAvg, compressor=top_k(0.8)), rounds))


# FAFED and its counter-example


STEM_PATH = """
0.5818906250 -0.0079531250
0.6204946875  0.2225005469
0.6465958629  0.3780153600
"""
NO_PRECONDITIONER = {"preconditioner": np.ones_like, "second_moment_decay": 0.5}


def test_fafed_without_preconditioner_is_stem():
    options = {"momentum": 0.5, "steps_per_round": 3, **NO_PRECONDITIONER}
    twin = toy(FAFED, **options)
    twin.init(toy_clients(ALL))
    assert_same(twin.x, [0.525, -0.35])
    expected = np.array(STEM_PATH.split(), dtype=float).reshape(3, 2)
    assert_same(run(twin, toy_rounds((ALL,) * 3)), expected, atol=1e-9)
    assert_same(run(toy(FAFED, **options), toy_rounds((ALL,) * 3)), expected, atol=1e-9)


def test_fafed_without_momentum_and_preconditioner_is_fedavg_from_x1():
    rounds = make_rounds(19, 5, NUM_CLIENTS, 3, 4, equal_steps=True, weighted=False)
    fafed = softmax(FAFED, momentum=1.0, steps_per_round=3, **NO_PRECONDITIONER)
    fafed.init(rounds[0][0])
    fedavg = softmax(FedAvg)
    first = [c.round_examples() for c in rounds[0][0]]
    m_0 = np.mean([problem.gradient(fedavg.x, examples) for examples in first], axis=0)
    fedavg.x = fedavg.x - 0.2 * m_0
    assert_same(fafed.x, fedavg.x)
    assert_same(run(fafed, rounds), run(fedavg, rounds))


def test_fafed_with_one_client_is_centralised_storm():
    q, rho, beta = 3, 0.01, 0.9
    eta, alpha = (lambda t: 0.05 / (1 + t) ** (1 / 3)), (lambda t: 0.9 / (1 + 0.1 * t))
    client = ReferenceClient(0, [], 1.0)
    data = problem.client_data()[4]
    rng = np.random.default_rng(20)
    rounds = []
    for _ in range(3):
        picks = [rng.integers(17, size=4) for _ in range(q)]
        batches = [(data[0][pick], data[1][pick]) for pick in picks]
        rounds.append([ReferenceClient(0, batches)])
    twin = FAFED(
        problem.initial_point(),
        1,
        problem.gradient,
        client_lr=eta,
        momentum=alpha,
        second_moment_decay=beta,
        steps_per_round=q,
        stability=rho,
        precondition_first_step=True,
    )
    path = run(twin, rounds)
    # one recursion over t = 1..9
    batches = [b for clients in rounds for b in clients[0].minibatches]
    client.minibatches = batches[:q]
    old = problem.initial_point()
    m = problem.gradient(old, client.round_examples())
    v = m**2
    a = np.sqrt(v) + rho
    x = old - eta(0) * m / a
    for t, batch in enumerate(batches, start=1):
        g = problem.gradient(x, batch)
        m = g + (1 - alpha(t)) * (m - problem.gradient(old, batch))
        v = beta * v + (1 - beta) * g**2
        if t % q == 0:
            a = np.sqrt(v) + rho
        old, x = x, x - eta(t) * m / a
        if t % q == 0:
            assert_same(path[t // q - 1], x)


def counter_example(y, minibatch):
    """f_1 = 3 x^2 or 6|x| - 3, f_2 = f_3 = -x^2 or -2|x| + 1, from |x| = 1 on the latter."""
    client = int(minibatch[0][0])
    slope = np.where(np.abs(y) <= 1, y, np.sign(y))
    return 6.0 * slope if client == 0 else -2.0 * slope


def counter_rounds(rounds, steps):
    return [[ReferenceClient(i, [(np.array([i]),)] * steps) for i in range(3)]] * rounds


def test_naive_adaptive_fedavg_walks_away_from_the_optimum():
    options = {"client_lr": 0.1, "second_moment_decay": 0.5}
    twin = NaiveAdaptiveFedAvg([10.0], 3, counter_example, **options)
    path = run(twin, counter_rounds(4, 1))
    expected = [10.0471404521, 10.0856304700, 10.1212653023, 10.1556918209]
    assert_same(path[:, 0], expected, atol=1e-9)
    twin = NaiveAdaptiveFedAvg([10.0], 3, counter_example, **options)
    assert_same(run(twin, counter_rounds(3, 5))[-1], [10.5234162945], atol=1e-9)
    for i, expected in enumerate((9.8585786438, 10.1414213562, 10.1414213562)):
        alone = NaiveAdaptiveFedAvg([10.0], 3, counter_example, **options)
        alone.round(counter_rounds(1, 1)[0][i : i + 1], 0)
        assert_same(alone.x, [expected], atol=1e-9)


@pytest.mark.parametrize("q", [1, 5])
def test_fafed_walks_towards_the_optimum(q):
    options = {"client_lr": 0.1, "second_moment_decay": 0.5, "momentum": 0.5}
    twin = FAFED([10.0], 3, counter_example, steps_per_round=q, **options)
    path = run(twin, counter_rounds(3000 // q, q))[:, 0]
    assert path[0] < 10
    far = path > 1.5
    assert (np.diff(path[far]) < 0).all()
    # what is left for q = 5 is client drift under a fixed step
    assert np.abs(path[-1]) < (0.1 if q == 1 else 1.0)


# FedSpeed


def recorded(twin_class, **options):
    """A twin on the softmax problem that records g~ of every step, in order."""
    twin = softmax(twin_class, **options)
    twin.taken = []
    direction = twin.direction

    def record(*arguments):
        twin.taken.append(direction(*arguments))
        return twin.taken[-1]

    twin.direction = record
    return twin


@pytest.mark.parametrize("a", [0.0, 0.7, 1.0])
def test_fedspeed_local_steps_satisfy_the_closed_form(a):
    twin = recorded(FedSpeed, perturbation_weight=a, prox_weight=0.4)
    lam = 1 / 0.4
    for t, (clients, _) in enumerate(make_rounds(21, 5, 4, 4, 4)):
        x_old, c_old = twin.x, twin.c.copy()
        twin.taken.clear()
        twin.round(clients, t)
        taken = iter(twin.taken)
        for client in clients:
            if not client.minibatches:
                continue
            k = np.arange(client.steps)
            gammas = 0.2 / lam * (1 - 0.2 / lam) ** (client.steps - 1 - k)
            total = gammas.sum()
            mixed = sum(g * next(taken) for g in gammas) / total
            c = c_old[client.id]
            move = -total * lam * mixed + total * lam * c
            assert_same(twin.c[client.id], (1 - total) * c + total * mixed)
            assert_same(twin.c[client.id], c - move / lam)
        assert np.abs(twin.x - x_old).max() > 1e-4


def test_fedspeed_sends_the_corrected_model():
    twin, clients = toy(FedSpeed, prox_weight=0.5, perturbation_weight=0.0), toy_clients((0,))
    y = TOY_X0
    for _ in range(3):
        y = y - 0.1 * (TOY_A[0] * (y - TOY_B[0]) + 0.5 * (y - TOY_X0))
    twin.round(clients, 0)
    assert_same(twin.x, 2 * y - TOY_X0)
    assert_same(twin.c[0], 0.5 * (TOY_X0 - y))


def test_fedspeed_perturbation():
    batch = (TOY_A[:1], TOY_B[:1])
    g = TOY_A[0] * (TOY_X0 - TOY_B[0])
    for normalize, radius in ((True, 0.3 / np.linalg.norm(g)), (False, 0.3)):
        twin = toy(
            FedSpeed,
            perturbation_radius=0.3,
            perturbation_weight=0.25,
            normalize_perturbation=normalize,
        )
        expected = g + 0.25 * TOY_A[0] * radius * g
        assert_same(twin.direction(TOY_X0, batch, 0), expected)
    at_minimum = toy(FedSpeed).direction(TOY_B[0], batch, 0)
    assert_same(at_minimum, 0)


@pytest.mark.parametrize(("a", "calls"), [(0.0, 3), (1.0, 6)])
def test_fedspeed_gradients_per_step(a, calls):
    seen = []

    def gradient(y, minibatch):
        seen.append(y)
        return toy_gradient(y, minibatch)

    FedSpeed(TOY_X0, 4, gradient, client_lr=0.1, perturbation_weight=a).round(toy_clients((0,)), 0)
    assert len(seen) == calls


@pytest.mark.parametrize("twin", [FedSpeed, FedSpeedIng])
def test_fedspeed_server_duals_agree_under_full_participation_only(twin):
    options = {"inertia": 0.3} if twin is FedSpeedIng else {}
    for cohort, same in ((NUM_CLIENTS, True), (4, False)):
        rounds = make_rounds(22, 5, cohort, 3, 4, equal_steps=True, weighted=False)
        ours, theirs = softmax(twin, **options), softmax(twin, server_dual="all", **options)
        difference = np.abs(run(ours, rounds) - run(theirs, rounds)).max()
        assert (difference < 1e-11) == same


def test_fedspeed_reduces_to_fedprox_and_fedavg():
    rounds = make_rounds(23, 5, 4, 3, 4)
    bare = {"correction": False, "perturbation_weight": 0.0}
    twin = softmax(FedSpeed, prox_weight=1e-13, **bare)
    assert_same(run(twin, rounds), run(softmax(FedAvg), rounds), atol=1e-11)
    assert_same(twin.c, 0)
    prox = toy(FedSpeed, prox_weight=0.5, **bare)
    expected = "0.4486875000 -0.1914375000 0.6344291094 0.1548154531 0.5707180930 0.4566831517"
    expected = np.array(expected.split(), dtype=float).reshape(3, 2)
    assert_same(run(prox, toy_rounds()), expected, atol=1e-9)


def test_fedspeed_ing_without_inertia_is_fedspeed_and_differs_with_it():
    rounds = make_rounds(24, 6, 4, 3, 4)
    plain = run(softmax(FedSpeed), rounds)
    assert_same(run(softmax(FedSpeedIng, inertia=lambda t: 0.0), rounds), plain)
    inert = softmax(FedSpeedIng, inertia=lambda t: 0.5)
    path = run(inert, rounds)
    assert_same(path[0], plain[0])
    assert np.abs(path[1] - plain[1]).max() > 1e-4
    assert_same(inert.xbar, path[-1] + 0.5 * (path[-1] - path[-2]))


def test_fedspeed_ing_by_hand():
    eta, prox, zeta = 0.1, 0.5, 0.3
    twin = toy(FedSpeedIng, inertia=zeta, prox_weight=prox, perturbation_weight=0.0)
    x = xbar = TOY_X0
    c, cbar = np.zeros(2), np.zeros(2)
    for t in range(4):
        y = x
        for _ in range(3):
            y = y - eta * (TOY_A[2] * (y - TOY_B[2]) - cbar + prox * (y - xbar))
        c_new = c - prox * (y - x)
        cbar = c_new + zeta * (c_new - c)
        x_new = y - c_new / prox
        x, xbar, c = x_new, x_new + zeta * (x_new - x), c_new
        twin.round(toy_clients((2,)), t)
        assert_same(twin.x, x)
        assert_same(twin.xbar, xbar)
        assert_same(twin.c[2], c)
        assert_same(twin.cbar[2], cbar)


def test_fedspeed_first_round_by_server_dual():
    fedprox = toy(FedSpeed, correction=False)
    fedprox.round(toy_clients((0, 1, 3)), 0)
    move = fedprox.x - TOY_X0
    for dual, factor in (("cohort", 2.0), ("all", 1 + 3 / 4)):
        twin = toy(FedSpeed, server_dual=dual)
        twin.round(toy_clients((0, 1, 3)), 0)
        assert_same(twin.x, TOY_X0 + factor * move)


def test_fedspeed_server_rate_interpolates():
    clients = toy_clients(ALL)
    full, half = toy(FedSpeed), toy(FedSpeed, server_lr=0.5)
    full.round(clients, 0)
    half.round(clients, 0)
    assert_same(half.x - TOY_X0, 0.5 * (full.x - TOY_X0))


def test_fedspeed_transform_sees_the_unperturbed_point():
    points = []

    def transform(g, y):
        points.append(y)
        return g + 0.1 * y

    twin = toy(FedSpeed, transform=transform)
    batch = (TOY_A[:1], TOY_B[:1])
    decayed = twin.direction(TOY_X0, batch, 0)
    assert_same(points, [TOY_X0])
    assert_same(decayed, toy(FedSpeed).direction(TOY_X0, batch, 0) + 0.1 * TOY_X0)


def test_fedspeed_needs_a_positive_prox_weight():
    with pytest.raises(ValueError, match="positive"):
        toy(FedSpeed, prox_weight=0.0)


# with which ``test_rules`` checks the rules that hold for all
EVERY = {
    "fedavg": (FedAvg, {}),
    "fedavgm": (FedAvgM, {"momentum": 0.9}),
    "fedadam": (FedAdam, {}),
    "fedyogi": (FedYogi, {}),
    "fedadagrad": (FedAdagrad, {}),
    "fedams": (FedAMS, {}),
    "fedopt adam": (FedOptAdam, {"learning_rate": 0.1}),
    "scaffold I": (Scaffold, {"control_update": "I"}),
    "scaffold II": (Scaffold, {}),
    "gradma": (GradMA, {"keep_local_model": True, "memory_size": 5}),
    "gradma_w": (GradMAW, {}),
    "gradma_s": (GradMAS, {"memory_size": 5}),
    "fedswa": (FedSWA, {}),
    "fedmoswa I": (FedMoSWA, {"control_update": "I"}),
    "fedmoswa II": (FedMoSWA, {}),
    "fedmo": (FedMo, {}),
    "cfedavg": (CFedAvg, {"compressor": top_k(0.7), "normalize_by_steps": True}),
    "fafed": (FAFED, {"momentum": 0.5, "second_moment_decay": 0.9, "steps_per_round": 3}),
    "naive": (NaiveAdaptiveFedAvg, {"second_moment_decay": 0.5, "client_lr": 0.01}),
    "fedspeed": (FedSpeed, {}),
    "fedspeed all": (FedSpeed, {"server_dual": "all"}),
    "fedspeed_ing": (FedSpeedIng, {"inertia": 0.3}),
}
