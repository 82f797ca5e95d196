"""The sharpness-aware twins and FedACG: golden trajectories, reductions, invariants.

The golden problem has N = 3, d = 3 and the full-batch gradients a_i (y - b_i); K = 2, eta = 0.1.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.reference import problem
from tests.reference.base import ReferenceClient
from tests.reference.client_momentum_numpy import FedCM
from tests.reference.dynamic_reg_numpy import FedDyn
from tests.reference.fedacg_numpy import FedACG
from tests.reference.fedavg_numpy import FedAvg
from tests.reference.fedspeed_numpy import FedSpeed
from tests.reference.fedswa_numpy import FedMo, FedMoSWA, FedSWA
from tests.reference.problem import NUM_CLIENTS, make_rounds, toy_gradient
from tests.reference.proximal_numpy import FedProx
from tests.reference.scaffold_numpy import Scaffold
from tests.reference.sharpness_numpy import (
    FedASAM,
    FedGAMMA,
    FedLESAM,
    FedSAM,
    FedSMOO,
    MoFedSAM,
    unit,
)
from tests.reference.test_twins import assert_same, run, snapshot, softmax

pytestmark = pytest.mark.methods  # `make check` runs these where a twin has changed

A = np.array([[1, 2, 3], [2, 1, 1], [1, 1, 4.0]])
B = np.array([[0, 1, -1], [1, 0, 1], [-1, -1, 0.0]])
X0 = np.array([1, -2, 0.5])
ALL = (0, 1, 2)
COHORTS = ((0, 1), (1, 2), (0, 2))
RHO = {"perturbation_radius": 0.1}


def cubic(twin, **options):
    """A twin on the golden problem."""
    return twin(X0, 3, options.pop("gradient", toy_gradient), **{"client_lr": 0.1, **options})


def clients_of(cohort, steps=2):
    """Clients of the golden problem; ``steps`` is one number, or one per client of the three."""
    steps = [steps] * 3 if isinstance(steps, int) else steps
    return [ReferenceClient(i, [(A[i : i + 1], B[i : i + 1])] * steps[i]) for i in cohort]


def rounds_of(cohorts=COHORTS, steps=2):
    return [clients_of(cohort, steps) for cohort in cohorts]


GOLDEN = {
    "fedavg": (FedAvg, {}),
    "fedsam": (FedSAM, RHO),
    "mofedsam": (MoFedSAM, {**RHO, "mixing": 0.1}),
    "fedasam": (FedASAM, {**RHO, "stability": 0.2}),
    "fedlesam own": (FedLESAM, RHO),
    "fedlesam last": (FedLESAM, {**RHO, "reference": "last_round"}),
    "fedlesam-s": (FedLESAM, {**RHO, "variant": "S"}),
    "fedlesam-d": (FedLESAM, {**RHO, "variant": "D", "prox_weight": 0.1}),
    "scaffold": (Scaffold, {}),
    "fedgamma": (FedGAMMA, RHO),
    "feddyn": (FedDyn, {"prox_weight": 0.1}),
    "fedsmoo mu_minus_e": (FedSMOO, {**RHO, "prox_weight": 0.1}),
    "fedsmoo mu": (FedSMOO, {**RHO, "prox_weight": 0.1, "s_source": "mu"}),
    "fedacg": (FedACG, {"momentum": 0.85, "prox_weight": 0.1}),
    "fedmo": (FedMo, {"momentum": 0.2}),
    "fedmoswa": (FedMoSWA, {"momentum": 0.2, "final_lr_ratio": 0.1, "server_lr": 1.5}),
    "fedswa": (FedSWA, {"final_lr_ratio": 0.1, "server_lr": 1.5}),
}
TRAJECTORIES = """
fedavg:             0.905000000 -1.270000000  0.165000000
                    0.741125000 -1.123700000  0.191525000
                    0.505311250 -0.729682500 -0.173601875
