"""Limits of memory."""

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import COHORT, FEDAVG, LR, Limit, N
from tests.algorithms.problem import loss_fn

TABLE = [
    Limit(
        "mifa, all clients = fedavg",
        a.mifa(loss_fn, server_lr=0.7, **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
        full_cohort=True,
    ),
    Limit(
        "mifam, all clients = fedavgm",
        a.mifam(loss_fn, momentum=0.6, server_lr=0.7, **LR),
        a.fedavgm(loss_fn, momentum=0.6, server_lr=0.7, **LR),
        full_cohort=True,
    ),
    Limit(
        "mifa round 1 = fedavg at server_lr S/N",
        a.mifa(loss_fn, **LR),
        a.fedavg(loss_fn, server_lr=COHORT / N, **LR),
        rounds=1,
        even=True,
    ),
    Limit("mifam momentum 0 = mifa", a.mifam(loss_fn, momentum=0.0, **LR), a.mifa(loss_fn, **LR)),
    Limit(
        "mifam of gradients, constant rate = of displacements",
        a.mifam(loss_fn, momentum=0.6, table="gradient", **LR),
        a.mifam(loss_fn, momentum=0.6, **LR),
    ),
    Limit(
        "mifa that waits, all clients = fedavg",
        a.mifa(loss_fn, start="wait", **LR),
        FEDAVG,
        full_cohort=True,
    ),
]
