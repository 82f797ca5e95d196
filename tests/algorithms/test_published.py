"""``step_transform`` makes the local steps of the published code, which clips the whole step."""

import numpy as np
import optax
import pytest

from fedjax_lab import algorithms
from tests.algorithms.cases import Case
from tests.algorithms.cases.base import LR
from tests.algorithms.compiled import ROUNDS, both, draw, twin_after
from tests.reference import published_numpy as published

DECAY, PROX = 0.05, 0.4
RADIUS = {"perturbation_radius": 0.3}
MIXED = LR | {"mixing": 0.3}
DUAL = {"client_lr": 0.2, "prox_weight": PROX}


def case(factory, twin, options, max_norm, prox=0.0, **only_factory):
    """With a proximal term, p y leaves the direction before the clip and returns after it."""
    clip, decay = optax.clip_by_global_norm(max_norm), optax.add_decayed_weights
    parts = [decay(-prox), clip, decay(prox + DECAY)] if prox else [clip, decay(DECAY)]
    return Case(
        factory.__name__,
        factory,
        twin,
        options,
        only_factory={"step_transform": optax.chain(*parts), **only_factory},
        only_twin={"clip_norm": max_norm, "weight_decay": DECAY},
    )


CASES = [
    case(algorithms.scaffold, published.SCAFFOLD, LR, 0.8),
    case(algorithms.fedgamma, published.SCAFFOLD, LR | RADIUS, 1.2),
    case(algorithms.fedcm, published.FedCM, MIXED, 0.3),
    case(algorithms.mofedsam, published.FedCM, MIXED | RADIUS, 0.4),
    case(algorithms.feddyn, published.FedDyn, DUAL, 0.9, PROX),
    case(algorithms.fedspeed, published.FedDyn, DUAL | RADIUS, 1.3, PROX, server_dual="all"),
    case(algorithms.fedsmoo, published.FedSMOO, DUAL | RADIUS, 1.1, PROX, s_source="mu"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_published_step(case, x64):
    ours, theirs = both(case, "vmap")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_clip_acts_in_some_steps_and_not_in_others(case, x64):
    acted = np.mean(twin_after(case, draw(case, ROUNDS)).acted)
    assert 0.2 < acted < 0.8
