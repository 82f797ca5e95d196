"""Rows of sharpness and global_sharpness."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case, decaying
from tests.reference.sharpness_numpy import (
    FedASAM,
    FedGAMMA,
    FedLESAM,
    FedSAM,
    FedSMOO,
    MoFedSAM,
)

SAM = LR | {"perturbation_radius": 0.3}
NO_RADIUS = {"perturbation_radius": 0.0}
SCHEDULES = {"client_lr": decaying(0.2), "perturbation_radius": decaying(0.3)}
MIXED = SAM | {"mixing": 0.3}
ASAM = SAM | {"stability": 0.1}
LAST_ROUND = {"reference": "last_round"}
LESAM_S = SAM | {"variant": "S", "correction_weight": 0.7}
LESAM_D = SAM | {"variant": "D", "prox_weight": 0.4}
SMOO = {"client_lr": 0.2, "perturbation_radius": 0.3, "prox_weight": 0.4}

CASES = [
    Case("fedsam", algorithms.fedsam, FedSAM, SAM, main=True),
    Case("fedsam-radius_0", algorithms.fedsam, FedSAM, SAM | NO_RADIUS),
    Case("fedsam-schedule-transform", algorithms.fedsam, FedSAM, SAM | SCHEDULES, **TRANSFORM),
    Case("mofedsam", algorithms.mofedsam, MoFedSAM, MIXED, main=True),
    Case(
        "mofedsam-schedule-transform",
        algorithms.mofedsam,
        MoFedSAM,
        MIXED | SCHEDULES | {"mixing": decaying(0.5)},
        **TRANSFORM,
    ),
    Case("fedasam", algorithms.fedasam, FedASAM, ASAM, main=True),
    Case("fedasam-all", algorithms.fedasam, FedASAM, SAM, only_factory={"adaptive": "all"}),
    Case("fedasam-transform", algorithms.fedasam, FedASAM, ASAM | {"stability": 0.0}, **TRANSFORM),
    Case("fedgamma", algorithms.fedgamma, FedGAMMA, SAM, main=True, uplink=2),
    Case(
        "fedgamma-schedule-transform", algorithms.fedgamma, FedGAMMA, SAM | SCHEDULES, **TRANSFORM
    ),
    Case("fedlesam", algorithms.fedlesam, FedLESAM, SAM, main=True),
    Case("fedlesam-last", algorithms.fedlesam, FedLESAM, SAM | LAST_ROUND),
    Case("fedlesam-transform", algorithms.fedlesam, FedLESAM, SAM | SCHEDULES, **TRANSFORM),
    Case("fedlesam-S", algorithms.fedlesam, FedLESAM, LESAM_S),
    Case("fedlesam-S-last", algorithms.fedlesam, FedLESAM, LESAM_S | LAST_ROUND | SCHEDULES),
    Case("fedlesam-D", algorithms.fedlesam, FedLESAM, LESAM_D),
    Case("fedlesam-D-last", algorithms.fedlesam, FedLESAM, LESAM_D | LAST_ROUND | SCHEDULES),
    Case("fedsmoo", algorithms.fedsmoo, FedSMOO, SMOO, main=True, uplink=2),
    Case("fedsmoo-mu", algorithms.fedsmoo, FedSMOO, SMOO | SCHEDULES | {"s_source": "mu"}),
    Case("fedsmoo-radius_0", algorithms.fedsmoo, FedSMOO, SMOO | NO_RADIUS),
    Case("fedsmoo-transform", algorithms.fedsmoo, FedSMOO, SMOO, **TRANSFORM),
]