fedsam:             0.903624627 -1.246155862  0.152990105
                    0.733116438 -1.095404291  0.182510444
                    0.488444442 -0.694645678 -0.202249807
mofedsam:           0.989917551 -1.918161699  0.459140354
                    0.960631457 -1.815379725  0.408021956
                    0.904461371 -1.657839382  0.301143856
fedasam:            0.903795597 -1.217881034  0.163529169
                    0.733307195 -1.066930106  0.190551616
                    0.489772794 -0.670412140 -0.178400473
fedlesam own:       0.905000000 -1.270000000  0.165000000
                    0.739010745 -1.115125520  0.187590136
                    0.494141268 -0.700664367 -0.180284549
fedlesam last:      0.905000000 -1.270000000  0.165000000
                    0.737894888 -1.106551040  0.174335857
                    0.489122881 -0.698035642 -0.178612582
fedlesam-s:         0.905000000 -1.270000000  0.165000000
                    0.680427411 -0.833292187 -0.052951531
                    0.548279930 -0.575076119 -0.132878701
fedlesam-d:         0.842500000 -0.790000000 -0.055000000
                    0.532788519 -0.206386754 -0.089696779
                    0.043080807  0.578378774 -0.579181410
scaffold:           0.905000000 -1.270000000  0.165000000
                    0.682541667 -0.841866667 -0.049016667
                    0.557585000 -0.610091389 -0.105459583
fedgamma:           0.903624627 -1.246155862  0.152990105
                    0.673979290 -0.808326564 -0.061413101
                    0.545297867 -0.573596629 -0.111700994
feddyn:             0.842500000 -0.790000000 -0.055000000
                    0.536293750 -0.220603500 -0.083175875
                    0.058040131  0.523551480 -0.560674314
fedsmoo mu_minus_e: 0.840215254 -0.750462973 -0.074862308
                    0.526118027 -0.173731386 -0.077521141
                    0.030747832  0.574825275 -0.580823586
fedsmoo mu:         0.840215254 -0.750462973 -0.074862308
                    0.526126606 -0.173731400 -0.077535440
                    0.030829678  0.574675515 -0.580827259
fedacg:             0.905500000 -1.274000000  0.167000000
                    0.683989638 -0.627245900  0.026320625
                    0.307517428  0.028192679 -0.293460558
fedmo:              0.905000000 -1.270000000  0.165000000
                    0.723550000 -1.165500000  0.087775000
                    0.707495000 -1.131375000  0.106239750
fedmoswa:           0.887875000 -1.127750000  0.088625000
                    0.679184604 -1.035009966  0.026401950
                    0.673447298 -1.045243216  0.094712026
fedswa:             0.887875000 -1.127750000  0.088625000
                    0.700416016 -0.986977062  0.155451547
                    0.431222724 -0.559250214 -0.266641209
