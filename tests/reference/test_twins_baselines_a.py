"""The twins of the baselines against golden trajectories, closed forms and exact reductions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import problem
from tests.reference.base import ReferenceClient, at
from tests.reference.client_momentum_numpy import FedCM, Mime, MimeLite
from tests.reference.dynamic_reg_numpy import FedADMM, FedDyn, FedPD
from tests.reference.fafed_numpy import FAFED
from tests.reference.fedavg_numpy import FedAvg
from tests.reference.fednova_numpy import FedNova, effective_steps
from tests.reference.fedopt_numpy import FedAvgM
from tests.reference.memory_numpy import MIFA, MIFAM
from tests.reference.mlp_numpy import MLP, cross_entropy
from tests.reference.problem import (
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
from tests.reference.proximal_numpy import FedProx, FedProxM
from tests.reference.representation_numpy import (
    MOON,
    MOONM,
    FedMLB,
    FedMLBM,
    LocalObjective,
    contrastive,
    divergence,
    fedmlb_objective,
    moon_objective,
)
from tests.reference.stem_numpy import STEM
from tests.reference.test_twins import (
    ALL,
    assert_golden,
    assert_same,
    golden,
    run,
    snapshot,
    softmax,
    toy,
    toy_rounds,
)

pytestmark = pytest.mark.methods  # `make check` runs these where a twin has changed

FULL = {"cohorts": (ALL,) * 3}
UNEQUAL = {"steps": (1, 2, 3, 4)}
STEM_TOY = {"momentum": 0.5, "steps_per_round": 3}
MODEL = MLP()


def perceptron(twin, model=MODEL, **options):
    return twin(model.initial_point(), NUM_CLIENTS, model, **{"client_lr": 0.2, **options})


def make(twin, **options):
    """A twin on the data of ``problem``, with the model that it needs."""
    return (perceptron if issubclass(twin, LocalObjective) else softmax)(twin, **options)


def exact(twin):
    """The same with exact local minimisers on the toy."""

    class Exact(twin):
        def local_model(self, client, t, *, start, dual, anchor):
            a, b = (array[0] for array in client.minibatches[0])
            rho = at(self.rho, t)
            return (a * b - dual + rho * anchor) / (a + rho)

    return Exact


def linear(y, minibatch):
    """Losses with the constant gradients of the mini-batches, (c,) with c [n, d]."""
    return minibatch[0].mean(axis=0)


LINEAR_C = np.array([[1.0, -2.0], [0.5, 0.3], [-0.7, 1.1], [2.0, 0.4]])


def linear_clients(cohort, steps=3, weights=None):
    steps = [steps] * 4 if isinstance(steps, int) else steps
    weights = [1.0] * 4 if weights is None else weights
    return [ReferenceClient(i, [(LINEAR_C[i : i + 1],)] * steps[i], weights[i]) for i in cohort]


def linear_toy(twin, **options):
    return twin(TOY_X0, 4, linear, **{"client_lr": 0.1, **options})


GOLDEN = {
    "fedprox": (FedProx, {"prox_weight": 0.5}, {}),
    "fedproxm": (FedProxM, {"prox_weight": 0.5, "momentum": 0.9}, {}),
    "fednova": (FedNova, {}, UNEQUAL),
    "fednova samples": (FedNova, {}, {**UNEQUAL, "weights": TOY_SIZES}),
    "feddyn": (FedDyn, {"prox_weight": 0.5}, {}),
    "feddyn exact": (exact(FedDyn), {"prox_weight": 0.5}, {}),
    "feddyn full": (FedDyn, {"prox_weight": 0.5}, FULL),
    "mifa": (MIFA, {}, {}),
    "mifam": (MIFAM, {"momentum": 0.9}, {}),
    "mime": (Mime, {"momentum": 0.9}, {}),
    "mimelite": (MimeLite, {"momentum": 0.9}, {}),
    "mime sgd": (Mime, {"momentum": 0.0}, {}),
    "fedcm": (FedCM, {"mixing": 0.1}, {}),
    "fedcm K_i": (FedCM, {"mixing": 0.1}, UNEQUAL),
    "fedadmm W": (FedADMM, {"prox_weight": 0.5}, {}),
    "fedadmm W full": (FedADMM, {"prox_weight": 0.5}, FULL),
    "fedadmm G local": (FedADMM, {"prox_weight": 0.5, "variant": "G"}, {}),
    "fedadmm G global": (FedADMM, {"prox_weight": 0.5, "variant": "G", "prev": "global"}, {}),
    "fedpd": (FedPD, {"prox_weight": 0.5}, FULL),
    "stem local": (STEM, STEM_TOY, FULL),
    "stem mean": (STEM, {**STEM_TOY, "prev_at_sync": "mean"}, FULL),
}
TRAJECTORIES = """
fedprox:          0.4486875000 -0.1914375000  0.6344291094 0.1548154531  0.5707180930 0.4566831517
fedproxm:         0.4486875000 -0.1914375000  0.5882478594 0.4325217031  0.6592100094 1.1809128704
fednova:          0.4700000000 -0.3181250000  0.6676561289 0.1483338958  0.6216073642 0.3568376693
fednova samples:  0.4277777778 -0.2861111111  0.7073061402 0.0964048062  0.5734091700 0.5434478276
feddyn:           0.4230312500 -0.0371562500  0.6856373711 0.5784753945  0.6526051342 0.9878139245
feddyn exact:     0.4500000000  0.5500000000  0.7614583333 1.1343750000  0.5014322917 1.1048828125
feddyn full:      0.6215625000  0.2321875000  0.7150552812 0.7939660938  0.7640224463 1.0868251305
mifa:             0.4728750000 -0.3373750000  0.5405526406 0.0271069219  0.6030697090 0.2921206839
mifam:            0.4728750000 -0.3373750000  0.5161401406 0.1734694219  0.6201202406 0.8662675311
mime:             0.4926118750 -0.4630593750  0.5084244678 -0.3787654640 0.5187813521 -0.2397144069
mimelite:         0.4927232500 -0.4630222500  0.5083084927 -0.3790246868 0.5186184966 -0.2398570785
mime sgd:         0.4356250000 -0.1781250000  0.6565242187 0.2092539063  0.5891086200 0.4934139508
fedcm:            0.4927232500 -0.4630222500  0.5085074168 -0.3794900311 0.5186484995 -0.2417208474
fedcm K_i:        0.4926000000 -0.4800750000  0.5180732674 -0.3914284506 0.5184179018 -0.2844544854
fedadmm W:        0.4486875000 -0.1914375000  0.6087728594 0.3090967031  0.6392596199 0.5538369149
fedadmm W full:   0.6215625000  0.2321875000  0.7150552812 0.7939660938  0.7640224463 1.0868251305
fedadmm G local:  0.3973750000  0.1171250000  0.6919664375 1.2720118125  0.8246969766 1.8425957976
fedadmm G global: 0.3973750000  0.1171250000  0.7945914375 0.6548868125  0.6133774141 0.7335006726
fedpd:            0.6215625000  0.2321875000  0.6338323672 0.3371827891  0.6402575843 0.4189158671
fedpd skip 0:     0.6215625000  0.2321875000  0.6325791094 0.3323165781  0.6352085935 0.4029499714
stem local:       0.5818906250 -0.0079531250  0.6204946875 0.2225005469  0.6465958629 0.3780153600
stem mean:        0.5818906250 -0.0079531250  0.6197519531 0.2202036133  0.6453369629 0.3744481766
"""


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_trajectory(name):
    assert_golden(TRAJECTORIES, name, *GOLDEN[name])


def test_golden_fedpd_that_skips_its_first_communication():
    twin = toy(FedPD, prox_weight=0.5, skip_probability=0.5, coin=lambda t: t == 0)
    for t, expected in enumerate(golden(TRAJECTORIES, "fedpd skip 0")):
        twin.round(toy_clients(ALL), t)
        assert_same(twin.anchor.mean(axis=0), expected, atol=1e-9)
        assert_same(twin.x, TOY_X0 if t == 0 else expected, atol=1e-9)


# FedProx


def test_fedprox_without_prox_or_with_one_step_is_fedavg():
    rounds, short = make_rounds(2, 5, 4, 3, 4), make_rounds(2, 5, 4, 1, 4)
    heavy = {"momentum": 0.7}
    assert_same(run(softmax(FedProx, prox_weight=0.0), rounds), run(softmax(FedAvg), rounds))
    assert_same(run(softmax(FedProx, prox_weight=2.0), short), run(softmax(FedAvg), short))
    bare = run(softmax(FedProxM, prox_weight=0.0, **heavy), rounds)
    assert_same(bare, run(softmax(FedAvgM, **heavy), rounds))
    memoryless = run(softmax(FedProxM, prox_weight=0.4, momentum=0.0), rounds)
    assert_same(memoryless, run(softmax(FedProx, prox_weight=0.4), rounds))


def test_fedprox_on_linear_losses():
    for i, steps in enumerate((1, 2, 3, 4)):
        twin = linear_toy(FedProx, prox_weight=0.5)
        twin.round(linear_clients((i,), steps), 0)
        expected = LINEAR_C[i] / 0.5 * (1 - (1 - 0.1 * 0.5) ** steps)
        assert_same(TOY_X0 - twin.x, expected)


# FedNova


def test_fednova_effective_steps_in_closed_form():
    for steps in range(1, 8):
        assert effective_steps(steps) == steps
        rho, shrink = 0.9, 0.05
        momentum = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        assert_same(effective_steps(steps, rho=rho), momentum)
        assert_same(effective_steps(steps, shrink=shrink), (1 - (1 - shrink) ** steps) / shrink)


@pytest.mark.parametrize("options", [{}, {"local_momentum": 0.9}, {"prox_weight": 0.5}])
def test_fednova_on_linear_losses_has_no_bias_by_steps(options):
    steps, p = (1, 2, 3, 4), np.array([0.1, 0.2, 0.3, 0.4])
    twin = linear_toy(FedNova, server_lr=0.7, **options)
    twin.round(linear_clients(ALL, steps, TOY_SIZES), 0)
    rho, shrink = options.get("local_momentum", 0.0), 0.1 * options.get("prox_weight", 0.0)
    tau = p @ [effective_steps(k, rho=rho, shrink=shrink) for k in steps]
    assert_same(twin.x, TOY_X0 - 0.7 * tau * 0.1 * p @ LINEAR_C)


def test_fednova_with_equal_steps_is_fedavg():
    rounds = make_rounds(3, 5, 4, 3, 4, equal_steps=True)
    assert_same(run(softmax(FedNova), rounds), run(softmax(FedAvg), rounds))
    prox = run(softmax(FedNova, prox_weight=0.4), rounds)
    assert_same(prox, run(softmax(FedProx, prox_weight=0.4), rounds))
    heavy = run(softmax(FedNova, server_momentum=0.6), rounds)
    assert_same(heavy, run(softmax(FedAvgM, momentum=0.6), rounds))


def test_fednova_buffer_is_in_gradient_units():
    twin = toy(FedNova, client_lr=lambda t: 0.1 / (t + 1), server_momentum=0.5)
    plain, rounds = toy(FedNova), toy_rounds((ALL, ALL))
    first = run(twin, rounds[:1])[0]
    plain.x, plain.client_lr = first.copy(), 0.05
    plain.round(rounds[1], 0)
    twin.round(rounds[1], 1)
    assert_same(twin.x, plain.x - 0.5 * 0.5 * (TOY_X0 - first))


def test_fednova_refuses_momentum_with_prox():
    with pytest.raises(ValueError, match="exclude"):
        toy(FedNova, local_momentum=0.9, prox_weight=0.1)


# FedDyn, FedADMM, FedPD


def test_feddyn_first_round_is_a_longer_step_of_fedprox():
    for cohort in ((1,), (0, 2), (0, 1, 3), ALL):
        dyn, prox = toy(FedDyn, prox_weight=0.5), toy(FedProx, prox_weight=0.5)
        dyn.round(toy_clients(cohort), 0)
        prox.round(toy_clients(cohort), 0)
        assert_same(dyn.x, TOY_X0 - (1 + len(cohort) / 4) * (TOY_X0 - prox.x))


def test_feddyn_weighs_the_models_but_not_h():
    clients = toy_clients((0, 1, 3), weights=TOY_SIZES)
    dyn, prox, even = (toy(twin, prox_weight=0.5) for twin in (FedDyn, FedProx, FedProx))
    dyn.round(clients, 0)
    prox.round(clients, 0)
    even.round(toy_clients((0, 1, 3)), 0)
    assert_same(dyn.x, prox.x - 3 / 4 * (TOY_X0 - even.x))


def test_feddyn_h_is_the_mean_of_all_lambda():
    twin = softmax(FedDyn, prox_weight=0.3)
    for t, (clients, _) in enumerate(make_rounds(4, 8, 4, 3, 4)):
        twin.round(clients, t)
        assert_same(twin.h, twin.lambda_i.mean(axis=0))
    assert np.abs(twin.h).max() > 1e-3


def test_feddyn_lambda_of_an_exact_solution_is_the_local_gradient():
    twin = toy(exact(FedDyn), prox_weight=0.5)
    for t, cohort in enumerate(TOY_COHORTS):
        x, old = twin.x, twin.lambda_i.copy()
        twin.round(toy_clients(cohort), t)
        for i in cohort:
            y = x - (twin.lambda_i[i] - old[i]) / 0.5
            assert_same(twin.lambda_i[i], TOY_A[i] * (y - TOY_B[i]))


@pytest.mark.parametrize("cohort", [(0,), (1, 3), ALL])
def test_fixed_points_of_the_dual_methods(cohort):
    gradients = TOY_A * (TOY_OPTIMUM - TOY_B)
    dyn = toy(FedDyn, prox_weight=0.5)
    dyn.lambda_i = gradients.copy()
    variants = ({}, {"variant": "G"}, {"variant": "G", "prev": "global"})
    admm = [toy(FedADMM, prox_weight=0.5, **options) for options in variants]
    pd = toy(FedPD, prox_weight=0.5)
    for twin in (*admm, pd):
        twin.u_i = -gradients
        twin.x_i[:] = TOY_OPTIMUM
    pd.anchor[:] = TOY_OPTIMUM
    # where the duals do not sum to 0 over the cohort, FedPD's mean of the anchors moves
    for twin in (dyn, *admm, *([pd] if cohort == ALL else [])):
        twin.x = TOY_OPTIMUM.copy()
        before = snapshot(twin)
        run(twin, toy_rounds((cohort,) * 3))
        for key, value in snapshot(twin).items():
            assert_same(value, before[key])


def test_feddyn_exact_converges_with_all_clients_and_with_cyclic_cohorts():
    for cohorts in ((ALL,) * 200, ((0, 1), (2, 3)) * 400):
        twin = toy(exact(FedDyn), prox_weight=0.5)
        assert_same(run(twin, toy_rounds(cohorts))[-1], TOY_OPTIMUM)


def test_feddyn_is_fedadmm_w_with_all_clients_only():
    for cohort, same in ((NUM_CLIENTS, True), (4, False)):
        rounds = make_rounds(5, 5, cohort, 3, 4, equal_steps=True, weighted=False)
        dyn = run(softmax(FedDyn, prox_weight=0.4), rounds)
        admm = run(softmax(FedADMM, prox_weight=0.4), rounds)
        assert (np.abs(dyn - admm).max() < 1e-11) == same


def test_fedadmm_w_is_the_mean_of_all_augmented_models():
    twin = softmax(FedADMM, prox_weight=0.4)
    for t, (clients, _) in enumerate(make_rounds(6, 8, 4, 3, 4)):
        twin.round(clients, t)
        assert_same(twin.x, (twin.x_i + twin.u_i / 0.4).mean(axis=0))


def test_fedadmm_g_with_rate_s_over_n_is_w():
    rounds = make_rounds(7, 6, 4, 3, 4, equal_steps=True, weighted=False)
    g = softmax(FedADMM, prox_weight=0.4, variant="G", server_lr=4 / NUM_CLIENTS)
    assert_same(run(g, rounds), run(softmax(FedADMM, prox_weight=0.4), rounds))


def test_fedadmm_of_the_code_is_a_longer_step_of_fedprox():
    admm = softmax(FedADMM, prox_weight=0.4, variant="G", prev="global", server_lr=0.7)
    prox = softmax(FedProx, prox_weight=0.4)
    clients = make_rounds(8, 1, 4, 3, 4)[0][0]
    x = prox.x
    admm.round(clients, 0)
    prox.round(clients, 0)
    assert_same(admm.x, x - 2 * 0.7 * (x - prox.x))


def test_fedpd_exact_is_feddyn_exact():
    rounds = toy_rounds((ALL,) * 6)
    pd, dyn = (toy(exact(twin), prox_weight=0.5) for twin in (FedPD, FedDyn))
    assert_same(run(pd, rounds), run(dyn, rounds))


def test_fedpd_is_a_warm_started_fedadmm_w():
    class Warm(FedADMM):
        def start(self, client):
            return self.x_i[client.id]

    rounds = make_rounds(9, 5, NUM_CLIENTS, 3, 4, equal_steps=True, weighted=False)
    pd, admm = (softmax(twin, prox_weight=0.4) for twin in (FedPD, Warm))
    assert_same(run(pd, rounds), run(admm, rounds))


def test_fedpd_without_communication_never_mixes():
    together = toy(FedPD, prox_weight=0.5, skip_probability=1.0)
    run(together, toy_rounds((ALL,) * 4))
    assert_same(together.x, TOY_X0)
    for i in ALL:
        alone = toy(FedPD, prox_weight=0.5, skip_probability=1.0)
        run(alone, toy_rounds(((i,),) * 4))
        assert_same(alone.anchor[i], together.anchor[i])
        assert_same(alone.x_i[i], together.x_i[i])


def test_fedpd_communicates_among_those_who_took_part():
    twin = toy(FedPD, prox_weight=0.5)
    twin.round(toy_clients((1, 3), weights=TOY_SIZES), 0)
    alone = toy(FedPD, prox_weight=0.5, skip_probability=1.0)
    alone.round(toy_clients((1, 3)), 0)
    assert_same(twin.x, (20 * alone.anchor[1] + 40 * alone.anchor[3]) / 60)
    assert_same(twin.anchor, [TOY_X0, twin.x, TOY_X0, twin.x])


@pytest.mark.parametrize("twin", [FedDyn, FedADMM, FedPD])
def test_dual_methods_need_a_positive_prox_weight(twin):
    with pytest.raises(ValueError, match="positive"):
        toy(twin, prox_weight=0.0)


def test_fedpd_needs_a_coin_for_a_real_probability():
    with pytest.raises(ValueError, match="coin"):
        toy(FedPD, prox_weight=0.5, skip_probability=0.5)


# MIFA


def test_mifa_with_all_clients_is_fedavg_and_mifam_fedavgm():
    rounds = make_rounds(10, 5, NUM_CLIENTS, 3, 4, equal_steps=True, weighted=False)
    assert_same(run(softmax(MIFA), rounds), run(softmax(FedAvg), rounds))
    heavy = {"momentum": 0.8, "server_lr": 0.6}
    assert_same(run(softmax(MIFAM, **heavy), rounds), run(softmax(FedAvgM, **heavy), rounds))


@pytest.mark.parametrize("table", ["displacement", "gradient"])
def test_mifa_steps_along_the_mean_of_all_rows(table):
    twin = softmax(MIFA, table=table, server_lr=0.7)
    x = twin.x
    for t, (clients, _) in enumerate(make_rounds(11, 8, 4, 3, 4)):
        twin.round(clients, t)
        assert_same(twin.mean, twin.table_i.mean(axis=0))
        assert_same(twin.x, x - 0.7 * twin.mean * (0.2 if table == "gradient" else 1))
        x = twin.x


def test_mifa_first_round_is_a_shorter_step_of_fedavg():
    clients = toy_clients((0, 1, 3))
    mifa, fedavg = toy(MIFA), toy(FedAvg, server_lr=3 / 4)
    mifa.round(clients, 0)
    fedavg.round(clients, 0)
    assert_same(mifa.x, fedavg.x)


def test_mifa_on_linear_losses_steps_along_the_mean_gradient():
    twin = linear_toy(MIFA, server_lr=0.7)
    for t, cohort in enumerate(((0, 1), (2, 3), (0, 2), (3,), (1, 2))):
        x = twin.x
        twin.round(linear_clients(cohort), t)
        if t > 0:
            assert_same(twin.x, x - 0.7 * 3 * 0.1 * LINEAR_C.mean(axis=0))


def test_mifa_tables_agree_for_a_constant_rate_only():
    rounds = make_rounds(12, 6, 4, 3, 4)
    for rate, same in ((0.2, True), (lambda t: 0.2 / (t + 1), False)):
        ours, theirs = (
            softmax(MIFA, client_lr=rate, table=t) for t in ("displacement", "gradient")
        )
        assert (np.abs(run(ours, rounds) - run(theirs, rounds)).max() < 1e-12) == same


def test_mifa_gradient_table_in_the_authors_form():
    rates = [0.1 / (t + 1) for t in range(3)]
    twin = toy(MIFA, client_lr=lambda t: rates[t], table="gradient")
    x, table = TOY_X0, np.zeros((4, 2))
    for t, cohort in enumerate(TOY_COHORTS):
        for i in cohort:
            y = x
            for _ in range(3):
                y = y - rates[t] * TOY_A[i] * (y - TOY_B[i])
            table[i] = (x - y) / rates[t]
        x = x - rates[t] * table.mean(axis=0)
        twin.round(toy_clients(cohort), t)
        assert_same(twin.x, x)


def test_mifa_that_waits_begins_with_fedavg_of_all():
    twin, fedavg = toy(MIFA, start="wait"), toy(FedAvg)
    fedavg.round(toy_clients(ALL), 0)
    path = run(twin, toy_rounds(((0, 1), (1,), (2, 3))))
    assert_same(path, [TOY_X0, TOY_X0, fedavg.x])


# FedCM, Mime, MimeLite


def test_fedcm_reductions():
    rounds = make_rounds(13, 5, 4, 3, 4)
    assert_same(run(softmax(FedCM, mixing=1.0), rounds), run(softmax(FedAvg), rounds))
    first = run(softmax(FedCM, mixing=0.3), rounds[:1])
    assert_same(first, run(softmax(FedAvg, client_lr=0.2 * 0.3), rounds[:1]))


def test_fedcm_direction_is_a_moving_average_of_gradients():
    eta, alpha = 0.1, 0.3
    seen = []

    def gradient(y, minibatch):
        seen.append(toy_gradient(y, minibatch))
        return seen[-1]

    twin = FedCM(TOY_X0, 4, gradient, client_lr=eta, server_lr=0.7, mixing=alpha)
    for t, cohort in enumerate(TOY_COHORTS):
        x, delta = twin.x, twin.delta
        seen.clear()
        twin.round(toy_clients(cohort), t)
        assert_same(twin.delta, alpha * np.mean(seen, axis=0) + (1 - alpha) * delta)
        assert_same(twin.x, x - 0.7 * eta * 3 * twin.delta)


def test_fedcm_direction_on_linear_losses_has_no_bias_by_steps():
    twin = linear_toy(FedCM, mixing=0.3)
    twin.round(linear_clients(ALL, (1, 2, 3, 4), TOY_SIZES), 0)
    assert_same(twin.delta, 0.3 * np.array([0.1, 0.2, 0.3, 0.4]) @ LINEAR_C)


def test_fedcm_is_mimelite_with_one_full_step_and_in_the_first_round():
    pair = (toy(FedCM, mixing=0.3), toy(MimeLite, momentum=0.7))
    rounds = toy_rounds(steps=1)
    assert_same(*(run(twin, rounds) for twin in pair))
    pair = (toy(FedCM, mixing=0.3), toy(MimeLite, momentum=0.7))
    ours, theirs = (run(twin, toy_rounds()) for twin in pair)
    assert_same(ours[0], theirs[0])
    assert np.abs(ours[1] - theirs[1]).max() > 1e-6


def test_mimelite_without_momentum_is_fedavg():
    rounds = make_rounds(14, 5, 4, 3, 4, full=True)
    assert_same(run(softmax(MimeLite, momentum=0.0), rounds), run(softmax(FedAvg), rounds))


@pytest.mark.parametrize("twin", [Mime, MimeLite])
def test_mime_with_one_full_step_is_centralised_momentum(twin):
    beta, x, m = 0.9, TOY_X0, np.zeros(2)
    twin = toy(twin, momentum=beta)
    for t, cohort in enumerate(TOY_COHORTS):
        c = np.mean([TOY_A[i] * (x - TOY_B[i]) for i in cohort], axis=0)
        m = (1 - beta) * c + beta * m
        x = x - 0.1 * m
        twin.round(toy_clients(cohort, steps=1), t)
        assert_same(twin.x, x)
        assert_same(twin.m, m)


@pytest.mark.parametrize("base", ["sgdm", "adam"])
def test_mime_of_a_single_client_with_full_batches_is_mimelite(base):
    rounds = toy_rounds(((0,), (2,), (0,)))
    options = {"momentum": 0.9, "base_optimizer": base, "stability": 0.1}
    assert_same(run(toy(Mime, **options), rounds), run(toy(MimeLite, **options), rounds))


def test_mime_with_one_step_does_not_depend_on_the_minibatch():
    first, second = (make_rounds(15, 3, 4, 1, 4, full=True, equal_steps=True) for _ in range(2))
    for clients, _ in second:
        for client in clients:
            client.minibatches = [problem.client_data()[(client.id + 1) % NUM_CLIENTS]]
    for twin, same in ((Mime, True), (MimeLite, False)):
        ours, theirs = (run(softmax(twin, momentum=0.5), rounds) for rounds in (first, second))
        assert (np.abs(ours - theirs).max() < 1e-12) == same


def test_mime_in_the_form_of_optax():
    beta, eta = 0.9, 0.1
    x, m = TOY_X0, np.zeros(2)
    twin = toy(MimeLite, momentum=beta, client_lr=eta)
    for t, cohort in enumerate(TOY_COHORTS):
        models = []
        for i in cohort:
            y = x
            for _ in range(3):
                y = y - eta * (1 - beta) * (TOY_A[i] * (y - TOY_B[i]) + beta * m)
            models.append(y)
        m = np.mean([TOY_A[i] * (x - TOY_B[i]) for i in cohort], axis=0) + beta * m
        x = np.mean(models, axis=0)
        twin.round(toy_clients(cohort), t)
        assert_same(twin.x, x)


@pytest.mark.parametrize("twin", [Mime, MimeLite])
def test_mime_on_linear_losses(twin):
    beta = 0.7
    twin = linear_toy(twin, momentum=beta)
    for t, cohort in enumerate(TOY_COHORTS):
        x, m = twin.x, twin.m
        c = LINEAR_C[list(cohort)].mean(axis=0)
        twin.round(linear_clients(cohort), t)
        moved = x - twin.x
        assert_same(moved, 3 * 0.1 * ((1 - beta) * c + beta * m))


def test_mime_adam_by_hand():
    b1, b2, eps, eta = 0.9, 0.8, 0.5, 0.1
    x, m, s = TOY_X0, np.zeros(2), np.zeros(2)
    options = {"base_optimizer": "adam", "second_moment_decay": b2, "stability": eps}
    twin = toy(Mime, momentum=b1, client_lr=eta, **options)
    for t in range(3):
        c = np.mean(TOY_A * (x - TOY_B), axis=0)
        models = []
        for i in ALL:
            y = x
            for _ in range(3):
                v = TOY_A[i] * (y - x) + c
                y = y - eta * ((1 - b1) * v + b1 * m) / (np.sqrt(s) + eps)
            models.append(y)
        x, m, s = np.mean(models, axis=0), (1 - b1) * c + b1 * m, (1 - b2) * c**2 + b2 * s
        twin.round(toy_clients(ALL), t)
        assert_same(twin.x, x)


@pytest.mark.parametrize("twin", [Mime, MimeLite])
def test_mime_takes_the_rounds_examples_or_the_full_ones(twin):
    for full in (False, True):
        clients = make_rounds(16, 1, 4, 3, 4, full=full)[0][0]
        twin_ = softmax(twin, momentum=0.0)
        present = [client for client in clients if client.minibatches]
        data = [client.full if full else client.round_examples() for client in present]
        gradients = [problem.gradient(twin_.x, examples) for examples in data]
        weights = [client.weight for client in present]
        twin_.round(clients, 0)
        assert_same(twin_.m, np.average(gradients, axis=0, weights=weights))


# STEM


def test_stem_starts_from_the_mean_gradient():
    twin = toy(STEM, **STEM_TOY)
    twin.init(toy_clients(ALL))
    assert_same(twin.x, [0.525, -0.35])
    started = run(twin, toy_rounds(**FULL))
    assert_same(started, run(toy(STEM, **STEM_TOY), toy_rounds(**FULL)))


@pytest.mark.parametrize("prev", ["local", "mean"])
def test_stem_without_momentum_is_a_gradient_step_then_fedavg(prev):
    rounds = make_rounds(17, 5, NUM_CLIENTS, 3, 4, equal_steps=True)
    stem = softmax(STEM, momentum=1.0, steps_per_round=3, prev_at_sync=prev)
    fedavg = softmax(FedAvg)
    stem.init(rounds[0][0])
    weights = np.array([c.weight for c in rounds[0][0]])
    first = [problem.gradient(fedavg.x, c.round_examples()) for c in rounds[0][0]]
    fedavg.x = fedavg.x - 0.2 * np.average(first, axis=0, weights=weights)
    assert_same(run(stem, rounds), run(fedavg, rounds))


def descent(gradient, steps):
    """x after 1..steps further steps of gradient descent, the start taking one itself."""
    x, path = TOY_X0 - 0.1 * gradient(TOY_X0), []
    for _ in range(steps):
        x = x - 0.1 * gradient(x)
        path.append(x)
    return np.array(path)


@pytest.mark.parametrize("a", [0.0, 0.3, 1.0])
def test_stem_with_full_batches_is_gradient_descent(a):
    def mean(x):
        return np.mean(TOY_A * (x - TOY_B), axis=0)

    one = toy(STEM, momentum=a, steps_per_round=1)
    assert_same(run(one, toy_rounds((ALL,) * 5, steps=1)), descent(mean, 5))
    assert_same(one.m, mean(one.old_i[0]))
    # one client, then four identical ones
    single = STEM(TOY_X0, 1, toy_gradient, client_lr=0.1, momentum=a, steps_per_round=3)
    expected = descent(lambda x: TOY_A[0] * (x - TOY_B[0]), 9)[2::3]
    assert_same(run(single, [toy_clients((0,))] * 3), expected)
    batch = (TOY_A[:1], TOY_B[:1])
    clones = [[ReferenceClient(i, [batch] * 3) for i in ALL]] * 3
    for prev in ("local", "mean"):
        same = toy(STEM, momentum=a, steps_per_round=3, prev_at_sync=prev)
        assert_same(run(same, clones), expected)


def test_stem_is_fafed_without_preconditioner():
    schedules = {"client_lr": lambda t: 0.3 / (1 + t) ** (1 / 3), "momentum": lambda t: 0.9**t}
    options = {**schedules, "steps_per_round": 3}
    identity = {"preconditioner": np.ones_like, "second_moment_decay": 0.5}
    for rounds in (make_rounds(18, 8, 4, 3, 4), make_rounds(18, 4, 4, 3, 4, empty_round=0)):
        ours, theirs = softmax(STEM, **options), softmax(FAFED, **options, **identity)
        assert_same(run(ours, rounds), run(theirs, rounds))
        assert_same(ours.old_i, theirs.previous)


def test_stem_old_points_at_a_sync():
    rounds = make_rounds(19, 2, 4, 3, 4, equal_steps=True)
    local, mean = (softmax(STEM, prev_at_sync=p, **STEM_TOY) for p in ("local", "mean"))
    ours, theirs = run(local, rounds[:1]), run(mean, rounds[:1])
    assert_same(ours, theirs)
    ids, weights = zip(*((c.id, c.weight) for c in rounds[0][0]), strict=True)
    average = np.average(local.old_i[list(ids)], axis=0, weights=weights)
    for i in ids:
        assert_same(mean.old_i[i], average)
    absent = sorted(set(range(NUM_CLIENTS)) - set(ids))
    assert_same(mean.old_i[absent], np.tile(problem.initial_point(), (len(absent), 1)))


# the multi-layer perceptron, MOON and FedMLB


def numeric_gradient(f, y):
    eye = 1e-6 * np.eye(y.size)
    return np.array([(f(y + e) - f(y - e)) / 2e-6 for e in eye])


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_perceptron_gradients_are_derivatives(activation):
    model, rng = MLP(activation=activation), np.random.default_rng(20)
    assert model.size == 59
    y, x_global, x_previous = (model.initial_point(seed) for seed in (1, 2, 3))
    batch = problem.client_data()[4]
    assert_same(model.pack(model.layers(y)), y, atol=0)

    def plain(y):
        return model.loss(y, batch)

    assert_same(model.gradient(y, batch), numeric_gradient(plain, y), atol=1e-8)

    def moon(y):
        options = {"mu": 0.7, "temperature": 0.5}
        return moon_objective(model, y, x_global, x_previous, batch, **options)

    assert_same(moon(y)[1], numeric_gradient(lambda y: moon(y)[0], y), atol=1e-8)
    assert np.abs(moon(y)[1] - model.gradient(y, batch)).max() > 1e-3
    for values in rng.uniform(0.3, 2.0, size=(3, 4)):

        def fedmlb(y, values=values):
            names = ("lambda1", "lambda2", "temperature", "ce_weight")
            options = dict(zip(names, values, strict=True))
            return fedmlb_objective(model, y, x_global, batch, **options)

        assert_same(fedmlb(y)[1], numeric_gradient(lambda y: fedmlb(y)[0], y), atol=1e-8)


def test_hybrid_paths_are_frozen_from_their_block_on():
    y, x_global = (MODEL.initial_point(seed) for seed in (1, 2))
    x = problem.client_data()[0][0]
    for m in (1, 2):
        joined = y.copy()
        joined[MODEL.blocks()[m].start :] = x_global[MODEL.blocks()[m].start :]
        hybrid = MODEL.forward(x_global, MODEL.forward(y, x)[m], depth=m)[-1]
        assert_same(hybrid, MODEL.forward(joined, x)[-1])


def test_contrastive_loss_by_hand():
    z, z_global, z_previous = (np.array([v]) for v in ([1.0, 0.0], [1.0, 1.0], [0.0, 1.0]))
    value, slope = contrastive(z, z_global, z_previous, 0.5)
    assert_same(value, [0.2176217216], atol=1e-9)
    assert_same(slope, [[0, 0.1145624397]], atol=1e-9)
    for scales in ((3.0, 1.0, 1.0), (1.0, 0.2, 1.0), (1.0, 1.0, 7.0)):
        scaled = (s * v for s, v in zip(scales, (z, z_global, z_previous), strict=True))
        assert_same(contrastive(*scaled, 0.5)[0], value)


def test_contrastive_loss_of_a_zero_representation_is_finite():
    zero, one = np.zeros((1, 2)), np.ones((1, 2))
    for arguments in ((zero, one, one), (one, zero, one), (one, one, zero), (zero, zero, zero)):
        value, slope = contrastive(*arguments, 0.5)
        assert np.isfinite(value).all()
        assert np.isfinite(slope).all()


def test_contrastive_loss_with_the_same_two_models():
    y, x = MODEL.initial_point(1), MODEL.initial_point(2)
    batch = problem.client_data()[0]
    same, slope = moon_objective(MODEL, y, x, x, batch, mu=3.0, temperature=0.5)
    assert_same(same, MODEL.loss(y, batch) + 3.0 * np.log(2))
    np.testing.assert_array_equal(slope, MODEL.gradient(y, batch))


def test_moon_reductions():
    rounds = make_rounds(21, 6, 4, 3, 4)
    plain = run(perceptron(FedAvg, MODEL_AS_ORACLE), rounds)
    assert_same(run(perceptron(MOON, mu=0.0), rounds), plain)
    skip, fill = (
        run(perceptron(MOON, mu=5.0, first_previous=p), rounds) for p in ("skip", "global")
    )
    assert_same(skip, fill)
    assert_same(skip[0], plain[0])
    assert np.abs(skip[-1] - plain[-1]).max() > 1e-3
    heavy = {"momentum": 0.7, "server_lr": 0.5}
    oracle = run(perceptron(FedAvgM, MODEL_AS_ORACLE, **heavy), rounds)
    assert_same(run(perceptron(MOONM, mu=0.0, **heavy), rounds), oracle)
    memoryless = run(perceptron(MOONM, mu=5.0, momentum=0.0), rounds)
    assert_same(memoryless, skip)


class _Oracle:
    """The perceptron's gradient in place of the model, for twins that need no more."""

    size = MODEL.size
    initial_point = staticmethod(MODEL.initial_point)

    def __call__(self, y, minibatch):
        return MODEL.gradient(y, minibatch)


