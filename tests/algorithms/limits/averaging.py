"""Limits of averaging."""

import optax

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

GROWING = 1 - 1e-6  # with this decay the second moments of the first rounds only grow

TABLE = [
    Limit(
        "fedavgm momentum 0 = fedavg",
        a.fedavgm(loss_fn, momentum=0.0, **LR),
        FEDAVG,
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
    Limit(
        "fedams 1, floor above every v = averaged momentum at lr / sqrt(tau)",
        a.fedams(loss_fn, server_lr=0.4, beta1=0.8, tau=4.0, **LR),
        a.fedavgm(loss_fn, server_lr=0.04, momentum=0.8, **LR),
    ),
    Limit(
        "fedams 2, bias corrected, growing v = adam",
        a.fedams(
            loss_fn,
            server_lr=0.05,
            beta2=GROWING,
            tau=1e-2,
            option=2,
            bias_correction=True,
            **LR,
        ),
        a.fedopt(loss_fn, optax.adam(0.05, b1=0.9, b2=GROWING, eps=1e-2), **LR),
        rounds=3,
    ),
    Limit(
        "fedams 1, bias corrected, round 1 = fedavg with the root of the scaled floor",
        a.fedams(loss_fn, tau=4.0, beta2=0.91, bias_correction=True, **LR),
        a.fedavg(loss_fn, server_lr=0.15, **LR),
        rounds=1,
    ),
]