"""
# the server state next to x after the third round
SERVER_STATES = {
    "fedgamma": ("c", (0.71979414, -1.54811165, 0.53437428)),
    "fedmo": ("m", (0.43462500, -1.03562500, 0.54857025)),
    "fedacg": ("m", (-0.37647221, 0.65543858, -0.31978118)),
    "fedsmoo mu_minus_e": ("s", (0.04828123, -0.03725402, 0.07925314)),
    "fedsmoo mu": ("s", (0.04804270, -0.02321928, 0.08457402)),
}


def golden(name):
    """x_1, x_2, x_3 of one entry of the table."""
    text = TRAJECTORIES.split(f"\n{name}:")[1].split(":")[0]
    return np.array(text.split()[:9], dtype=float).reshape(3, 3)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_trajectory(name):
    make, options = GOLDEN[name]
    twin = cubic(make, **options)
    assert_same(run(twin, rounds_of()), golden(name), atol=1e-9)
    if name in SERVER_STATES:
        attribute, expected = SERVER_STATES[name]
        assert_same(getattr(twin, attribute), expected, atol=1e-8)


# reductions: each pair agrees exactly on ragged weighted rounds

ZERO = {"perturbation_radius": 0.0}
BIG = {"perturbation_radius": 0.4}
NONE_ADAPTIVE = np.zeros(problem.DIMENSION, bool)
REDUCTIONS = {
    "fedsam rho=0": (FedSAM, ZERO, FedAvg, {}),
    "mofedsam a=1": (MoFedSAM, {**BIG, "mixing": 1.0}, FedSAM, BIG),
    "mofedsam a=1 rho=0": (MoFedSAM, {**ZERO, "mixing": 1.0}, FedAvg, {}),
    "mofedsam rho=0": (MoFedSAM, {**ZERO, "mixing": 0.3}, FedCM, {"mixing": 0.3}),
    "fedasam rho=0": (FedASAM, ZERO, FedAvg, {}),
    "fedasam t=1": (FedASAM, {**BIG, "adaptive": NONE_ADAPTIVE}, FedSAM, BIG),
    "fedlesam rho=0": (FedLESAM, ZERO, FedAvg, {}),
    "fedlesam last rho=0": (FedLESAM, {**ZERO, "reference": "last_round"}, FedAvg, {}),
    "fedlesam-s rho=0": (FedLESAM, {**ZERO, "variant": "S"}, Scaffold, {}),
    "fedlesam-d rho=0": (
        FedLESAM,
        {**ZERO, "variant": "D", "prox_weight": 0.3},
        FedDyn,
        {"prox_weight": 0.3},
    ),
    "fedlesam-s corr=0": (
        FedLESAM,
        {**BIG, "variant": "S", "correction_weight": 0.0},
        FedLESAM,
        BIG,
    ),
    "fedgamma rho=0": (FedGAMMA, ZERO, Scaffold, {}),
    "fedsmoo rho=0": (FedSMOO, {**ZERO, "prox_weight": 0.3}, FedDyn, {"prox_weight": 0.3}),
    "fedsmoo mu rho=0": (
        FedSMOO,
        {**ZERO, "prox_weight": 0.3, "s_source": "mu"},
        FedDyn,
        {"prox_weight": 0.3},
    ),
    "fedacg lam=b=0": (FedACG, {"momentum": 0.0, "prox_weight": 0.0}, FedAvg, {}),
    "fedacg lam=0": (FedACG, {"momentum": 0.0, "prox_weight": 0.3}, FedProx, {"prox_weight": 0.3}),
    "fedmoswa is fedmo": (FedMoSWA, {"final_lr_ratio": 1.0, "server_lr": 1.0}, FedMo, {}),
    "fedswa is fedavg": (FedSWA, {"final_lr_ratio": 1.0, "server_lr": 1.0}, FedAvg, {}),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name):
    make, options, other, other_options = REDUCTIONS[name]
    rounds = make_rounds(31, 6, 4, 3, 4)
    path = run(softmax(other, **other_options), rounds)
    assert_same(run(softmax(make, **options), rounds), path, atol=1e-11)
    assert np.abs(path[-1] - problem.initial_point()).max() > 1e-3


FIRST_ROUNDS = {
    "fedlesam": (FedLESAM, BIG, FedAvg, {}),
    "fedlesam last": (FedLESAM, {**BIG, "reference": "last_round"}, FedAvg, {}),
    "fedlesam-s": (FedLESAM, {**BIG, "variant": "S"}, Scaffold, {}),
    "fedlesam-d": (
        FedLESAM,
        {**BIG, "variant": "D", "prox_weight": 0.3},
        FedDyn,
        {"prox_weight": 0.3},
    ),
    "fedgamma": (FedGAMMA, BIG, FedSAM, BIG),
    "mofedsam": (
        MoFedSAM,
        {**BIG, "mixing": 0.1, "client_lr": 0.2},
        FedSAM,
        {**BIG, "client_lr": 0.02},
    ),
    "fedacg": (FedACG, {"momentum": 0.9, "prox_weight": 0.3}, FedProx, {"prox_weight": 0.3}),
    "fedmo": (FedMo, {}, FedAvg, {}),
}


@pytest.mark.parametrize("name", FIRST_ROUNDS)
def test_first_round_equals_the_simpler_method_and_the_second_does_not(name):
    make, options, other, other_options = FIRST_ROUNDS[name]
    rounds = make_rounds(32, 2, 6, 3, 4)
    first, second = run(softmax(make, **options), rounds) - run(
        softmax(other, **other_options), rounds
    )
    assert_same(first, 0)
    assert np.abs(second).max() > 1e-5


def constant_gradient(y, minibatch):
    """The gradient of a linear loss."""
    return minibatch[0][0]


@pytest.mark.parametrize("make", [FedSAM, FedASAM, FedLESAM])
def test_linear_losses_make_the_perturbation_void(make):
    twin = cubic(make, **BIG, gradient=constant_gradient)
    plain = cubic(FedAvg, gradient=constant_gradient)
    assert_same(run(twin, rounds_of()), run(plain, rounds_of()))


# the perturbations


def test_unit_vector():
    assert_same(unit(np.array([3.0, -4.0])), [0.6, -0.8])
    for v in (np.zeros(3), np.full(3, 1e-13)):
        np.testing.assert_array_equal(unit(v), 0)


def test_fedsam_step_in_closed_form():
    b = B[1]
    client = ReferenceClient(0, [(np.ones((1, 3)), b[None])])
    twin = cubic(FedSAM, perturbation_radius=0.3)
    twin.round([client], 0)
    away = X0 - b
    assert_same(twin.x, X0 - 0.1 * (away + 0.3 * away / np.linalg.norm(away)))
    at_minimum = cubic(FedSAM, perturbation_radius=0.3)
    at_minimum.x = b.copy()
    at_minimum.round([client], 0)
    np.testing.assert_array_equal(at_minimum.x, b)


def test_ascent_lengths():
    rng = np.random.default_rng(0)
    data = problem.client_data()[2]
    adaptive = np.arange(problem.DIMENSION) < 15
    for _ in range(5):
        y = rng.normal(size=problem.DIMENSION)
        e = softmax(FedSAM, **BIG).ascent(y, data, 0)
        np.testing.assert_allclose(np.linalg.norm(e), 0.4)
        assert e @ problem.gradient(y, data) > 0
        twin = softmax(FedASAM, **BIG, adaptive=adaptive)
        scales = np.concatenate([np.abs(y[:15]) + 0.2, np.ones(3)])
        assert_same(twin.scales(y), scales)
        e = twin.ascent(y, data, 0)
        np.testing.assert_allclose(np.linalg.norm(e / scales), 0.4)
        ratio = e / (scales**2 * problem.gradient(y, data))
        np.testing.assert_allclose(ratio, ratio[0])


def test_fedasam_by_hand():
    y, g = X0, A[0] * (X0 - B[0])
    scales = np.array([1.2, 2.2, 1.0])
    twin = cubic(FedASAM, perturbation_radius=0.3, stability=0.2, adaptive=[True, True, False])
    twin.round(clients_of((0,), steps=1), 0)
    e = 0.3 * scales**2 * g / np.sqrt(((scales * g) ** 2).sum())
    assert_same(twin.x, X0 - 0.1 * A[0] * (y + e - B[0]))


def test_fedasam_where_all_entries_have_size_one_is_fedsam():
    signs = np.array([1.0, -1.0, 1.0])
    paths = []
    for make, options in ((FedASAM, {"stability": 0.0}), (FedSAM, {})):
        twin = cubic(make, **BIG, **options)
        twin.x = signs.copy()
        paths.append(run(twin, rounds_of(COHORTS[:1], steps=1)))
    assert_same(*paths)


def test_fedasam_is_invariant_to_a_rescaling_that_keeps_the_loss():
    def gradient(y, _):
        """Of (w1 w2 - 2)^2 / 2."""
        return (y[0] * y[1] - 2) * y[::-1]

    def perturbed_loss(make, c, **options):
        twin = make([1.5, 0.7], 1, gradient, client_lr=0.1, perturbation_radius=0.4, **options)
        y = np.array([1.5 * c, 0.7 / c])
        return (np.prod(y + twin.ascent(y, None, 0)) - 2) ** 2 / 2

    adaptive = [perturbed_loss(FedASAM, c, stability=0.0) for c in (0.2, 1.0, 3.0)]
    np.testing.assert_allclose(adaptive, adaptive[0])
    fixed = [perturbed_loss(FedSAM, c) for c in (0.2, 1.0, 3.0)]
    assert np.ptp(fixed) > 0.01


@pytest.mark.parametrize("make", [FedSAM, FedASAM, FedLESAM])
def test_scaling_the_loss_and_unscaling_the_rate_changes_nothing(make):
    rounds = make_rounds(33, 5, 4, 3, 4)
    twin = softmax(make, **BIG, client_lr=0.2 / 8)
    twin.gradient = lambda y, minibatch: 8 * problem.gradient(y, minibatch)
    assert_same(run(twin, rounds), run(softmax(make, **BIG), rounds))


def evaluations(make, **options):
    """The points of all gradients of client 1's round, after a first round of it."""
    points = []

    def gradient(y, minibatch):
        points.append(y)
        return toy_gradient(y, minibatch)

    twin = cubic(make, gradient=gradient, **options)
    twin.round(clients_of((1,)), 0)
    points.clear()
    x = twin.x
    twin.round(clients_of((1,)), 1)
    return x, points