MODEL_AS_ORACLE = _Oracle()


def test_moon_keeps_the_last_local_model():
    twin = perceptron(MOON)
    clients = [ReferenceClient(2, [problem.client_data()[2]] * 2)]
    twin.round(clients, 0)
    assert_same(twin.previous[2], twin.x)  # one client: the mean is its model
    assert twin.has_previous.tolist() == [i == 2 for i in range(NUM_CLIENTS)]
    x, batch = twin.x, clients[0].minibatches[0]
    twin.round([ReferenceClient(2, [batch])], 1)
    g = moon_objective(MODEL, x, x, x, batch, mu=1.0, temperature=0.5)[1]
    assert_same(twin.x, x - 0.2 * g)


def test_fedmlb_losses_by_hand():
    hybrid, main = np.array([[2.0, 0, 0]]), np.array([[1.0, 1, 0]])
    assert_same(divergence(hybrid, main, 1.0)[0], [0.3029291011], atol=1e-9)
    assert_same(cross_entropy(hybrid, np.array([0]))[0], [0.2395447662], atol=1e-9)
    assert_same(cross_entropy(main, np.array([0]))[0], [0.8619948041], atol=1e-9)


def test_fedmlb_reductions():
    rounds = make_rounds(22, 5, 4, 3, 4)
    bare = {"lambda1": 0.0, "lambda2": 0.0}
    plain = run(perceptron(FedAvg, MODEL_AS_ORACLE), rounds)
    assert_same(run(perceptron(FedMLB, **bare), rounds), plain)
    heavy = {"momentum": 0.7, "server_lr": 0.5}
    oracle = run(perceptron(FedAvgM, MODEL_AS_ORACLE, **heavy), rounds)
    assert_same(run(perceptron(FedMLBM, **bare, **heavy), rounds), oracle)
    full = run(perceptron(FedMLB), rounds)
    assert_same(run(perceptron(FedMLBM, momentum=0.0), rounds), full)
    assert np.abs(full - plain).max() > 1e-3


