"""Rows of dynamic_reg."""

import jax
import numpy as np

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case, decaying
from tests.reference.dynamic_reg_numpy import FedADMM, FedDyn, FedPD

PROX = {"client_lr": 0.2, "prox_weight": 0.7}
FALLING = {"client_lr": decaying(0.2), "prox_weight": decaying(1.0)}
GONG = {"variant": "G", "server_lr": 0.8}
SKIP = 0.4


def skips(t):
    """FedPD's coin in a round of ``problem.to_batch``."""
    key = jax.random.fold_in(jax.random.key(1), t)
    draw = jax.random.uniform(jax.random.fold_in(key, np.uint32(2**32 - 1)), dtype=np.float32)
    return bool(draw < SKIP)


COIN = {"only_twin": {"coin": skips}}

CASES = [
    Case("feddyn", algorithms.feddyn, FedDyn, PROX, main=True),
    Case("feddyn-schedule-transform", algorithms.feddyn, FedDyn, FALLING, **TRANSFORM),
    Case("fedadmm", algorithms.fedadmm, FedADMM, PROX, main=True),
    Case("fedadmm-schedule", algorithms.fedadmm, FedADMM, FALLING),
    Case("fedadmm-G-global", algorithms.fedadmm, FedADMM, PROX | GONG | {"prev": "global"}),
    Case(
        "fedadmm-G-transform",
        algorithms.fedadmm,
        FedADMM,
        LR | PROX | {"variant": "G"},
        **TRANSFORM,
    ),
    Case(
        "fedpd",
        algorithms.fedpd,
        FedPD,
        PROX | {"skip_probability": SKIP},
        **COIN,
        main=True,
    ),
    Case("fedpd-schedule-transform", algorithms.fedpd, FedPD, FALLING, **TRANSFORM),
]