@pytest.mark.parametrize("reference", ["own_last_visit", "last_round"])
def test_fedlesam_takes_one_gradient_per_step_behind_the_model(reference):
    x, points = evaluations(FedLESAM, **BIG, reference=reference)
    assert len(points) == 2
    assert_same(points[0], x + 0.4 * (X0 - x) / np.linalg.norm(X0 - x))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (FedSAM, {}),
        (FedASAM, {}),
        (MoFedSAM, {"mixing": 0.3}),
        (FedGAMMA, {}),
        (FedSMOO, {"prox_weight": 0.1}),
    ],
)
def test_two_gradients_per_step_a_perturbation_apart(make, options):
    x, points = evaluations(make, **BIG, **options)
    assert len(points) == 4
    assert_same(points[0], x)
    if make is not FedASAM:
        distances = [np.linalg.norm(points[k + 1] - points[k]) for k in (0, 2)]
        assert_same(distances, 0.4)


def test_fedlesam_references():
    """A client looks back to its own last visit, or all look back to the last round."""
    own, last = cubic(FedLESAM, **BIG), cubic(FedLESAM, **BIG, reference="last_round")
    models = [X0]
    for t, cohort in enumerate(((0, 1), (1, 2), (), (0, 1))):
        for twin in (own, last):
            twin.x = models[-1].copy()  # the same trajectory for both
        if t == 3:
            # the empty round counts for nobody
            back = unit(models[0] - models[3]), unit(models[1] - models[3])
            assert_same(own.perturbation(0, t), 0.4 * back[0])
            assert_same(own.perturbation(1, t), 0.4 * back[1])
            for i in ALL:
                assert_same(last.perturbation(i, t), 0.4 * back[1])
        if t == 1:
            assert_same(own.perturbation(2, t), 0)
            assert_same(last.perturbation(2, t), 0.4 * unit(models[0] - models[1]))
        for twin in (own, last):
            twin.round(clients_of(cohort), t)
        models.append(own.x.copy())
    assert_same(models[2], models[3])
    full = rounds_of((ALL,) * 4)
    paths = [
        run(cubic(FedLESAM, **BIG, reference=r), full) for r in ("own_last_visit", "last_round")
    ]
    assert_same(*paths)


