"""Limits of proximal."""

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

TABLE = [
    Limit(
        "fedprox without prox = fedavg",
        a.fedprox(loss_fn, prox_weight=0.0, server_lr=0.7, **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
    ),
    Limit(
        "fedprox, one step = fedavg",
        a.fedprox(loss_fn, prox_weight=3.0, **LR),
        FEDAVG,
        max_steps=1,
    ),
    Limit(
        "fedproxm momentum 0 = fedprox",
        a.fedproxm(loss_fn, prox_weight=0.5, momentum=0.0, **LR),
        a.fedprox(loss_fn, prox_weight=0.5, **LR),
    ),
    Limit(
        "fedproxm without prox = fedavgm",
        a.fedproxm(loss_fn, prox_weight=0.0, momentum=0.6, server_lr=0.7, **LR),
        a.fedavgm(loss_fn, momentum=0.6, server_lr=0.7, **LR),
    ),
]
