"""Limits of client_momentum."""

import optax

from fedjax_lab import algorithms as a
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn


def averaged_momentum(beta):
    """Mean gradients averaged over the rounds; with one local step, centralised momentum SGD."""
    return a.fedopt(loss_fn, optax.chain(optax.ema(beta, debias=False), optax.sgd(1.0)), **LR)


TABLE = [
    Limit("fedcm mixing 1 = fedavg", a.fedcm(loss_fn, mixing=1.0, **LR), FEDAVG),
    Limit(
        "fedcm round 1 = fedavg at mixing * client_lr",
        a.fedcm(loss_fn, mixing=0.3, client_lr=0.5),
        a.fedavg(loss_fn, client_lr=0.15),
        rounds=1,
    ),
    Limit(
        "fedcm, one step = mimelite",
        a.fedcm(loss_fn, mixing=0.3, server_lr=0.7, **LR),
        a.mimelite(loss_fn, momentum=0.7, server_lr=0.7, **LR),
        max_steps=1,
    ),
    Limit(
        "fedcm round 1 = mimelite",
        a.fedcm(loss_fn, mixing=0.3, **LR),
        a.mimelite(loss_fn, momentum=0.7, **LR),
        rounds=1,
    ),
    Limit(
        "mimelite momentum 0 = fedavg",
        a.mimelite(loss_fn, momentum=0.0, server_lr=0.7, **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
    ),
    Limit(
        "mimelite, one step = averaged momentum",
        a.mimelite(loss_fn, momentum=0.7, **LR),
        averaged_momentum(0.7),
        max_steps=1,
    ),
    Limit(
        "mime, one step = averaged momentum",
        a.mime(loss_fn, momentum=0.7, **LR),
        averaged_momentum(0.7),
        max_steps=1,
    ),
    Limit(
        "fedacg without momentum and prox = fedavg",
        a.fedacg(loss_fn, momentum=0.0, prox_weight=0.0, **LR),
        FEDAVG,
    ),
    Limit(
        "fedacg without momentum = fedprox",
        a.fedacg(loss_fn, momentum=0.0, prox_weight=0.4, **LR),
        a.fedprox(loss_fn, prox_weight=0.4, **LR),
    ),
    Limit(
        "fedacg round 1 = fedprox",
        a.fedacg(loss_fn, momentum=0.7, prox_weight=0.4, **LR),
        a.fedprox(loss_fn, prox_weight=0.4, **LR),
        rounds=1,
    ),
]