# MoFedSAM


def test_mofedsam_momentum_is_the_last_move_per_step_and_rate():
    def rate(t):
        return 0.1 * 0.5**t

    twin = cubic(MoFedSAM, **RHO, mixing=0.2, client_lr=rate)
    for t, clients in enumerate(rounds_of()):
        old = twin.x
        twin.round(clients, t)
        assert_same(twin.m, (old - twin.x) / (2 * rate(t)))


def test_mofedsam_divides_by_each_clients_own_steps():
    twin = softmax(MoFedSAM, **BIG, mixing=0.2, server_lr=0.7)
    taken = []
    twin.transform = lambda g, y: taken.append(g) or g
    for t, (clients, _) in enumerate(make_rounds(34, 6, 4, 4, 4)):
        taken.clear()
        m = twin.m
        twin.round(clients, t)
        left = iter(taken)
        present = [c for c in clients if c.minibatches]
        means = [np.mean([next(left) for _ in c.minibatches], axis=0) for c in present]
        fresh = np.average(means, axis=0, weights=[c.weight for c in present])
        assert_same(twin.m, 0.2 * fresh + 0.8 * m)


# control variates and duals


def options_of(variant, **more):
    return {**BIG, "variant": variant, **more}


CONTROLLED = {
    "scaffold": (Scaffold, {}),
    "fedgamma": (FedGAMMA, BIG),
    "fedlesam-s": (FedLESAM, options_of("S")),
    "fedmo": (FedMo, {}),
    "fedmoswa": (FedMoSWA, {"final_lr_ratio": 0.3}),
}