def test_fedmlb_at_the_server_model_distils_nothing():
    x, batch = MODEL.initial_point(1), problem.client_data()[0]
    options = {"ce_weight": 0.0, "lambda1": 0.0, "lambda2": 1.0}
    value, slope = fedmlb_objective(MODEL, x, x, batch, **options)
    assert_same(value, 0)
    assert_same(slope, 0, atol=1e-15)


def test_fedmlb_first_step_moves_blocks_by_their_factors():
    twin = perceptron(FedMLB, lambda1=0.6, lambda2=5.0, ce_weight=1.2)
    batch, x = problem.client_data()[3], twin.x
    twin.round([ReferenceClient(3, [batch])], 0)
    g = MODEL.gradient(x, batch)
    for b, part in enumerate(MODEL.blocks(), start=1):
        assert_same(twin.x[part], x[part] - 0.2 * (1.2 + 0.6 * (2 - b + 1) / 2) * g[part])


def test_local_steps_compare_with_the_rounds_start():
    x, previous = MODEL.initial_point(), MODEL.initial_point(3)
    batches = [problem.client_data()[i] for i in (1, 3, 5)]
    moon, fedmlb = perceptron(MOON, mu=2.0), perceptron(FedMLB)
    moon.previous[2], moon.has_previous[2] = previous, True
    by_moon = by_fedmlb = x
    for batch in batches:
        g = moon_objective(MODEL, by_moon, x, previous, batch, mu=2.0, temperature=0.5)[1]
        by_moon = by_moon - 0.2 * g
        by_fedmlb = by_fedmlb - 0.2 * fedmlb_objective(MODEL, by_fedmlb, x, batch)[1]
    for twin, expected in ((moon, by_moon), (fedmlb, by_fedmlb)):
        twin.round([ReferenceClient(2, batches)], 0)
        assert_same(twin.x, expected)


