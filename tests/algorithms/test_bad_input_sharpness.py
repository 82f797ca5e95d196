"""Wrong arguments of the sharpness-aware methods, of client momentum and of STEM."""

import pytest

from fedjax_lab import algorithms
from tests.algorithms.problem import loss_fn

RADIUS = {"perturbation_radius": 0.1}
DUAL = RADIUS | {"prox_weight": 0.1}
ACG = {"momentum": 0.5, "prox_weight": 0.1}


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (algorithms.fedsam, {"perturbation_radius": -1}, "perturbation_radius is -1; .* at least"),
        (algorithms.fedasam, RADIUS | {"stability": -0.1}, "stability is -0.1; .* at least 0"),
        (algorithms.fedasam, RADIUS | {"adaptive": "weight"}, "Did you mean 'weights'"),
        (algorithms.mofedsam, RADIUS | {"mixing": 1.5}, "mixing is 1.5; .* at most 1"),
        (algorithms.mofedsam, {"perturbation_radius": -1, "mixing": 0.1}, "radius is -1"),
        (algorithms.fedgamma, {"perturbation_radius": float("nan")}, "radius is nan; .* finite"),
        (algorithms.fedlesam, {"perturbation_radius": -1}, "perturbation_radius is -1"),
        (algorithms.fedlesam, RADIUS | {"variant": "s"}, "variant is 's'; .* D, S, base"),
        (algorithms.fedlesam, RADIUS | {"reference": "last"}, "Did you mean 'last_round'"),
        (algorithms.fedlesam, RADIUS | {"prox_weight": -1}, "prox_weight is -1"),
        (algorithms.fedlesam, RADIUS | {"correction_weight": -1}, "correction_weight is -1"),
        (
            algorithms.fedlesam,
            RADIUS | {"prox_weight": 1.0},
            "1.0, which variant 'base' does not use",
        ),
        (
            algorithms.fedlesam,
            RADIUS | {"variant": "D", "correction_weight": 0},
            "variant 'D' does",
        ),
        (algorithms.fedsmoo, DUAL | {"s_source": "e"}, "s_source is 'e'; .* mu, mu_minus_e"),
        (algorithms.fedsmoo, DUAL | {"perturbation_radius": -1}, "perturbation_radius is -1"),
        (algorithms.fedsmoo, DUAL | {"prox_weight": -1}, "prox_weight is -1"),
        (algorithms.fedcm, {"mixing": -0.1}, "mixing is -0.1; .* at least 0"),
        (algorithms.mime, {"momentum": 2}, "momentum is 2; .* at most 1"),
        (algorithms.mimelite, {"momentum": 2}, "momentum is 2; .* at most 1"),
        (algorithms.fedacg, ACG | {"momentum": 2}, "momentum is 2; .* at most 1"),
        (algorithms.fedacg, ACG | {"prox_weight": -1}, "prox_weight is -1"),
        (algorithms.stem, {"momentum": 2}, "momentum is 2; .* at most 1"),
        (algorithms.stem, {"momentum": 1, "prev_at_sync": "own"}, "must be one of local, mean"),
    ],
)
def test_hyper_parameters(factory, options, message):
    with pytest.raises(ValueError, match=message):
        factory(loss_fn, client_lr=0.1, **options)