@pytest.mark.parametrize("name", CONTROLLED)
def test_a_control_variate_is_the_mean_gradient_of_the_round(name):
    make, options = CONTROLLED[name]
    twin = softmax(make, **options)
    taken = []
    twin.transform = lambda g, y: taken.append(g) or g
    for t, (clients, _) in enumerate(make_rounds(35, 6, 4, 4, 4)):
        taken.clear()
        twin.round(clients, t)
        left = iter(taken)
        for client in clients:
            if client.minibatches:
                k = np.arange(client.steps) / client.steps
                rates = 1 - k * (1 - 0.3) if name == "fedmoswa" else np.ones(client.steps)
                gradients = [next(left) for _ in client.minibatches]
                mean = np.average(gradients, axis=0, weights=rates)
                assert_same(twin.c_i[client.id], mean)
        if name in ("scaffold", "fedgamma", "fedlesam-s"):
            assert_same(twin.c, twin.c_i.mean(axis=0))


DUAL = {
    "fedlesam-d": (FedLESAM, options_of("D", prox_weight=0.3)),
    "fedsmoo": (FedSMOO, {**BIG, "prox_weight": 0.3}),
}


@pytest.mark.parametrize("name", DUAL)
def test_the_server_dual_is_the_mean_of_all_clients(name):
    make, options = DUAL[name]
    twin = softmax(make, **options)
    for t, (clients, _) in enumerate(make_rounds(36, 6, 4, 3, 4)):
        twin.round(clients, t)
        assert_same(twin.hbar, twin.h_i.mean(axis=0))
    assert np.abs(twin.hbar).max() > 1e-3


def test_prox_weight_zero_is_not_fedavg():
    for make, options in DUAL.values():
        twin = cubic(make, **{**options, **ZERO, "prox_weight": 0.0})
        plain = run(cubic(FedAvg), rounds_of())
        first = X0 + (1 + 2 / 3) * (plain[0] - X0)
        assert_same(run(twin, rounds_of())[0], first)


def identical_clients(rounds):
    """Every client the same mini-batches."""
    batches = [
        make_rounds(37, rounds, 1, 3, 4, equal_steps=True)[t][0][0].minibatches
        for t in range(rounds)
    ]
    return [[ReferenceClient(i, b) for i in range(NUM_CLIENTS)] for b in batches]