# with which ``test_rules`` checks the rules that hold for all
EVERY = {
    "fedprox": (FedProx, {"prox_weight": 0.3}),
    "fedproxm": (FedProxM, {"prox_weight": 0.3, "momentum": 0.7}),
    "fednova": (FedNova, {"server_momentum": 0.5}),
    "fednova momentum": (FedNova, {"local_momentum": 0.5}),
    "fednova prox": (FedNova, {"prox_weight": 0.5}),
    "feddyn": (FedDyn, {"prox_weight": 0.3}),
    "fedadmm W": (FedADMM, {"prox_weight": 0.3}),
    "fedadmm G": (FedADMM, {"prox_weight": 0.3, "variant": "G", "server_lr": 0.5}),
    "fedadmm code": (FedADMM, {"prox_weight": 0.3, "variant": "G", "prev": "global"}),
    "fedpd": (FedPD, {"prox_weight": 0.3, "coin": lambda t: t % 3 == 0}),
    "mifa": (MIFA, {}),
    "mifa gradient": (MIFA, {"table": "gradient"}),
    "mifa wait": (MIFA, {"start": "wait"}),
    "mifam": (MIFAM, {"momentum": 0.5}),
    "fedcm": (FedCM, {"mixing": 0.3}),
    "mime": (Mime, {"momentum": 0.5}),
    "mimelite": (MimeLite, {"momentum": 0.5}),
    "mime adam": (Mime, {"momentum": 0.5, "base_optimizer": "adam", "stability": 1.0}),
    "stem": (STEM, {"momentum": 0.5, "steps_per_round": 3}),
    "stem mean": (STEM, {"momentum": 0.5, "steps_per_round": 3, "prev_at_sync": "mean"}),
    "moon": (MOON, {}),
    "moonm": (MOONM, {"momentum": 0.5, "first_previous": "global"}),
    "fedmlb": (FedMLB, {}),
    "fedmlbm": (FedMLBM, {"momentum": 0.5}),
}


