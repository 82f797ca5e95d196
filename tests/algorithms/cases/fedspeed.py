"""Rows of fedspeed."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case, decaying
from tests.reference.fedspeed_numpy import FedSpeed, FedSpeedIng

SPEED = LR | {"prox_weight": 0.4, "perturbation_radius": 0.3, "perturbation_weight": 0.7}
UNNORMALIZED = {"normalize_perturbation": False}
UNPERTURBED = {"perturbation_weight": 0.0}
UNCORRECTED = {"correction": False}
DUAL_OF_ALL = {"server_dual": "all"}
INERTIA = {"inertia": decaying(0.5)}

CASES = [
    Case("fedspeed", algorithms.fedspeed, FedSpeed, SPEED, main=True),
    Case("fedspeed-defaults", algorithms.fedspeed, FedSpeed, LR),
    Case("fedspeed-constant", algorithms.fedspeed, FedSpeed, SPEED | UNNORMALIZED),
    Case("fedspeed-unperturbed", algorithms.fedspeed, FedSpeed, SPEED | UNPERTURBED),
    Case("fedspeed-radius_0", algorithms.fedspeed, FedSpeed, SPEED | {"perturbation_radius": 0.0}),
    Case("fedspeed-uncorrected", algorithms.fedspeed, FedSpeed, SPEED | UNCORRECTED),
    Case("fedspeed-prox", algorithms.fedspeed, FedSpeed, SPEED | UNCORRECTED | UNPERTURBED),
    Case("fedspeed-all", algorithms.fedspeed, FedSpeed, SPEED | DUAL_OF_ALL),
    Case("fedspeed-all-uncorrected", algorithms.fedspeed, FedSpeed, LR | DUAL_OF_ALL | UNCORRECTED),
    Case(
        "fedspeed-schedule-transform",
        algorithms.fedspeed,
        FedSpeed,
        SPEED | {"client_lr": decaying(0.2), "perturbation_radius": decaying(0.3)},
        **TRANSFORM,
    ),
    Case("fedspeed_ing", algorithms.fedspeed_ing, FedSpeedIng, SPEED | {"inertia": 0.3}, main=True),
    Case("fedspeed_ing-schedule", algorithms.fedspeed_ing, FedSpeedIng, SPEED | INERTIA),
    Case("fedspeed_ing-all", algorithms.fedspeed_ing, FedSpeedIng, SPEED | INERTIA | DUAL_OF_ALL),
    Case(
        "fedspeed_ing-uncorrected",
        algorithms.fedspeed_ing,
        FedSpeedIng,
        SPEED | INERTIA | UNCORRECTED,
    ),
]
