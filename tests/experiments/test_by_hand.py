"""The benchmark's rounds written by hand compute what the twins compute."""

import jax
import numpy as np
import pytest

from experiments.benchmarks import by_hand
from tests.algorithms import problem as softmax
from tests.reference import problem as reference
from tests.reference.fafed_numpy import FAFED
from tests.reference.fedavg_numpy import FedAvg
from tests.reference.fedspeed_numpy import FedSpeed
from tests.reference.gradma_numpy import GradMA
from tests.reference.scaffold_numpy import Scaffold
from tests.tiers import few

LR = {"client_lr": 0.2}
N = reference.NUM_CLIENTS
FAFED_OPTIONS = {**LR, "momentum": 0.3, "second_moment_decay": 0.9, "stability": 0.1}
CASES = {
    "fedavg": (FedAvg, LR, {}),
    "scaffold": (Scaffold, LR, {}),
    "fedspeed": (FedSpeed, LR, {}),
    "fafed": (FAFED, FAFED_OPTIONS, {"steps_per_round": 3}),
    "gradma": (GradMA, {**LR, "memory_size": N}, {}),
}


@pytest.mark.parametrize("name", few(1, CASES))
def test_a_round_by_hand_is_that_of_the_twin(name, x64):
    del x64
    twin_class, options, only_twin = CASES[name]
    drawn = reference.make_rounds(
        5, 4, cohort_size=4, max_steps=3, batch_size=4, weighted=False, equal_steps=True
    )
    twin = twin_class(reference.initial_point(), N, reference.gradient, **options, **only_twin)
    start, one_round = getattr(by_hand, name)(softmax.loss_fn, N, **options)
    state, one_round = start(softmax.initial_params()), jax.jit(one_round)
    if name == "fafed":  # both without first estimates
        twin.m, twin.v = np.zeros_like(twin.x), np.zeros_like(twin.x)
    for t, (clients, padded) in enumerate(drawn):
        twin.round(clients, t)
        state, _ = one_round(state, softmax.to_batch(padded, t))
    assert np.abs(twin.x - reference.initial_point()).max() > 0.05
    np.testing.assert_allclose(softmax.flat(state["params"]), twin.x, atol=1e-9)