def test_identical_clients_need_no_correction():
    rounds = identical_clients(4)
    assert_same(run(softmax(FedGAMMA, **BIG), rounds), run(softmax(FedSAM, **BIG), rounds))
    assert_same(run(softmax(FedMo, momentum=1.0), rounds), run(softmax(FedAvg), rounds))


def test_fedmo_with_everybody_and_weight_one_is_scaffold():
    rounds = rounds_of((ALL,) * 5)
    assert_same(run(cubic(FedMo, momentum=1.0), rounds), run(cubic(Scaffold), rounds))


def test_fedmoswa_with_frozen_controls_is_fedswa():
    twin, plain = softmax(FedMoSWA), softmax(FedSWA)
    for t, (clients, _) in enumerate(make_rounds(38, 5, 4, 3, 4)):
        twin.round(clients, t)
        plain.round(clients, t)
        assert_same(twin.x, plain.x)
        twin.m, twin.c_i = 0 * twin.m, 0 * twin.c_i


def test_fixed_points_of_control_variates():
    optimum = (A * B).sum(axis=0) / A.sum(axis=0)
    gradients = A * (optimum - B)
    moved = {}
    for make in (FedMo, Scaffold, FedGAMMA):
        for cohort in (ALL, (0, 1)):
            twin = cubic(make, **(ZERO if make is FedGAMMA else {}))
            twin.x, twin.c_i = optimum.copy(), gradients.copy()
            path = run(twin, rounds_of((cohort,) * 3))
            moved[make, cohort] = np.abs(path - optimum).max()
    drifting = moved.pop((FedMo, (0, 1)))
    assert max(moved.values()) < 1e-12
    assert drifting > 1e-3


# FedSMOO


def test_fedsmoo_with_one_step_starts_like_fedspeed():
    clients = make_rounds(39, 1, 5, 1, 4)[0][0]
    twin = softmax(FedSMOO, **BIG, prox_weight=0.3)
    speed = {"perturbation_radius": 0.4, "prox_weight": 0.3, "server_dual": "all"}
    assert_same(run(twin, [clients]), run(softmax(FedSpeed, **speed), [clients]))
    np.testing.assert_array_equal(twin.s, 0)  # mu_i = e
    clients = make_rounds(39, 1, 5, 3, 4)[0][0]
    twin = softmax(FedSMOO, **BIG, prox_weight=0.3)
    difference = run(twin, [clients]) - run(softmax(FedSpeed, **speed), [clients])
    assert np.abs(difference).max() > 1e-5


@pytest.mark.parametrize("source", ["mu_minus_e", "mu"])
def test_fedsmoo_global_perturbation_has_the_radius(source):
    twin = softmax(FedSMOO, **BIG, prox_weight=0.3, s_source=source)
    for t, (clients, _) in enumerate(make_rounds(40, 5, 4, 3, 4)):
        twin.round(clients, t)
        np.testing.assert_allclose(np.linalg.norm(twin.s), 0.4)
        if source == "mu":
            present = [client for client in clients if client.minibatches]
            rows = twin.mu_i[[client.id for client in present]]
            mean = np.average(rows, axis=0, weights=[client.weight for client in present])
            assert_same(twin.s, 0.4 * mean / np.linalg.norm(mean))


def test_fedsmoo_sources_share_the_first_round():
    rounds = make_rounds(41, 2, 4, 3, 4)
    options = {**BIG, "prox_weight": 0.3}
    difference = run(softmax(FedSMOO, **options), rounds) - run(
        softmax(FedSMOO, **options, s_source="mu"), rounds
    )
    assert_same(difference[0], 0)
    assert np.abs(difference[1]).max() > 1e-6


