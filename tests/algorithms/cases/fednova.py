"""Rows of fednova."""

from fractions import Fraction

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case, decaying
from tests.reference import problem as reference
from tests.reference.fednova_numpy import FedNova

STEP_COUNT = Fraction(1, reference.DIMENSION)  # one number beside the vector

CASES = [
    Case(
        "fednova",
        algorithms.fednova,
        FedNova,
        LR | {"local_momentum": 0.5},
        main=True,
        uplink=1 + STEP_COUNT,
    ),
    Case("fednova-plain", algorithms.fednova, FedNova, LR),
    Case("fednova-prox", algorithms.fednova, FedNova, LR | {"prox_weight": 0.8}),
    Case(
        "fednova-server_momentum-schedule-transform",
        algorithms.fednova,
        FedNova,
        {"client_lr": decaying(0.2), "server_momentum": 0.6, "prox_weight": decaying(1.0)},
        **TRANSFORM,
    ),
]
