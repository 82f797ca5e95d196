"""Rows of fedswa."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import TRANSFORM, Case, decaying
from tests.reference.fedswa_numpy import FedMo, FedMoSWA, FedSWA

SWA = {"client_lr": 0.2, "final_lr_ratio": 0.1, "server_lr": 1.5}
MOSWA = SWA | {"momentum": 0.3}

CASES = [
    Case("fedswa", algorithms.fedswa, FedSWA, SWA, main=True),
    Case(
        "fedswa-schedule-transform",
        algorithms.fedswa,
        FedSWA,
        SWA | {"client_lr": decaying(0.2), "final_lr_ratio": decaying(0.5)},
        **TRANSFORM,
    ),
    Case("fedmoswa", algorithms.fedmoswa, FedMoSWA, MOSWA, main=True, uplink=2),
    Case("fedmoswa-I", algorithms.fedmoswa, FedMoSWA, MOSWA | {"control_update": "I"}),
    Case(
        "fedmoswa-schedule-transform",
        algorithms.fedmoswa,
        FedMoSWA,
        MOSWA | {"momentum": decaying(0.5)},
        **TRANSFORM,
    ),
    Case(
        "fedmoswa-first_round",
        algorithms.fedmoswa,
        FedMoSWA,
        SWA,
        only_factory={"momentum": 0.3, "first_round_gamma_one": True},
        only_twin={"momentum": lambda t: 1.0 if t == 0 else 0.3},
    ),
    Case(
        "fedmoswa-trapezoid",
        algorithms.fedmoswa,
        FedMoSWA,
        MOSWA | {"control_divisor": "trapezoid"},
    ),
    Case(
        "fedmo", algorithms.fedmo, FedMo, {"client_lr": 0.2, "momentum": 0.3}, main=True, uplink=2
    ),
    Case("fedmo-I", algorithms.fedmo, FedMo, {"client_lr": 0.2, "control_update": "I"}),
]
