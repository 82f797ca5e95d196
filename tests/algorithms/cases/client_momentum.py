"""Rows of client_momentum."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case, decaying
from tests.reference.client_momentum_numpy import FedCM, Mime, MimeLite
from tests.reference.fedacg_numpy import FedACG

CM = LR | {"mixing": 0.3}
MIME = LR | {"momentum": 0.7}
ACG = {"client_lr": 0.2, "momentum": 0.7, "prox_weight": 0.4}
CHANGING = LR | {"client_lr": decaying(0.2), "momentum": decaying(0.9)}

CASES = [
    Case("fedcm", algorithms.fedcm, FedCM, CM, main=True),
    Case(
        "fedcm-schedule-transform",
        algorithms.fedcm,
        FedCM,
        CM | {"client_lr": decaying(0.2), "mixing": decaying(0.5)},
        **TRANSFORM,
    ),
    Case("mime", algorithms.mime, Mime, MIME, main=True, uplink=2),
    Case("mime-full-transform", algorithms.mime, Mime, CHANGING, full=True, **TRANSFORM),
    Case("mimelite", algorithms.mimelite, MimeLite, MIME, main=True, uplink=2),
    Case(
        "mimelite-full-transform", algorithms.mimelite, MimeLite, CHANGING, full=True, **TRANSFORM
    ),
    Case("fedacg", algorithms.fedacg, FedACG, ACG, main=True),
    Case(
        "fedacg-schedule-transform",
        algorithms.fedacg,
        FedACG,
        ACG | {"client_lr": decaying(0.2), "momentum": decaying(0.9), "prox_weight": decaying(1.0)},
        **TRANSFORM,
    ),
]