# the keyword of a schedule, and where the twin holds it
SCHEDULED = {
    "fedprox": (FedProx, "prox_weight", "mu", {}),
    "fedproxm": (FedProxM, "momentum", "beta", {"prox_weight": 0.3}),
    "fednova": (FedNova, "prox_weight", "mu", {}),
    "fednova server": (FedNova, "server_momentum", "beta", {}),
    "feddyn": (FedDyn, "prox_weight", "rho", {}),
    "fedadmm": (FedADMM, "prox_weight", "rho", {}),
    "fedpd": (FedPD, "prox_weight", "rho", {}),
    "mifam": (MIFAM, "momentum", "beta", {}),
    "fedcm": (FedCM, "mixing", "alpha", {}),
    "mime": (Mime, "momentum", "beta", {}),
    "moon": (MOON, "mu", "mu", {}),
    "fedmlb": (FedMLB, "lambda2", "lambda2", {}),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_are_called_with_the_round(name):
    twin, keyword, attribute, options = SCHEDULED[name]
    rounds = make_rounds(27, 3, 4, 3, 4)
    rates, values = (0.2, 0.1, 0.15), (0.3, 0.6, 0.4)
    scheduled = {"client_lr": lambda t: rates[t], keyword: lambda t: values[t]}
    path = run(make(twin, **options, **scheduled), rounds)
    by_hand = make(twin, **options, **{keyword: values[0]})
    for t, (clients, _) in enumerate(rounds):
        by_hand.client_lr = rates[t]
        setattr(by_hand, attribute, values[t])
        by_hand.round(clients, t)
        assert_same(by_hand.x, path[t], atol=0)
