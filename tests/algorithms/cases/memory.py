"""Rows of memory."""

from fedjax_lab import algorithms
from tests.algorithms.cases.base import LR, TRANSFORM, Case, decaying
from tests.reference.memory_numpy import MIFA, MIFAM

FALLING = {"client_lr": decaying(0.2), "server_lr": 0.8}
GRADIENT, WAIT = {"table": "gradient"}, {"start": "wait"}

CASES = [
    Case("mifa", algorithms.mifa, MIFA, LR, main=True),
    Case("mifa-schedule-transform", algorithms.mifa, MIFA, FALLING, **TRANSFORM),
    Case("mifa-gradient", algorithms.mifa, MIFA, FALLING | GRADIENT),
    Case("mifa-wait", algorithms.mifa, MIFA, LR | WAIT),
    Case("mifam", algorithms.mifam, MIFAM, LR | {"momentum": 0.6}, main=True),
    Case(
        "mifam-gradient-wait",
        algorithms.mifam,
        MIFAM,
        FALLING | GRADIENT | WAIT | {"momentum": 0.6},
    ),
]
