"""Limits of averaging."""

import optax

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import LR, Limit
from tests.algorithms.problem import loss_fn

TABLE = [
    Limit(
        "fedavgm momentum 0 = fedavg",
        a.fedavgm(loss_fn, momentum=0.0, **LR),
        a.fedavg(loss_fn, **LR),
    ),
    Limit(
        "fedopt sgd(s) = fedavg server_lr s",
        a.fedopt(loss_fn, optax.sgd(0.7), **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
    ),
    Limit(
        "fedopt sgd with momentum = fedavgm",
        a.fedopt(loss_fn, optax.sgd(0.7, momentum=0.6), **LR),
        a.fedavgm(loss_fn, server_lr=0.7, momentum=0.6, **LR),
    ),
    Limit(
        "fedavgm at lr (1 - b) = averaged momentum at lr",
        a.fedavgm(loss_fn, momentum=0.8, server_lr=0.2, **LR),
        a.fedopt(loss_fn, optax.chain(optax.ema(0.8, debias=False), optax.sgd(1.0)), **LR),
    ),
    Limit(
        "fedadam beta2 1 = averaged momentum at lr / (2 tau)",
        a.fedadam(loss_fn, server_lr=0.4, beta1=0.8, beta2=1.0, tau=0.2, **LR),
        a.fedavgm(loss_fn, server_lr=0.2, momentum=0.8, **LR),
    ),
    Limit(
        "fedyogi beta2 1 = fedadam beta2 1",
        a.fedyogi(loss_fn, server_lr=0.4, beta2=1.0, tau=0.2, **LR),
        a.fedadam(loss_fn, server_lr=0.4, beta2=1.0, tau=0.2, **LR),
    ),
]
