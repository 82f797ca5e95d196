"""Limits of dynamic_reg."""

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import COHORT, LR, Limit, N
from tests.algorithms.problem import loss_fn

PROX = LR | {"prox_weight": 0.5}

TABLE = [
    Limit(
        "feddyn round 1 = fedprox at server_lr 1 + S/N",
        a.feddyn(loss_fn, **PROX),
        a.fedprox(loss_fn, server_lr=1 + COHORT / N, **PROX),
        rounds=1,
        even=True,
    ),
    Limit(
        "feddyn = fedadmm W, all clients",
        a.feddyn(loss_fn, **PROX),
        a.fedadmm(loss_fn, **PROX),
        full_cohort=True,
    ),
    Limit(
        "fedadmm G at server_lr S/N = W",
        a.fedadmm(loss_fn, variant="G", server_lr=COHORT / N, **PROX),
        a.fedadmm(loss_fn, **PROX),
        even=True,
    ),
    Limit(
        "fedadmm G of the published code, round 1 = fedprox at twice the server_lr",
        a.fedadmm(loss_fn, variant="G", prev="global", server_lr=0.7, **PROX),
        a.fedprox(loss_fn, server_lr=1.4, **PROX),
        rounds=1,
    ),
    Limit(
        "fedpd round 1, all clients = fedadmm W",
        a.fedpd(loss_fn, **PROX),
        a.fedadmm(loss_fn, **PROX),
        rounds=1,
        full_cohort=True,
    ),
]
