"""Limits of control_variates."""

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

TABLE = [
    Limit(
        "scaffold II round 1 = fedavg",
        a.scaffold(loss_fn, server_lr=0.7, **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
        rounds=1,
    ),
    Limit(
        "scaffold I round 1 = fedavg",
        a.scaffold(loss_fn, control_update="I", **LR),
        FEDAVG,
        rounds=1,
    ),
    Limit(
        "scaffold, one step, all clients = fedavg",
        a.scaffold(loss_fn, **LR),
        FEDAVG,
        max_steps=1,
        full_cohort=True,
    ),
]
