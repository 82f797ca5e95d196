"""``as_published`` makes the local steps of the published code, which clips the whole step."""

import functools

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


def case(name, twin, options, max_norm):
    clipping = {"clip_norm": max_norm, "weight_decay": DECAY}
    factory = functools.partial(algorithms.as_published, name)
    return Case(name, factory, twin, options | clipping)


CASES = [
    case("scaffold", published.SCAFFOLD, LR, 0.8),
    case("fedgamma", published.SCAFFOLD, LR | RADIUS, 1.2),
    case("fedcm", published.FedCM, MIXED, 0.3),
    case("mofedsam", published.FedCM, MIXED | RADIUS, 0.4),
    case("feddyn", published.FedDyn, DUAL, 0.9),
    case("fedspeed", published.FedDyn, DUAL | RADIUS, 1.3),
    case("fedsmoo", published.FedSMOO, DUAL | RADIUS, 1.1),
]


AT_ONCE = ("scaffold", "fedsmoo")  # in every run; `make test-methods` has the rest


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=() if case.id in AT_ONCE else pytest.mark.methods)
        for case in CASES
    ],
)
def test_the_published_step(case, x64):
    ours, theirs = both(case, "vmap")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_clip_acts_in_some_steps_and_not_in_others(case, x64):
    acted = np.mean(twin_after(case, draw(case, ROUNDS)).acted)
    assert 0.2 < acted < 0.8


def no_loss(params, examples, key):
    """Nothing is trained."""


def test_the_settings_of_each_code_make_a_method():
    for name, found in algorithms.PUBLISHED.items():
        more = {"memory_size": 4} if name in ("gradma", "gradma_s") else {}
        made = algorithms.as_published(name, no_loss, client_lr=0.1, **more)
        assert made.name == found.factory.__name__ == name
        assert found.options.items() <= made.hyperparameters.items()
        transforms = {"gradient_transform", "step_transform"}
        given = {part for part in transforms if made.hyperparameters[part] is not None}
        assert len(given) == (found.clip_norm is not None)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="name is 'fednova'"):
        algorithms.as_published("fednova", no_loss, client_lr=0.1)
    with pytest.raises(TypeError, match="step_transform is given"):
        algorithms.as_published("scaffold", no_loss, client_lr=0.1, step_transform=optax.identity())
    with pytest.raises(ValueError, match="clip_norm is 0"):
        algorithms.as_published("scaffold", no_loss, client_lr=0.1, clip_norm=0.0)
    with pytest.raises(TypeError, match="prox_weight"):
        algorithms.as_published("fedprox", no_loss, client_lr=0.1, prox_weight=lambda round: 0.1)
