"""Limits of fedswa."""

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

TABLE = [
    Limit(
        "fedswa, constant rate, server_lr 1 = fedavg",
        a.fedswa(loss_fn, final_lr_ratio=1.0, server_lr=1.0, **LR),
        FEDAVG,
    ),
    Limit(
        "fedswa, one step = fedavg at its server_lr",
        a.fedswa(loss_fn, server_lr=1.5, **LR),
        a.fedavg(loss_fn, server_lr=1.5, **LR),
        max_steps=1,
    ),
    Limit(
        "fedmoswa II round 1 = fedswa", a.fedmoswa(loss_fn, **LR), a.fedswa(loss_fn, **LR), rounds=1
    ),
    Limit(
        "fedmoswa I round 1 = fedswa",
        a.fedmoswa(loss_fn, control_update="I", **LR),
        a.fedswa(loss_fn, **LR),
        rounds=1,
    ),
    Limit(
        "fedmoswa, constant rate, server_lr 1 = fedmo",
        a.fedmoswa(loss_fn, final_lr_ratio=1.0, server_lr=1.0, **LR),
        a.fedmo(loss_fn, **LR),
    ),
    Limit("fedmo round 1 = scaffold", a.fedmo(loss_fn, **LR), a.scaffold(loss_fn, **LR), rounds=1),
]
