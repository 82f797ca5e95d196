"""Limits of cfedavg."""

from fedjax_lab import algorithms as a
from fedjax_lab import with_compression
from tests.algorithms.limits.base import FEDAVG, LR, Limit
from tests.algorithms.problem import loss_fn

TABLE = [
    Limit(
        "cfedavg, identity = fedavg",
        a.cfedavg(loss_fn, compressor="identity", server_lr=0.7, **LR),
        a.fedavg(loss_fn, server_lr=0.7, **LR),
    ),
    Limit(
        "cfedavg, nothing dropped = fedavg",
        a.cfedavg(loss_fn, compressor="top_k:0", **LR),
        FEDAVG,
    ),
    Limit(
        "cfedavg, nothing dropped at random = fedavg",
        a.cfedavg(loss_fn, compressor="random_drop:0", error_feedback=False, **LR),
        FEDAVG,
    ),
    Limit(
        "cfedavg by steps, equal steps K, server_lr K = cfedavg",
        a.cfedavg(loss_fn, compressor="top_k:0.7", normalize_by_steps=True, server_lr=2.1, **LR),
        a.cfedavg(loss_fn, compressor="top_k:0.7", server_lr=0.7, **LR),
        full_cohort=True,
    ),
    Limit(
        "cfedavg round 1 = compressed scaffold",
        a.cfedavg(loss_fn, compressor="top_k:0.7", **LR),
        with_compression(a.scaffold(loss_fn, **LR), "top_k:0.7"),
        rounds=1,
    ),
]