def test_fedsmoo_second_round_by_hand():
    rho, eta, prox = 0.4, 0.1, 0.3
    twin = cubic(FedSMOO, **BIG, prox_weight=prox)
    twin.round(clients_of((0, 1)), 0)
    x, s, mu, h = twin.x, twin.s, twin.mu_i[1].copy(), twin.h_i[1].copy()
    assert np.linalg.norm(s) > 0
    y = x
    for _ in range(3):
        u = A[1] * (y - B[1]) - mu - s
        e = rho * u / np.sqrt(u @ u)
        mu = mu + e - s
        y = y - eta * (A[1] * (y + e - B[1]) + prox * (h + y - x))
    hbar = twin.hbar + (y - x) / 3
    twin.round(clients_of((1,), steps=3), 1)
    assert_same(twin.mu_i[1], mu)
    assert_same(twin.h_i[1], h + y - x)
    assert_same(twin.x, y + hbar)
    assert_same(twin.s, rho * (mu - e) / np.linalg.norm(mu - e))


# FedACG


def test_fedacg_with_one_full_step_is_nesterov():
    lam, eta = 0.8, 0.1
    twin = cubic(FedACG, momentum=lam, prox_weight=0.0)
    x = z = X0
    for t in range(6):
        x_new = z - eta * (A * (z - B)).mean(axis=0)
        x, z = x_new, x_new + lam * (x_new - x)
        twin.round(clients_of(ALL, steps=1), t)
        assert_same(twin.x, x)
        assert_same(twin.x + lam * twin.m, z)


# rules that hold for all

EVERY = {
    "fedsam": (FedSAM, BIG),
    "mofedsam": (MoFedSAM, {**BIG, "mixing": 0.2}),
    "fedasam": (FedASAM, {**BIG, "adaptive": np.arange(problem.DIMENSION) < 15}),
    "fedgamma": (FedGAMMA, BIG),
    "fedlesam": (FedLESAM, BIG),
    "fedlesam last": (FedLESAM, {**BIG, "reference": "last_round"}),
    "fedlesam-s": (FedLESAM, options_of("S")),
    "fedlesam-s last": (FedLESAM, options_of("S", reference="last_round")),
    "fedlesam-d": (FedLESAM, options_of("D", prox_weight=0.3)),
    "fedlesam-d last": (FedLESAM, options_of("D", reference="last_round")),
    "fedsmoo": (FedSMOO, {**BIG, "prox_weight": 0.3}),
    "fedsmoo mu": (FedSMOO, {**BIG, "prox_weight": 0.3, "s_source": "mu"}),
    "fedacg": (FedACG, {"momentum": 0.8, "prox_weight": 0.3}),
}
PLAIN_SERVER = [name for name in EVERY if not name.startswith(("fedsmoo", "fedlesam-d"))]


@pytest.mark.parametrize("name", EVERY)
def test_a_cohort_is_the_weighted_mean_of_its_clients_in_any_order(name):
    make, options = EVERY[name]
    twin = softmax(make, **options)
    for t, (clients, _) in enumerate(make_rounds(42, 5, 5, 3, 4)):
        start, backwards = copy.deepcopy(twin), copy.deepcopy(twin)
        backwards.round(clients[::-1], t)
        twin.round(clients, t)
        for key, value in snapshot(twin).items():
            assert_same(snapshot(backwards)[key], value)
        if name in PLAIN_SERVER:
            present = [client for client in clients if client.minibatches]
            ends = []
            for client in present:
                alone = copy.deepcopy(start)
                alone.round([client], t)
                ends.append(alone.x)
            mean = np.average(ends, axis=0, weights=[c.weight for c in present])
            assert_same(twin.x, mean)


@pytest.mark.parametrize("name", [n for n in EVERY if not n.startswith(("fedsmoo", "fedacg"))])
def test_the_server_rate_interpolates_towards_the_new_model(name):
    make, options = EVERY[name]
    once, half = softmax(make, **options), softmax(make, **options, server_lr=0.5)
    clients = make_rounds(43, 1, 4, 3, 4)[0][0]
    once.round(clients, 0)
    half.round(clients, 0)
    assert_same(half.x, (once.x + problem.initial_point()) / 2)
