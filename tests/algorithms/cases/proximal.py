"""Rows of proximal."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case, decaying
from tests.reference.proximal_numpy import FedProx, FedProxM

PROX = LR | {"prox_weight": 0.7}
FALLING = {"client_lr": decaying(0.2), "prox_weight": decaying(1.0)}

CASES = [
    Case("fedprox", algorithms.fedprox, FedProx, PROX, main=True),
    Case("fedprox-schedule-transform", algorithms.fedprox, FedProx, FALLING, **TRANSFORM),
    Case("fedproxm", algorithms.fedproxm, FedProxM, PROX | {"momentum": 0.6}, main=True),
]
