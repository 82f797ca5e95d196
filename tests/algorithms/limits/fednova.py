"""Limits of fednova."""

import optax

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

TABLE = [
    Limit("fednova, one step = fedavg", a.fednova(loss_fn, **LR), FEDAVG, max_steps=1),
    Limit(
        "fednova, equal steps = fedavg",
        a.fednova(loss_fn, server_lr=0.7, **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
        even=True,
    ),
    Limit(
        "fednova with prox, equal steps = fedprox",
        a.fednova(loss_fn, prox_weight=0.5, **LR),
        a.fedprox(loss_fn, prox_weight=0.5, **LR),
        even=True,
    ),
    Limit(
        "fednova with local momentum, equal steps = fedavg whose gradients have it",
        a.fednova(loss_fn, local_momentum=0.5, **LR),
        a.fedavg(loss_fn, gradient_transform=optax.trace(0.5), **LR),
        even=True,
    ),
    Limit(
        "fednova with server momentum, equal steps = fedavgm",
        a.fednova(loss_fn, server_momentum=0.6, server_lr=0.7, **LR),
        a.fedavgm(loss_fn, momentum=0.6, server_lr=0.7, **LR),
        even=True,
    ),
]
