"""Limits of gradma."""

from fedjax_lab import algorithms as a
from tests.algorithms.cases import N
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

TABLE = [
    Limit(
        "gradma_s without memory = fedavgm",
        a.gradma_s(loss_fn, memory_size=0, server_momentum=0.6, **LR),
        a.fedavgm(loss_fn, momentum=0.6, **LR),
    ),
    Limit(
        "gradma without memory and momentum = gradma_w",
        a.gradma(loss_fn, memory_size=0, server_momentum=0.0, **LR),
        a.gradma_w(loss_fn, **LR),
    ),
    Limit(
        "gradma_w, one step = fedavg",
        a.gradma_w(loss_fn, **LR),
        FEDAVG,
        max_steps=1,
    ),
    Limit(
        "gradma, one step = gradma_s",
        a.gradma(loss_fn, memory_size=5, **LR),
        a.gradma_s(loss_fn, memory_size=5, **LR),
        max_steps=1,
    ),
    Limit(
        "memory that never overflows = any larger one",
        a.gradma_s(loss_fn, memory_size=N, **LR),
        a.gradma_s(loss_fn, memory_size=6, **LR),
        rounds=1,
    ),
]
